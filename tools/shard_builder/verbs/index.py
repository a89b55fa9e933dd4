"""``shard-builder index``: (re)build the consolidated index."""

from __future__ import annotations

from pathlib import Path

import click

from lfdata.format.durable import Files
from lfdata.format.meta import INDEX, read_manifest
from shard_builder.consolidate import write_consolidated
from shard_builder.target import Target


@click.command("index", short_help="Build or rebuild the consolidated index.")
@click.argument("dataset", type=click.Path(exists=True, file_okay=False, path_type=Path))
def command(dataset: Path) -> None:
    """Write DATASET/index.lfi: data-set-wide columns and keys in one mapping."""
    files = Files()
    with Target(dataset, files):
        write_consolidated(dataset, read_manifest(dataset), files)
    click.echo(f"{dataset / INDEX}: {(dataset / INDEX).stat().st_size / 1e6:,.1f} MB")
