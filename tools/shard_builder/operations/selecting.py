"""Which files a result is made of, when some samples of some data sets are kept.

A shard of which every sample is kept is taken over as it is. From any other, the kept samples are copied, as stored, into new shards;
neighbours that store their fields alike share one, up to its size. The plan depends on the samples kept and on the index alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lfdata.dataset import ShardDataset
from lfdata.errors import OptionError
from lfdata.format.writer import GROUP_BYTES
from shard_builder.operations.inputs import ROW_BYTES, layout_of, payload_sizes

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class ShardSizes:
    """Sizes of new shards, as in ``convert``."""

    shard_bytes: int = 1 << 30
    shard_rows: int = 1_000_000
    group_bytes: int = GROUP_BYTES

    def __post_init__(self) -> None:
        if min(self.shard_bytes, self.shard_rows, self.group_bytes) < 1:
            raise OptionError("sizes of shards and groups must be at least 1")


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows ``first`` to ``stop`` of a shard, of which those count that the mask keeps."""

    input: int
    shard: int
    first: int
    stop: int


@dataclass(slots=True)
class Planned:
    """One file of the result: a whole shard taken over, or pieces of shards."""

    whole: bool
    pieces: list[Piece] = field(default_factory=list)


def starts_of(data: ShardDataset) -> NDArray[np.int64]:
    """Index of the first sample of every shard, then the total."""
    return np.cumsum([0, *(shard.rows for shard in data.manifest.shards)], dtype=np.int64)


def plan(inputs: Sequence[ShardDataset], masks: Sequence[Mask], names: Sequence[str], sizes: ShardSizes) -> list[Planned]:
    """The files of the result, in order."""
    planner = _Planner(sizes)
    for number, (data, mask) in enumerate(zip(inputs, masks, strict=True)):
        starts = starts_of(data)
        for ordinal, entry in enumerate(data.manifest.shards):
            kept = mask[starts[ordinal] : starts[ordinal + 1]]
            count = int(kept.sum())
            if count and count == entry.rows:
                planner.whole(Piece(number, ordinal, 0, entry.rows))
            elif count:
                shard = data.shard(ordinal)
                planner.part(number, ordinal, kept, payload_sizes(shard, names) + ROW_BYTES, layout_of(shard, names))
    return planner.done()


class _Planner:
    def __init__(self, sizes: ShardSizes) -> None:
        self._sizes = sizes
        self._found: list[Planned] = []
        self._open: Planned | None = None
        self._layout = b""
        self._bytes = self._rows = 0

    def whole(self, piece: Piece) -> None:
        self._open = None
        self._found.append(Planned(True, [piece]))

    def part(self, number: int, ordinal: int, kept: Mask, sizes: NDArray[np.int64], layout: bytes) -> None:
        if layout != self._layout:
            self._open, self._layout = None, layout
        rows = np.flatnonzero(kept)
        ends = np.cumsum(sizes[rows])
        for low, high in self._cuts(ends):
            if self._open is None:
                self._open = Planned(False)
                self._found.append(self._open)
            stop = int(rows[high - 1]) + 1
            self._open.pieces.append(Piece(number, ordinal, int(rows[low]), stop))

    def _cuts(self, ends: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
        """Runs of rows that fit the open shard, and then new ones; sets it to ``None`` where one ends."""
        low = 0
        while low < len(ends):
            if self._open is None:
                self._bytes = self._rows = 0
            before = int(ends[low - 1]) if low else 0
            fits = int(np.searchsorted(ends, before + self._sizes.shard_bytes - self._bytes, side="right"))
            high = min(max(fits, low), low + self._sizes.shard_rows - self._rows, len(ends))
            if high == low and self._rows == 0:
                high = low + 1  # a row larger than a shard has one of its own
            if high > low:
                yield low, high
                self._bytes += int(ends[high - 1]) - before
                self._rows += high - low
            if high < len(ends):
                self._open = None
            low = high

    def done(self) -> list[Planned]:
        return self._found
