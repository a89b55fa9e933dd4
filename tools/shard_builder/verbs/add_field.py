"""``shard-builder add-field``."""

from __future__ import annotations

from pathlib import Path

import click

from shard_builder.examine.report import progress_bar
from shard_builder.fields import parse_field
from shard_builder.operations.fields import ON_ERROR, add_field
from shard_builder.options import pairs
from shard_builder.signals import interruptible
from shard_builder.sources import open_source


@click.command("add-field", short_help="Add a field beside the shards, without touching them.")
@click.argument("dataset", type=click.Path(exists=True, path_type=Path))
@click.argument("field", metavar="NAME:KIND=COLUMN[@ORIGIN][,OPTION=VALUE...]")
@click.option("--table", help="A .jsonl, .csv or .tsv file with the values by key; without it, COLUMN is an existing field.")
@click.option("--source-option", "-s", multiple=True, metavar="NAME=VALUE", help="An option of the table, such as key=COLUMN.")
@click.option("--replace", is_flag=True, help="The field may exist: its values are replaced.")
@click.option(
    "--on-error", type=click.Choice(ON_ERROR), default="stop", show_default=True, help="What to do with a value that is bad."
)
@click.option("--workers", type=click.IntRange(0), default=0, help="Processes; 0: the cores available.")
def command(
    dataset: Path, field: str, table: str | None, source_option: tuple[str, ...], replace: bool, on_error: str, workers: int
) -> None:
    """Add FIELD to DATASET as sidecar files; interrupted, run the same command again.

    From an existing field: 'ids:tokens=caption,tokenizer=tokenizer.json'. From a table: 'score:scalar=score,dtype=float32' with --table.
    """
    interruptible()
    spec = parse_field(field)
    source = None
    if table is not None:
        source = open_source(table, kind="table", fields=[spec], **pairs(source_option))
    with progress_bar("add-field") as progress:
        made = add_field(dataset, spec, table=source, replace=replace, on_error=on_error, workers=workers, progress=progress)
    click.echo(
        f"{dataset}: field {spec.name!r} ({spec.kind}) in {made.present:,} of {made.rows:,} samples, {made.bytes / 1e6:,.1f} MB"
    )
    if made.unmatched:
        click.echo(f"{made.unmatched:,} rows of the table have the key of no sample", err=True)
    for error in made.errors:
        click.echo(f"left absent: {error}", err=True)
    if made.bad > len(made.errors):
        click.echo(f"and {made.bad - len(made.errors):,} more", err=True)
