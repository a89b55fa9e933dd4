"""The fewest contiguous parts of some rows (docs/runtime.md)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

# Of the places that so many parts reach, those that are looked at further: the furthest. One would do if parts took less with every row that is
# left out; a feature such as "square of the tokens over the rows" may fall when a short row joins.
BREADTH = 64

Reach = Callable[[int], NDArray[np.bool_]]
"""From a row on: of each number of rows, from 1 on, whether so many are a part that fits."""


def fewest(rows: int, reach: Reach, most: int) -> tuple[list[int], list[int]] | None:
    """Bounds of the fewest parts, and the rows that do not fit even alone: each is a part. ``None``: more than ``most`` parts are needed."""
    bounds, alone = [0], list[int]()
    while bounds[-1] < rows:
        bounds, whole = _search(bounds, rows, reach, most)
        if not whole:
            alone.append(bounds[-1])
            bounds = [*bounds, bounds[-1] + 1]
        if len(bounds) - 1 > most:
            return None
    return bounds, alone


def _search(before: list[int], rows: int, reach: Reach, most: int) -> tuple[list[int], bool]:
    """Go on from some bounds to the end, or as far as any parts reach, in as few as that takes."""
    paths = {before[-1]: before}
    front = [before[-1]]
    while front:
        found: list[int] = []
        for first in sorted(front, reverse=True)[:BREADTH]:
            stops = (first + 1 + np.flatnonzero(reach(first))[-BREADTH:]).tolist()
            if stops and stops[-1] == rows:
                return [*paths[first], rows], True
            if len(paths[first]) <= most:
                found += [stop for stop in stops if stop not in paths]
                paths.update({stop: [*paths[first], stop] for stop in stops if stop not in paths})
        front = found
    return paths[max(paths)], False
