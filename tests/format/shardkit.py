"""Small data sets for tests: shards from rows of ready-made values, and a manifest over them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lfdata.codecs.base import Encoded
from lfdata.dataset import ShardDataset
from lfdata.format.container import Written
from lfdata.format.durable import Files
from lfdata.format.index import write_index
from lfdata.format.meta import (
    INDEX,
    MANIFEST,
    FieldMeta,
    Manifest,
    Position,
    ShardEntry,
    ShardMeta,
    SidecarEntry,
    SourceRange,
    encode_manifest,
    merge_statistics,
)
from lfdata.format.writer import ShardWriter

Row = tuple[bytes, Mapping[str, Encoded]]
AUDIO_PARAMS = {"sample_format": "s16le", "chunk_frames": 64}
# Small enough that a few rows make several groups.
GROUP_BYTES = 4096


@dataclass
class Side:
    """A sidecar of one shard: its fields, and one mapping of values a row."""

    fields: Sequence[FieldMeta]
    rows: Sequence[Mapping[str, Encoded]]
    dictionaries: Mapping[str, bytes] = field(default_factory=dict)


@dataclass
class Part:
    """A base shard and its sidecars."""

    rows: Sequence[Row]
    sidecars: Sequence[Side] = ()


def identity(*words: object) -> bytes:
    """A 16-byte id made from words."""
    return hashlib.sha256(repr(words).encode()).digest()[:16]


def write_shard(
    path: Path,
    fields: Sequence[FieldMeta],
    rows: Sequence[Row],
    shard_id: bytes = identity("shard"),
    part_id: bytes = bytes(16),
    *,
    group_bytes: int = GROUP_BYTES,
    dictionaries: Mapping[str, bytes] | None = None,
    meta: ShardMeta | None = None,
) -> Written:
    """One file from its rows."""
    writer = ShardWriter(path, fields, shard_id, part_id, dictionaries, group_bytes)
    for key, values in rows:
        writer.add(key, values)
    return writer.finish(meta or ShardMeta(fields=()))


def write_dataset(
    root: Path,
    fields: Sequence[FieldMeta],
    parts: Sequence[Part],
    *,
    name: str = "set",
    group_bytes: int = GROUP_BYTES,
    dictionaries: Mapping[str, bytes] | None = None,
    with_index: bool = False,
) -> Manifest:
    """A whole data set: shards, sidecars, manifest and, if asked for, the index."""
    root.mkdir(parents=True, exist_ok=True)
    effective = {f.name: f for f in fields}
    entries, statistics, first = [], [], 0
    for number, part in enumerate(parts):
        shard_id = identity(name, number)
        file = f"s00000-{number:04d}-{shard_id[:4].hex()}.lfd"
        where = Position(0, 1, number, number == len(parts) - 1)
        made = {"options": {"group_bytes": group_bytes}}
        meta = ShardMeta((), where, SourceRange(first, first + len(part.rows)), provenance=made)
        written = write_shard(
            root / file, fields, part.rows, shard_id, group_bytes=group_bytes, dictionaries=dictionaries, meta=meta
        )
        mine, sides = dict(written.statistics), []
        for order, side in enumerate(part.sidecars):
            part_id = identity(name, number, order)
            side_file = f"{file[:-4]}+{part_id[:4].hex()}.lfd"
            side_rows = [(b"", values) for values in side.rows]
            side_meta = ShardMeta((), where, SourceRange(first, first + len(part.rows)), provenance=made)
            done = write_shard(
                root / side_file, side.fields, side_rows, shard_id, part_id,
                group_bytes=group_bytes, dictionaries=side.dictionaries, meta=side_meta,
            )  # fmt: skip
            names = tuple(f.name for f in side.fields)
            sides.append(SidecarEntry(side_file, part_id.hex(), done.bytes, done.tail, done.sha256, names))
            effective |= {f.name: f for f in side.fields}
            mine |= done.statistics
        entries.append(
            ShardEntry(file, shard_id.hex(), written.rows, written.bytes, written.tail, written.sha256, 0, number, tuple(sides))
        )
        statistics.append(mine)
        first += len(part.rows)
    manifest = Manifest(first, tuple(effective.values()), tuple(entries), merge_statistics(statistics), made if parts else {})
    save_manifest(root, manifest)
    if with_index:
        add_index(root, manifest)
    return manifest


def save_manifest(root: Path, manifest: Manifest) -> None:
    """Write ``manifest.json``."""
    Files().write_file(root / MANIFEST, encode_manifest(manifest))


def add_index(root: Path, manifest: Manifest, name: str = INDEX) -> None:
    """Write the consolidated index."""
    data = ShardDataset(root)
    write_index(root / name, manifest, data.shard_column, lambda n: data.shard(n).base.key_hashes(), Files())


# -- values ---------------------------------------------------------------------------------------------------------------


def audio(samples: np.ndarray, rate: int = 8000) -> Encoded:
    """int16 (frames, channels) as stored."""
    return Encoded(samples.astype("<i2").tobytes(), {"frames": len(samples), "channels": samples.shape[1], "rate": rate})


def tokens(ids: Sequence[int], dtype: str) -> Encoded:
    """Token ids as stored."""
    return Encoded(np.array(ids, np.dtype(dtype).newbyteorder("<")).tobytes(), {"tokens": len(ids)})


def array(values: np.ndarray) -> Encoded:
    """An array as stored."""
    little = np.ascontiguousarray(values.astype(values.dtype.newbyteorder("<"))).reshape(values.shape)
    return Encoded(little.tobytes(), {"dims": values.shape})


def scalar(value: Any, dtype: str) -> Encoded:
    """A scalar as stored."""
    return Encoded(np.array(value, np.dtype(dtype).newbyteorder("<")).tobytes())


def raw_image(pixels: np.ndarray) -> Encoded:
    """uint8 or uint16 (height, width, channels) as raw pixels."""
    height, width, channels = pixels.shape
    sizes = {"width": width, "height": height, "channels": channels, "codec": 4, "bits": pixels.dtype.itemsize * 8}
    return Encoded(np.ascontiguousarray(pixels.astype(pixels.dtype.newbyteorder("<"))).tobytes(), sizes)


def plain(data: bytes) -> Encoded:
    """Text or bytes."""
    return Encoded(data)
