"""Data sets made for measuring, straight through the format's writer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfdata.codecs.base import Encoded
from lfdata.format.durable import Files
from lfdata.format.meta import MANIFEST, FieldMeta, Manifest, ShardEntry, ShardMeta, encode_manifest
from lfdata.format.writer import GROUP_BYTES, ShardWriter


def write_bytes_dataset(path: Path, rows: NDArray[Any], group_bytes: int = GROUP_BYTES) -> None:
    """One shard with one ``bytes`` field ``value``: row i of a (rows, size) uint8 array."""
    path.mkdir(parents=True, exist_ok=True)
    fields = (FieldMeta("value", "bytes"),)
    writer = ShardWriter(path / "s.lfd", fields, bytes(15) + b"\1", group_bytes=group_bytes)
    for number in range(len(rows)):
        writer.add(b"%d" % number, {"value": Encoded(rows[number].tobytes())})
    written = writer.finish(ShardMeta(fields=fields))
    entry = ShardEntry("s.lfd", (bytes(15) + b"\1").hex(), written.rows, written.bytes, written.tail, written.sha256)
    Files().write_file(
        path / MANIFEST, encode_manifest(Manifest(len(rows), fields, (entry,), {"value": written.statistics["value"]}))
    )


def write_scalar_shards(path: Path, shards: int, rows: int) -> int:
    """``shards`` shards of ``rows`` samples each with one int32 ``label``; keys are the decimal sample numbers. Returns bytes on disk."""
    path.mkdir(parents=True, exist_ok=True)
    fields = (FieldMeta("label", "scalar", {"dtype": "int32"}),)
    entries = []
    for number in range(shards):
        identity = number.to_bytes(16, "little")
        writer = ShardWriter(path / f"s{number:05d}.lfd", fields, identity)
        for row in range(rows):
            writer.add(b"%d" % (number * rows + row), {"label": Encoded(np.int32(row).tobytes())})
        written = writer.finish(ShardMeta(fields=fields))
        entries.append(
            ShardEntry(f"s{number:05d}.lfd", identity.hex(), written.rows, written.bytes, written.tail, written.sha256, number)
        )
    manifest = Manifest(shards * rows, fields, tuple(entries))
    Files().write_file(path / MANIFEST, encode_manifest(manifest))
    return sum(entry.bytes for entry in entries)
