"""``lfbench environment``: installs a peer into an environment of its own."""

from __future__ import annotations

import subprocess

import click

from benchmarks.harness.environments import PACKAGES, environment, make


@click.command("environment")
@click.argument("subjects", nargs=-1, type=click.Choice([name.rstrip("_") for name in sorted(PACKAGES)]))
def command(subjects: tuple[str, ...]) -> None:
    """Install what SUBJECTS need (all, by default), each into its own environment beside this one."""
    failed = []
    for subject in [name for name in sorted(PACKAGES) if not subjects or name.rstrip("_") in subjects]:
        click.echo(f"{subject}: {', '.join(PACKAGES[subject])} into {environment(subject)}")
        try:
            make(subject)
        except subprocess.CalledProcessError:
            failed.append(subject)
    if failed:
        raise click.ClickException(f"not installed: {', '.join(failed)} (see above)")
