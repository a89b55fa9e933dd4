"""Small real data sets for the tests of the verbs: values through the real encoders, shards through the real writer."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lfdata.codecs.base import Encoded
from lfdata.codecs.registry import library_versions, make_encoder
from lfdata.format.durable import Files
from lfdata.format.meta import (
    MANIFEST,
    FieldMeta,
    Manifest,
    Position,
    ShardEntry,
    ShardMeta,
    SidecarEntry,
    encode_manifest,
    merge_statistics,
)
from lfdata.format.writer import ShardWriter
from shard_builder.consolidate import write_consolidated

Row = tuple[bytes, Mapping[str, Any]]
FIELDS: dict[str, tuple[str, dict[str, str]]] = {
    "image": ("image", {"codec": "png"}),
    "caption": ("text", {}),
    "sound": ("audio", {"chunk_frames": "64"}),
    "about": ("json", {}),
    "vector": ("array", {"dtype": "float32", "ndim": "1"}),
    "ids": ("tokens", {"vocab": "1000"}),
    "blob": ("bytes", {}),
    "label": ("scalar", {"dtype": "int32"}),
}


def picture(seed: int, width: int = 20, height: int = 12) -> bytes:
    """A PNG of noise."""
    return png(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def png(pixels: np.ndarray[Any, Any]) -> bytes:
    """Any 8-bit pixels as a PNG."""
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def tone(frames: int = 200, rate: int = 8000, channels: int = 1, level: float = 0.5) -> tuple[Any, int]:
    """A sine."""
    wave = np.sin(np.arange(frames) * 0.2) * level * 32767
    return np.repeat(wave[:, None], channels, 1).astype(np.int16), rate


def row(number: int) -> dict[str, Any]:
    """A value of every field."""
    return {
        "image": picture(number),
        "caption": f"picture number {number}",
        "sound": tone(200 + number),
        "about": {"number": number, "tags": ["a", "b"]},
        "vector": np.arange(number % 3 + 1, dtype=np.float32),
        "ids": [number % 1000, 1, 2],
        "blob": bytes([number % 256]) * 5,
        "label": number % 3,
    }


def rows(count: int, first: int = 0) -> list[Row]:
    """Samples with keys ``key/NNNN``."""
    return [(f"key/{number:04d}".encode(), row(number)) for number in range(first, first + count)]


def _encoded(encoder: Any, value: Any) -> Encoded:
    """Values that are encoded already are stored as they are: how tests get payloads no encoder makes."""
    found: Encoded = value if isinstance(value, Encoded) else encoder.encode(value)
    return found


def build(
    root: Path,
    shards: Sequence[Sequence[Row]],
    fields: Mapping[str, tuple[str, dict[str, str]]] = FIELDS,
    *,
    index: bool = False,
    sidecars: Mapping[int, tuple[str, tuple[str, dict[str, str]], Sequence[Any]]] | None = None,
) -> Manifest:
    """Write a data set. ``sidecars``: by shard number, (field, (kind, options), one value a row)."""
    root.mkdir(parents=True, exist_ok=True)
    encoders = {name: make_encoder(kind, options) for name, (kind, options) in fields.items()}
    schema = {name: FieldMeta(name, encoder.kind, encoder.params) for name, encoder in encoders.items()}
    entries, statistics = [], []
    for number, shard_rows in enumerate(shards):
        shard_id = hashlib.sha256(f"{root.name} {number}".encode()).digest()[:16]
        position = Position(0, 1, number, number == len(shards) - 1)
        name = f"s00000-{number:04d}-{shard_id[:4].hex()}.lfd"
        writer = ShardWriter(root / name, list(schema.values()), shard_id, group_bytes=4096)
        for key, values in shard_rows:
            writer.add(key, {field: _encoded(encoders[field], value) for field, value in values.items()})
        written = writer.finish(ShardMeta((), position))
        statistics.append(written.statistics)
        extra = []
        if sidecars and number in sidecars:
            field, (kind, options), column = sidecars[number]
            encoder = make_encoder(kind, options)
            meta = FieldMeta(field, kind, encoder.params)
            part = hashlib.sha256(f"part {number}".encode()).digest()[:16]
            side = ShardWriter(root / f"{name[:-4]}+{part[:4].hex()}.lfd", [meta], shard_id, part)
            for value in column:
                side.add(b"", {field: encoder.encode(value)})
            done = side.finish(ShardMeta((), position))
            extra.append(SidecarEntry(side.path.name, part.hex(), done.bytes, done.tail, done.sha256, (field,)))
        entries.append(
            ShardEntry(name, shard_id.hex(), written.rows, written.bytes, written.tail, written.sha256, 0, number, tuple(extra))
        )
    if sidecars:
        field, (kind, options), _ = next(iter(sidecars.values()))
        schema[field] = FieldMeta(field, kind, make_encoder(kind, options).params)
    provenance = {
        "library": library_versions({"json", "audio", "tokens"}),
        "source": {"type": "test"},
        "options": {"shard_rows": 10},
    }
    manifest = Manifest(
        sum(e.rows for e in entries), tuple(schema.values()), tuple(entries), merge_statistics(statistics), provenance
    )
    (root / MANIFEST).write_bytes(encode_manifest(manifest))
    if index:
        write_consolidated(root, manifest, Files())
    return manifest


def flip(path: Path, offset: int) -> None:
    """Invert one byte of a file."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 0xFF
    path.write_bytes(data)


def reseal(root: Path, manifest: Manifest) -> None:
    """Give the manifest the digests its files have now, so that only what lies beneath them can notice a change."""
    shards = []
    for shard in manifest.shards:
        raw = {name: getattr(shard, name) for name in shard.__struct_fields__}
        raw["sha256"] = hashlib.sha256((root / shard.file).read_bytes()).hexdigest()
        shards.append(ShardEntry(**raw))
    manifest.shards = tuple(shards)
    (root / MANIFEST).write_bytes(encode_manifest(manifest))
