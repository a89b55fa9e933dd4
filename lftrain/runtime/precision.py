"""Number formats and the gradient scale of fp16."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lftrain.compute import masters
from lftrain.compute.adamw import master_of
from lftrain.compute.fp8 import Fp8Linear, convert
from lftrain.errors import ConfigError, DamagedCheckpointError, NonFiniteError
from lftrain.options import PrecisionOptions

_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
GROWTH, BACKOFF = 2.0, 0.5


class Precision:
    """Autocast, and a scale that follows the rule of ``torch.amp.GradScaler``, on the device and without waiting for it.

    Attributes:
        scale: float32 scalar on the device: what losses are multiplied by; 1 but for fp16.
        masters: fp32 values of parameters that are stored in fewer bits, once :meth:`prepare` has run.
    """

    def __init__(self, options: PrecisionOptions, device: torch.device) -> None:
        self.options, self.device = options, device
        self.type = _TYPES[options.mode]
        self.scaled = options.mode == "fp16"
        self.scale = torch.tensor(options.scale_init if self.scaled else 1.0, device=device)
        self._good = torch.zeros((), dtype=torch.int32, device=device)
        self._halves: list[nn.Parameter] = []

    @property
    def masters(self) -> list[torch.Tensor]:
        # As they are now: loading a state may put others in their place.
        return [master for one in self._halves if (master := master_of(one)) is not None]

    def prepare(self, model: nn.Module) -> str:
        """Store parameters in the compute type, and those that are not trained in fp8, if that is asked for. Returns which are in fp8, or "".

        Raises:
            ConfigError: parameters in fp16 are to be trained: their gradients can be neither scaled back nor added up. Or fp8 that cannot be.
        """
        halves = [name for name, one in model.named_parameters() if one.requires_grad and one.dtype is torch.float16]
        if halves:
            raise ConfigError(
                f"parameter {halves[0]!r} is trained and stored in fp16; store it in fp32 and let precision.mode cast it"
            )
        if self.options.frozen != "keep" and self.type is not torch.float32:
            modules = [module for module in model.modules() if not isinstance(module, Fp8Linear)]
            for parameter in (one for module in modules for one in module.parameters(recurse=False)):
                if not parameter.requires_grad and parameter.dtype is torch.float32:
                    parameter.data = parameter.data.to(self.type)
        if self.options.weights == "compute":
            self._halves = masters.convert(model, self.type)
        else:
            masters.revert(model)  # of an earlier run with the same model
        return convert(model, self.type, self.device) if self.options.frozen == "fp8" else ""

    def autocast(self) -> torch.autocast:
        """Around the forward pass. Its cache of cast weights is left off, since a graph of the step must cast anew each time."""
        cast = self.type is not torch.float32
        return torch.autocast(
            self.device.type, self.type if cast else None, enabled=cast, cache_enabled=cast and self.device.type == "cpu"
        )

    def update(self, bad: torch.Tensor, counted: torch.Tensor) -> None:
        """After a step, in place, so that a graph can hold it.

        ``bad``, a bool scalar, says whether its gradients were not finite, ``counted`` whether anything counted in it: a step without is
        neither good nor bad.
        """
        if not self.scaled:
            return
        good = torch.where(bad, 0, self._good + counted.int())
        grown = torch.where(torch.isfinite(self.scale * GROWTH), self.scale * GROWTH, self.scale)
        grow = good == self.options.scale_growth_interval
        self.scale.copy_(torch.where(bad, self.scale * BACKOFF, torch.where(grow, grown, self.scale)))
        self._good.copy_(torch.where(grow, 0, good))

    def check(self, scale: float) -> None:
        """Raise :class:`NonFiniteError` for a scale that has fallen so far that gradients are lost."""
        if self.scaled and scale < 1:
            raise NonFiniteError(
                f'the gradient scale has fallen to {scale:g}: gradients overflow fp16 whatever the scale. Use precision.mode = "bf16", a lower '
                "learning rate, or look for values that explode"
            )

    def tensors(self) -> list[torch.Tensor]:
        """What :meth:`update` changes in place."""
        return [self.scale, self._good]

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {"scale": float(self.scale), "good": int(self._good)} if self.scaled else {}

    def load_state_dict(self, state: dict[str, Any], where: str) -> None:
        """From another run of the same mode; a state without a scale (another mode) leaves the first one."""
        if not self.scaled or not state:
            return
        try:
            scale, good = float(state["scale"]), int(state["good"])
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedCheckpointError(where, None, f"not a state of the gradient scale: {error!r}") from error
        self.scale.fill_(scale)
        self._good.fill_(good)
