"""Whether all ranks still hold the same parameters: sums of their bits, compared."""

from __future__ import annotations

import torch
from torch import nn

from lftrain.comm.group import Group
from lftrain.errors import DivergenceError

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(model: nn.Module) -> torch.Tensor:
    """For each parameter, in the model's order, the sum of its bits (and its master's) as integers: int64 (parameters,), wrapping."""
    sums = []
    for parameter in model.parameters():
        found, master = _sum(parameter), getattr(parameter, "master", None)
        # Copies in fewer bits may be alike where masters are not.
        sums.append(found if master is None else found + _sum(master))
    return torch.stack(sums)


def _sum(value: torch.Tensor) -> torch.Tensor:
    return value.detach().contiguous().view(_INTEGERS[value.element_size()]).sum(dtype=torch.int64)


def compare(model: nn.Module, group: Group, step: int) -> None:
    """Raise :class:`DivergenceError` on every rank if one holds other parameters. Waits for the device."""
    if group.world == 1:
        return
    mine = checksum(model)
    # An odd multiplier by place, so that two sums that change places show.
    weights = torch.arange(1, 2 * len(mine), 2, device=mine.device)
    if bool((totals := group.gather((mine * weights).sum()[None])[:, 0]).eq(totals[0]).all()):
        return
    every = group.gather(mine)
    differs = every.ne(every[0])
    ranks = differs.any(1).nonzero().flatten().tolist()
    first = int(differs.any(0).nonzero()[0])
    name = [name for name, _ in model.named_parameters()][first]
    raise DivergenceError(
        f"step {step}: rank {', '.join(map(str, ranks))} does not hold the parameters of rank 0; the first that differs is {name!r}. "
        "Gradients were not reduced everywhere, or a rank computes wrongly: go on from a checkpoint before it"
    )
