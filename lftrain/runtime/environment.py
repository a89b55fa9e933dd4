"""What a run ran on: recorded with it, so that a figure can be traced to machine and versions."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from typing import Any

import torch

from lfdata import __version__ as lfdata_version

_PACKAGES = ("torch", "numpy", "msgspec", "xxhash", "triton", "safetensors", "tensorboardX", "pillow", "pillow-simd")
_PREFIXES = ("NCCL_", "TORCH", "PYTORCH_", "CUDA_", "CUBLAS_", "OMP_", "MKL_", "GLOO_")
_PRIVATE = ("TOKEN", "SECRET", "PASSWORD", "KEY")


def environment(device: torch.device) -> dict[str, Any]:
    """Machine, versions and the variables that change numbers or speed: JSON-able."""
    found: dict[str, Any] = {
        "lfdata": lfdata_version,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": platform.node(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "packages": {name: version(name) for name in _PACKAGES},
        "torch": str(torch.__version__),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_PREFIXES) and not any(word in name for word in _PRIVATE)
        },
        "command": sys.argv,
    }
    if device.type == "cuda":
        found["gpu"] = gpu(device)
    return found


def gpu(device: torch.device) -> dict[str, Any]:
    """A GPU and the libraries that drive it."""
    properties = torch.cuda.get_device_properties(device)
    nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else None
    return {
        "name": properties.name,
        "bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, nccl)) if isinstance(nccl, tuple) else nccl,
    }


def version(name: str) -> str | None:
    """Of an installed package."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
