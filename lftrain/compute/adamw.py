"""AdamW whose update, within a CUDA graph, is a kernel that moves as few bytes as there are."""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from typing import Any

import torch

# Smaller parameters are updated together, by torch's kernel: a launch for each would take longer than its work.
LARGE = 1 << 16


class AdamW(torch.optim.AdamW):
    """As torch's: its options, its state, its results within rounding.

    torch's fused kernel writes the gradients back, divided by scale and clipping. Where steps are to be captured
    (``capturable``), so that a launch costs nothing, large parameters have a launch each of a kernel that only reads them. The rest is torch's.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update; with ``grad_scale`` and ``found_inf``, if they are set, as torch's fused one has it."""
        done = (
            []
            if closure is not None or _kernels() is None
            else [one for group in self.param_groups for one in self._by_kernel(group)]
        )
        gradients = [one.grad for one in done]
        for one in done:
            one.grad = None
        try:
            return _unhooked()(self, closure)
        finally:
            for one, gradient in zip(done, gradients, strict=True):
                one.grad = gradient

    def _by_kernel(self, group: dict[str, Any]) -> list[torch.Tensor]:
        """Update the large parameters of a group, and say which."""
        if not (group["fused"] and group["capturable"]) or group["amsgrad"] or group["maximize"]:
            return []
        large = [one for one in group["params"] if _fits(one) and self.state[one]]
        if not large:
            return []
        scale, bad = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        states = [self.state[one] for one in large]
        steps = [state["step"] for state in states]
        # As many summands as steps: the host would wait for one of the device's.
        torch._foreach_add_(steps, [torch.ones_like(steps[0]) if bad is None else 1.0 - bad] * len(steps))
        first, second = group["betas"]
        numbers = torch.stack(steps).double()
        corrections = torch.stack([1 - torch.pow(first, numbers), (1 - torch.pow(second, numbers)).sqrt()], 1).float()
        options = (group["lr"], group["betas"], group["eps"], group["weight_decay"])
        for one, state, correction in zip(large, states, corrections, strict=True):
            _kernels().update(one, one.grad, state["exp_avg"], state["exp_avg_sq"], correction, scale, bad, *options)
        return large


def _fits(one: torch.Tensor) -> bool:
    """Whether the kernel takes a parameter: large, on a GPU, float32, in one piece, its gradient too."""
    gradient = one.grad
    return (
        gradient is not None
        and one.is_cuda
        and one.numel() >= LARGE
        and one.dtype == gradient.dtype == torch.float32
        and one.is_contiguous()
        and gradient.is_contiguous()
    )


def _unhooked() -> Any:
    """torch's update without the calls of hooks that it gets once an optimiser of that class is made: this one's own has them."""
    found: Any = torch.optim.AdamW.step
    while getattr(found, "hooked", False):
        found = found.__wrapped__
    return found


@cache
def _kernels() -> Any:
    """The module, or ``None`` without Triton."""
    if importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module("lftrain.compute.kernels")
