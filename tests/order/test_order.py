"""Orders: the published vectors, the second implementation, bijections at every size, and how well small ones are shuffled."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections import Counter
from pathlib import Path
from typing import Any

import independent_order
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lfdata.errors import OptionError
from lfdata.order.order import MODES, Batches, Order
from lfdata.order.permutation import MAX_SAMPLES, Permutation, make_key

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "order.md"
_ROW = re.compile(r"\| (\d+) \| (\d+) \| (\d+) \| ([a-z]+)(?: (\d+) x (\d+))? \| ([\d ]+) \| `([0-9a-f]{64})` \|")


def vectors() -> list[tuple[Any, ...]]:
    """Rows of the document's table: seed, epoch, n, mode, block, window, first indices, digest."""
    return [match.groups() for match in _ROW.finditer(DOCUMENT.read_text())]


def test_there_are_vectors_of_every_mode() -> None:
    assert {row[3] for row in vectors()} == set(MODES) and len(vectors()) >= 8


@pytest.mark.parametrize("row", vectors(), ids=lambda row: " ".join(row[:4]))
def test_the_published_vectors(row: tuple[Any, ...]) -> None:
    seed, epoch, n, mode, block, window, first, digest = row
    options = {"block": int(block), "window": int(window)} if block else {}
    found = Order(int(n), int(seed), mode, **options).indices(int(epoch), np.arange(int(n)))
    assert found[:16].tolist() == [int(index) for index in first.split()]
    assert hashlib.sha256(found.astype("<u8").tobytes()).hexdigest() == digest
    if int(n) <= 5000:
        assert independent_order.epoch_of(int(n), int(seed), int(epoch), mode, **options) == found.tolist()


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 700),
    st.integers(0, 2**64 - 1),
    st.integers(0, 50),
    st.sampled_from(MODES),
    st.integers(1, 60),
    st.integers(1, 9),
)
def test_every_sample_once_and_both_implementations_agree(
    n: int, seed: int, epoch: int, mode: str, block: int, window: int
) -> None:
    order = Order(n, seed, mode, block=block, window=window)
    found = order.indices(epoch, np.arange(n))
    assert sorted(found.tolist()) == list(range(n))
    assert found.tolist() == independent_order.epoch_of(n, seed, epoch, mode, block, window)
    backwards = order.indices(epoch, np.arange(n)[::-1])
    assert np.array_equal(backwards[::-1], found), "a position's sample depends on what else is asked for"


@pytest.mark.parametrize("n", [1, 2, 3, 2**20 - 1, 2**20, 2**31, 2**40 + 12345, MAX_SAMPLES])
def test_large_permutations_are_inverted_by_their_inverse(n: int) -> None:
    permutation = Permutation(n, make_key(1, n))
    positions = np.unique(np.concatenate([[0, n - 1], np.random.default_rng(0).integers(0, n, 2000)]))
    found = permutation(positions)
    assert np.array_equal(permutation.inverse(found), positions) and np.array_equal(
        permutation(permutation.inverse(positions)), positions
    )
    assert len(np.unique(found)) == len(positions) and found.min() >= 0 and found.max() < n


def test_every_order_of_four_comes_about_as_often() -> None:
    keys = 24 * 500
    counts = Counter(tuple(Permutation(4, make_key(key))(np.arange(4)).tolist()) for key in range(keys))
    assert set(counts) == set(itertools.permutations(range(4)))
    chi = sum((count - 500) ** 2 / 500 for count in counts.values())
    assert chi < 60, f"chi-square {chi:.0f} of 23 degrees of freedom"


def test_epochs_and_seeds_differ_and_positions_are_uniform() -> None:
    n = 1000
    epochs = np.stack([Order(n, seed).indices(epoch, np.arange(n)) for seed in range(8) for epoch in range(25)])
    assert len({row.tobytes() for row in epochs}) == 200
    # Where sample 0 comes, and what comes first, over 200 epochs: means within four standard errors of the middle.
    for values in (np.argmax(epochs == 0, 1), epochs[:, 0], epochs[:, 499]):
        assert abs(values.mean() - (n - 1) / 2) < 4 * n / np.sqrt(12 * 200)
    steps = np.abs(np.diff(epochs, axis=1)).mean()
    assert abs(steps / (n / 3) - 1) < 0.02, "neighbours are about a third of the whole apart"


def test_a_window_of_blocks_is_read_once() -> None:
    n, block, window = 10_000 + 7, 64, 8
    found = Order(n, 3, "block", block=block, window=window).indices(0, np.arange(n))
    blocks = found // block
    for number in range(-(-n // block)):
        places = np.flatnonzero(blocks == number)
        assert places[-1] - places[0] < block * window, "all of a block comes within one window"
    assert len(np.unique(blocks[:64])) == window, "a window's samples are mixed"


@pytest.mark.parametrize(
    ("n", "size", "tail"), [(100, 16, "drop_last"), (100, 16, "pad"), (5, 16, "pad"), (96, 16, "pad"), (0, 4, "pad")]
)
def test_ranks_share_every_global_batch_whatever_their_number(n: int, size: int, tail: str) -> None:
    batches = Batches(n, size, tail, static=False)
    assert len(batches) == (n // size if tail == "drop_last" else -(-n // size))
    counted: list[int] = []
    for step in range(len(batches)):
        alone, real = batches.positions(step)
        counted += alone[real].tolist()
        for world in (1, 2, 3, 5, 7, 16, 40):
            parts = [batches.positions(step, rank, world) for rank in range(world)]
            assert np.array_equal(np.concatenate([positions for positions, _ in parts]), alone)
            assert np.array_equal(np.concatenate([mask for _, mask in parts]), real)
    assert counted == list(range(n if tail == "pad" else n // size * size))


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(OptionError, match=r"3 ranks do not divide a global batch of 8; these do: 1, 2, 4, 8"):
        Batches(100, 8).rows(0, 3)
    wrong: list[Any] = [
        lambda: Batches(100, 8).rows(4, 4),
        lambda: Batches(10, 0),
        lambda: Batches(10, 4, "keep"),
        lambda: Order(5, mode="buffer"),
        lambda: Order(5, block=0),
        lambda: Order(5, -1),
        lambda: Permutation(MAX_SAMPLES + 1, 0),
    ]
    for call in wrong:
        with pytest.raises(OptionError):
            call()
    for order, position in ((Order(5), 5), (Order(5), -1), (Order(5, mode="block"), 5), (Order(0), 0)):
        with pytest.raises(IndexError):
            order.indices(0, [position])
    with pytest.raises(IndexError, match="step 2 of 2"):
        Batches(9, 4).positions(2)
    assert Order(0).indices(0, []).tolist() == []
