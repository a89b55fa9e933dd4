"""Which blocks keep their activations for the backward pass and which compute them again: measured, then a knapsack."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from lftrain.errors import ConfigError
from lftrain.memory.measure import same_random
from lftrain.options import ActivationOptions

MB = 1e6
# The knapsack counts bytes in so many parts of the budget, rounded up: it never takes more than the budget.
PARTS = 2000


@dataclass(frozen=True)
class Measured:
    """A block: what it keeps for its backward pass beyond parameters and its own inputs, and the time of its forward pass."""

    name: str
    bytes: int
    ms: float


def measure(blocks: Sequence[nn.Module], forward: Callable[[], Any]) -> list[Measured]:
    """Run ``forward`` twice, the first time to warm up, and see what each block keeps. Random numbers are as before afterwards."""
    found: dict[int, Measured] = {}
    originals = [block.forward for block in blocks]
    devices = (one.device for block in blocks for one in block.parameters() if one.is_cuda)
    try:
        for number, block in enumerate(blocks):
            block.forward = partial(_observed, number, block, originals[number], found)
        with same_random(next(devices, torch.device("cpu"))):
            forward()
            forward()
    finally:
        for block, original in zip(blocks, originals, strict=True):
            block.forward = original
    return [found.get(number, Measured(type(block).__name__, 0, 0.0)) for number, block in enumerate(blocks)]


def _observed(number: int, block: nn.Module, original: Any, found: dict[int, Measured], *arguments: Any, **more: Any) -> Any:
    known = {
        one.untyped_storage().data_ptr()
        for one in (*block.parameters(), *block.buffers(), *_tensors(arguments), *_tensors(more))
    }
    kept: dict[int, int] = {}

    def keep(value: torch.Tensor) -> torch.Tensor:
        storage = value.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return value

    _settle(block)
    began = time.perf_counter()
    with saved_tensors_hooks(keep, lambda value: value):
        result = original(*arguments, **more)
    _settle(block)
    seconds = time.perf_counter() - began
    found[number] = Measured(f"{type(block).__name__} {number}", sum(kept.values()), 1e3 * seconds)
    return result


def choose(measured: Sequence[Measured], budget: float) -> list[int]:
    """Places of the blocks to be recomputed: those kept fit into ``budget`` bytes and would have taken longest to compute again."""
    if sum(one.bytes for one in measured) <= budget:
        return []
    room_for = max(1, int(budget))
    sizes = [-(-one.bytes * PARTS // room_for) for one in measured]
    # best[c]: (time kept, bitmap of the blocks kept) with at most c units.
    best: list[tuple[float, int]] = [(0.0, 0)] * (PARTS + 1)
    for number, (one, size) in enumerate(zip(measured, sizes, strict=True)):
        for room in range(PARTS, size - 1, -1):
            time_, kept = best[room - size]
            if time_ + one.ms > best[room][0]:
                best[room] = (time_ + one.ms, kept | 1 << number)
    kept = best[PARTS][1]
    again = [number for number, one in enumerate(measured) if one.bytes and not kept >> number & 1]
    # What fits after all, since sizes were rounded up.
    left = budget - sum(one.bytes for number, one in enumerate(measured) if number not in again)
    for number in sorted(again, key=lambda place: -measured[place].ms):
        if measured[number].bytes <= left:
            left -= measured[number].bytes
            again.remove(number)
    return again


def recompute(blocks: Sequence[nn.Module], places: Sequence[int]) -> None:
    """These blocks keep only their inputs, and run again in the backward pass, with the same random numbers."""
    for place in places:
        blocks[place].forward = _Recomputed(blocks[place].forward)


class _Recomputed:
    """A block's forward that keeps its inputs only. A CUDA graph cannot hold that a generator is set back, so there it is done without if the
    block drew nothing when it last ran eagerly; the graph's gradients are compared with eager ones anyway."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward, self._draws = forward, True

    def __call__(self, *arguments: Any, **more: Any) -> Any:
        again = partial(checkpoint, self._forward, use_reentrant=False)
        if not torch.cuda.is_initialized():
            return again(*arguments, **more)
        if torch.cuda.is_current_stream_capturing():
            return again(*arguments, preserve_rng_state=self._draws, **more)
        before = torch.cuda.get_rng_state()
        result = again(*arguments, **more)
        self._draws = not torch.equal(before, torch.cuda.get_rng_state())
        return result


def prepare(blocks: Sequence[nn.Module], options: ActivationOptions, compiled: bool, forward: Callable[[], Any]) -> str:
    """Do as the options say. ``forward``: the loss of a real micro-batch. Returns what was done, "" for nothing.

    Raises:
        ConfigError: options that need something that is not there.
    """
    if options.mode == "none":
        return ""
    if options.mode == "torch":
        if not compiled:
            raise ConfigError(
                'activations.mode = "torch" is an option of torch.compile: set compile.blocks = true, or use "budget"'
            )
        torch._functorch.config.activation_memory_budget = options.torch_budget
        return f"torch.compile keeps {options.torch_budget:.0%} of the activations"
    if not blocks:
        raise ConfigError(
            f"activations.mode = {options.mode!r} needs a model with blocks() -> list of modules; this one has none"
        )
    if options.mode == "all":
        recompute(blocks, range(len(blocks)))
        return f"all {len(blocks)} blocks are recomputed"
    if options.budget_mb is None:
        raise ConfigError('activations.mode = "budget" needs activations.budget_mb')
    measured = measure(blocks, forward)
    places = choose(measured, options.budget_mb * MB)
    recompute(blocks, places)
    kept = sum(one.bytes for number, one in enumerate(measured) if number not in places)
    again = sum(measured[place].ms for place in places)
    return (
        f"{len(places)} of {len(blocks)} blocks are recomputed ({again:.1f} ms a micro-batch); the others keep {kept / MB:.1f} MB of "
        f"{sum(one.bytes for one in measured) / MB:.1f} MB, the budget is {options.budget_mb:g} MB"
    )


def _tensors(values: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, tuple | list | dict):
            found += _tensors(value)
    return found


def _settle(block: nn.Module) -> None:
    """A measured time needs a device that has done what was asked of it."""
    if any(one.is_cuda for one in block.parameters()):
        torch.cuda.synchronize()
