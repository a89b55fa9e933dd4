"""``shard-builder advise``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from lfdata.format.meta import MANIFEST
from shard_builder.examine.text import size_text, visible
from shard_builder.fields import load_mapping, parse_field
from shard_builder.operations.advise import AdviceOptions, advise
from shard_builder.options import pairs
from shard_builder.signals import interruptible
from shard_builder.sources import open_source


@click.command("advise", short_help="Measure storage and data, and recommend how to store them.")
@click.argument("source")
@click.option("--kind", help="Kind of source; guessed by default. A data set of shards is known by its manifest.")
@click.option(
    "--field", "fields", multiple=True, metavar="NAME:KIND=COLUMN...", help="A field of the source, as in convert (repeatable)."
)
@click.option(
    "--map", "mapping", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="TOML file that declares the fields."
)
@click.option("--source-option", "-s", multiple=True, metavar="NAME=VALUE", help="An option of the source.")
@click.option(
    "--storage", type=click.Path(exists=True, path_type=Path), help="Measure reads of the files here instead of the source's."
)
@click.option("--samples", type=click.IntRange(1), default=48, show_default=True, help="Samples to encode.")
@click.option("--side", type=click.IntRange(1), help="Store pictures at this shorter side, if training needs no more.")
@click.option("--cores", type=click.IntRange(0), default=0, help="Cores that will decode; 0: those of this machine.")
@click.option("--seconds", type=float, default=5.0, show_default=True, help="Time for one measurement of the storage.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable, and complete.")
def command(source: str, fields: tuple[str, ...], mapping: Path | None, **given: Any) -> None:
    """Read some of SOURCE, a source as in convert or a data set of shards, and say how to store it. Nothing is written."""
    interruptible()
    location = Path(source)
    options = AdviceOptions(given["samples"], given["side"], given["cores"], given["seconds"], given["storage"])
    opened = None
    if not (location / MANIFEST).is_file():
        specs = [*(load_mapping(mapping) if mapping else ()), *(parse_field(text) for text in fields)]
        opened = open_source(source, kind=given["kind"], fields=specs or None, **pairs(given["source_option"]))
        if not location.exists():  # a pattern of tars
            location = location.parent
    found = advise(location, opened, options)
    if given["as_json"]:
        click.echo(msgspec.json.encode(found).decode())
    else:
        _print(found)


def _print(found: dict[str, Any]) -> None:
    storage, data = found["storage"], found["data"]
    click.echo(f"storage ({visible(storage['place'])}):")
    for name in ("sequential", "sequential_again", "random", "small_files"):
        part = storage[name]
        shown = ", ".join(f"{key} {value:,}" for key, value in part.items()) if part else "nothing to measure it on"
        click.echo(f"  {name.replace('_', ' ')}: {shown}")
    click.echo(f"  ({storage['note']})")
    click.echo(f"data: {data['records']:,} samples, {data['files']:,} files, {size_text(data['bytes'])}")
    for name, field in data["fields"].items():
        if field["kind"] != "image":
            click.echo(f"  {visible(name)} ({field['kind']}): {field['bytes'] or 0:,} bytes a sample")
            continue
        for item in field["candidates"]:
            way = ",".join(f"{key}={value}" for key, value in item["options"].items())
            if item["samples"]:
                times = f"encode {item['encode_ms']:.2f} ms, decode {item['decode_ms']:.2f} ms"
                click.echo(f"  {visible(name)} as {way}: {item['bytes']:,} bytes, {times} ({item['samples']} samples)")
            if item["errors"]["count"]:
                click.echo(f"  {visible(name)} as {way}: {item['errors']['count']} refused: {visible(item['errors']['first'])}")
    click.echo("recommended:")
    for name, item in found["recommendation"].items():
        click.echo(f"  {visible(name)}: {item['value']}\n    {item['why']}")
