"""How many bytes rules for giving up blocks would fetch for a sequence of accesses: the least recently used one, and the offline optimum."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def least_recently_used(accesses: Sequence[int], sizes: NDArray[np.int64], room: int) -> int:
    """Bytes fetched by a cache of ``room`` bytes that gives up what was unused longest. ``sizes``: bytes of each block."""
    held: OrderedDict[int, None] = OrderedDict()
    used = fetched = 0
    for block in accesses:
        if block in held:
            held.move_to_end(block)
            continue
        fetched += int(sizes[block])
        used += int(sizes[block])
        held[block] = None
        while used > room and len(held) > 1:
            used -= int(sizes[held.popitem(last=False)[0]])
    return fetched


def offline_optimum(accesses: Sequence[int], sizes: NDArray[np.int64], room: int) -> int:
    """The same of one that gives up what is needed last (Belady's rule; the optimum where all blocks are as large)."""
    end = len(accesses)
    following = np.full(end, end, np.int64)
    last: dict[int, int] = {}
    for at in range(end - 1, -1, -1):
        following[at] = last.get(accesses[at], end)
        last[accesses[at]] = at
    held: dict[int, int] = {}
    heap: list[tuple[int, int]] = []
    used = fetched = 0
    for at, block in enumerate(accesses):
        if block not in held:
            fetched += int(sizes[block])
            used += int(sizes[block])
        held[block] = int(following[at])
        # What was just fetched stays, however late it is needed: a cache that hands out what it keeps cannot do otherwise.
        kept = (-held[block], block)
        while used > room and len(held) > 1:
            use, victim = heapq.heappop(heap)
            if held.get(victim) == -use and victim != block:
                del held[victim]
                used -= int(sizes[victim])
        heapq.heappush(heap, kept)
    return fetched
