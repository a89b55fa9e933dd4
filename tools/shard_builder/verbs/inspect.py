"""``shard-builder inspect``: what a data set, or one file of it, holds and where it comes from. Reads no payload."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click
import msgspec

from lfdata.errors import ChangedError, LfdataError
from lfdata.format import layout
from lfdata.format.files import LocalFile
from lfdata.format.reader import ShardFile
from shard_builder.examine.opened import DataSet, is_data_set
from shard_builder.examine.report import print_file, print_set
from shard_builder.examine.text import visible

_KINDS = {layout.KIND_BASE: "base shard", layout.KIND_SIDECAR: "sidecar", layout.KIND_INDEX: "consolidated index"}


def inspect(path: str | Path) -> dict[str, Any]:
    """Describe a data set (by its manifest) or one shard, sidecar or index file (by its header, directory and META).

    Returns:
        JSON-able. A data set: ``type`` (``"data set"``), ``rows``, ``shards`` (list), ``fields``, ``bytes`` (shards by the
        manifest, on disk, index), ``bytes_a_sample``, ``statistics``, ``provenance``, ``index`` (state: absent, present,
        foreign, damaged). A file: ``type``, ``header``, ``sections``, ``meta``.

    Raises:
        LfdataError: nothing there, or damaged beyond reading.
    """
    path = Path(path)
    return _data_set(DataSet.open(path)) if is_data_set(path) else _file(path)


def _data_set(data: DataSet) -> dict[str, Any]:
    manifest = data.manifest
    expected = sum(member.size for member in data.members)
    shards, on_disk = [], 0
    for number, shard in enumerate(manifest.shards):
        found = {name: _size(data.path / name) for name in (shard.file, *(sidecar.file for sidecar in shard.sidecars))}
        on_disk += sum(size or 0 for size in found.values())
        missing = [name for name, size in found.items() if size is None]
        first = data.starts[number]
        shards.append({**msgspec.to_builtins(shard), "first": first, "stop": data.starts[number + 1], "missing": missing})
    return {
        "type": "data set",
        "path": visible(str(data.path)),
        "version": list(manifest.version),
        "rows": manifest.rows,
        "fields": msgspec.to_builtins(manifest.fields),
        "bytes": {"manifest_says": expected, "on_disk": on_disk, "index": _size(data.index_path)},
        "bytes_a_sample": expected / manifest.rows if manifest.rows else None,
        "index": _index(data),
        "statistics": manifest.statistics,
        "provenance": manifest.provenance,
        "shards": shards,
    }


def _size(path: Path) -> int | None:
    try:
        return os.stat(path).st_size
    except OSError:
        return None


def _index(data: DataSet) -> dict[str, Any]:
    if not data.index_path.exists():
        return {"state": "absent", "reason": "whole columns are read shard by shard; `shard-builder index` writes one"}
    try:
        data.open_index()
    except ChangedError as error:
        return {"state": "foreign", "reason": f"it belongs to other shards and is not used: {visible(error.reason)}"}
    except LfdataError as error:
        return {"state": "damaged", "reason": f"it is not used: {visible(str(error))}"}
    return {"state": "present", "reason": ""}


def _file(path: Path) -> dict[str, Any]:
    opened = ShardFile(LocalFile(path))
    identity = opened.identity
    sections = []
    for entry in opened.entries:
        name = opened.fields[entry.field].name if entry.field < len(opened.fields) else None
        role = layout.ROLES[entry.role] if entry.type == b"COLM" else None
        element = "bytes" if not entry.element else "locator" if entry.dtype == layout.LOCATOR else entry.dtype.name
        sections.append(
            {
                "type": entry.type.decode("ascii", "backslashreplace"),
                "field": name,
                "role": role,
                "element": element,
                "offset": entry.offset,
                "bytes": entry.length,
                "count": entry.count,
                "first": entry.first,
                "check": f"{entry.check:016x}",
                "required": bool(entry.flags & layout.FLAG_REQUIRED),
                "blocked": entry.blocked,
            }
        )
    header = {
        "version": [identity.major, identity.minor],
        "kind": _KINDS[identity.kind],
        "required_features": identity.required,
        "optional_features": identity.optional,
        "shard_id": identity.shard_id.hex(),
        "part_id": identity.part_id.hex(),
        "rows": opened.rows,
        "bytes": opened.file.size,
    }
    dictionaries = {name: len(dictionary) for name, dictionary in opened.dictionaries.items()}
    meta = msgspec.to_builtins(opened.meta)
    return {
        "type": _KINDS[identity.kind],
        "path": visible(str(path)),
        "header": header,
        "sections": sections,
        "dictionaries": dictionaries,
        "meta": meta,
    }


@click.command("inspect", short_help="Schema, counts, sizes and provenance.")
@click.argument("dataset", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Machine-readable, and complete.")
def command(dataset: Path, as_json: bool) -> None:
    """Describe DATASET: a directory, or one shard, sidecar or index file. No payload is read."""
    result = inspect(dataset)
    if as_json:
        click.echo(msgspec.json.encode(result).decode())
    elif result["type"] == "data set":
        print_set(result, click.echo)
    else:
        print_file(result, click.echo)
