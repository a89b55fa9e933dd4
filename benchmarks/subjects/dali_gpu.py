"""NVIDIA DALI with a GPU: threads read, the GPU decodes, crops and resizes; batches are left on it, where a training step wants them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness.work import Batch, Settings, Workload
from benchmarks.subjects import dali_cpu

TITLE = "DALI with its GPU decoder"
IMPORTS = dali_cpu.IMPORTS
FORMAT = "files"
WORK = dali_cpu.WORK
workers = dali_cpu.workers
prepare = dali_cpu.prepare


def batches(workload: Workload, prepared: Path, settings: Settings) -> Iterator[Iterator[Batch]]:
    """Epochs without end."""
    import torch

    if not torch.cuda.is_available():
        raise ImportError("no GPU here")
    loader = dali_cpu.loader_of(dali_cpu.pipeline(workload, settings, "mixed", torch.cuda.current_device()))
    while True:
        yield dali_cpu.epoch(loader)
