"""Indices a caller gives: checked, grouped by shard, and room for the values they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfdata.errors import LimitError, OptionError


def checked_rows(path: Path, count: int, indices: Any) -> NDArray[np.int64]:
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


def _integers(path: Path, count: int, indices: Any, given: NDArray[Any]) -> NDArray[Any]:
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


def reserve(
    path: Path, name: str, lengths: NDArray[np.int64], given: NDArray[np.uint8] | None = None
) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Offsets of values of these lengths, and the buffer for them: ``given``, or a new one. Raises :class:`LimitError`."""
    count = len(lengths)
    if count and int(lengths.max()) * count >= 1 << 62:
        raise LimitError(path, None, f"field {name!r}: more than 2^62 bytes in {count} samples")
    offsets = np.zeros(count + 1, np.int64)
    lengths.cumsum(out=offsets[1:])
    if given is not None:
        return offsets, given
    try:
        return offsets, np.empty(int(offsets[-1]), np.uint8)
    except MemoryError as error:
        raise LimitError(
            path, None, f"field {name!r}: no memory for {offsets[-1]} bytes. Read fewer samples at a time"
        ) from error
