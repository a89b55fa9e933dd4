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
from lfdata.format.layout import BLOCK_BYTES, Entry

if TYPE_CHECKING:
    from lfdata.format.reader import ShardFile

DEFAULT_BUDGET = 256 << 20


class _Held:
    __slots__ = ("data", "have")

    def __init__(self, entry: Entry) -> None:
        self.data = np.empty(entry.blocks * BLOCK_BYTES, np.uint8)
        self.have = np.zeros(entry.blocks, bool)


class IndexCache:
    """Shared by the shards of a data set. Thread-safe."""

    def __init__(self, budget: int = DEFAULT_BUDGET) -> None:
        self.budget = budget
        self._lock = threading.Lock()
        self._held: OrderedDict[tuple[str, int], _Held] = OrderedDict()
        self._bytes = 0
        self._verified: dict[tuple[str, int], NDArray[np.bool_]] = {}

    def take(self, file: ShardFile, entry: Entry, index: NDArray[np.int64]) -> NDArray[Any]:
        """Elements ``index`` of a blocked section as an owned array."""
        if not len(index):
            return np.empty(0, entry.dtype)
        if int(index.min()) < 0 or int(index.max()) >= entry.count:
            raise CorruptError(file.name, entry.offset, f"element {int(index.max())} of section {entry.type.decode()}, which has {entry.count}")
        width = entry.dtype.itemsize
        if entry.blocks * BLOCK_BYTES > self.budget // 4:
            return self._take_blocks(file, entry, index)
        with self._lock:
            held = self._hold(file, entry)
            first, last = int(index.min()) * width // BLOCK_BYTES, int(index.max()) * width // BLOCK_BYTES
            if first == last:
                missing = [] if held.have[first] else [first]
            else:
                touched = np.unique(index * width // BLOCK_BYTES)
                missing = touched[~held.have[touched]].tolist()
            for start, stop in _runs(missing):
                end = min(stop * BLOCK_BYTES, entry.length)
                file.read_blocks(entry, start, stop, held.data.data[start * BLOCK_BYTES : end])
                held.have[start:stop] = True
            data = held.data
        result: NDArray[Any] = data.view(entry.dtype)[index]
        return result

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
        place = (file.name, entry.offset)
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
            bits = self._verified.setdefault((file.name, entry.offset), np.zeros(entry.blocks, bool))
            return np.flatnonzero(~bits).tolist()

    def mark_verified(self, file: ShardFile, entry: Entry, number: int) -> None:
        """Remember that a mapped block was verified."""
        self._verified[(file.name, entry.offset)][number] = True


def _runs(numbers: list[int]) -> list[tuple[int, int]]:
    """Ascending numbers as runs (start, stop)."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number:
            runs[-1] = (runs[-1][0], number + 1)
        else:
            runs.append((number, number + 1))
    return runs
