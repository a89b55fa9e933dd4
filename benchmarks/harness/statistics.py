"""When two series of repeats differ: exact rank tests and a smallest ratio. No normality, no variance: five repeats have neither."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from functools import lru_cache

P_LIMIT = 0.01
APART_LIMIT = 0.001
"""Of the rank-sum test where the signed-rank test shows nothing: rare enough to leave the limit about where it is."""
SMALLEST = 0.02
"""Medians closer than this are called equal, whatever the test says."""
FEWEST_PAIRS = 8
"""From this many rounds on the signed-rank test can reach the limit, and is used for series of the same rounds."""


@lru_cache(maxsize=64)
def _counts(a: int, b: int) -> tuple[int, ...]:
    """How many orders of ``a`` and ``b`` distinct values have each Mann-Whitney U."""
    if not a or not b:
        return (1,)
    # The largest value is one of the first (it beats all b) or one of the second.
    first, second = _counts(a - 1, b), _counts(a, b - 1)
    total = [0] * (a * b + 1)
    for u, count in enumerate(first):
        total[u + b] += count
    for u, count in enumerate(second):
        total[u] += count
    return tuple(total)


def rank_sum_p(a: Sequence[float], b: Sequence[float]) -> float:
    """Two-sided exact p of the rank-sum test (ties count half; with ties the p is that of the nearer whole U, upwards)."""
    u = sum((x > y) + 0.5 * (x == y) for x in a for y in b)
    low = math.ceil(min(u, len(a) * len(b) - u))
    counts = _counts(len(a), len(b))
    return min(1.0, 2 * sum(counts[: low + 1]) / sum(counts))


def least_p(first: int, second: int) -> float:
    """The smallest p that :func:`rank_sum_p` can give for so many values: where none of one lies among the other's."""
    return 2 / math.comb(first + second, first)


def signed_rank_p(differences: Sequence[float]) -> float:
    """Two-sided exact p of the signed-rank test: how often random signs make the rank sums as uneven. Zeros say nothing and are left out."""
    sizes = sorted(abs(x) for x in differences if x)
    # Twice the rank, so that ties, which share the mean of theirs, stay whole.
    rank = {size: 2 * sizes.index(size) + sizes.count(size) + 1 for size in sizes}
    ways = {0: 1}
    for size in sizes:
        before = ways.copy()
        for total, count in before.items():
            ways[total + rank[size]] = ways.get(total + rank[size], 0) + count
    positive = sum(rank[x] for x in differences if x > 0)
    low = min(positive, sum(rank[size] for size in sizes) - positive)
    return min(1.0, 2 * sum(count for total, count in ways.items() if total <= low) / (1 << len(sizes)))


def median_bounds(values: Sequence[float], level: float = 0.95) -> dict[str, float]:
    """Median, and bounds that the true median lies above and below, each with this certainty: by the sign test, so values of the sample.
    Infinite where there are too few values."""
    ordered, n, below = sorted(values), len(values), 0.0
    reach = 0
    for k in range(n):
        below += math.comb(n, k) / 2**n
        if below > 1 - level:
            break
        reach = k + 1
    low, high = (ordered[reach - 1], ordered[n - reach]) if reach else (-math.inf, math.inf)
    return {"median": statistics.median(ordered), "low": low, "high": high}


def verdict(a: Sequence[float], b: Sequence[float], *, paired: bool = False) -> tuple[float, float, bool]:
    """Ratio a/b, p, and whether they are shown to differ. ``paired``: the n-th of each come from one round, so that what slows a
    whole round is not held against either; the ratio is then the median over rounds. One disturbed round of few can hide a large difference
    from the signed ranks: series that hardly overlap differ all the same."""
    if paired and len(a) == len(b) >= FEWEST_PAIRS:
        ratio = statistics.median(x / y for x, y in zip(a, b, strict=True))
        p = signed_rank_p([math.log(x / y) for x, y in zip(a, b, strict=True)])
        apart = rank_sum_p(a, b)
        if p >= P_LIMIT and apart < APART_LIMIT:
            p = apart
    else:
        ratio = statistics.median(a) / statistics.median(b)
        p = rank_sum_p(a, b)
    return ratio, p, p < P_LIMIT and abs(math.log(ratio)) > math.log1p(SMALLEST)


def kolmogorov_smirnov_p(a: Sequence[float], b: Sequence[float]) -> float:
    """Asymptotic p of the two-sample Kolmogorov-Smirnov test."""
    xs, ys = sorted(a), sorted(b)
    i = j = 0
    distance = 0.0
    while i < len(xs) and j < len(ys):
        value = min(xs[i], ys[j])
        while i < len(xs) and xs[i] <= value:
            i += 1
        while j < len(ys) and ys[j] <= value:
            j += 1
        distance = max(distance, abs(i / len(xs) - j / len(ys)))
    root = math.sqrt(len(xs) * len(ys) / (len(xs) + len(ys)))
    x = (root + 0.12 + 0.11 / root) * distance
    if x < 0.2:
        return 1.0
    tail = math.fsum((1 if k % 2 else -1) * math.exp(-2 * (k * x) ** 2) for k in range(1, 101))
    return min(1.0, max(0.0, 2 * tail))
