"""Indices a caller gives: checked, grouped by shard, and room for the values they stand for."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfdata.errors import LimitError, OptionError

# A buffer that is used again: a part more than was asked for, and kept unless it is so many times too large.
SPARE, KEEP, LEAST = 8, 8, 1 << 20


def checked_rows(path: Path | str, count: int, indices: Any) -> NDArray[np.int64]:
    """``indices`` as ordinals 0 to ``count`` - 1: int64, shape (n,); negative ones count from the end.

    Raises:
        IndexError: out of range. OptionError: not a one-dimensional sequence of integers.
    """
    try:
        given = np.asarray(indices)
    except (ValueError, TypeError) as error:
        raise OptionError(f"indices must be a one-dimensional sequence of integers: {error}") from error
    if given.ndim == 1 and given.size and given.dtype.kind in "Of":
        given = _integers(path, count, indices, given)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise OptionError(f"indices must be a one-dimensional sequence of integers, not {given.dtype} of shape {given.shape}")
    rows = np.minimum(given, count).astype(np.int64) if given.dtype.kind == "u" else given.astype(np.int64, copy=False)
    if rows.size and (rows.min() < 0 or rows.max() >= count):
        rows = np.where(rows < 0, rows + count, rows)
        bad = (rows < 0) | (rows >= count)
        if bad.any():
            raise IndexError(f"{path}: index {given[int(np.argmax(bad))]} of {count} samples")
    return rows


def _integers(path: Path | str, count: int, indices: Any, given: NDArray[Any]) -> NDArray[Any]:
    """Python integers that numpy keeps as objects or floats, as an array of integers; anything else as it is."""
    values = list(indices)
    if not all(isinstance(value, int | np.integer) and not isinstance(value, bool) for value in values):
        return given
    outside = next((value for value in values if not -count <= value < count), None)
    if outside is not None:
        raise IndexError(f"{path}: index {outside} of {count} samples")
    return np.array(values, np.int64)


def by_shard(starts: NDArray[np.int64], rows: NDArray[np.int64]) -> list[tuple[int, NDArray[np.int64]]]:
    """Shards touched, each with the positions in ``rows`` that lie in it; ``starts`` has one more element than there are shards."""
    if len(starts) == 2 and len(rows):
        return [(0, np.arange(len(rows)))]
    shard_of = starts.searchsorted(rows, side="right") - 1
    if len(rows) and (shard_of == shard_of[0]).all():
        return [(int(shard_of[0]), np.arange(len(rows)))]
    return [(int(number), np.flatnonzero(shard_of == number)) for number in np.unique(shard_of)]


class Memory:
    """A buffer that is used again by whoever reads in the same thread: what was read before is gone then."""

    def __init__(self) -> None:
        self._own = threading.local()

    def __call__(self, size: int) -> NDArray[np.uint8]:
        """``size`` bytes. Raises MemoryError."""
        kept: NDArray[np.uint8] | None = getattr(self._own, "buffer", None)
        if kept is None or len(kept) < size or len(kept) > KEEP * max(size, LEAST):
            self._own.buffer = kept = None
            self._own.buffer = kept = np.empty(size + size // SPARE, np.uint8)
        return kept[:size]


def reserve(
    path: Path | str,
    name: str,
    lengths: NDArray[np.int64],
    given: NDArray[np.uint8] | None = None,
    memory: Memory | None = None,
) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Offsets of values of these lengths, and the buffer for them: ``given``, one of ``memory``, or a new one. Raises :class:`LimitError`."""
    count = len(lengths)
    if count and int(lengths.max()) * count >= 1 << 62:
        raise LimitError(path, None, f"field {name!r}: more than 2^62 bytes in {count} samples")
    offsets = np.zeros(count + 1, np.int64)
    lengths.cumsum(out=offsets[1:])
    if given is not None:
        return offsets, given
    try:
        size = int(offsets[-1])
        return offsets, np.empty(size, np.uint8) if memory is None else memory(size)
    except MemoryError as error:
        raise LimitError(
            path, None, f"field {name!r}: no memory for {offsets[-1]} bytes. Read fewer samples at a time"
        ) from error


def scatter(columns: dict[str, NDArray[Any]], where: Any, rows: int, found: dict[str, NDArray[Any]]) -> None:
    """Put columns of some rows into those of all ``rows``, which are made as they come; ``where``: the places of those rows."""
    for role, data in columns.items():
        if role not in found:
            found[role] = np.zeros((rows, *data.shape[1:]), data.dtype)
        found[role][where] = data
