"""``lfbench sizes``: bytes a sample of a data set beside its source files and a tar of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from benchmarks.record import save
from lfdata import ShardDataset


def tar_bytes(sizes: list[int]) -> int:
    """Size of a tar with members of these sizes: a header and whole blocks each, two end blocks, padded to 10,240."""
    total = sum(512 + -(-size // 512) * 512 for size in sizes) + 1024
    return -(-total // 10_240) * 10_240


def source_sizes(folder: Path, table: Path | None) -> list[int]:
    """Sizes of the source's files, one a member of a tar: all below a folder, or what a JSONL table names and its lines."""
    if table is None:
        return [path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]
    sizes = []
    for line in table.read_bytes().splitlines():
        sizes.append(len(line) + 1)
        row: dict[str, Any] = msgspec.json.decode(line)
        texts = sorted({value for value in row.values() if isinstance(value, str) and "/" in value})
        named = [text for text in texts if (folder / text).is_file()]
        sizes += [(folder / value).stat().st_size for value in named]
    return sizes


@click.command("sizes")
@click.argument("dataset", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--source", type=click.Path(exists=True, file_okay=False, path_type=Path), required=True, help="The source's folder."
)
@click.option(
    "--table", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="The JSONL file it was converted from."
)
@click.option("--name", required=True, help="Name of the record.")
@click.option("--output", type=click.Path(path_type=Path))
def command(dataset: Path, source: Path, table: Path | None, name: str, output: Path | None) -> None:
    """Bytes a sample of DATASET's shards, beside the source's files and a tar with one member a value."""
    opened = ShardDataset(dataset)
    sizes = source_sizes(source, table)
    samples = len(opened)
    stored = {
        field: stats["bytes"]["sum"] for field, stats in opened.manifest.statistics.items() if "sum" in stats.get("bytes", {})
    }
    totals = {
        "shards": sum(shard.bytes for shard in opened.manifest.shards),
        "source files": sum(sizes),
        "tar of the source": tar_bytes(sizes),
    }
    per_sample = {what: size / samples for what, size in totals.items()}
    for what, size in per_sample.items():
        click.echo(f"{what:20} {size:12,.0f} bytes a sample   {size / per_sample['source files']:6.2f} of the source")
    results = {
        "samples": samples,
        "bytes_a_sample": per_sample,
        "values_before_sharing": {field: size / samples for field, size in stored.items()},
        "fields": {field.name: {"kind": field.kind, "params": field.params} for field in opened.manifest.fields},
    }
    click.echo(f"record: {save(f'sizes-{name}', {'data': name}, results, output)}")
