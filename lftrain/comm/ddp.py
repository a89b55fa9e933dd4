"""DDP, with a hook that looks at this rank's gradients before they are mixed with the others'."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from lftrain.comm.group import Group
from lftrain.errors import ConfigError
from lftrain.options import DdpOptions

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket


class Parallel:
    """A model as all ranks train it.

    Attributes:
        network: what the loss calls: the model, or DDP around it.
        parameters: those that are trained, in the model's order; ``names`` beside them.
        first_bad: int64 scalar on the device: place of the first parameter whose own gradient was not finite before reduction, or
            ``len(parameters)``. With one rank nothing is reduced and it stays at that.
        ready: called when the last gradients of this rank exist and only their reduction is left.
    """

    def __init__(self, model: nn.Module, group: Group, options: DdpOptions) -> None:
        trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        if not trained:
            raise ConfigError("the model has no parameter that is trained (requires_grad)")
        if options.hook == "powersgd" and options.find_unused:
            raise ConfigError(
                'ddp.find_unused does not go with ddp.hook = "powersgd": both send among ranks at times of their own, and mix. Freeze '
                'parameters without a gradient, or take ddp.hook = "allreduce"'
            )
        self.names = [name for name, _ in trained]
        self.parameters = [parameter for _, parameter in trained]
        self.ready: Callable[[], None] = lambda: None
        self._none = torch.tensor(len(trained), device=group.device)
        self.first_bad = self._none
        self.network: nn.Module = model
        self._ddp: DistributedDataParallel | None = None
        self._powersgd: powerSGD_hook.PowerSGDState | None = None
        if group.world > 1:
            self._ddp = DistributedDataParallel(
                model,
                device_ids=[group.device.index] if group.device.type == "cuda" else None,
                bucket_cap_mb=options.bucket_mb,
                gradient_as_bucket_view=options.bucket_view,
                find_unused_parameters=options.find_unused,
            )
            self._places = {id(parameter): place for place, parameter in enumerate(self.parameters)}
            self._bucket_places: dict[tuple[int, ...], torch.Tensor] = {}
            self._powersgd = _powersgd(options) if options.hook == "powersgd" else None
            # torch refuses annotations that are text, as they are in this module.
            self._ddp.register_comm_hook(None, lambda _, bucket: self._hook(bucket))
            self.network = self._ddp

    def begin(self) -> None:
        """Before a step's first backward pass."""
        self.first_bad = self._none

    def quiet(self, last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of a micro-batch: gradients travel with the last one only."""
        return nullcontext() if last or self._ddp is None else self._ddp.no_sync()

    def forget(self) -> None:
        """After a step that was skipped: what PowerSGD keeps of it is not finite either, and would spoil every later one."""
        if self._powersgd is not None:
            self._powersgd.error_dict.clear()
            self._powersgd.p_memory_dict.clear()
            self._powersgd.q_memory_dict.clear()

    def _hook(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        places = tuple(self._places[id(parameter)] for parameter in bucket.parameters())
        at = self._bucket_places.get(places)
        if at is None:
            at = self._bucket_places[places] = torch.tensor(places, device=self._none.device)
        largest = torch.stack(torch._foreach_norm(bucket.gradients(), float("inf")))
        bad = torch.where(torch.isfinite(largest), self._none, at).min()
        self.first_bad = torch.minimum(self.first_bad, bad)
        if bucket.is_last():
            self.ready()
        if self._powersgd is not None:
            return powerSGD_hook.powerSGD_hook(self._powersgd, bucket)
        everyone = dist.group.WORLD
        assert everyone is not None
        return allreduce_hook(everyone, bucket)


def _powersgd(options: DdpOptions) -> powerSGD_hook.PowerSGDState:
    return powerSGD_hook.PowerSGDState(
        dist.group.WORLD, matrix_approximation_rank=options.powersgd_rank, start_powerSGD_iter=options.powersgd_start
    )
