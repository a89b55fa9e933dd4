"""The loss on data that is never trained on."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from lftrain.comm.group import Group
from lftrain.runtime.feed import Batch
from lftrain.runtime.precision import Precision
from lftrain.runtime.seed import derive
from lftrain.runtime.step import Loss


@torch.no_grad()
def held_out_loss(
    loss: Loss, model: nn.Module, loader: Iterable[Batch], group: Group, precision: Precision, seed: int
) -> float:
    """Mean over one epoch of ``loader``, over all ranks; NaN without a single item.

    What the loss draws at random is the same each time, and the run's own random numbers go on as if nothing had been.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=group.device)
    training = model.training
    model.eval()
    try:
        with torch.random.fork_rng([group.device] if group.device.type == "cuda" else []):
            for number, batch in enumerate(loader):
                torch.manual_seed(derive(seed, "held_out", number, group.rank))
                moved = {name: value.to(group.device, non_blocking=True) for name, value in batch.items()}
                with precision.autocast():
                    mean, count = loss(model, moved)
                weight = torch.as_tensor(count, dtype=torch.float64, device=group.device)
                sums += torch.stack([torch.where(weight > 0, mean.double() * weight, 0.0), weight])
    finally:
        model.train(training)
    total, items = group.gather(sums).sum(0).tolist()
    return total / items if items else float("nan")
