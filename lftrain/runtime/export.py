"""Weights for others: one safetensors file."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import BinaryIO

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
        with open(temporary, "r+b") as file:
            _order(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise storage_error(path, "write", error) from error


def _order(file: BinaryIO) -> None:
    """Put the keys of the header's metadata in order, which are written in any: the same weights are the same bytes."""
    (length,) = struct.unpack("<Q", file.read(8))
    header = json.loads(file.read(length))
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    if len(text) <= length:
        file.seek(8)
        file.write(text.ljust(length))
