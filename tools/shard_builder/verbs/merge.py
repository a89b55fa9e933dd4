"""``shard-builder merge``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from shard_builder.examine.report import progress_bar
from shard_builder.operations.merge import DUPLICATES, merge
from shard_builder.verb_options import build_options, building, say


@click.command("merge", short_help="Make one data set of several.")
@click.argument("datasets", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--output", "-o", required=True, type=click.Path(path_type=Path), help="Directory of the result.")
@click.option(
    "--duplicates", type=click.Choice(DUPLICATES), default="error", show_default=True, help="Keys that occur more than once."
)
@building
def command(datasets: tuple[Path, ...], output: Path, duplicates: str, **given: Any) -> None:
    """Put DATASETS, which have the same fields, one after the other.

    Whole shards are linked (copied where that cannot be); shards that lose samples to --duplicates are written anew.
    """
    with progress_bar("merge") as progress:
        made = merge(datasets, output, duplicates=duplicates, build=build_options(given), progress=progress)
    say(made)
