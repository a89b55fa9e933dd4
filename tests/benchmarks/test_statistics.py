"""The rule that says two series differ."""

from __future__ import annotations

import itertools
import random

import pytest

from benchmarks.harness.statistics import kolmogorov_smirnov_p, median_bounds, rank_sum_p, signed_rank_p, verdict


def _by_counting(a: list[float], b: list[float]) -> float:
    """The same p by going through every way the values could have been dealt out."""
    values = a + b
    observed = sum(x > y for x in a for y in b)
    extreme = min(observed, len(a) * len(b) - observed)
    splits = list(itertools.combinations(range(len(values)), len(a)))
    hits = 0
    for split in splits:
        ours = [values[i] for i in split]
        theirs = [values[i] for i in range(len(values)) if i not in split]
        u = sum(x > y for x in ours for y in theirs)
        hits += min(u, len(a) * len(b) - u) <= extreme
    return hits / len(splits)


@pytest.mark.parametrize(("m", "n"), [(5, 5), (3, 6), (1, 4)])
def test_rank_sum_is_exact(m: int, n: int) -> None:
    rng = random.Random(m * 10 + n)
    for shift in (0.0, 0.5, 3.0):
        a, b = [rng.gauss(shift, 1) for _ in range(m)], [rng.gauss(0, 1) for _ in range(n)]
        assert rank_sum_p(a, b) == pytest.approx(_by_counting(a, b))
        assert rank_sum_p(b, a) == pytest.approx(rank_sum_p(a, b))


@pytest.mark.parametrize("n", [1, 4, 8])
@pytest.mark.parametrize("ties", [False, True])
def test_signed_rank_is_exact(n: int, ties: bool) -> None:
    rng = random.Random(n)
    differences = [float(rng.choice([-2, -1, 0, 1, 2, 3])) if ties else rng.gauss(0.5, 1) for _ in range(n)]
    sizes = sorted(abs(x) for x in differences if x)
    ranks = [sum(i + 1 for i, other in enumerate(sizes) if other == size) / sizes.count(size) for size in sizes]
    positive = sum(ranks[sizes.index(x)] for x in differences if x > 0)
    extreme = min(positive, sum(ranks) - positive)
    sums = [sum(itertools.compress(ranks, signs)) for signs in itertools.product((0, 1), repeat=len(ranks))]
    expected = min(1.0, 2 * sum(total <= extreme for total in sums) / len(sums))
    assert signed_rank_p(differences) == pytest.approx(expected)
    assert signed_rank_p([-x for x in differences]) == pytest.approx(expected)


def test_one_disturbed_round_of_eight_does_not_hide_a_large_difference() -> None:
    slow, fast = [100.0 + n for n in range(7)] + [125.0], [151.0 + n for n in range(7)] + [120.0]
    assert signed_rank_p([a - b for a, b in zip(slow, fast, strict=True)]) >= 0.01
    ratio, p, differs = verdict(fast, slow, paired=True)
    assert ratio > 1.4 and p < 0.01
    assert differs


def test_rounds_that_differ_do_not_hide_a_difference() -> None:
    # Every round has its own speed, far apart; within each, the second is a tenth slower.
    rng = random.Random(6)
    rounds = [rng.uniform(60, 140) for _ in range(10)]
    first = [x * rng.gauss(1, 0.02) for x in rounds]
    second = [x * 0.9 * rng.gauss(1, 0.02) for x in rounds]
    ratio, _, differs = verdict(first, second, paired=True)
    assert differs and ratio == pytest.approx(1 / 0.9, rel=0.03)
    assert not verdict(first, second)[2]
    # Fewer rounds than the test needs: the other one is used.
    assert verdict(first[:5], second[:5], paired=True) == verdict(first[:5], second[:5])


def test_what_is_called_a_difference() -> None:
    base = [100.0, 101.0, 99.0, 102.0, 98.0]
    assert verdict(base, [x * 0.9 for x in base])[2]
    assert not verdict(base, [x * 1.001 for x in base])[2]
    assert not verdict(base, base)[2]
    # Apart, but by too little to matter; far apart, but with too few repeats to know.
    close = [100.0, 100.1, 100.2, 100.3, 100.4]
    assert not verdict(close, [x + 0.6 for x in close])[2]
    assert not verdict([100.0, 101.0], [50.0, 51.0])[2]


def test_bounds_of_a_median_hold_as_often_as_they_say() -> None:
    # Ten values: the second of each end, which the true median is beyond with 11 / 1024.
    assert median_bounds(list(range(10))) == {"median": 4.5, "low": 1, "high": 8}
    assert median_bounds([1.0, 2.0])["high"] == float("inf")
    rng = random.Random(7)
    beyond = sum(median_bounds([rng.expovariate(1) for _ in range(10)])["high"] < 0.6931 for _ in range(4000))
    assert beyond / 4000 < 0.05


def test_equal_series_are_rarely_called_different() -> None:
    rng = random.Random(4)

    def series(n: int) -> list[float]:
        return [rng.gauss(100, 5) for _ in range(n)]

    assert sum(verdict(series(5), series(5))[2] for _ in range(2000)) / 2000 < 0.015
    assert sum(verdict(series(10), series(10), paired=True)[2] for _ in range(2000)) / 2000 < 0.015


def test_kolmogorov_smirnov() -> None:
    rng = random.Random(5)
    a, b = [rng.random() for _ in range(800)], [rng.random() for _ in range(8000)]
    assert kolmogorov_smirnov_p(a, b) > 0.01
    assert kolmogorov_smirnov_p([x**1.2 for x in a], b) < 0.001
    assert kolmogorov_smirnov_p(a, a) == 1.0
    assert kolmogorov_smirnov_p([0.0] * 50, [1.0] * 50) < 1e-9
