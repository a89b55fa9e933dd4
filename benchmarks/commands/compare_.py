"""``lfbench compare``: two records of the same workload, flagged where they differ by more than their spread."""

from __future__ import annotations

from pathlib import Path

import click

from benchmarks.harness.report import compare
from benchmarks.record import RecordError, read


@click.command("compare")
@click.argument("before", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("after", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--any-machine", is_flag=True, help="Compare although the machines, data or options differ.")
@click.option("--beside", help="A subject of both records, such as bare_calls: compare ratios to it, not speeds.")
@click.option("--fail", is_flag=True, help="Exit with 1 if a subject became slower.")
def command(before: Path, after: Path, any_machine: bool, beside: str | None, fail: bool) -> None:
    """Compare the subjects that the records BEFORE and AFTER share."""
    try:
        lines, slower = compare(read(before), read(after), any_machine=any_machine, beside=beside)
    except RecordError as error:
        raise click.UsageError(str(error)) from error
    click.echo("\n".join(lines))
    if slower and fail:
        raise click.exceptions.Exit(1)
