"""SPDL's pipeline of threads with another decoder: libjpeg-turbo and OpenCV, both without the GIL, in place of its FFmpeg."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.work import Batch, Settings, Workload
from benchmarks.subjects import spdl_
from benchmarks.subjects.pixels import with_turbo

TITLE = "SPDL + simplejpeg + cv2"
IMPORTS = ("torch", "spdl.pipeline", "simplejpeg", "cv2")
FORMAT = "files"
WORK = spdl_.WORK
workers = spdl_.workers
prepare = spdl_.prepare


def decoder(work: Workload) -> Callable[[tuple[int, str]], tuple[int, Any]]:
    """Key and path to key and picture."""
    decode = with_turbo(work)

    def one(item: tuple[int, str]) -> tuple[int, Any]:
        key, path = item
        with open(path, "rb") as file:
            return key, decode(file.read())

    return one


def collate(samples: list[tuple[int, Any]]) -> Batch:
    """Pictures copied into one array, seen as a tensor."""
    import torch

    return Batch([key for key, _ in samples], {"image": torch.from_numpy(np.stack([image for _, image in samples]))})


def batches(workload: Workload, prepared: Path, settings: Settings) -> Iterator[Iterator[Batch]]:
    """Epochs without end, from one pipeline that is kept between them. A picture that fails ends it."""
    return spdl_.pipeline(workload, settings, decoder(workload), collate)
