"""DDP, with a hook that looks at this rank's gradients before they are mixed with the others'."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from lftrain.comm.group import Group
from lftrain.comm.powersgd import PowerSgd
from lftrain.errors import ConfigError
from lftrain.options import DdpOptions

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket


class FixedBuckets(DistributedDataParallel):
    """DDP whose buckets lie as they will from the first step on, in the order of parameters from the last to the first.

    DDP itself lays them anew after the first step of a process, by when gradients came. gloo adds up ranks in an order that depends on where a
    number lies, so a run that goes on would then differ from one that was never interrupted; PowerSGD's state would not fit.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reducer._push_all_rebuilt_params()
        self.reducer._rebuild_buckets()

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        parameters, sparse = super()._build_params_for_reducer()
        return parameters[::-1], sparse[::-1]


class Parallel:
    """A model as all ranks train it.

    Args:
        tell: called with what people should know of the hook's state, the same on all ranks.

    Attributes:
        network: what the loss calls: the model, or DDP around it.
        parameters: those that are trained, in the model's order; ``names`` beside them.
        first_bad: int64 scalar on the device: place of the first parameter whose own gradient was not finite before reduction, or
            ``len(parameters)``. With one rank nothing is reduced and it stays at that.
        ready: called when the last gradients of this rank exist and only their reduction is left.
    """

    def __init__(
        self, model: nn.Module, group: Group, options: DdpOptions, tell: Callable[[str], None] = lambda _: None
    ) -> None:
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
        self._powersgd: PowerSgd | None = None
        self._reduced = 0  # parameters, in this step
        self._group, self._tell = group, tell
        if group.world > 1:
            # With find_unused they stay as they are at first. NCCL promises no bits, and the order in which gradients come may be better.
            fixed = not options.find_unused and (group.device.type == "cpu" or options.hook == "powersgd")
            self._ddp = (FixedBuckets if fixed else DistributedDataParallel)(
                model,
                device_ids=[group.device.index] if group.device.type == "cuda" else None,
                bucket_cap_mb=options.bucket_mb,
                gradient_as_bucket_view=options.bucket_view,
                find_unused_parameters=options.find_unused,
            )
            self._places = {id(parameter): place for place, parameter in enumerate(self.parameters)}
            self._bucket_places: dict[tuple[int, ...], torch.Tensor] = {}
            self._powersgd = PowerSgd(options, tell) if options.hook == "powersgd" else None
            # torch refuses annotations that are text, as they are in this module.
            self._ddp.register_comm_hook(None, lambda _, bucket: self._hook(bucket))
            self.network = self._ddp

    def begin(self) -> None:
        """Before a step's first backward pass."""
        self.first_bad = self._none
        self._reduced = 0

    def check(self, last: torch.Tensor) -> None:
        """After the backward pass of ``last``, the loss of a step's last micro-batch: all gradients must have been sent.

        DDP waits for every parameter there. For one that is not in it, it sends neither that gradient nor those behind it, without a word:
        each rank would be left with gradients of its own.

        Raises:
            ConfigError: they were not.
        """
        if self._ddp is None or self._reduced == len(self.parameters):
            return
        used = _leaves(last)
        missing = [name for name, one in zip(self.names, self.parameters, strict=True) if id(one) not in used]
        if not missing:
            raise ConfigError(
                f"the gradients of {len(self.parameters) - self._reduced} of {len(self.parameters)} parameters were not sent between ranks: "
                "the loss must call the model that it is given (DDP), in every micro-batch"
            )
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise ConfigError(
            f"parameter {missing[0]!r}{more} took no part in the last micro-batch of a step on rank {self._group.rank}, with which gradients "
            "travel between ranks: use it in each, freeze it (requires_grad_(False)), or set ddp.find_unused = true"
        )

    def quiet(self, last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of a micro-batch: gradients travel with the last one only."""
        return nullcontext() if last or self._ddp is None else self._ddp.no_sync()

    def forget(self) -> None:
        """After a step that was skipped for gradients that are not finite."""
        if self._powersgd is not None:
            self._powersgd.forget()

    def hook_state(self) -> tuple[dict[str, Any] | None, dict[str, torch.Tensor]]:
        """All ranks together: what the hook keeps, JSON-able and as tensors on the host; the same on all ranks."""
        return (None, {}) if self._powersgd is None else self._powersgd.state(self._group)

    def load_hook_state(self, plain: dict[str, Any] | None, read: Callable[[str], torch.Tensor]) -> None:
        """From :meth:`hook_state`. ``read`` gives a tensor by its name."""
        if self._powersgd is not None:
            self._powersgd.load(plain, read, self._group)
        elif plain is not None:
            self._tell("the checkpoint has a state of PowerSGD, which is not used here: what it kept back of gradients is lost")

    def _hook(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        places = tuple(self._places[id(parameter)] for parameter in bucket.parameters())
        at = self._bucket_places.get(places)
        if at is None:
            at = self._bucket_places[places] = torch.tensor(places, device=self._none.device)
        largest = torch.stack(torch._foreach_norm(bucket.gradients(), float("inf")))
        bad = torch.where(torch.isfinite(largest), self._none, at).min()
        self.first_bad = torch.minimum(self.first_bad, bad)
        self._reduced += len(places)
        if bucket.is_last():
            self.ready()
        if self._powersgd is not None:
            return self._powersgd.reduce(bucket, [self.names[place] for place in places])
        everyone = dist.group.WORLD
        assert everyone is not None
        return allreduce_hook(everyone, bucket)


def _leaves(value: torch.Tensor) -> set[int]:
    """Ids of the parameters that a tensor was computed from."""
    found, seen, left = set(), {value.grad_fn}, [value.grad_fn]
    while left:
        node = left.pop()
        if node is None:
            continue
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        fresh = {before for before, _ in node.next_functions} - seen
        seen |= fresh
        left += fresh
    return found
