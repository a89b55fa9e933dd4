"""How well an order is shuffled, in numbers (docs/order.md)."""

from __future__ import annotations

import numpy as np

from lfdata.errors import OptionError
from lfdata.order.order import Order


def shuffle_quality(order: Order, epoch: int = 0, *, batch: int = 256) -> dict[str, float]:
    """Measures of one epoch, for which all its positions are evaluated: arrays as long as the epoch.

    Returns:
        ``displacement``: mean distance of a sample from its place in the data set, over n / 3 (a full shuffle has 1);
        ``step``: mean distance in the data set of two samples that follow each other, over n / 3 (a full shuffle has 1);
        ``neighbours``: share of those that are neighbours in the data set (a full shuffle has 2 / n);
        ``blocks``: mean number of blocks of ``order.block`` samples among the samples of a batch;
        ``blocks_full``: what that number is expected to be for a full shuffle.

    Raises:
        OptionError: an epoch shorter than two samples or than one batch.
    """
    if order.n < max(2, batch) or batch < 1:
        raise OptionError(f"{order.n} samples in batches of {batch}: there must be a batch of 1 or more, and 2 samples")
    n = order.n
    found = order.indices(epoch, np.arange(n))
    if order.selection is not None:
        found = order.selection.rank(found)
    steps = np.abs(np.diff(found))
    whole = found[: n // batch * batch].reshape(-1, batch)
    blocks = np.sort(whole // order.block, axis=1)
    # A block of s samples is missed by a batch with the chance C(n - s, batch) / C(n, batch), close to (1 - s / n) ** batch.
    count = -(-n // order.block)
    sizes = np.full(count, order.block)
    sizes[-1] = n - (count - 1) * order.block
    return {
        "displacement": float(np.abs(found - np.arange(n)).mean() / (n / 3)),
        "step": float(steps.mean() / (n / 3)),
        "neighbours": float((steps == 1).mean()),
        "blocks": float((1 + (np.diff(blocks, axis=1) > 0).sum(1)).mean()),
        "blocks_full": float((1 - (1 - sizes / n) ** batch).sum()),
    }
