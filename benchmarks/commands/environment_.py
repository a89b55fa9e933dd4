"""``lfbench environment``: installs a peer into an environment of its own."""

from __future__ import annotations

import subprocess

import click

from benchmarks.harness.environments import ALONE, PACKAGES, environment, make


@click.command("environment")
@click.argument("subjects", nargs=-1, type=click.Choice([name.rstrip("_") for name in sorted(PACKAGES)]))
def command(subjects: tuple[str, ...]) -> None:
    """Install what SUBJECTS need, each into an environment of its own: all by default but lerobot (9 GB, another torch)."""
    failed = []
    for subject in [name for name in sorted(PACKAGES) if (name.rstrip("_") in subjects if subjects else name not in ALONE)]:
        click.echo(f"{subject}: {', '.join(PACKAGES[subject])} into {environment(subject)}")
        try:
            make(subject)
        except subprocess.CalledProcessError:
            failed.append(subject)
    if failed:
        raise click.ClickException(f"not installed: {', '.join(failed)} (see above)")
