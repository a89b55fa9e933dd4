"""This package's loader over JPEGs that were rewritten, without loss, with restart markers within rows: what lies around a crop is skipped."""

from __future__ import annotations

from pathlib import Path

from benchmarks.harness.work import Workload
from benchmarks.subjects import lfdata_loader, lfdata_reader

TITLE = "lfdata loader, restart blocks"
IMPORTS = lfdata_loader.IMPORTS
FORMAT = "lfdata-blocks"
WORK = ("crop", "centre")
workers = lfdata_loader.workers
batches = lfdata_loader.batches
resumable = lfdata_loader.resumable


def prepare(workload: Workload, source: Path, target: Path) -> None:
    """By ``shard-builder``."""
    lfdata_reader.convert_pictures(source, target, "codec=keep,restart=blocks")
