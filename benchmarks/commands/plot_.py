"""``lfbench plot``: plots from records alone."""

from __future__ import annotations

from pathlib import Path

import click

from benchmarks.harness.plot import draw
from benchmarks.harness.report import REPO
from benchmarks.record import RESULTS, RecordError, read


@click.command("plot")
@click.argument("records", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=REPO / "docs" / "plots",
    help="Directory for the plots.",
)
def command(records: tuple[Path, ...], output: Path) -> None:
    """Draw RECORDS of `lfbench run` (default: every committed one) as SVG."""
    output.mkdir(parents=True, exist_ok=True)
    for path in records or sorted(RESULTS.glob("W*.json")):
        try:
            draw(read(path), output / f"{path.stem}.svg")
        except ModuleNotFoundError as error:
            raise click.ClickException(f"{error.name} is not installed: pip install 'lfdata[plots]'") from error
        except (RecordError, KeyError) as error:
            raise click.UsageError(f"{path}: not a record of `lfbench run`: {error}") from error
        click.echo(output / f"{path.stem}.svg")
