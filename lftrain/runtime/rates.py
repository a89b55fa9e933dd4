"""The learning rate as a pure function of the step: nothing to save, nothing to lose."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from lftrain.options import OptimizerOptions

Schedule = Callable[[int], float]


def schedule(options: OptimizerOptions, steps: int) -> Schedule:
    """Factor of the learning rate at a step, counted from 0: a linear warm-up, then ``schedule``, down to ``final`` at the last step."""

    def factor(step: int) -> float:
        if step < options.warmup:
            return (step + 1) / options.warmup
        if options.schedule == "constant":
            return 1.0
        done = min(1.0, (step - options.warmup) / max(1, steps - 1 - options.warmup))
        left = 0.5 * (1 + math.cos(math.pi * done)) if options.schedule == "cosine" else 1 - done
        return options.final + (1 - options.final) * left

    return factor


class Rates:
    """Sets the rates of an optimiser's groups: each group's own, as it was when this was made, times the factor."""

    def __init__(self, optimizer: torch.optim.Optimizer, factor: Schedule) -> None:
        self._groups, self._factor = optimizer.param_groups, factor
        self._own = [float(group["lr"]) for group in self._groups]

    def set(self, step: int) -> float:
        """For the step that comes. Returns the first group's."""
        factor = self._factor(step)
        for group, own in zip(self._groups, self._own, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(own * factor)
            else:
                group["lr"] = own * factor
        return self._own[0] * factor
