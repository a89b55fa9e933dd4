"""Bytes that a micro-batch takes, measured while it is trained on."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
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
def same_random(device: torch.device) -> Iterator[None]:
    """Random numbers of torch, numpy and Python go on afterwards as if nothing within had been."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Buffers (statistics of BatchNorm, say) are afterwards what they were: measuring is no training."""
    kept = [
        (module._buffers, name, one, one.detach().clone() if can_be_written(one) else None)
        for module in model.modules()
        for name, one in module._buffers.items()
        if one is not None
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for owner, name, one, before in kept:
                owner[name] = one if before is None else one.copy_(before)


def can_be_written(value: torch.Tensor) -> bool:
    """Whether a buffer can be copied to: none that is sparse, and none of which one number is in several places."""
    return (
        value.layout is torch.strided
        and not value.is_meta
        and not value.is_quantized
        and all(stride or size < 2 for size, stride in zip(value.shape, value.stride(), strict=True))
    )
