"""``shard-builder finish``."""

from __future__ import annotations

from pathlib import Path

import click

from shard_builder.finish import finish


@click.command("finish", short_help="Make one data set of what tasks have made.")
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--max-errors", type=click.IntRange(min=0), help="Refuse more bad samples than this, in all tasks together.")
@click.option("--allow-empty", is_flag=True, help="Accept a data set without samples.")
def command(target: Path, max_errors: int | None, allow_empty: bool) -> None:
    """Make one data set of TARGET, where all tasks of `convert --task` have been run. It is the same, byte by byte, as without tasks."""
    samples, shards = finish(target, allow_empty=allow_empty, max_errors=max_errors)
    click.echo(f"{target}: {samples:,} samples in {shards} shards", err=True)
