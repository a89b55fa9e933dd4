"""Mixtures: the published vectors, the second implementation, counts of every block, and every sample once an epoch of its source."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import independent_order
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import digest, table

from lfdata.errors import OptionError
from lfdata.order.mixture import EXHAUSTION, Mixture
from lfdata.order.order import Order
from lfdata.order.samples import Samples
from lfdata.order.selection import Selection

small = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12)), min_size=1, max_size=5)


def sources(sizes: list[int], seed: int = 0) -> list[Order]:
    return [Order(size, seed + number) for number, size in enumerate(sizes)]


def columns(samples: Samples) -> list[list[int]]:
    return np.stack([samples.source, samples.epoch, samples.index, samples.occurrence], 1).tolist()


@pytest.mark.parametrize("row", table("Mixtures"), ids=lambda row: f"{row[2]}-{row[4]}-{row[5]}")
def test_the_published_mixtures(row: list[str]) -> None:
    seed, sizes, block, epoch, n = int(row[0]), [int(size) for size in row[1].split()], int(row[3]), int(row[5]), int(row[6])
    kind, *numbers = row[2].split()
    options: dict[str, Any] = {}
    parts = sizes
    if kind == "weights":
        options["weights"] = [float(number) for number in numbers]
        parts = [int(Fraction(number) * 1000) for number in numbers]
    if kind == "temperature":
        options["temperature"] = float(numbers[0])
        parts = [max(1, round((size / max(sizes)) ** (1 / float(numbers[0])) * 2**32)) for size in sizes]
    mixture = Mixture(sources(sizes, seed), block=block, exhaustion=row[4], seed=seed, **options)
    assert mixture.n == n or row[4] == "repeat"
    mixture = Mixture(sources(sizes, seed), block=block, exhaustion=row[4], seed=seed, n=n, **options)
    found = columns(mixture.samples(epoch, np.arange(n)))
    assert " ".join(f"{sample[0]}:{sample[2]}" for sample in found[:8]) == row[7]
    assert digest([sample[:3] for sample in found]) == row[8]
    plain = independent_order.mixture(sizes, parts, block, row[4], seed, epoch, n)
    orders: dict[tuple[int, int], list[int]] = {}
    for source, at, _ in plain:
        if (source, at) not in orders:
            orders[source, at] = independent_order.epoch_of(sizes[source], seed + source, at, "full")
    assert digest([(source, at, orders[source, at][place]) for source, at, place in plain]) == row[8]


@settings(deadline=None, max_examples=40)
@given(small, st.integers(2, 24), st.sampled_from(EXHAUSTION), st.integers(0, 9), st.integers(0, 2))
def test_both_implementations_agree(
    given_sources: list[tuple[int, int]], block: int, exhaustion: str, seed: int, epoch: int
) -> None:
    sizes, weights = [size for size, _ in given_sources], [weight for _, weight in given_sources]
    orders = [Order(size, seed, "sequential") for size in sizes]
    mixture = Mixture(orders, weights=weights, block=block, exhaustion=exhaustion, seed=seed)
    found = [tuple(sample[:3]) for sample in columns(mixture.samples(epoch, np.arange(mixture.n)))] if mixture.n else []
    assert found == independent_order.mixture(sizes, weights, block, exhaustion, seed, epoch)


@settings(deadline=None, max_examples=40)
@given(small, st.integers(1, 24), st.sampled_from(EXHAUSTION), st.integers(0, 5), st.randoms(use_true_random=False))
def test_a_position_does_not_depend_on_what_else_is_asked_for(
    given_sources: list[tuple[int, int]], block: int, exhaustion: str, epoch: int, random: Any
) -> None:
    mixture = Mixture(sources([size for size, _ in given_sources]), temperature=3, block=block, exhaustion=exhaustion)
    whole = columns(mixture.samples(epoch, np.arange(mixture.n))) if mixture.n else []
    asked = [random.randrange(mixture.n) for _ in range(20)] if mixture.n else []
    assert columns(mixture.samples(epoch, asked)) == [whole[position] for position in asked]
    for position in asked[:5]:
        assert columns(mixture.samples(epoch, [position])) == [whole[position]]


@settings(deadline=None, max_examples=100)
@given(st.lists(st.one_of(st.integers(1, 20), st.integers(1, 10**6)), min_size=1, max_size=12), st.integers(1, 64))
def test_counts_of_blocks_add_up_never_go_down_and_stay_near_the_ideal(weights: list[int], block: int) -> None:
    shares = Mixture(sources([10] * len(weights)), weights=weights, block=block)._segments[0].shares
    counts = np.array([shares.at(k) for k in range(200)])
    assert (counts.sum(1) == np.arange(200) * block).all() and (np.diff(counts, axis=0) >= 0).all()
    off = np.abs(counts - np.arange(200)[:, None] * block * np.array(weights) / sum(weights))
    limit = 1 if min(weights) * block >= sum(weights) else 2
    assert off.max() < limit + 1e-6
    far = shares.at(1 << 40)
    assert sum(far) == block << 40 and all(
        abs(c - (block * w << 40) / sum(weights)) < 2.1 for c, w in zip(far, weights, strict=True)
    )


def test_every_block_holds_its_shares() -> None:
    mixture = Mixture(sources([1000, 300, 50]), weights=[0.5, 0.3, 0.2], block=10, n=5000)
    blocks = mixture.samples(0, np.arange(5000)).source.reshape(-1, 10)
    assert {tuple(np.bincount(block, minlength=3).tolist()) for block in blocks} == {(5, 3, 2)}
    assert len({block.tobytes() for block in blocks}) > 100, "not all laid alike"


@settings(deadline=None, max_examples=15)
@given(small, st.integers(3, 24), st.integers(1, 3))
def test_repeat_goes_on_where_it_stopped(given_sources: list[tuple[int, int]], block: int, epochs: int) -> None:
    sizes = [size for size, _ in given_sources]
    mixture = Mixture(sources(sizes), weights=[weight for _, weight in given_sources], block=block)
    first = mixture.samples(0, np.arange(mixture.n))
    seen = [len(set(first.index[first.source == number].tolist())) for number in range(len(sizes))]
    assert seen == sizes, "an epoch shows every sample of every source"
    last = mixture.samples(0, [mixture.n - 1])
    assert int((first.source == last.source[0]).sum()) == sizes[last.source[0]], "and ends with the last of the slowest"
    parts = [columns(mixture.samples(epoch, np.arange(mixture.n))) for epoch in range(epochs)]
    for number, size in enumerate(sizes):
        mine = [sample for part in parts for sample in part if sample[0] == number]
        assert [sample[1] for sample in mine] == [count // size for count in range(len(mine))]
        for start in range(0, len(mine) - size + 1, size):
            assert sorted(sample[2] for sample in mine[start : start + size]) == list(range(size))


@settings(deadline=None, max_examples=40)
@given(small, st.integers(1, 24), st.integers(0, 3))
def test_drop_shows_every_sample_once_in_segments(given_sources: list[tuple[int, int]], block: int, epoch: int) -> None:
    sizes, weights = [size for size, _ in given_sources], [weight for _, weight in given_sources]
    mixture = Mixture(sources(sizes), weights=weights, block=block, exhaustion="drop")
    assert mixture.n == sum(sizes)
    found = mixture.samples(epoch, np.arange(mixture.n))
    assert set(found.epoch.tolist()) == {epoch}
    ends = []
    for number, size in enumerate(sizes):
        mine = found.source == number
        assert sorted(found.index[mine].tolist()) == list(range(size))
        ends.append(int(np.flatnonzero(mine)[-1]) + 1)
    assert sorted(ends)[:-1] == [segment.start for segment in mixture._segments[1:]]
    for segment in mixture._segments:
        live = [number for number, end in enumerate(ends) if end > segment.start]
        assert list(segment.live) == live
        inside = found.source[segment.start : min(end for end in ends if end > segment.start)]
        total = sum(weights[number] for number in live)
        for stop in range(block, len(inside) + 1, block):
            for number in live:
                assert abs((inside[:stop] == number).sum() - stop * weights[number] / total) < 2


def test_stop_ends_before_a_source_would_be_missed() -> None:
    for sizes, weights in (([100, 40, 30], [5, 3, 1]), ([7, 7], None), ([1000, 1], None), ([1], None)):
        mixture = Mixture(sources(sizes), weights=weights, block=8, exhaustion="stop")
        longer = Mixture(sources(sizes), weights=weights or sizes, block=8, n=mixture.n + 1)
        found, more = mixture.samples(3, np.arange(mixture.n)), longer.samples(0, np.arange(mixture.n + 1))
        assert np.array_equal(found.source, more.source[:-1]) and set(more.epoch[:-1].tolist()) == {0} and more.epoch[-1] == 1
        assert all(
            len(np.unique(found.index[found.source == number])) == (found.source == number).sum()
            for number in range(len(sizes))
        )


def test_sources_may_be_selections_and_any_mode() -> None:
    mask = np.arange(200) % 3 == 0
    mixture = Mixture(
        [Order(Selection.of(mask), 1, "block", block=8, window=2), Order(50, 2, "sequential")], block=16, exhaustion="drop"
    )
    found = mixture.samples(0, np.arange(mixture.n))
    assert np.array_equal(np.sort(found.index[found.source == 0]), np.flatnonzero(mask))
    assert np.array_equal(found.index[found.source == 1], np.arange(50)), "a source's own order is kept"


def test_enormous_sources_cost_nothing() -> None:
    mixture = Mixture(sources([1 << 46, 1 << 45, 12345]), exhaustion="drop")
    assert mixture.n == (1 << 46) + (1 << 45) + 12345
    found = mixture.samples(1, np.arange(mixture.n - 300, mixture.n))
    assert found.index.max() > 1 << 40
    late = Mixture(sources([1 << 40, 1000]), weights=[1, 1]).samples(1 << 20, [0, 1])
    assert late.epoch.max() > 1 << 20


def test_what_makes_no_sense_is_refused() -> None:
    two = sources([10, 20])
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"weights": [1, 0]}, "leave out"),
        ({"weights": [1, float("nan")]}, "above 0"),
        ({"weights": [1]}, "1 weights for 2"),
        ({"weights": [1, 2], "temperature": 2}, "one of them"),
        ({"temperature": 0}, "above 0"),
        ({"block": 0}, "block of 0"),
        ({"exhaustion": "loop"}, "stop, repeat, drop"),
        ({"exhaustion": "drop", "n": 31}, "up to 30"),
        ({"n": 0}, "n = 0"),
        ({"seed": -1}, "seeds"),
        ({"weights": [1e-300, 1]}, "more weight"),
    ]
    for options, message in wrong:
        with pytest.raises(OptionError, match=message):
            Mixture(two, **options)
    with pytest.raises(OptionError, match=r"\[1\] have no samples"):
        Mixture(sources([10, 0]))
    with pytest.raises(OptionError, match="no sources"):
        Mixture([])
    mixture = Mixture(two)
    for position in (-1, mixture.n):
        with pytest.raises(IndexError):
            mixture.samples(0, [position])
    with pytest.raises(OptionError, match="epoch"):
        mixture.samples(1 << 62, [0])
    assert len(mixture.samples(0, [])) == 0
    assert Mixture(two, weights=[1e-300, 1], n=100).samples(0, np.arange(100)).source.sum() == 100
    assert Mixture(two, temperature=float("inf")).parts == (1, 1) and Mixture(two, temperature=1).parts == (1, 2)
    assert Mixture(two, weights=[0.1, 0.7]).parts == (1, 7)
