"""``shard-builder split``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

from shard_builder.examine.report import progress_bar
from shard_builder.operations.split import BY, SplitOptions, split
from shard_builder.verb_options import build_options, building, say


@click.command("split", short_help="Deal a data set's samples out into parts.")
@click.argument("dataset", type=click.Path(exists=True, path_type=Path))
@click.option("--output", "-o", required=True, type=click.Path(path_type=Path), help="Directory of the parts' directories.")
@click.option("--ratio", help="Shares, such as 0.9,0.1 or 98,1,1.")
@click.option(
    "--by",
    type=click.Choice(BY),
    default="key-hash",
    show_default=True,
    help="key-hash: by key alone, stable when the data grow; exact: exact shares; order: as they lie.",
)
@click.option("--column", help="Instead of shares: a part for every value of this scalar field.")
@click.option("--names", help="Names of the parts, joined by commas.")
@click.option("--seed", type=int, default=0, show_default=True, help="Another number deals otherwise.")
@building
def command(dataset: Path, output: Path, ratio: str | None, **given: Any) -> None:
    """Write every part of DATASET as a data set OUTPUT/NAME; each sample goes whole into exactly one."""
    options = SplitOptions(
        ratio=tuple(part.strip() for part in ratio.split(",")) if ratio else (),
        by=given["by"],
        column=given["column"] or "",
        names=tuple(name.strip() for name in (given["names"] or "").split(",") if name.strip()),
        seed=given["seed"],
    )
    # A small data set may well leave a part empty: it is made, and said.
    build = dataclasses.replace(build_options(given), allow_empty=True)
    with progress_bar("split") as progress:
        parts = split(dataset, output, options, build=build, progress=progress)
    for made in parts:
        say(made)
        if not made.rows and not given["allow_empty"]:
            click.echo(f"warning: {made.path} has no samples", err=True)
