"""This package's loader with numpy arrays in place of tensors: torch is not imported."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness.work import Batch, Settings, Workload
from benchmarks.subjects import lfdata_loader

TITLE = "lfdata loader, numpy"
IMPORTS = ("lfdata.loader.loader",)
FORMAT = "lfdata"
WORK = ("crop", "centre")
workers = lfdata_loader.workers
prepare = lfdata_loader.prepare


def batches(workload: Workload, prepared: Path, settings: Settings) -> Iterator[Iterator[Batch]]:
    """Epochs without end."""
    return lfdata_loader.batches(workload, prepared, settings, numpy=True)
