"""Which block is needed when: what is known of the accesses to come, stretch by stretch."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lfdata.storage.blockfile import Block
from lfdata.storage.blocks import NEVER, UNKNOWN

Ids = NDArray[np.int64]

# A block's id is the number of its object, and its own in it: 2^24 blocks of a MiB are 16 TiB.
_NUMBER_BITS = 24
# Steps of a stretch, as a part of the numbers that are compared.
STRETCH_BITS = 16


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Accesses of some steps: (id, step - first) pairs in one sorted array, without repetitions."""

    first: int
    stop: int
    keys: Ids

    def next_use(self, ids: Ids, now: int) -> Ids:
        """First step after ``now``; :data:`NEVER` where there is none here."""
        if now + 1 >= self.stop or not len(self.keys):
            return np.full(len(ids), NEVER)
        begin = max(0, now + 1 - self.first)
        at = np.minimum(np.searchsorted(self.keys, (ids << STRETCH_BITS) | begin), len(self.keys) - 1)
        found = self.keys[at]
        same = (found >> STRETCH_BITS == ids) & (found & ((1 << STRETCH_BITS) - 1) >= begin)
        return np.where(same, self.first + (found & ((1 << STRETCH_BITS) - 1)), NEVER)


class Future:
    """Accesses by step, from the present on. One thread adds, any may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stretches: deque[_Stretch] = deque()
        self._objects: dict[bytes, tuple[int, int]] = {}
        self.now = -1

    def object(self, identity: bytes, planned: int = 1 << _NUMBER_BITS) -> int:
        """The number of an object, as ids have it above those of its blocks; a new one for one that is not known.

        ``planned``: of how many blocks, from the first on, accesses are told; of the others nothing is known.
        """
        with self._lock:
            return self._objects.setdefault(identity, (len(self._objects), planned))[0] << _NUMBER_BITS

    def add(self, first: int, stop: int, ids: Ids, steps: Ids) -> None:
        """All accesses of steps ``first`` to ``stop`` - 1, which follow on those known: block ids, and the step of each."""
        if stop - first > 1 << STRETCH_BITS:
            raise ValueError("a stretch of too many steps")
        keys = np.unique((ids << STRETCH_BITS) | (steps - first))
        with self._lock:
            self._stretches.append(_Stretch(first, stop, keys))

    def go(self, now: int) -> None:
        """Step ``now`` is being made: what is needed by it is needed at once, what lies before is past."""
        with self._lock:
            self.now = now
            while self._stretches and self._stretches[0].stop <= now:
                self._stretches.popleft()

    def clear(self) -> None:
        """Forget all accesses."""
        with self._lock:
            self._stretches.clear()
            self.now = -1

    @property
    def accesses(self) -> int:
        """Accesses that are known."""
        with self._lock:
            return sum(len(stretch.keys) for stretch in self._stretches)

    def __call__(self, blocks: Sequence[Block]) -> NDArray[np.int64]:
        """Next use of blocks, from the present on, as :data:`lfdata.storage.blocks.Ranking` wants it."""
        with self._lock:
            numbers, stretches, now = dict(self._objects), list(self._stretches), self.now
        ids = np.full(len(blocks), -1)
        for place, block in enumerate(blocks):
            number, planned = numbers.get(block.identity, (0, 0))
            if block.number < planned:
                ids[place] = (number << _NUMBER_BITS) | block.number
        found = np.full(len(ids), NEVER)
        left = np.arange(len(ids))
        for stretch in stretches:
            uses = stretch.next_use(ids[left], now - 1)
            found[left] = uses
            left = left[uses == NEVER]
        found[ids < 0] = UNKNOWN
        return found
