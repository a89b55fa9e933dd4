"""Data sets with a field of every kind, and digests of what a loader gives."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from shardkit import Part, array, audio, plain, scalar, tokens, write_dataset

from lfdata import Loader
from lfdata.codecs.base import Encoded
from lfdata.codecs.registry import make_encoder
from lfdata.format.meta import FieldMeta
from lfdata.loader.produce import Producer

AUDIO_PARAMS = {"sample_format": "s16le", "chunk_frames": 64}
PAD = 9
FIELDS = (
    FieldMeta("image", "image", make_encoder("image", {"codec": "jpeg"}).params),
    FieldMeta("picture", "image", make_encoder("image", {"codec": "png"}).params),
    FieldMeta("ids", "tokens", {"dtype": "uint16", "vocab": 60_000}),
    FieldMeta("sound", "audio", AUDIO_PARAMS),
    FieldMeta("box", "array", {"dtype": "float32", "ndim": 2, "shape": [2, 3]}),
    FieldMeta("points", "array", {"dtype": "int16", "ndim": 2}),
    FieldMeta("label", "scalar", {"dtype": "int32"}),
    FieldMeta("caption", "text", {}),
    FieldMeta("blob", "bytes", {}),
    FieldMeta("about", "json", make_encoder("json", {}).params),
)
NAMES = tuple(field.name for field in FIELDS)
# Those that some rows lack.
OPTIONAL = NAMES[1:]


def pixels(seed: int, height: int, width: int) -> np.ndarray:
    """A smooth picture."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (-(-height // 8), -(-width // 8), 3), dtype=np.uint8)
    return np.kron(coarse, np.ones((8, 8, 1), np.uint8))[:height, :width]


def row(number: int, seed: int) -> dict[str, Encoded]:
    """All fields of a sample, with sizes that differ."""
    rng = np.random.default_rng([seed, number])
    height, width = int(rng.integers(24, 56)), int(rng.integers(24, 56))
    return {
        "image": make_encoder("image", {"codec": "jpeg"}).encode(pixels(number, height, width)),
        "picture": make_encoder("image", {"codec": "png"}).encode(pixels(number + 1000, 8 + number % 5, 9)),
        "ids": tokens(rng.integers(1, 60_000, number * 7 % 23).tolist(), "uint16"),
        "sound": audio(rng.integers(-(2**15), 2**15, (number * 31 % 170, 1)).astype(np.int16)),
        "box": array(rng.standard_normal((2, 3)).astype(np.float32)),
        "points": array(rng.integers(-99, 99, (number % 4, 3)).astype(np.int16)),
        "label": scalar(number * 3 - 20, "int32"),
        "caption": plain(("ä" * (number % 6) + f" sample {number}").encode()),
        "blob": plain(bytes(rng.integers(0, 256, number % 9, dtype=np.uint8))),
        "about": make_encoder("json", {}).encode(json.dumps({"n": number, "list": list(range(number % 5))})),
    }


def lacks(number: int, name: str) -> bool:
    """Whether a row of an incomplete data set lacks a field."""
    return name in OPTIONAL and (number + OPTIONAL.index(name)) % 6 == 0


