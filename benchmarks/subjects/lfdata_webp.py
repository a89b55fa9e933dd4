"""This package's loader over shards whose pictures were encoded anew as WebP of quality 80: fewer bytes, more work to decode."""

from __future__ import annotations

from pathlib import Path

from benchmarks.harness.work import Workload
from benchmarks.subjects import lfdata_loader, lfdata_reader

TITLE = "lfdata loader, WebP q80"
IMPORTS = lfdata_loader.IMPORTS
FORMAT = "lfdata-webp80"
WORK = ("crop", "centre")
REENCODES = "WebP of quality 80"
workers = lfdata_loader.workers
batches = lfdata_loader.batches
resumable = lfdata_loader.resumable


def prepare(workload: Workload, source: Path, target: Path) -> None:
    """By ``shard-builder``."""
    lfdata_reader.convert_pictures(source, target, "codec=webp,quality=80")
