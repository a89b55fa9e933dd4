"""AdamW whose update, within a CUDA graph, is a kernel that moves as few bytes as there are."""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from typing import Any

import torch
from torch.optim.adamw import adamw

from lftrain.errors import ConfigError

AVERAGES = ("exp_avg", "exp_avg_sq")
# Smaller parameters are updated together, by torch's kernel: a launch for each would take longer than its work.
LARGE = 1 << 16


class AdamW(torch.optim.AdamW):
    """As torch's: its options, its state, its results within rounding.

    torch's fused kernel writes the gradients back, divided by scale and clipping. Where steps are to be captured
    (``capturable``), so that a launch costs nothing, large parameters have a launch each of a kernel that only reads them. The rest is torch's.

    A parameter that has a master (:func:`master_of`) is a copy of it in fewer bits: master and averages are float32, and the copy follows.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update; with ``grad_scale`` and ``found_inf``, if they are set, as torch's fused one has it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        done: list[torch.Tensor] = []
        for group in self.param_groups:
            done += self._by_kernel(group)
            done += self._of_masters(group, {id(one) for one in done})
        gradients = [one.grad for one in done]
        for one in done:
            one.grad = None
        try:
            _unhooked()(self)
        finally:
            for one, gradient in zip(done, gradients, strict=True):
                one.grad = gradient
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, which gives averages the type of their parameter: those of one with a master stay float32."""
        super().load_state_dict(state_dict)
        order = [place for group in state_dict["param_groups"] for place in group["params"]]
        ours = [one for group in self.param_groups for one in group["params"]]
        for place, one in zip(order, ours, strict=True):
            if master_of(one) is not None and place in state_dict["state"]:
                for name in AVERAGES:
                    self.state[one][name] = state_dict["state"][place][name].to(one.device, torch.float32, copy=True)

    def _by_kernel(self, group: dict[str, Any]) -> list[torch.Tensor]:
        """Update the large parameters of a group, and say which."""
        if _kernels() is None or not (group["fused"] and group["capturable"]) or group["amsgrad"] or group["maximize"]:
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
            averages = (state["exp_avg"], state["exp_avg_sq"])
            _kernels().update(one, master_of(one), one.grad, *averages, correction, scale, bad, *options)
        return large

    def _of_masters(self, group: dict[str, Any], done: set[int]) -> list[torch.Tensor]:
        """Update those other parameters of a group that have masters, by torch's kernels, and say which."""
        halves = [one for one in group["params"] if one.grad is not None and id(one) not in done]
        rest = [one for one in halves if master_of(one) is not None]
        if not rest:
            return []
        if group["amsgrad"]:
            raise ConfigError("amsgrad is not for parameters with fp32 masters (precision.weights): leave it out")
        masters = [_master(one) for one in rest]
        for one, master in zip(rest, masters, strict=True):
            if not self.state[one]:
                device = one.device if group["fused"] or group["capturable"] else "cpu"
                self.state[one] = {
                    "step": torch.zeros((), device=device),
                    **{name: torch.zeros_like(master) for name in AVERAGES},
                }
        states = [self.state[one] for one in rest]
        averages: tuple[list[torch.Tensor], ...] = tuple([state[name] for state in states] for name in AVERAGES)
        first, second = group["betas"]
        gradients, steps = [one.grad.float() for one in rest], [state["step"] for state in states]
        adamw(
            masters,
            gradients,
            averages[0],
            averages[1],
            [],
            steps,
            foreach=group["foreach"],
            capturable=group["capturable"],
            fused=group["fused"],
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=getattr(self, "found_inf", None),
            amsgrad=False,
            beta1=first,
            beta2=second,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )
        torch._foreach_copy_(rest, masters)
        return rest


def master_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """What a parameter is a copy of; ``None``: it is what is trained."""
    return getattr(parameter, "master", None)


def _master(parameter: torch.Tensor) -> torch.Tensor:
    found = master_of(parameter)
    assert found is not None
    return found


def _fits(one: torch.Tensor) -> bool:
    """Whether the kernel takes a parameter: large, on a GPU, float32 or with a master, in one piece, its gradient too."""
    gradient, master = one.grad, master_of(one)
    return (
        gradient is not None
        and one.is_cuda
        and one.numel() >= LARGE
        and one.dtype == gradient.dtype
        and (one.dtype == torch.float32 or master is not None)
        and (master is None or master.is_contiguous())
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
