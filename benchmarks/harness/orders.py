"""Whether keys come in random order, another one every epoch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.harness.verify import WrongWorkError

FEWEST_KEYS = 32
"""With fewer keys, orders that chance makes look like others."""
LEAST_STEP, LEAST_SHARE = 48, 0.08
"""How far apart the keys of neighbours are, at least, in the median: so many, or this share of all keys where that is less. A random order has
0.29 of all keys; a shuffle buffer of n samples over files in order about 0.7 n; batches of 64 files in order, shuffled within, 19."""
MOST_PAIRS = 0.5
"""Share of neighbours of an epoch that may be neighbours in the next one too. Of two random orders it is one pair or two."""


def check_orders(epochs: Sequence[Sequence[int]]) -> None:
    """Keys of whole epochs, as they came.

    Raises:
        WrongWorkError: they come nearly one after the other, or in the order of an epoch before.
    """
    arrays = [np.asarray(keys, np.int64) for keys in epochs]
    pairs: list[set[tuple[int, int]]] = []
    for number, keys in enumerate(arrays):
        if len(keys) < FEWEST_KEYS:
            return
        step = float(np.median(np.abs(np.diff(keys))))
        if step < min(LEAST_STEP, LEAST_SHARE * len(keys)):
            raise WrongWorkError(
                f"epoch {number}: the order is not random: keys of neighbours are {step:g} apart in the median of {len(keys)} keys"
            )
        mine = set(zip(keys[:-1].tolist(), keys[1:].tolist(), strict=True))
        for before, other in enumerate(pairs):
            share = len(mine & other) / len(mine)
            if share > MOST_PAIRS:
                raise WrongWorkError(
                    f"epoch {number} has the order of epoch {before}: {share:.0%} of its neighbours are the same"
                )
        pairs.append(mine)
