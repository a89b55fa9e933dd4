"""Bytes that a micro-batch takes, measured while it is trained on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks


class Taken:
    """Bytes, once the measuring is over."""

    bytes = 0.0


@contextmanager
def kept(known: Iterable[torch.Tensor]) -> Iterator[Taken]:
    """What the forward passes within keep for their backward passes: every storage once, those of ``known`` (parameters, inputs) left out."""
    taken, left_out = Taken(), {one.untyped_storage().data_ptr() for one in known}
    found: dict[int, int] = {}

    def keep(value: torch.Tensor) -> torch.Tensor:
        storage = value.untyped_storage()
        if storage.data_ptr() not in left_out:
            # One that was freed and whose place another has taken: the larger of both.
            found[storage.data_ptr()] = max(found.get(storage.data_ptr(), 0), storage.nbytes())
        return value

    with saved_tensors_hooks(keep, lambda value: value):
        yield taken
    taken.bytes = float(sum(found.values()))


@contextmanager
def peak(device: torch.device) -> Iterator[Taken]:
    """The most that torch allocates on a GPU at a time within, beyond what it had. Nothing waits: it counts when work is launched."""
    taken = Taken()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    yield taken
    taken.bytes = float(torch.cuda.max_memory_allocated(device) - before)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Buffers (statistics of BatchNorm, say) are afterwards what they were: measuring is no training."""
    kept = [(one, one.detach().clone()) for one in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for one, before in kept:
                one.copy_(before)
