"""``shard-builder convert``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec
from tqdm import tqdm

from lfdata.codecs.pil_versions import check_codec_versions, pil_report
from lfdata.errors import OptionError
from lfdata.storage import is_url
from shard_builder import transfer
from shard_builder.convert import Summary, convert
from shard_builder.fields import load_mapping, parse_field
from shard_builder.options import DUPLICATES, ON_ERROR, ConvertOptions, Task, pairs, parse_size
from shard_builder.signals import interruptible
from shard_builder.sources import KINDS, open_source
from shard_builder.sources.base import FieldSpec, Source
from shard_builder.target import ERRORS


def parse_task(text: str | None) -> Task | None:
    """``"3/16"``; ``None`` for none."""
    if text is None:
        return None
    number, slash, count = text.partition("/")
    if not (slash and number.isdecimal() and count.isdecimal()):
        raise OptionError(f"--task {text!r}: write I/N, such as 0/16")
    return Task(int(number), int(count))


@click.command("convert", short_help="Convert a source into a data set of shards.")
@click.argument("source")
@click.argument("target")
@click.option("--kind", help=f"Kind of source: {', '.join(sorted(KINDS))}. Guessed from SOURCE by default.")
@click.option(
    "--field",
    "fields",
    multiple=True,
    metavar="NAME:KIND=COLUMN[@ORIGIN][,OPTION=VALUE...]",
    help="A field of the data set (repeatable).",
)
@click.option(
    "--map", "mapping", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="TOML file that declares the fields."
)
@click.option(
    "--source-option",
    "-s",
    multiple=True,
    metavar="NAME=VALUE",
    help="An option of the source, such as root=DIR or key=COLUMN.",
)
@click.option("--workers", type=click.IntRange(min=1), help="Encoder processes (default: the cores there are).")
@click.option("--shard-size", default="1G", show_default=True, help="Size at which a new shard begins.")
@click.option(
    "--shard-rows",
    type=click.IntRange(min=1),
    default=1_000_000,
    show_default=True,
    help="Samples at which a new shard begins.",
)
@click.option(
    "--segment-size", default="4G", show_default=True, help="Source bytes that make a segment; shards do not cross segments."
)
@click.option("--group-size", default="8M", show_default=True, help="Payload bytes of a row group.")
@click.option(
    "--on-error", type=click.Choice(ON_ERROR), default="stop", show_default=True, help="What to do with a bad sample."
)
@click.option("--max-errors", type=click.IntRange(min=0), help="Stop after more bad samples than this.")
@click.option(
    "--duplicates",
    type=click.Choice(DUPLICATES),
    default="error",
    show_default=True,
    help="What to do with keys that occur more than once.",
)
@click.option("--sample-timeout", type=float, default=300.0, show_default=True, help="Seconds a sample may take.")
@click.option("--resume", is_flag=True, help="Go on with an unfinished conversion.")
@click.option("--overwrite", is_flag=True, help="Replace what the target holds.")
@click.option("--allow-empty", is_flag=True, help="Accept a source without samples.")
@click.option(
    "--task",
    metavar="I/N",
    help="Make only part I of N (0/N to N-1/N), beside others; `shard-builder finish TARGET` makes one data set of all.",
)
@click.option(
    "--engine", type=click.Choice(("local", "ray")), default="local", show_default=True, help="Where the work is done."
)
@click.option("--tasks", type=click.IntRange(min=1), help="Parts that an engine makes (default: as many as run at a time).")
@click.option("--address", default="auto", show_default=True, help="Of the Ray cluster.")
@click.option(
    "--work",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where copies of a SOURCE by URL, and the shards of a TARGET by URL until they are sent, lie (default: below the user's cache).",
)
@click.option("--quiet", "-q", is_flag=True, help="No progress and no summary.")
def command(source: str, target: str, **given: Any) -> None:
    """Convert SOURCE (a folder, a table, tars and other formats: docs/sources.md) into the data set directory TARGET.

    Both may be URLs (s3://, gs://, and for SOURCE http://). The same source, options and library versions give the same bytes for any
    number of workers. After an interruption, --resume goes on.
    """
    interruptible()
    specs = [*(load_mapping(given["mapping"]) if given["mapping"] else ()), *(parse_field(text) for text in given["fields"])]
    source_options = pairs(given["source_option"])
    if any(map(is_url, (*source.split("::"), target, source_options.get("root", "")))):
        if given["task"] or given["engine"] != "local":
            raise OptionError("tasks and engines need a source and a target that all their machines see as paths, not URLs")

        def run(staged: str, place: Path, changed: dict[str, str]) -> None:
            _run(staged, place, changed, specs, given)

        return transfer.convert_by_url(source, target, source_options, given, run)
    return _run(source, Path(target), source_options, specs, given)


def _run(source: str, target: Path, source_options: dict[str, str], specs: Sequence[FieldSpec], given: dict[str, Any]) -> None:
    opened = open_source(source, kind=given["kind"], fields=specs or None, **source_options)
    options = ConvertOptions(
        shard_bytes=parse_size(given["shard_size"]),
        shard_rows=given["shard_rows"],
        segment_bytes=parse_size(given["segment_size"]),
        group_bytes=parse_size(given["group_size"]),
        duplicates=given["duplicates"],
        workers=given["workers"] or 0,
        on_error=given["on_error"],
        max_errors=given["max_errors"],
        sample_timeout=given["sample_timeout"],
        resume=given["resume"],
        overwrite=given["overwrite"],
        allow_empty=given["allow_empty"],
        task=parse_task(given["task"]),
    )
    quiet = given["quiet"]
    if given["engine"] == "ray":
        _on_ray(opened, target, options, given)
        return
    if not quiet:
        _say_hello(options, opened.fields)
    with tqdm(unit=" samples", disable=True if quiet else None, file=sys.stderr, smoothing=0.1) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        summary = convert(opened, target, options, progress=progress)
    if not quiet:
        _say_summary(summary, target, opened.notes())


def _on_ray(source: Source, target: Path, options: ConvertOptions, given: dict[str, Any]) -> None:
    from shard_builder.engines.ray_engine import convert_on_ray

    with tqdm(unit=" tasks", disable=True if given["quiet"] else None, file=sys.stderr) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        samples, shards = convert_on_ray(
            source, target, options, address=given["address"], tasks=given["tasks"] or 0, progress=progress
        )
    if not given["quiet"]:
        click.echo(f"{target}: {samples:,} samples in {shards} shards", err=True)


def _say_hello(options: ConvertOptions, fields: Sequence[FieldSpec]) -> None:
    click.echo(
        f"fields: {', '.join(f'{spec.name} ({spec.kind})' for spec in fields)}; {options.worker_count} workers", err=True
    )
    if any(spec.kind == "image" for spec in fields):
        versions = ", ".join(f"{name} {version}" for name, version in pil_report().items() if version)
        click.echo(f"images through {versions}", err=True)
        for warning in check_codec_versions():
            click.echo(f"warning: {warning}", err=True)


def _say_summary(summary: Summary, target: Path, notes: dict[str, Any]) -> None:
    for warning in summary.warnings[:20]:
        click.echo(f"warning: {warning}", err=True)
    for warning in notes.get("warnings", [])[:20]:
        click.echo(f"warning: {warning}", err=True)
    rate = summary.samples / summary.seconds if summary.seconds else 0.0
    share = f", {summary.bytes / summary.source_bytes:.0%} of the source" if summary.source_bytes else ""
    resumed = f" ({summary.resumed_shards} already there)" if summary.resumed_shards else ""
    click.echo(
        f"{target}: {summary.samples:,} samples in {summary.shards} shards{resumed}, {summary.bytes / 1e6:,.1f} MB{share}; "
        f"{summary.seconds:.1f} s, {rate:,.0f} samples/s",
        err=True,
    )
    skipped = {name: value for name, value in notes.items() if name.startswith("skipped") and value}
    if skipped:
        click.echo(f"not taken from the source: {msgspec.json.encode(skipped).decode()}", err=True)
    if summary.errors or summary.dropped:
        click.echo(
            f"{summary.errors} bad samples left out, {summary.dropped} duplicates dropped: see {target / ERRORS}", err=True
        )
