"""Index columns in memory: read with ``pread`` block by block at first touch, verified, bounded in bytes.

Arrays are allocated without being filled, so untouched blocks cost address space only. When the budget is exceeded the column
unused longest is dropped; a column larger than a quarter of the budget is never held whole: only the blocks a call touches are read.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lfdata.errors import CorruptError
from lfdata.format.forking import watch
from lfdata.format.layout import BLOCK_BYTES, Entry

if TYPE_CHECKING:
    from lfdata.format.reader import ShardFile

DEFAULT_BUDGET = 256 << 20
# Blocks of a section too large to hold that are read at a time.
MAX_WINDOW_BLOCKS = 64
# A section of at most this many blocks is read whole at first touch.
WHOLE_BLOCKS = 16

Place = tuple[str, int, int]
"""File name, its directory check (a file written anew under the same name has another), offset of the section."""


class _Held:
    __slots__ = ("data", "elements", "have", "missing")

    def __init__(self, entry: Entry) -> None:
        self.data = np.empty(entry.blocks * BLOCK_BYTES, np.uint8)
        self.elements: NDArray[Any] = self.data.view(entry.dtype)
        self.have = np.zeros(entry.blocks, bool)
        self.missing = entry.blocks


class IndexCache:
    """Shared by the shards of a data set. Thread-safe."""

    def __init__(self, budget: int = DEFAULT_BUDGET) -> None:
        self.budget = budget
        self._lock = threading.Lock()
        self._held: OrderedDict[Place, _Held] = OrderedDict()
        self._bytes = 0
        self._verified: dict[Place, NDArray[np.bool_]] = {}
        watch(self)

    def after_fork(self) -> None:
        """See :class:`lfdata.format.forking.Forked`. What is held stays: a block counts as there only once it is complete."""
        self._lock = threading.Lock()
        self._bytes = sum(held.data.nbytes for held in self._held.values())
        for held in self._held.values():
            held.missing = int((~held.have).sum())

    def take(self, file: ShardFile, entry: Entry, index: NDArray[np.int64]) -> NDArray[Any]:
        """Elements ``index`` of a blocked section as an owned array."""
        if not len(index):
            return np.empty(0, entry.dtype)
        low, high = int(index.min()), int(index.max())
        if low < 0 or high >= entry.count:
            raise CorruptError(
                file.name, entry.offset, f"element {high} of section {entry.type.decode()}, which has {entry.count}"
            )
        return self.rows(file, entry, index)

    def rows(self, file: ShardFile, entry: Entry, index: NDArray[np.int64]) -> NDArray[Any]:
        """:meth:`take` for ordinals that are known to be in range."""
        if not len(index):  # sections of length 0 may share an offset, and so a place in the cache, with one of another type
            return np.empty(0, entry.dtype)
        held = self.held(file, entry, index)
        if held is None:
            return self._take_blocks(file, entry, index)
        result: NDArray[Any] = held[index]
        return result

    def held(self, file: ShardFile, entry: Entry, index: NDArray[np.int64]) -> NDArray[Any] | None:
        """The section as an array in which the elements ``index`` are there and verified; ``None`` for one too large to hold."""
        if not entry.length:  # it may share its offset, and so a place in the cache, with another section
            return np.empty(0, entry.dtype)
        if entry.blocks * BLOCK_BYTES > self.budget // 4:
            return None
        with self._lock:
            held = self._hold(file, entry)
            if held.missing:
                self._load(file, entry, held, self._touched(entry, index))
        return held.elements[: entry.count]

    def _touched(self, entry: Entry, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """Blocks to read for some elements: of a small section all, in one go."""
        if entry.blocks <= WHOLE_BLOCKS:
            return np.arange(entry.blocks)
        return np.unique(index * entry.dtype.itemsize // BLOCK_BYTES)

    def spans(self, file: ShardFile, entry: Entry, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> list[bytes]:
        """Byte ranges of a blocked section; the ranges must lie in it. Neighbouring blocks are read together."""
        result = [b""] * len(starts)
        filled = np.flatnonzero(stops > starts)
        order = filled[np.argsort(starts[filled], kind="stable")]
        first, last = starts[order] // BLOCK_BYTES, (stops[order] - 1) // BLOCK_BYTES
        if entry.blocks * BLOCK_BYTES <= self.budget // 4 and len(order):
            with self._lock:
                touched = np.unique(np.concatenate([np.arange(a, b + 1) for a, b in _windows(first, last, entry.blocks)]))
                held = self._hold(file, entry)
                if held.missing:
                    self._load(file, entry, held, touched)
                data = held.data.data
            for place, start, stop in zip(order.tolist(), starts[order].tolist(), stops[order].tolist(), strict=True):
                result[place] = bytes(data[start:stop])
            return result
        at = 0
        for begin, end in _windows(first, last, MAX_WINDOW_BLOCKS):
            window = file.read_span(entry, begin, end + 1)
            while at < len(order) and first[at] >= begin and last[at] <= end:
                place = int(order[at])
                offset = begin * BLOCK_BYTES
                result[place] = bytes(window[int(starts[place]) - offset : int(stops[place]) - offset])
                at += 1
        return result

    def _load(self, file: ShardFile, entry: Entry, held: _Held, touched: NDArray[np.int64]) -> None:
        """Read and verify those of the ``touched`` blocks that are not there. Under the lock."""
        for start, stop in _runs(touched[~held.have[touched]].tolist()):
            end = min(stop * BLOCK_BYTES, entry.length)
            file.read_blocks(entry, start, stop, held.data.data[start * BLOCK_BYTES : end])
            held.have[start:stop] = True
            held.missing -= stop - start

    def _take_blocks(self, file: ShardFile, entry: Entry, index: NDArray[np.int64]) -> NDArray[Any]:
        width = entry.dtype.itemsize
        result = np.empty(len(index), entry.dtype)
        block_of = index * width // BLOCK_BYTES
        buffer = np.empty(BLOCK_BYTES, np.uint8)
        for number in np.unique(block_of).tolist():
            size = min(BLOCK_BYTES, entry.length - number * BLOCK_BYTES)
            file.read_blocks(entry, number, number + 1, buffer.data[:size])
            mine = block_of == number
            result[mine] = buffer.view(entry.dtype)[index[mine] - number * (BLOCK_BYTES // width)]
        return result

    def _hold(self, file: ShardFile, entry: Entry) -> _Held:
        place = _place(file, entry)
        held = self._held.get(place)
        if held is None:
            held = self._held[place] = _Held(entry)
            self._bytes += held.data.nbytes
            while self._bytes > self.budget and len(self._held) > 1:
                _, dropped = self._held.popitem(last=False)
                self._bytes -= dropped.data.nbytes
        else:
            self._held.move_to_end(place)
        return held

    def unverified(self, file: ShardFile, entry: Entry) -> list[int]:
        """Blocks of a mapped section that no call has verified yet."""
        with self._lock:
            bits = self._verified.setdefault(_place(file, entry), np.zeros(entry.blocks, bool))
            return np.flatnonzero(~bits).tolist()

    def mark_verified(self, file: ShardFile, entry: Entry, number: int) -> None:
        """Remember that a mapped block was verified."""
        self._verified[_place(file, entry)][number] = True


def _place(file: ShardFile, entry: Entry) -> Place:
    return file.name, file.trailer.directory_check, entry.offset


def _windows(first: NDArray[np.int64], last: NDArray[np.int64], limit: int) -> list[tuple[int, int]]:
    """Spans of blocks (first and last, ordered by first) joined where they touch, while a window stays within ``limit`` blocks."""
    windows: list[tuple[int, int]] = []
    for a, b in zip(first.tolist(), last.tolist(), strict=True):
        if windows and a <= windows[-1][1] + 1 and max(b, windows[-1][1]) - windows[-1][0] < limit:
            windows[-1] = (windows[-1][0], max(b, windows[-1][1]))
        else:
            windows.append((a, b))
    return windows


def _runs(numbers: list[int]) -> list[tuple[int, int]]:
    """Ascending numbers as runs (start, stop)."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number:
            runs[-1] = (runs[-1][0], number + 1)
        else:
            runs.append((number, number + 1))
    return runs
