"""Everything a run is, as tensors by name and a plain rest; and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load

from lftrain.errors import CheckpointError, ConfigError
from lftrain.runtime.storage import Manifest, Reader

Tensors = dict[str, torch.Tensor]
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
# What names of tensors begin with. The hook's are read one by one, if they fit.
MODEL, OPTIMIZER, HOOK = "model.", "optimizer.", "hook."


def check_state(model: nn.Module) -> None:
    """Raise :class:`ConfigError` for a model that checkpoints cannot hold: state of modules other than tensors (``get_extra_state``)."""
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            kind = type(module).__name__
            raise ConfigError(
                f"module {name or kind!r} ({kind}) keeps a state of its own (get_extra_state), and checkpoints hold tensors: keep it in "
                "parameters and buffers"
            )


def collect(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Tensors, dict[str, Any]]:
    """All tensors of model and optimiser, as they are (no copies), and what of the optimiser's state is a plain number.

    Options of the optimiser (learning rate, decay) are not state: they come from the configuration.
    """
    tensors: Tensors = {}
    for name, value in get_model_state_dict(model).items():
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(f"the model's state {name!r} is {type(value).__name__}; only tensors are kept")
        tensors[MODEL + name] = value
    plain: dict[str, Any] = {}
    for name, value in _optimizer_state(model, optimizer).items():
        if isinstance(value, torch.Tensor):
            tensors[OPTIMIZER + name] = value
        elif value is None or isinstance(value, bool | int | float | str):
            plain[name] = value
        else:
            raise CheckpointError(
                f"the optimizer's state {name!r} is {type(value).__name__}; only tensors and numbers are kept"
            )
    return tensors, plain


def restore(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    reader: Reader,
    manifest: Manifest,
    plain: Mapping[str, Any],
    where: str,
    untouched: bool = False,
) -> None:
    """Load tensors in place, and the plain rest. ``untouched``: no step has changed anything so far, so the optimiser may have no state.

    Raises:
        CheckpointError: other tensors than the checkpoint's, or of other shapes. DamagedCheckpointError: bytes that do not match.
    """
    tensors, _ = collect(model, optimizer)
    if untouched and not any(name.startswith(OPTIMIZER) for name in manifest.tensors):
        # Looking at it above has made it.
        optimizer.state.clear()
        tensors = {name: value for name, value in tensors.items() if name.startswith(MODEL)}
    _compare(tensors, manifest, where)
    try:
        load(dict(tensors), storage_reader=reader, planner=DefaultLoadPlanner(flatten_state_dict=False), no_dist=True)
    except CheckpointException as error:
        raise unwrapped(error) from error
    if plain:
        state = {**_optimizer_state(model, optimizer), **plain}
        groups = get_optimizer_state_dict(model, optimizer, options=_FLAT)
        set_optimizer_state_dict(model, optimizer, {**groups, **state}, options=_FLAT)


def unwrapped(error: CheckpointException) -> BaseException:
    """The failure itself, without the list of ranks around it."""
    first: BaseException = next(iter(error.failures.values()), (error,))[0]
    return first


def _optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    found = get_optimizer_state_dict(model, optimizer, options=_FLAT)
    return {name: value for name, value in found.items() if name.startswith("state.")}


def _compare(tensors: Tensors, manifest: Manifest, where: str) -> None:
    """Refuse a checkpoint of something else, naming the first difference."""
    stored = manifest.tensors
    hint = "the checkpoint is of another model or optimizer: use that configuration, or another run.folder"
    if missing := next((name for name in tensors if name not in stored), None):
        raise CheckpointError(f"{where} has no {missing!r}: {hint}")
    if extra := next((name for name in stored if name not in tensors and not name.startswith(HOOK)), None):
        raise CheckpointError(f"{where} has {extra!r}, which is not here: {hint}")
    for name, value in tensors.items():
        if tuple(stored[name].shape) != tuple(value.shape):
            raise CheckpointError(f"{where}: {name!r} has shape {tuple(stored[name].shape)}, here {tuple(value.shape)}: {hint}")


def stage(tensors: Tensors, buffers: Tensors) -> Tensors:
    """Copies on the host. ``buffers`` keeps them between calls, so that pinned memory is reserved once."""
    waits = False
    for name, value in tensors.items():
        buffer = buffers.get(name)
        if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
            buffer = buffers[name] = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
        buffer.copy_(value.detach(), non_blocking=value.is_cuda)
        waits |= value.is_cuda
    if waits:
        torch.cuda.current_stream().synchronize()
    for name in set(buffers) - set(tensors):
        del buffers[name]
    return dict(buffers)
