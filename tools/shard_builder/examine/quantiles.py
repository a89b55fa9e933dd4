"""Exact order statistics of columns of any length in bounded memory.

Values are mapped to unsigned 64-bit numbers in the same order; a percentile is then found 16 bits at a time by counting, in
at most four passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

PERCENTILES = (1, 5, 50, 95, 99)
# Sorted at once up to this many values: 8 MiB.
SORT_VALUES = 1 << 20
_SIGN = np.uint64(1 << 63)

Chunks = Callable[[], Iterator[NDArray[Any]]]
"""Gives the same arrays each time it is called."""


def summarise(chunks: Chunks) -> dict[str, Any]:
    """Count, minimum, percentiles, maximum and mean of finite values, and how many were not finite.

    Percentiles are nearest-rank: the smallest value that at least p % of the values do not exceed.

    Returns:
        ``{"count", "nonfinite"?, "min", "p1", "p5", "p50", "p95", "p99", "max", "mean"}``; only the counts if there is no
        finite value.
    """
    count = nonfinite = 0
    sums: list[float] = []
    kind = "u"
    for chunk in chunks():
        values = _finite(chunk)
        kind = values.dtype.kind
        nonfinite += chunk.size - values.size
        count += values.size
        sums.append(float(values.sum(dtype=np.float64)))
    found: dict[str, Any] = {"count": count} | ({"nonfinite": nonfinite} if nonfinite else {})
    if not count:
        return found
    ranks = [0, *(max(0, math.ceil(p / 100 * count) - 1) for p in PERCENTILES), count - 1]
    low, *middle, high = (_value(number, kind) for number in select(chunks, count, ranks))
    return (
        found
        | {"min": low}
        | {f"p{p}": v for p, v in zip(PERCENTILES, middle, strict=True)}
        | {"max": high, "mean": math.fsum(sums) / count}
    )


def select(chunks: Chunks, count: int, ranks: Sequence[int]) -> list[int]:
    """The values of some ranks (from 0) in ascending order, as ordered 64-bit numbers."""
    if count <= SORT_VALUES:
        parts = [_ordered(_finite(chunk)) for chunk in chunks()]
        together = np.sort(np.concatenate(parts))
        return [int(together[rank]) for rank in ranks]
    # By rank: the bits found so far, and the rank among the values that share them.
    state = {rank: (0, rank) for rank in ranks}
    for shift in (48, 32, 16, 0):
        prefixes = sorted({prefix for prefix, _ in state.values()})
        counts = {prefix: np.zeros(1 << 16, np.int64) for prefix in prefixes}
        for chunk in chunks():
            ordered = _ordered(_finite(chunk))
            for prefix in prefixes:
                mine = ordered if shift == 48 else ordered[(ordered >> np.uint64(shift + 16)) == np.uint64(prefix)]
                digits = (mine >> np.uint64(shift)).astype(np.int64) & 0xFFFF
                counts[prefix] += np.bincount(digits, minlength=1 << 16)
        for rank, (prefix, left) in state.items():
            ends = np.cumsum(counts[prefix])
            digit = int(np.searchsorted(ends, left, side="right"))
            state[rank] = (prefix << 16 | digit, left - (int(ends[digit - 1]) if digit else 0))
    return [state[rank][0] for rank in ranks]


def _finite(values: NDArray[Any]) -> NDArray[Any]:
    return values[np.isfinite(values)] if values.dtype.kind == "f" else values


def _ordered(values: NDArray[Any]) -> NDArray[np.uint64]:
    kind = values.dtype.kind
    if kind == "i":
        return values.astype(np.int64).view(np.uint64) ^ _SIGN
    if kind == "f":
        # Minus zero is zero; negative numbers have all bits turned, positive ones the sign.
        bits = (values.astype(np.float64) + 0.0).view(np.uint64)
        return np.where(bits & _SIGN != 0, ~bits, bits | _SIGN)
    return values.astype(np.uint64)


def _value(number: int, kind: str) -> int | float:
    if kind == "i":
        return number - (1 << 63)
    if kind == "f":
        bits = number & ((1 << 63) - 1) if number >> 63 else ~number & ((1 << 64) - 1)
        return float(np.uint64(bits).view(np.float64))
    return number
