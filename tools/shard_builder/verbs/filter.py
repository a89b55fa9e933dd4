"""``shard-builder filter``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from shard_builder.examine.report import progress_bar
from shard_builder.operations.filtering import filter_samples
from shard_builder.verb_options import build_options, building, say


@click.command("filter", short_help="Keep the samples for which an expression is true.")
@click.argument("dataset", type=click.Path(exists=True, path_type=Path))
@click.option("--output", "-o", required=True, type=click.Path(path_type=Path), help="Directory of the result.")
@click.option("--where", required=True, help="Such as: image.width >= 256 and has(caption) and not key startswith 'tmp/'")
@building
def command(dataset: Path, output: Path, where: str, **given: Any) -> None:
    """Make a data set of some samples of DATASET, by its index columns and keys. No payload is decoded.

    Columns are a scalar field's name, or FIELD.ROLE such as image.width, ids.tokens, caption.bytes (`shard-builder inspect` lists
    fields); names with other characters go in backquotes.
    """
    with progress_bar("filter") as progress:
        made = filter_samples(dataset, output, where, build=build_options(given), progress=progress)
    say(made)
