"""Selections and draws: the published vectors, rank against select, and draws that belong to their sample alone."""

from __future__ import annotations

from typing import Any

import independent_order
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import table

from lfdata.errors import OptionError
from lfdata.order.draws import uniform
from lfdata.order.order import MODES, Order
from lfdata.order.quality import shuffle_quality
from lfdata.order.selection import Selection


@pytest.mark.parametrize("row", table("Selections"), ids=lambda row: "-".join(row[:2]))
def test_the_published_selections(row: list[str]) -> None:
    n, every = int(row[0]), int(row[1])
    mask = np.array([independent_order.mix(i) % every == 0 for i in range(n)], bool)
    selection = Selection.of(mask)
    assert (selection.n, len(selection), selection.digest) == (n, int(row[2]), row[4])
    assert selection.select(np.arange(min(8, len(selection)))).tolist() == [int(index) for index in row[3].split()]
    assert independent_order.selection_digest(mask) == row[4]


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 3000), st.floats(0, 1), st.integers(0, 1000))
def test_rank_and_select_are_inverse(n: int, share: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    mask = random.random(n) < share
    selection = Selection.of(mask)
    chosen = np.flatnonzero(mask)
    ranks = random.permutation(len(chosen))
    assert np.array_equal(selection.select(ranks), chosen[ranks])
    assert np.array_equal(selection.rank(chosen[ranks]), ranks)
    assert np.array_equal(selection.rank(np.arange(n + 1)), np.concatenate([[0], np.cumsum(mask)]))
    assert np.array_equal(selection.contains(np.arange(n)), mask)
    if n:
        other = mask.copy()
        other[seed % n] ^= True
        assert Selection.of(other).digest != selection.digest


def test_a_selection_is_small_and_refuses_what_it_does_not_have() -> None:
    selection = Selection.of(np.ones(1 << 20, bool))
    assert selection.select(np.arange(0, 1 << 20, 1 << 16).reshape(4, 4)).shape == (4, 4)
    assert sum(array.nbytes for array in (selection._blocks, selection._before)) < 1.13 * (1 << 17)
    few = Selection.of(np.array([True, False, True]))
    for call in (lambda: few.select([2]), lambda: few.select([-1]), lambda: few.rank([4]), lambda: few.contains([3])):
        with pytest.raises(IndexError):
            call()
    wrong: list[Any] = [[1, 0], np.zeros((2, 2), bool)]
    for mask in wrong:
        with pytest.raises(OptionError):
            Selection.of(mask)
    with pytest.raises(OptionError, match="no bit beyond"):
        Selection(3, np.array([8], np.uint8))


@pytest.mark.parametrize("mode", MODES)
def test_an_order_over_a_selection_gives_the_selected_samples(mode: str) -> None:
    mask = np.random.default_rng(0).random(500) < 0.4
    order = Order(Selection.of(mask), 3, mode, block=16, window=4)
    plain = Order(int(mask.sum()), 3, mode, block=16, window=4)
    found = order.samples(2, np.arange(order.n))
    assert np.array_equal(np.sort(found.index), np.flatnonzero(mask))
    assert np.array_equal(found.index, np.flatnonzero(mask)[plain.indices(2, np.arange(plain.n))])
    assert set(found.source) == {0} and set(found.epoch) == {2} and set(found.occurrence) == {0}


@pytest.mark.parametrize("row", table("Draws"), ids=lambda row: "-".join(row[:4]))
def test_the_published_draws(row: list[str]) -> None:
    seed, epoch, index, occurrence = map(int, row[:4])
    expected = [float(draw) for draw in row[5].split()]
    assert uniform(seed, epoch, index, occurrence, row[4], 4)[0].tolist() == expected
    assert independent_order.draws(seed, epoch, index, occurrence, row[4], 4) == expected


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**64 - 1), st.lists(st.tuples(*[st.integers(0, 2**63 - 1)] * 3), min_size=1, max_size=8), st.text())
def test_draws_belong_to_their_sample_alone(seed: int, samples: list[tuple[int, int, int]], operation: str) -> None:
    columns = np.array(samples, np.int64).T
    found = uniform(seed, *columns, operation, 5)
    assert found.dtype == np.float64 and found.shape == (len(samples), 5)
    for row, sample in zip(found, samples, strict=True):
        assert row.tolist() == uniform(seed, *sample, operation, 9)[0, :5].tolist()
        assert row.tolist() == independent_order.draws(seed, *sample, operation, 5)


def test_draws_are_uniform_and_do_not_go_together() -> None:
    count = 20_000
    of_samples = uniform(0, 1, np.arange(count), 0, "crop", 2)
    series = [
        of_samples[:, 0],
        of_samples[:, 1],
        uniform(0, np.arange(count), 5, 0, "crop", 1)[:, 0],
        uniform(0, 1, np.arange(count), 0, "flip", 1)[:, 0],
        uniform(1, 1, np.arange(count), 0, "crop", 1)[:, 0],
        uniform(0, 1, np.arange(count), 1, "crop", 1)[:, 0],
        uniform(0, 0, 0, 0, "crop", count)[0],
    ]
    for values in series:
        # Kolmogorov-Smirnov: 1.95 / sqrt(n) is passed once in a thousand.
        assert np.abs(np.sort(values) - (np.arange(count) + 0.5) / count).max() < 1.95 / np.sqrt(count)
        assert values.min() >= 0 and values.max() < 1
        assert abs(np.corrcoef(values[1:], values[:-1])[0, 1]) < 4 / np.sqrt(count)
    between = np.corrcoef(series) - np.eye(len(series))
    assert np.abs(between).max() < 4 / np.sqrt(count)


def test_no_draws_and_wrong_ones() -> None:
    assert uniform(0, [], [], [], "crop", 3).shape == (0, 3) and uniform(0, 1, 2, 3, "crop", 0).shape == (1, 0)
    assert uniform(0, 0, [], 0, "crop", 3).shape == (0, 3)
    for seed, count in ((-1, 1), (1 << 64, 1), (0, -1)):
        with pytest.raises(OptionError):
            uniform(seed, 0, 0, 0, "crop", count)


def test_block_shuffle_is_as_good_as_the_document_says() -> None:
    n = 1 << 16
    full, wide, narrow, none = (
        shuffle_quality(Order(n, 5, mode, block=256, window=window), 1)
        for mode, window in (("full", 1), ("block", 16), ("block", 4), ("sequential", 1))
    )
    assert abs(full["displacement"] - 1) < 0.02 and abs(full["step"] - 1) < 0.02 and full["neighbours"] < 1e-3
    assert abs(full["blocks"] / full["blocks_full"] - 1) < 0.01
    assert 0.85 < wide["step"] < 1.1 and narrow["step"] < wide["step"] and wide["neighbours"] < narrow["neighbours"] < 0.004
    assert narrow["blocks"] == 4 and wide["blocks"] == pytest.approx(16, abs=0.01)
    assert none["displacement"] == 0 and none["neighbours"] == 1 and none["blocks"] == 1
    mask = np.arange(2 * n) % 2 == 0
    assert shuffle_quality(Order(Selection.of(mask), 5, block=256), 1) == full, "measured among the selected samples"
    with pytest.raises(OptionError):
        shuffle_quality(Order(100), 0)
