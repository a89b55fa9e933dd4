"""All fields of some rows, and what becomes of rows that fail in one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfdata.errors import SampleError, StorageError
from lfdata.loader.filler import Filler
from lfdata.loader.rows import NOT_THE_FILE, Rows, lost
from lfdata.order.samples import Samples

Bad = dict[int, tuple[str, Exception]]
"""Rows that failed, with the field and the error."""


def identity(samples: Samples, row: int) -> tuple[int, int]:
    """Which sample a row is."""
    return int(samples.source[row]), int(samples.index[row])


def fill_all(
    fillers: Sequence[Filler], rows: Rows, arrays: dict[str, NDArray[Any]], threads: int, crashed: Sequence[int] = ()
) -> Bad:
    """All fields of all rows, as they are before augmentation. Rows that must not be decoded (``crashed``) are bad."""
    bad: Bad = {}
    if not len(rows):
        # Of a rank without rows, or all of them crashed: nothing to read, and no values.
        for part in (part for filler in fillers for part in filler.parts):
            arrays[part.name][: 0 if part.by else None] = 0
        fillers = ()
    for filler in fillers:
        rows.spans.check()
        try:
            found = filler.fill(rows, arrays, threads)
        except (*NOT_THE_FILE, StorageError) as gone:
            raise lost(gone, filler.name, rows) from gone
        for row, error in found.items():
            bad.setdefault(row, (filler.name, error))
    for row in crashed:
        bad[row] = ("", SampleError("crash", "a decoder process crashed over this sample"))
    return bad


def augment_all(fillers: Sequence[Filler], rows: Rows, arrays: dict[str, NDArray[Any]], bad: Bad) -> None:
    """Augmentation of the same rows; adds those that fail in it to ``bad``."""
    for filler in fillers if len(rows) else ():
        for row, error in filler.augment(rows, arrays, bad).items():
            bad.setdefault(row, (filler.name, error))


def clear(fillers: Sequence[Filler], arrays: dict[str, NDArray[Any]], bad: Bad) -> None:
    """A row that failed in one field holds nothing in any."""
    if not bad:
        return
    for part in (part for filler in fillers for part in filler.parts):
        if part.by:
            take_out(arrays[part.name], arrays[part.by], bad)
        elif not part.offsets:
            arrays[part.name][list(bad)] = 0
    for part in (part for filler in fillers for part in filler.parts if part.offsets):
        lengths = np.diff(arrays[part.name])
        lengths[list(bad)] = 0
        np.cumsum(lengths, out=arrays[part.name][1:])


def take_out(values: NDArray[Any], offsets: NDArray[np.int64], bad: Iterable[int]) -> None:
    """Close the gaps that ragged values of bad rows leave."""
    for row in sorted(bad, reverse=True):
        first, stop, end = int(offsets[row]), int(offsets[row + 1]), int(offsets[-1])
        if first < stop:
            # Rows after this one that are bad too have been taken out; what moves along behind the end is not used.
            values[first : end - (stop - first)] = values[stop:end].copy()
