"""Data sets an operation reads: opened, named by what they hold, and their stored values row by row, undecoded."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfdata.codecs.base import Encoded
from lfdata.dataset import ShardDataset
from lfdata.dataset.rows import reserve
from lfdata.dataset.shard import Shard
from lfdata.errors import ChangedError, CorruptError, OptionError
from lfdata.format.columns import scalar_dtype
from lfdata.format.meta import MANIFEST, FieldMeta, Manifest
from lfdata.storage.urls import is_url, shown

CACHE_BYTES = 64 << 20
BATCH_ROWS = 1024
BATCH_BYTES = 16 << 20
# What a row takes in any shard beside its payload and key, about.
ROW_BYTES = 64


def open_input(path: str | Path, checksum: str | None = None) -> ShardDataset:
    """A data set. With ``checksum``, one whose manifest is another than when the operation began is a :class:`ChangedError`."""
    if is_url(str(path)):
        raise OptionError(f"{shown(str(path))}: operations read local data sets; copy this one first")
    found = ShardDataset(Path(path), index_cache_bytes=CACHE_BYTES, read_threads=1)
    if checksum is not None and found.manifest.checksum != checksum:
        raise ChangedError(
            place_of(found) / MANIFEST, None, "the data set was replaced while it was read. Run the command again"
        )
    return found


def place_of(data: ShardDataset) -> Path:
    """The directory of a local data set."""
    return Path(data.path)


def refuse_overlap(result: str | Path, inputs: Sequence[str | Path]) -> None:
    """Before anything is written. Raises :class:`OptionError`: a result in an input's directory, or around one, would be part of it."""
    place = Path(result).resolve()
    for given in inputs:
        held = Path(given).resolve()
        if place == held:
            raise OptionError(f"{result}: the result cannot be written over its input; choose another directory")
        if place.is_relative_to(held):
            raise OptionError(f"{result}: the result lies inside its input {given}; choose a directory outside it")
        if held.is_relative_to(place):
            raise OptionError(f"{result}: the input {given} lies inside the result's directory; choose another one")


def describe_input(manifest: Manifest) -> dict[str, Any]:
    """What an operation's identity says of an input: nothing of where it lies."""
    conversion = manifest.provenance.get("conversion")
    return {"manifest": manifest.checksum, "conversion": conversion, "rows": manifest.rows, "shards": len(manifest.shards)}


def payload_sizes(shard: Shard, names: Sequence[str], *, unpacked: bool = False) -> NDArray[np.int64]:
    """Bytes of every row of a shard, over some fields: int64, (rows,). ``unpacked``: json counts as before compression."""
    total = np.zeros(shard.rows, np.int64)
    for name in names:
        field, file = shard.field(name), shard.file_of(name)
        if field.kind == "scalar":
            total += scalar_dtype(field).itemsize
            continue
        role = "tokens" if field.kind == "tokens" else "raw_bytes" if field.kind == "json" and unpacked else "bytes"
        column = file.read_column(name, role)
        if column is None:
            raise CorruptError(file.name, None, f"field {name!r} has no column {role!r}")
        total += column.astype(np.int64) * (scalar_dtype(field).itemsize if role == "tokens" else 1)
    return total


def stored_fields(shard: Shard, names: Sequence[str]) -> tuple[FieldMeta, ...]:
    """Some fields as this shard stores them."""
    return tuple(shard.field(name) for name in names)


def stored_dictionaries(shard: Shard, names: Sequence[str]) -> dict[str, bytes]:
    """The dictionaries of some fields, by name."""
    found = {name: shard.file_of(name).dictionaries.get(name) for name in names}
    return {name: dictionary for name, dictionary in found.items() if dictionary}


def layout_of(shard: Shard, names: Sequence[str]) -> bytes:
    """A digest of what rows of two shards must share to lie in one: fields with all their parameters, and dictionaries."""
    digest = hashlib.sha256(repr(stored_fields(shard, names)).encode())
    for name, dictionary in sorted(stored_dictionaries(shard, names).items()):
        digest.update(f"{name!r} {len(dictionary)} ".encode() + dictionary)
    return digest.digest()


def stored_rows(
    shard: Shard, names: Sequence[str], rows: NDArray[np.int64], *, keys: bool = True
) -> Iterator[tuple[int, bytes, dict[str, Encoded]]]:
    """Row, key and stored values of some rows of a shard, in the order given; every payload is compared with its check.

    Memory is bounded by :data:`BATCH_BYTES` (or one row). Raises :class:`lfdata.errors.FormatError` naming file, field and row.
    """
    for start in range(0, len(rows), BATCH_ROWS):
        batch = rows[start : start + BATCH_ROWS]
        ends = np.cumsum(_sizes_at(shard, names, batch))
        at = 0
        while at < len(batch):
            before = int(ends[at - 1]) if at else 0
            stop = max(at + 1, int(np.searchsorted(ends, before + BATCH_BYTES, side="right")))
            yield from _batch(shard, names, batch[at:stop], keys)
            at = stop


def _sizes_at(shard: Shard, names: Sequence[str], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Payload bytes of some rows. Only the blocks of the index that hold them are read."""
    total = np.zeros(len(rows), np.int64)
    for name in names:
        if shard.field(name).kind != "scalar":
            total += shard.lengths(name, rows)[1]
    return total


def _batch(
    shard: Shard, names: Sequence[str], rows: NDArray[np.int64], with_keys: bool
) -> Iterator[tuple[int, bytes, dict[str, Encoded]]]:
    keys = shard.base.keys(rows) if with_keys else [b""] * len(rows)
    values = {name: _column(shard, name, rows) for name in names}
    for place, row in enumerate(rows.tolist()):
        found = {name: value for name in names if (value := values[name][place]) is not None}
        yield row, keys[place], found


def _column(shard: Shard, name: str, rows: NDArray[np.int64]) -> list[Encoded | None]:
    field = shard.field(name)
    present = shard.present(name, rows).tolist()
    if field.kind == "scalar":
        return [
            Encoded(value.tobytes()) if there else None for value, there in zip(shard.scalars(name, rows), present, strict=True)
        ]
    located = shard.lengths(name, rows)
    offsets, out = reserve(Path(shard.name), name, located[1])
    shard.read(name, rows, located, out, offsets[:-1])
    sizes = {role: data.tolist() for role, data in shard.sizes(name, rows).items() if role != "bytes"}
    aux: list[NDArray[np.uint64] | None] = [None] * len(rows)
    if field.kind == "image":
        aux = shard.mcu_rows(name, rows)
    ends = offsets.tolist()
    view = out.data
    found: list[Encoded | None] = []
    for place, there in enumerate(present):
        mine = {role: tuple(data[place]) if role == "dims" else data[place] for role, data in sizes.items()}
        found.append(Encoded(view[ends[place] : ends[place + 1]], mine, aux[place]) if there else None)
    return found
