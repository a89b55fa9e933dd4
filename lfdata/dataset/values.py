"""Values of many samples of a data set: shard by shard, into one piece of memory a field."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfdata.dataset.ragged import Ragged
from lfdata.dataset.rows import Memory, reserve
from lfdata.dataset.shards import Shards
from lfdata.errors import SampleError
from lfdata.format.columns import scalar_dtype

Parts = list[tuple[int, NDArray[np.int64]]]
"""Shards, each with the places of the rows that lie in it (:func:`lfdata.dataset.rows.by_shard`)."""


def keys_of(shards: Shards, rows: NDArray[np.int64], parts: Parts) -> list[bytes]:
    """Keys of some rows."""
    keys = [b""] * len(rows)
    for number, where in parts:
        for place, key in zip(where.tolist(), shards.shard(number).base.keys(rows[where] - shards.starts[number]), strict=True):
            keys[place] = key
    return keys


def values_of(shards: Shards, name: str, rows: NDArray[np.int64], parts: Parts, threads: int, decode: bool) -> Any:
    """A field of some rows: decoded one by one, or (without ``decode``) as it is stored, scalars as their array."""
    if shards.schema[name].kind == "scalar":
        return scalars_of(shards, name, rows, parts, decode)
    ragged = payloads_of(shards, name, rows, parts, threads)
    assert ragged is not None
    if not decode:
        return ragged
    values: list[Any] = [None] * len(rows)
    view = ragged.values.data
    offsets = ragged.offsets.tolist()
    for number, where in parts:
        shard = shards.shard(number)
        local = rows[where] - shards.starts[number]
        decoder = shard.decoder(name)
        sizes = {role: data.tolist() for role, data in shard.sizes(name, local).items()}
        for position, place in enumerate(where.tolist()):
            if not ragged.present[place]:
                continue
            mine = {role: data[position] for role, data in sizes.items()}
            if "dims" in mine:
                mine["dims"] = tuple(mine["dims"])
            try:
                values[place] = decoder.decode(view[offsets[place] : offsets[place + 1]], mine)
            except SampleError as error:
                error.field, error.path = name, f"{shard.name}, row {int(local[position])}, index {int(rows[place])}"
                error.key = shard.base.keys(local[position : position + 1])[0]
                raise
    return values


def scalars_of(shards: Shards, name: str, rows: NDArray[np.int64], parts: Parts, decode: bool) -> Any:
    """A scalar field of some rows."""
    result = np.zeros(len(rows), scalar_dtype(shards.schema[name]))
    present = np.ones(len(rows), bool)
    for number, where in parts:
        local = rows[where] - shards.starts[number]
        result[where] = shards.shard(number).scalars(name, local)
        present[where] = shards.shard(number).present(name, local)
    if not decode:
        return result
    return [value if there else None for value, there in zip(result, present.tolist(), strict=True)]


def payloads_of(
    shards: Shards,
    name: str,
    rows: NDArray[np.int64],
    parts: Parts,
    threads: int,
    given: NDArray[np.uint8] | None = None,
    memory: Memory | None = None,
) -> Ragged | None:
    """Payloads in memory of their own, of ``memory``, or in ``given`` if they are of one length and fill it exactly (``None`` if not)."""
    if len(parts) == 1:
        # The usual case: nothing has to be scattered.
        shard = shards.shard(parts[0][0])
        local = rows - shards.starts[parts[0][0]]
        found = shard.lengths(name, local)
        if given is not None and not fill(found[1], given):
            return None
        offsets, out = reserve(shards.path, name, found[1], given, memory)
        shard.read(name, local, found, out, offsets[:-1], threads)
        return Ragged(out, offsets, shard.present(name, local))
    lengths = np.zeros(len(rows), np.int64)
    present = np.ones(len(rows), bool)
    located = []
    for number, where in parts:
        local = rows[where] - shards.starts[number]
        found = shards.shard(number).lengths(name, local)
        present[where] = shards.shard(number).present(name, local)
        lengths[where] = found[1]
        located.append((number, local, found, where))
    if given is not None and not fill(lengths, given):
        return None
    offsets, out = reserve(shards.path, name, lengths, given, memory)
    for number, local, found, where in located:
        shards.shard(number).read(name, local, found, out, offsets[where], threads)
    return Ragged(out, offsets, present)


def fill(lengths: NDArray[np.int64], given: NDArray[np.uint8]) -> bool:
    """Whether payloads are of one length and as long as the memory for them."""
    return bool((lengths * len(lengths) == len(given)).all())
