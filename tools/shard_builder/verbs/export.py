"""``shard-builder export``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from lfdata.errors import OptionError
from shard_builder.examine.report import progress_bar
from shard_builder.options import parse_size
from shard_builder.signals import interruptible
from shard_builder.sinks.base import KEY_RULES, RAW_IMAGES, ExportOptions
from shard_builder.sinks.job import EXPORT, FORMATS, export


@click.command("export", short_help="Write a data set as WebDataset tars or Parquet files.")
@click.argument("dataset", type=click.Path(exists=True, path_type=Path))
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--format", "format_", type=click.Choice(sorted(FORMATS)), required=True)
@click.option("--fields", help="Names joined by commas (default: all).")
@click.option("--shard-size", default="1G", show_default=True, help="Size at which a new file begins.")
@click.option("--prefix", default="data", show_default=True, help="Begins the name of every file.")
@click.option(
    "--keys",
    type=click.Choice(KEY_RULES),
    default="escape",
    show_default=True,
    help="Keys a tar member cannot carry: write %XX for the bytes in question, or refuse.",
)
@click.option(
    "--raw-images",
    type=click.Choice(RAW_IMAGES),
    default="png",
    show_default=True,
    help="Pictures that no file format holds as they are stored.",
)
@click.option(
    "--ending", "endings", multiple=True, metavar="FIELD=ENDING", help="Ending of a field's tar members (repeatable)."
)
@click.option("--short", is_flag=True, help="Endings without the field's name where that is clear: KEY.jpg, KEY.txt.")
@click.option("--row-group-size", default="64M", show_default=True, help="Stored bytes of a Parquet row group.")
@click.option("--workers", type=click.IntRange(0), default=0, help="Processes; 0: the cores available.")
@click.option("--json", "as_json", is_flag=True, help="Print what export.json holds.")
def command(dataset: Path, target: Path, **given: Any) -> None:
    """Write DATASET into the directory TARGET as files of another format. Run again after an interruption, it goes on."""
    interruptible()
    if given["fields"] is not None and not given["fields"].strip(", "):
        raise OptionError("--fields names no field; leave it out for all")
    options = ExportOptions(
        format=given["format_"],
        fields=tuple(name for name in (given["fields"] or "").split(",") if name),
        prefix=given["prefix"],
        shard_bytes=parse_size(given["shard_size"]),
        keys=given["keys"],
        raw_images=given["raw_images"],
        endings=dict(_ending(text) for text in given["endings"]),
        short=given["short"],
        row_group_bytes=parse_size(given["row_group_size"]),
        workers=given["workers"],
    )
    with progress_bar("export") as progress:
        found = export(dataset, target, options, progress=progress)
    if given["as_json"]:
        click.echo(msgspec.json.encode(found).decode())
        return
    total = sum(file["bytes"] for file in found["files"])
    click.echo(
        f"{target}: {found['rows']:,} samples in {len(found['files'])} files, {total / 1e6:,.1f} MB; see {target / EXPORT}"
    )
    if options.format == "webdataset":
        click.echo("fields, as `shard-builder convert` reads them back (with -s keys=escaped):")
        for field in found["fields"]:
            click.echo(f"  --field '{field['declare']}'")


def _ending(text: str) -> tuple[str, str]:
    name, equals, ending = text.partition("=")
    if not equals or not name or not ending:
        raise OptionError(f"--ending {text!r}: write FIELD=ENDING")
    return name, ending
