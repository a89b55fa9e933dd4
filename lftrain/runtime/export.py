"""Weights for others: one safetensors file."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from lfdata.errors import MissingExtraError
from lfdata.format.durable import storage_error


def check_export() -> None:
    """Raise :class:`MissingExtraError` now rather than at the end of a run."""
    try:
        import safetensors.torch  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("checkpoint.export needs the extra: pip install 'lfdata[safetensors]'") from error


def export(model: nn.Module, path: Path, step: int) -> None:
    """Write all parameters and buffers, under their names. Tensors that share memory are written each.

    Raises:
        MissingExtraError: no safetensors. StorageError: it cannot be written.
    """
    check_export()
    from safetensors.torch import save_file

    tensors = {
        name: value.detach().to("cpu", copy=True).contiguous()
        for name, value in get_model_state_dict(model).items()
        if isinstance(value, torch.Tensor)
    }
    temporary = path.with_name(f".tmp-{path.name}")
    try:
        save_file(tensors, temporary, metadata={"step": str(step), "format": "pt"})
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise storage_error(path, "write", error) from error
