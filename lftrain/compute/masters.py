"""Weights of linear layers stored in the compute type, each with an fp32 master beside it that the optimiser updates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lftrain.compute.adamw import AdamW, master_of
from lftrain.errors import ConfigError
from lftrain.options import Options

ADVICE = 'or take precision.weights = "fp32"'


class HalfLinear(nn.Linear):
    """A linear layer made by :func:`convert`. Its weight is bf16; ``weight.master``, float32, is what ``state_dict`` has.

    Copies of it have a master of their own. Cast to another type it is a plain layer again, with the master's values.
    """

    # torch copies a parameter without what hangs on it.
    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "master": master_of(self.weight)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        master = state["master"]
        super().__setstate__({name: value for name, value in state.items() if name != "master"})
        weight: Any = self.weight
        weight.master = master

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> HalfLinear:
        """What ``to``, ``cuda``, ``float`` and the like do: the master goes where the weight goes."""
        before: Any = self.weight
        kind, master = before.dtype, before.master
        super()._apply(fn, recurse)
        weight: Any = self.weight  # another object where torch cannot keep it (meta)
        with torch.no_grad():
            moved = fn(master)
        # A cast to the type that the weight has leaves the master as exact as it is.
        weight.master = moved if moved.dtype is torch.float32 or weight.dtype is not kind else master.to(weight.device)
        if weight.dtype is not kind:
            _plain(self)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = master_of(self.weight)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *more: Any) -> None:
        weight: Any = self.weight
        half, weight.data = weight.data, weight.master  # changed in place
        try:
            super()._load_from_state_dict(state_dict, prefix, *more)
        finally:
            if self.weight is not weight:
                # Assigned (assign=True): the optimiser's parameter stays the one it is.
                weight.data.copy_(self.weight.data)
                self.weight = weight
            weight.data = half
        _follow(weight)


def convert(model: nn.Module, kind: torch.dtype) -> list[nn.Parameter]:
    """Store the weights of the linear layers that are trained in ``kind``, in place: modules and parameters stay the objects that they are.

    Weights that several modules share stay as they are, and so do layers of classes of their own.

    Returns:
        The parameters that have a master, those of an earlier call among them.

    Raises:
        ConfigError: there are none.
    """
    places = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    owners = Counter(id(one) for module in model.modules() for one in module._parameters.values())
    found = []
    for module in model.modules():
        weight: Any = getattr(module, "weight", None)
        plain = type(module) is nn.Linear and isinstance(module._parameters.get("weight"), nn.Parameter)
        if plain and weight.requires_grad and weight.dtype is torch.float32 and places[id(module)] == owners[id(weight)] == 1:
            made: Any = module
            made.__class__ = HalfLinear
            weight.master = weight.data
            weight.data = weight.data.to(kind)
        if isinstance(module, HalfLinear):
            found.append(weight)
    if not found:
        raise ConfigError(
            f'precision.weights = "compute" fits no layer of this model: no plain nn.Linear in fp32 is trained. {ADVICE}'
        )
    return found


def revert(model: nn.Module) -> None:
    """Plain layers again, with the masters as weights, in place. Layers that :func:`convert` has not made stay as they are."""
    for module in model.modules():
        if isinstance(module, HalfLinear):
            _plain(module)


def refresh(model: nn.Module) -> None:
    """After the masters were changed in place, by a checkpoint."""
    for module in model.modules():
        if isinstance(module, HalfLinear):
            _follow(module.weight)


def _plain(linear: nn.Linear) -> None:
    module: Any = linear
    weight = module.weight
    weight.data = weight.master
    if weight.grad is not None:
        weight.grad = weight.grad.to(weight.dtype)
    del weight.master
    module.__class__ = nn.Linear


@torch.no_grad()
def _follow(weight: Any) -> None:
    weight.data.copy_(weight.master)  # in place: a graph may hold it


def check(options: Options, micro: int | None, fused_adamw: bool) -> None:
    """Whether ``precision.weights`` goes with the rest. ``micro``: batches of a step, if that is known.

    Raises:
        ConfigError: it does not.
    """
    if options.precision.weights != "compute":
        return
    if options.precision.mode != "bf16":
        raise ConfigError(
            f'precision.weights = "compute" goes with precision.mode = "bf16", and this is "{options.precision.mode}": take that, {ADVICE}'
        )
    if (micro is not None and micro > 1) or options.activations.admit_mb is not None:
        what = "activations.admit_mb cuts a step into" if micro is None or micro <= 1 else f"a step has {micro}"
        raise ConfigError(
            f'{what} micro-batches, whose gradients precision.weights = "compute" would add up in bf16: take one a step, {ADVICE}'
        )
    if options.ddp.hook == "powersgd":
        raise ConfigError(
            'ddp.hook = "powersgd" takes gradients in fp32, and precision.weights = "compute" has them in bf16: leave one out'
        )
    if not fused_adamw:
        raise ConfigError(
            f'precision.weights = "compute" needs lftrain.AdamW with fused=True and no amsgrad, which updates fp32 masters: take it, {ADVICE}'
        )


def takes_masters(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimiser updates masters."""
    return isinstance(optimizer, AdamW) and all(one["fused"] and not one["amsgrad"] for one in optimizer.param_groups)
