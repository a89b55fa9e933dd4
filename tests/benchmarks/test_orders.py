"""Keys that come in order, or in the same order again, are other work; what shuffles within a buffer or by shard is not."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from benchmarks.harness.orders import FEWEST_KEYS, check_orders
from benchmarks.harness.verify import WrongWorkError

COUNT = 2000


def _buffered(keys: list[int], size: int, rng: random.Random) -> list[int]:
    """A shuffle buffer as streaming loaders have one."""
    held, out = [], []
    for key in keys:
        held.append(key)
        if len(held) >= size:
            out.append(held.pop(rng.randrange(len(held))))
    rng.shuffle(held)
    return out + held


def _sharded(rng: random.Random, buffer: int) -> list[int]:
    shards = [list(range(start, min(COUNT, start + 125))) for start in range(0, COUNT, 125)]
    rng.shuffle(shards)
    return _buffered([key for shard in shards for key in shard], buffer, rng)


def _interleaved(rng: random.Random) -> list[int]:
    """Two workers that take batches by turns, each of its own half in order."""
    halves = [list(range(COUNT // 2)), list(range(COUNT // 2, COUNT))]
    return [key for start in range(0, COUNT // 2, 50) for half in halves for key in half[start : start + 50]]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "order",
    [
        lambda rng: rng.sample(range(COUNT), COUNT),
        lambda rng: _buffered(list(range(COUNT)), 1000, rng),
        lambda rng: _buffered(list(range(COUNT)), 128, rng),
        lambda rng: _sharded(rng, 1000),
        lambda rng: _sharded(rng, 100),
        lambda rng: rng.sample(range(FEWEST_KEYS), FEWEST_KEYS),
        lambda rng: list(range(FEWEST_KEYS - 1)),
    ],
    ids=[
        "full",
        "buffer of 1000",
        "buffer of 128",
        "shards and buffer",
        "shards and small buffer",
        "few keys",
        "too few to tell",
    ],
)
def test_random_orders_pass(order: Callable[[random.Random], list[int]], seed: int) -> None:
    rng = random.Random(seed)
    check_orders([order(rng), order(rng)])


@pytest.mark.parametrize(
    "order",
    [
        lambda rng: list(range(COUNT)),
        lambda rng: list(range(COUNT))[::-1],
        _interleaved,
        lambda rng: [key for start in rng.sample(range(0, COUNT, 50), COUNT // 50) for key in range(start, start + 50)],
        lambda rng: [key for start in range(0, COUNT, 50) for key in rng.sample(range(start, start + 50), 50)],
        lambda rng: list(range(FEWEST_KEYS)),
    ],
    ids=["in order", "backwards", "workers in order", "batches shuffled, each in order", "shuffled within batches", "few keys"],
)
def test_orders_that_are_hardly_random_are_refused(order: Callable[[random.Random], list[int]]) -> None:
    rng = random.Random(0)
    with pytest.raises(WrongWorkError, match="epoch 0: the order is not random"):
        check_orders([order(rng), order(rng)])


def test_an_order_that_comes_again_is_refused() -> None:
    rng = np.random.default_rng(0)
    first, second = rng.permutation(COUNT).tolist(), rng.permutation(COUNT).tolist()
    check_orders([first, second])
    check_orders([first, second[:500]])
    batches = rng.permutation(COUNT // 50)
    by_batch = [key for batch in batches.tolist() for key in first[batch * 50 : batch * 50 + 50]]
    for again in (first, first[700:] + first[:700], by_batch, first[:500]):
        with pytest.raises(WrongWorkError, match="epoch 1 has the order of epoch 0"):
            check_orders([first, again])
    with pytest.raises(WrongWorkError, match="epoch 2 has the order of epoch 0"):
        check_orders([first, second, first])
