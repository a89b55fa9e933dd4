"""``shard-builder show``: a contact sheet of many samples, or one sample in full."""

from __future__ import annotations

import io
import math
import sys
from pathlib import Path
from typing import Any

import click
import msgspec
from PIL import Image, ImageDraw

from lfdata.dataset import ShardDataset
from lfdata.errors import KeyMissingError, OptionError
from lfdata.format.durable import Files
from shard_builder.examine.opened import DataSet, is_data_set
from shard_builder.examine.sample import Sample, counted, describe, extract, load
from shard_builder.examine.text import visible
from shard_builder.examine.tiles import INK, Font, caption, draw_tile, text_tile

MAX_PIXELS = 100_000_000
CAPTION_LINES = 3
GAP = 8
_PAGE = (232, 232, 228)


def contact_sheet(
    path: str | Path,
    indices: list[int] | None = None,
    *,
    start: int = 0,
    count: int = 24,
    columns: int | None = None,
    tile: int = 192,
    field: str | None = None,
    font: Path | None = None,
) -> tuple[bytes, list[dict[str, Any]]]:
    """Draw samples as a PNG.

    Args:
        indices: which samples; ``count`` from ``start`` on by default. columns: tiles a row; about as many as rows by default.
        tile: pixels a side. field: what to draw; the image by default, else sound, text, json. font: a font file for captions.

    Returns:
        The PNG (of a data set without samples, one that says so), and the samples that could not be shown: dicts with ``index``,
        ``shard``, ``file``, ``row``, ``key``, ``reason``.

    Raises:
        LfdataError: no data set. OptionError: a sample or field it does not have, or a sheet that would be too large.
    """
    data = _open(path)
    if field is not None and field not in data.schema:
        raise OptionError(f"{path}: no field {field!r}; there are {', '.join(data.schema) or 'none'}")
    if indices is None and start >= max(1, data.manifest.rows):
        raise OptionError(f"{path}: no sample {start}; {counted(data.manifest.rows)}")
    chosen = list(range(start, min(start + count, data.manifest.rows))) if indices is None else list(indices)
    columns = columns or max(1, math.ceil(math.sqrt(len(chosen))))
    lettering = _font(tile, font)
    cell = (tile + GAP, tile + GAP + CAPTION_LINES * lettering.line)
    rows = max(1, -(-len(chosen) // columns))
    width, height = min(columns, max(1, len(chosen))) * cell[0] + GAP, rows * cell[1] + GAP
    if width * height > MAX_PIXELS:
        raise OptionError(f"a sheet of {width} x {height} pixels is too large; ask for fewer samples or smaller tiles")
    sheet = Image.new("RGB", (width, height), _PAGE)
    if not chosen:
        sheet.paste(text_tile(["no samples"], tile, lettering), (GAP, GAP))
    faults: list[dict[str, Any]] = []
    for number, index in enumerate(chosen):
        at = (GAP + number % columns * cell[0], GAP + number // columns * cell[1])
        faults += _draw_cell(sheet, at, load(data, index), tile, lettering, field)
    out = io.BytesIO()
    sheet.save(out, "PNG")
    return out.getvalue(), faults


def _font(tile: int, path: Path | None) -> Font:
    try:
        return Font(max(9, min(16, tile // 15)), path)
    except OSError as error:
        raise OptionError(f"{path}: not a font that can be read: {error}") from error


def _draw_cell(
    sheet: Image.Image, at: tuple[int, int], sample: Sample, tile: int, font: Font, field: str | None
) -> list[dict[str, Any]]:
    sheet.paste(draw_tile(sample, tile, font, field), at)
    draw = ImageDraw.Draw(sheet)
    for number, line in enumerate(font.wrap(f"#{sample.index} {caption(sample)}", tile, CAPTION_LINES)):
        draw.text((at[0], at[1] + tile + 2 + number * font.line), line, fill=INK, font=font.font)
    about = describe_place(sample)
    if sample.error:
        return [about | {"reason": sample.error}]
    return [about | {"field": value.name, "reason": value.error} for value in sample.values if value.error]


def describe_place(sample: Sample) -> dict[str, Any]:
    """Where a sample is, for messages."""
    key = None if sample.key is None else visible(sample.key.decode("utf-8", "backslashreplace"))
    return {"index": sample.index, "shard": sample.shard, "file": sample.file, "row": sample.row, "key": key}


def show_sample(path: str | Path, index: int | None = None, key: str | bytes | None = None) -> Sample:
    """One sample, decoded, by index (negative ones from the end) or by key.

    Raises:
        LfdataError: no data set. OptionError: no such index. KeyMissingError: no such key.
    """
    data = _open(path)
    if (index is None) == (key is None):
        raise OptionError("give an index or a key, one of them")
    if key is not None:
        with_keys = ShardDataset(data.path)
        try:
            index = with_keys.index_of(key)
        except KeyMissingError as error:
            raise KeyMissingError(visible(str(error))) from error
        finally:
            with_keys.close()
    assert index is not None
    return load(data, index + data.manifest.rows if index < 0 else index)


def _open(path: str | Path) -> DataSet:
    if not is_data_set(Path(path)):
        raise OptionError(f"{path}: samples are shown of a data set; give its directory")
    return DataSet.open(Path(path))


def _indices(_: click.Context, __: click.Parameter, text: str | None) -> list[int] | None:
    if text is None:
        return None
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not (first.isdecimal() and (last.isdecimal() or not dash)):
            raise click.BadParameter(f"{part.strip()!r}: numbers and ranges, such as 0,5,10-19")
        stop = int(last) if dash else int(first)
        if stop - int(first) >= MAX_PIXELS:
            raise click.BadParameter(f"{part.strip()!r}: too many")
        found += range(int(first), stop + 1)
    return found


@click.command("show", short_help="A contact sheet of many samples, or one in full.")
@click.argument("dataset", type=click.Path(path_type=Path))
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("contact.png"),
    show_default=True,
    help="PNG to write.",
)
@click.option("--count", type=click.IntRange(1), default=24, show_default=True, help="Number of samples.")
@click.option("--start", type=click.IntRange(0), default=0, show_default=True, help="Index of the first.")
@click.option("--indices", callback=_indices, help="These samples instead, such as 0,5,10-19.")
@click.option("--columns", type=click.IntRange(1), default=None, help="Tiles a row.")
@click.option("--tile", type=click.IntRange(32, 2048), default=192, show_default=True, help="Pixels a side of a tile.")
@click.option("--field", default=None, help="Field to draw; the image by default, else sound, text, json.")
@click.option(
    "--font", type=click.Path(path_type=Path, exists=True, dir_okay=False), default=None, help="Font file for captions."
)
@click.option("--sample", "index", type=int, default=None, help="Print this sample in full instead.")
@click.option("--key", default=None, help="Print the sample with this key in full instead.")
@click.option(
    "--extract",
    "directory",
    type=click.Path(path_type=Path, file_okay=False),
    default=None,
    help="With --sample or --key: write its values as files.",
)
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def command(
    dataset: Path,
    index: int | None,
    key: str | None,
    directory: Path | None,
    as_json: bool,
    **sheet: Any,
) -> None:
    """Draw samples of DATASET as a contact sheet, or print one (--sample, --key) in full.

    Exit status: 0, or 1 if a sample could not be read or decoded.
    """
    if index is not None or key is not None:
        bad = _one(dataset, index, key, directory, as_json)
    elif directory is not None:
        raise OptionError("--extract needs --sample or --key")
    else:
        bad = _sheet(dataset, as_json, **sheet)
    if bad:
        sys.exit(1)


def _sheet(dataset: Path, as_json: bool, *, output: Path, indices: list[int] | None, **options: Any) -> bool:
    png, faults = contact_sheet(dataset, indices, **options)
    Files().write_file(output, png)
    if as_json:
        click.echo(msgspec.json.encode({"output": visible(str(output)), "bad": faults}).decode())
        return bool(faults)
    click.echo(visible(str(output)) + ("" if _open(dataset).manifest.rows else ": the data set has no samples"))
    for fault in faults:
        field = f", field {visible(fault['field'])!r}" if "field" in fault else ""
        place = f"index {fault['index']} ({visible(fault['file'])} row {fault['row']}, key {fault['key']!r})"
        click.echo(f"bad: {place}{field}: {fault['reason']}", err=True)
    return bool(faults)


def _one(dataset: Path, index: int | None, key: str | None, directory: Path | None, as_json: bool) -> bool:
    sample = show_sample(dataset, index, key)
    about = describe(sample)
    written = [] if directory is None else extract(sample, directory)
    if as_json:
        click.echo(msgspec.json.encode(about | {"files": [visible(str(path)) for path in written]}).decode())
    else:
        _print_sample(about)
        for path in written:
            click.echo(f"wrote {visible(str(path))}")
    return bool(sample.error) or any(value.error for value in sample.values)


def _print_sample(about: dict[str, Any]) -> None:
    click.echo(f"index {about['index']}: {visible(about['file'])} row {about['row']}, key {about['key']!r}")
    if about["error"]:
        click.echo(f"  BAD: {about['error']}")
    for name, value in about["fields"].items():
        rest = {k: v for k, v in value.items() if k not in ("kind", "present", "error", "sizes")}
        sizes = ", ".join(f"{role} {number}" for role, number in value.get("sizes", {}).items())
        state = "" if value["present"] else " absent"
        click.echo(f"{visible(name)} ({value['kind']}){state}" + (f": {sizes}" if sizes else ""))
        if "error" in value:
            click.echo(f"  BAD: {value['error']}")
        elif value["kind"] == "text" and value["present"]:
            for line in value["value"].split("\n"):
                click.echo(f"  {visible(line)}")
        elif value["kind"] == "json" and value["present"]:
            pretty = msgspec.json.format(msgspec.json.encode(value["value"]), indent=2).decode()
            click.echo("\n".join(f"  {visible(line)}" for line in pretty.split("\n")))
        else:
            for item, number in rest.items():
                click.echo(f"  {item}: {visible(str(number))}")
