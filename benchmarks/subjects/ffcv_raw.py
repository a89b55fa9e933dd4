"""FFCV with pixels stored as they are: nothing to decode, many times the bytes."""

from __future__ import annotations

from pathlib import Path

from benchmarks.harness.work import Workload
from benchmarks.subjects import ffcv_

TITLE = "FFCV, raw pixels"
IMPORTS = ffcv_.IMPORTS
FORMAT = "beton-raw"
WORK = ("crop", "centre")
workers = ffcv_.workers
batches = ffcv_.batches


def prepare(workload: Workload, source: Path, target: Path) -> None:
    """By its own writer."""
    from ffcv.fields import RGBImageField

    ffcv_.write(ffcv_.Pictures(source), target, RGBImageField(write_mode="raw"))
