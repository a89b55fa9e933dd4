"""Batch size against accumulation: the global batch stays, its micro-batches are as large as memory allows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lftrain.errors import ConfigError

MB = 1e6


@dataclass(frozen=True)
class Plan:
    """Rows of a rank's micro-batch, micro-batches a step, and bytes that such a micro-batch is expected to take."""

    rows: int
    accumulate: int
    bytes: float


def plan(share: int, limit: float, measure: Callable[[int], float]) -> Plan:
    """The largest micro-batch that divides a rank's share and fits.

    Bytes grow with the rows as a line, which two measurements give: of 1 and 2 rows, or, where that is larger, of 1/16 and 1/8 of the
    share, since kernels and allocators are uneven at the smallest sizes. The plan is then measured itself: the next smaller one is taken
    if it was more than expected and does not fit, a larger one if that fits too.

    Args:
        share: rows of a step on one rank. limit: bytes. measure: bytes that a micro-batch of so many rows takes.

    Raises:
        ConfigError: not even one row fits.
    """
    sizes = [rows for rows in range(1, share + 1) if share % rows == 0]
    low = max(1, share // 16)
    high = min(share, 2 * low)
    first, second = measure(low), measure(high)
    each = (second - first) / (high - low) if high > low else 0.0
    fits = [rows for rows in sizes if first + each * (rows - low) <= limit]
    for rows in reversed(fits or sizes[:1]):
        found = measure(rows)
        if found <= limit:
            for more in (one for one in sizes if one > rows):
                if (larger := measure(more)) > limit:
                    break
                rows, found = more, larger
            return Plan(rows, share // rows, found)
    least = measure(sizes[0])
    raise ConfigError(
        f"a micro-batch of one row takes {least / MB:.1f} MB and {limit / MB:.1f} MB are to be had: recompute activations "
        "(activations.mode), use a smaller model, or raise activations.limit_mb"
    )
