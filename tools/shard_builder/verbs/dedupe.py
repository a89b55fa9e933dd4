"""``shard-builder dedupe``."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from shard_builder.examine.report import progress_bar
from shard_builder.examine.text import size_text, visible
from shard_builder.operations.dedupe import SAMPLE, Report, dedupe
from shard_builder.operations.inputs import refuse_overlap
from shard_builder.signals import interruptible
from shard_builder.verb_options import written


@click.command("dedupe", short_help="Report values and samples that occur more than once.")
@click.argument("dataset", type=click.Path(exists=True, path_type=Path))
@click.option("--fields", help="Names joined by commas (default: all; scalars count for whole samples only).")
@click.option("--output", "-o", type=click.Path(dir_okay=False, path_type=Path), help="Write every group as a JSON line.")
@click.option("--scratch", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Directory for digests.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def command(dataset: Path, fields: str | None, output: Path | None, scratch: Path | None, as_json: bool) -> None:
    """Find values of DATASET whose stored bytes are the same, field by field, and samples that are the same in all fields.

    Nothing is changed. Pictures that look alike but are stored otherwise are not found.
    """
    interruptible()
    names = [name for name in (fields or "").split(",") if name]
    with progress_bar("dedupe") as progress:
        if output is None:
            report = dedupe(dataset, fields=names, scratch=scratch, progress=progress)
        else:
            refuse_overlap(output, [dataset])
            with written(output) as groups:
                report = dedupe(dataset, fields=names, output=groups, scratch=scratch, progress=progress)
    if as_json:
        click.echo(msgspec.json.encode({"rows": report.rows, "fields": report.fields, "largest": report.largest}).decode())
    else:
        _print(dataset, report)


def _print(dataset: Path, report: Report) -> None:
    click.echo(f"{dataset}: {report.rows:,} samples")
    for name, found in report.fields.items():
        title = "whole samples" if name == SAMPLE else visible(name)
        click.echo(
            f"{title}: {found.values:,} values, {found.repeats:,} of them repeat another ({found.groups:,} groups, "
            f"{size_text(found.repeated_bytes)})"
        )
        for group in report.largest[name]:
            keys = ", ".join(visible(key) for key in group.keys[:4]) + (", ..." if group.count > 4 else "")
            click.echo(f"  {group.count:,} x {size_text(group.bytes)}: {keys}")
