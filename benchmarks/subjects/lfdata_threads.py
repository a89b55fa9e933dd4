"""This package's loader, its decoder in threads of the consumer's process: a process less, and nothing between a broken file and training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness.work import Batch, Settings, Workload
from benchmarks.subjects import lfdata_loader

TITLE = "lfdata loader, one process"
IMPORTS = lfdata_loader.IMPORTS
FORMAT = "lfdata"
WORK = ("crop", "centre")
workers = lfdata_loader.workers
prepare = lfdata_loader.prepare


def batches(workload: Workload, prepared: Path, settings: Settings) -> Iterator[Iterator[Batch]]:
    """Epochs without end."""
    return lfdata_loader.batches(workload, prepared, settings, engine="thread")
