"""The loss on data that is never trained on."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from lftrain.comm.group import Group
from lftrain.errors import LossError
from lftrain.memory.measure import same_random
from lftrain.runtime.feed import Batch
from lftrain.runtime.precision import Precision
from lftrain.runtime.seed import derive, seed_all
from lftrain.runtime.step import Loss, scalar


@torch.no_grad()
def held_out_loss(
    loss: Loss, model: nn.Module, loader: Iterable[Batch], group: Group, precision: Precision, seed: int
) -> float:
    """Mean over one epoch of ``loader``, over all ranks; NaN without a single item. Raises :class:`LossError` for counts that cannot be.

    What the loss draws at random is the same each time, and the run's own random numbers go on as if nothing had been.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=group.device)
    least = torch.zeros((), dtype=torch.float64, device=group.device)
    training = model.training
    model.eval()
    try:
        with same_random(group.device):
            for number, batch in enumerate(loader):
                seed_all(derive(seed, "held_out", number, group.rank))
                moved = {name: value.to(group.device, non_blocking=True) for name, value in batch.items()}
                with precision.autocast():
                    mean, count = loss(model, moved)
                weight = scalar(count, group.device).double()
                sums += torch.stack([torch.where(weight == 0, 0.0, mean.double() * weight), weight])
                least = torch.minimum(least, weight)
    finally:
        model.train(training)
    rows = group.gather(torch.cat([sums, least[None]])).tolist()
    for rank, (_, items, smallest) in enumerate(rows):
        if smallest < 0 or not math.isfinite(items):
            count = smallest if smallest < 0 else items
            raise LossError(
                f"held-out data: the loss gives a count of {count:g} on rank {rank}; a count is 0 or more, and finite"
            )
    total, items = sum(row[0] for row in rows), sum(row[1] for row in rows)
    return float(total / items) if items else math.nan
