"""A configuration as the things it describes: model, loss, loaders, optimiser, runtime."""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from torch import nn

import lfdata.transforms as T
from lfdata import Loader
from lfdata.errors import OptionError
from lftrain.comm.group import Group, join
from lftrain.compute import masters
from lftrain.compute.adamw import AdamW
from lftrain.errors import ConfigError
from lftrain.models import check as check_model
from lftrain.models import make
from lftrain.options import Config, DataOptions, HeldOutOptions, OptimizerOptions
from lftrain.runtime.export import check_export
from lftrain.runtime.loop import Runtime
from lftrain.runtime.rates import schedule
from lftrain.runtime.seed import derive, seed_all
from lftrain.runtime.step import Loss
from lftrain.runtime.usage import MicroBatches
from lftrain.tune.batch import plan

_LOADER = ("shuffle", "block", "window", "mixture", "buckets", "packing", "bad_samples", "most_bad", "most_bad_rate")
_BUDGET = ("max_bytes", "over")
_PLACES = ("engine", "processes", "threads", "prefetch")


def build(config: Config) -> Runtime:
    """Everything, ready to run.

    Raises:
        ConfigError and what loader and model raise for options that make no sense.
    """
    check(config)
    group = join(config.run)
    # The same parameters on every rank, whatever was drawn before.
    seed_all(derive(config.run.seed, "model"))
    model, loss = make(config.model)
    data = config.data
    accumulate = data.accumulate if data.accumulate != "auto" else planned(config, model, loss, group)
    loader = training_loader(data, accumulate, config.run.seed, group)
    held_out = held_out_loader(config.held_out, data, accumulate, group) if config.held_out else None
    runtime = Runtime(
        model,
        loss,
        loader,
        optimizer(model, config.optimizer),
        config,
        schedule=schedule(config.optimizer, config.run.steps),
        accumulate=accumulate,
        held_out=held_out,
        held_out_every=config.held_out.every if config.held_out else 0,
        group=group,
        record={"config": msgspec.to_builtins(config), "parameters": count(model), "accumulate": accumulate},
    )
    return runtime


def check(config: Config) -> None:
    """All that can be said of a configuration without opening data and making a model.

    Raises:
        ConfigError, OptionError, MissingExtraError: what :func:`build` would raise for it.
    """
    if config.checkpoint.export:
        check_export()
    check_model(config.model)
    data, held = config.data, config.held_out
    if data.accumulate != "auto" and data.accumulate < 1:
        raise ConfigError(f"data.accumulate is {data.accumulate}; it is a number of micro-batches from 1 on, or auto")
    micro = None if data.accumulate == "auto" else data.accumulate
    masters.check(config, micro, config.optimizer.kind == "adamw" and config.optimizer.fused)
    if config.precision.weights == "compute" and data.over == "split":
        raise ConfigError(
            'data.over = "split" gives steps in micro-batches, whose gradients precision.weights = "compute" would add up in bf16: take '
            f'"error", {masters.ADVICE}'
        )
    fields(data.fields, "data.fields")
    fields(held.fields if held else None, "held_out.fields")
    try:
        T.from_spec(data.batch_transforms)
        Loader.check(data.path, mixture=data.mixture, buckets=data.buckets, packing=data.packing, max_bytes=data.max_bytes)
    except OptionError as error:
        raise ConfigError(f"data: {error}") from error
    if not all(0 <= beta < 1 for beta in config.optimizer.betas):
        raise ConfigError(f"optimizer.betas is {list(config.optimizer.betas)}; each is 0 or more, and less than 1")


def planned(config: Config, model: nn.Module, loss: Loss, group: Group) -> int:
    """Micro-batches a step, from what micro-batches of this model take on a real batch; the most that any rank needs."""
    if config.data.over == "split":
        raise ConfigError('data.accumulate = "auto" measures whole batches, and data.over = "split" cuts them: set a number')
    loader = training_loader(config.data, 1, config.run.seed, group)
    try:
        batch = next(iter(loader), None)
        if batch is None:
            raise ConfigError('data.accumulate = "auto": the data set has fewer samples than data.batch_size')
        usage = MicroBatches(model.to(group.device), loss, batch, config.precision, group.device)
        found = plan(usage.rows, usage.limit(config.activations.limit_mb), usage.bytes).accumulate
    finally:
        loader.close()
    return int(max(group.gather_json(found)))


def training_loader(data: DataOptions, accumulate: int, seed: int, group: Group) -> Loader:
    """The training data of this rank."""
    options = {name: getattr(data, name) for name in (*_LOADER, *_PLACES, *_BUDGET)}
    return Loader(
        data.path,
        data.batch_size,
        fields(data.fields, "data.fields"),
        seed=seed,
        accumulate=accumulate,
        batch_transforms=T.from_spec(data.batch_transforms),
        rank=group.rank,
        world_size=group.world,
        **options,
    )


def held_out_loader(held: HeldOutOptions, data: DataOptions, accumulate: int, group: Group) -> Any:
    """Every sample once, in stored order, the same at any number of ranks."""
    chosen = data.fields if held.fields is None else held.fields
    size = held.batch_size or max(group.world, data.batch_size // accumulate)
    options = {name: getattr(data, name) for name in (*_PLACES, *_BUDGET)}
    loader = Loader(
        held.path,
        size,
        fields(chosen, "held_out.fields"),
        shuffle="sequential",
        tail="pad",
        rank=group.rank,
        world_size=group.world,
        bad_samples="mask" if data.bad_samples != "stop" else "stop",
        **options,
    )
    if not len(loader):
        raise ConfigError(
            f"held_out.path {held.path}: there is no sample to evaluate on; leave [held_out] out, or name other data"
        )
    return Epoch(loader)


class Epoch:
    """A loader that gives its first epoch each time it is iterated."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def __iter__(self) -> Any:
        self.loader.set_epoch(0)
        return iter(self.loader)


def fields(spec: dict[str, list[dict[str, Any]]] | None, where: str) -> dict[str, list[Any] | None] | None:
    """Fields with their transforms. ``where`` names the table in errors."""
    if spec is None:
        return None
    found: dict[str, list[Any] | None] = {}
    for name, operations in spec.items():
        try:
            found[name] = T.from_spec(operations) or None
        except OptionError as error:
            raise ConfigError(f"{where}.{name}: {error}") from error
    return found


def optimizer(model: nn.Module, options: OptimizerOptions) -> torch.optim.Optimizer:
    """Over all parameters that are trained; only matrices decay."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [one for one in trained if one.dim() >= 2], "weight_decay": options.weight_decay},
        {"params": [one for one in trained if one.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise ConfigError("the model has no parameter that is trained (requires_grad)")
    # Not False, which torch takes for a wish to go through the parameters one by one.
    fused = options.fused or None
    if options.kind == "sgd":
        return torch.optim.SGD(groups, lr=options.lr, momentum=options.betas[0], fused=fused)
    return AdamW(groups, lr=options.lr, betas=options.betas, eps=options.eps, fused=fused)


def count(model: nn.Module) -> dict[str, int]:
    """Numbers of parameters."""
    return {
        "all": sum(one.numel() for one in model.parameters()),
        "trained": sum(one.numel() for one in model.parameters() if one.requires_grad),
    }
