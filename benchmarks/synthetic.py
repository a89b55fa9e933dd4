"""Data sets made for measuring, straight through the format's writer."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfdata.codecs.base import Encoded
from lfdata.format.container import ContainerWriter
from lfdata.format.durable import Files
from lfdata.format.layout import KIND_BASE, MAJOR, MINOR, REGION_ALIGN, Identity, xxh3
from lfdata.format.meta import MANIFEST, FieldMeta, Manifest, ShardEntry, ShardMeta, encode_manifest
from lfdata.format.writer import GROUP_BYTES, ShardWriter


def write_bytes_dataset(path: Path, rows: NDArray[Any], group_bytes: int = GROUP_BYTES) -> None:
    """One shard with one ``bytes`` field ``value``: row i of a (rows, size) uint8 array."""
    values = (Encoded(row.tobytes()) for row in rows)
    _write_one_shard(path, FieldMeta("value", "bytes"), values, group_bytes)


def write_bytes_shards(path: Path, rows: NDArray[Any], shards: int) -> None:
    """The same in several shards."""
    path.mkdir(parents=True, exist_ok=True)
    field, entries = FieldMeta("value", "bytes"), []
    for number, part in enumerate(np.array_split(rows, shards)):
        identity = number.to_bytes(15, "little") + b"\1"
        writer = ShardWriter(path / f"s{number:05d}.lfd", (field,), identity)
        for row in part:
            writer.add(row[:8].tobytes(), {field.name: Encoded(row.tobytes())})
        written = writer.finish(ShardMeta(fields=(field,)))
        entries.append(
            ShardEntry(writer.path.name, identity.hex(), written.rows, written.bytes, written.tail, written.sha256, number)
        )
    statistics = {field.name: {"present": len(rows)}}
    Files().write_file(path / MANIFEST, encode_manifest(Manifest(len(rows), (field,), tuple(entries), statistics)))


def write_tokens_dataset(path: Path, rows: NDArray[np.uint16]) -> None:
    """One shard with one ``tokens`` field ``tokens``: row i of a (rows, length) uint16 array."""
    field = FieldMeta("tokens", "tokens", {"dtype": "uint16", "vocab": 1 << 16})
    _write_one_shard(path, field, (Encoded(row.astype("<u2").tobytes(), {"tokens": len(row)}) for row in rows))


def _write_one_shard(path: Path, field: FieldMeta, values: Iterable[Encoded], group_bytes: int = GROUP_BYTES) -> None:
    path.mkdir(parents=True, exist_ok=True)
    identity = bytes(15) + b"\1"
    writer = ShardWriter(path / "s.lfd", (field,), identity, group_bytes=group_bytes)
    for number, value in enumerate(values):
        writer.add(b"%d" % number, {field.name: value})
    written = writer.finish(ShardMeta(fields=(field,)))
    entry = ShardEntry("s.lfd", identity.hex(), written.rows, written.bytes, written.tail, written.sha256)
    statistics = {field.name: written.statistics[field.name]}
    Files().write_file(path / MANIFEST, encode_manifest(Manifest(written.rows, (field,), (entry,), statistics)))


def write_scalar_shards(path: Path, shards: int, rows: int) -> int:
    """``shards`` shards of ``rows`` samples with an int32 ``label``; keys are the sample numbers in nine digits.

    Columns are written whole, not row by row, so that 10^8 rows take minutes. Returns the bytes on disk.
    """
    path.mkdir(parents=True, exist_ok=True)
    fields = (FieldMeta("label", "scalar", {"dtype": "int32"}),)
    entries = []
    for number in range(shards):
        identity = Identity(MAJOR, MINOR, KIND_BASE, 0, 0, number.to_bytes(16, "little"), bytes(16))
        container = ContainerWriter(path / f"s{number:05d}.lfd", identity, Files())
        container.pad(REGION_ALIGN)
        container.column(b"COLM", np.arange(rows, dtype="<i4"), field=0, role=0)
        digits = (np.arange(number * rows, (number + 1) * rows)[:, None] // 10 ** np.arange(8, -1, -1)) % 10 + ord("0")
        keys = digits.astype(np.uint8).tobytes()
        hashes = np.array([xxh3(keys[at : at + 9]) for at in range(0, len(keys), 9)], "<u8")
        order = np.argsort(hashes, kind="stable")
        container.column(b"KEYS", np.frombuffer(keys, np.uint8))
        container.column(b"KOFF", np.arange(rows + 1, dtype="<u8") * np.uint64(9))
        container.column(b"KHSH", hashes[order])
        container.column(b"KROW", order.astype("<u8"))
        written = container.finish(rows, ShardMeta(fields=fields))
        name, shard_id = container.path.name, identity.shard_id.hex()
        entries.append(ShardEntry(name, shard_id, rows, written.bytes, written.tail, written.sha256, number))
    Files().write_file(path / MANIFEST, encode_manifest(Manifest(shards * rows, fields, tuple(entries))))
    return sum(entry.bytes for entry in entries)