def write_all_kinds(root: Path, count: int = 40, *, complete: bool = False, seed: int = 0, shards: int = 3) -> Path:
    """Rows with a field of every kind; unless ``complete``, most fields are absent here and there."""
    parts = []
    for part in range(shards):
        rows = []
        for number in range(count * part // shards, count * (part + 1) // shards):
            values = {name: value for name, value in row(number, seed).items() if complete or not lacks(number, name)}
            rows.append((b"key-%d-%d" % (seed, number), values))
        parts.append(Part(rows))
    write_dataset(root, FIELDS, parts, name=f"set-{seed}")
    return root


def write_numbers(root: Path, count: int, *, seed: int = 0, lengths: Sequence[int] | None = None) -> Path:
    """Small rows: their number as a label; and tokens, ``lengths`` of them, which name the row and the place."""
    fields = (FieldMeta("label", "scalar", {"dtype": "int64"}), FieldMeta("ids", "tokens", {"dtype": "uint32", "vocab": 2**31}))
    rows = []
    for number in range(count):
        length = lengths[number] if lengths is not None else number % 5
        ids = [seed * 100_000_000 + number * 1000 + place for place in range(length)]
        rows.append((b"%d-%d" % (seed, number), {"label": scalar(number, "int64"), "ids": tokens(ids, "uint32")}))
    half = count // 2
    write_dataset(root, fields, [Part(rows[:half]), Part(rows[half:])] if half else [Part(rows)], name=f"numbers-{seed}")
    return root


def spoil(root: Path, indices: Iterable[int], field: str = "image") -> list[int]:
    """Damage the stored bytes of some samples, on disk: a byte in the middle of each payload is turned over."""
    from lfdata import ShardDataset

    data, done = ShardDataset(root), []
    for index in indices:
        (stored,) = data.read_many([index], [field], decode=False)[field]
        file = root / data.shard_name(index)
        content = bytearray(file.read_bytes())
        at = content.find(stored.tobytes())
        assert at > 0 and content.count(stored.tobytes()) == 1
        content[at + len(stored) // 2] ^= 0xFF
        file.write_bytes(bytes(content))
        done.append(index)
    data.close()
    return done


def write_pictures(root: Path, count: int, *, bad: Iterable[int] = (), size: int = 40, seed: int = 0) -> Path:
    """Pictures and labels; the bad ones hold bytes that no decoder takes."""
    fields = (FIELDS[0], FieldMeta("label", "scalar", {"dtype": "int64"}))
    wrong, rows = set(bad), []
    for number in range(count):
        image = make_encoder("image", {"codec": "jpeg"}).encode(pixels(seed * 1000 + number, size, size + number % 3))
        if number in wrong:
            image = Encoded(b"\xff\xd8\xff" + bytes(40), image.sizes)
        rows.append((b"p%d" % number, {"image": image, "label": scalar(number, "int64")}))
    third = max(1, count // 3)
    parts = [Part(rows[at : at + third]) for at in range(0, count, third)] or [Part([])]
    write_dataset(root, fields, parts, name=f"pictures-{seed}")
    return root


# -- what comes out -------------------------------------------------------------------------------------------------------


def poisoned(loader: Loader) -> Loader:
    """The loader, with memory that is filled with a pattern before each job."""
    loader._spec = msgspec.structs.replace(loader._spec, poison=True)
    loader._producer = Producer(loader._spec)
    return loader


def digest(batch: Mapping[str, torch.Tensor]) -> str:
    """Of names, dtypes, shapes and bytes."""
    found = hashlib.sha256()
    for name in sorted(batch):
        value = batch[name].numpy()
        found.update(repr((name, value.dtype.str, value.shape)).encode())
        found.update(np.ascontiguousarray(value).tobytes())
    return found.hexdigest()


def digests(loader: Loader, epochs: int = 1) -> list[str]:
    """Of all batches of some epochs."""
    found = [digest(batch) for _ in range(epochs) for batch in loader]
    loader.close()
    return found


def joined(parts: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, np.ndarray]:
    """The ranks' batches of one step as the global batch."""
    result = {}
    for name in parts[0]:
        values = [part[name].numpy() for part in parts]
        if name.endswith(".offsets"):
            lengths = np.concatenate([np.diff(value) for value in values])
            result[name] = np.concatenate([[0], np.cumsum(lengths)])
        else:
            result[name] = np.concatenate(values)
    return result


def epoch_of(loaders: Sequence[Loader]) -> list[dict[str, np.ndarray]]:
    """One epoch of all ranks, global batch by global batch."""
    found = [joined(parts) for parts in zip(*loaders, strict=True)]
    for loader in loaders:
        loader.close()
    return found


def same(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> bool:
    """Equality to the bit."""
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype
        and one[name].shape == other[name].shape
        and one[name].tobytes() == other[name].tobytes()
        for name in one
    )


def indices(batches: Iterable[Mapping[str, Any]]) -> list[int]:
    """All indices."""
    return [int(index) for batch in batches for index in batch["__index__"]]


BAD_HOW: dict[str, Any] = {"most_bad_rate": 1.0}
