"""torch's DataLoader over a folder of files, decoded by libjpeg-turbo and resized by OpenCV: the fastest decoder without the GIL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness.work import Batch, Settings, Workload
from benchmarks.subjects import torch_pil
from benchmarks.subjects.pixels import with_turbo

TITLE = "torch DataLoader + simplejpeg + cv2"
IMPORTS = ("torch.utils.data", "simplejpeg", "cv2")
FORMAT = "files"
WORKLOADS = ("W1", "W2")
workers = torch_pil.workers
prepare = torch_pil.prepare


def batches(workload: Workload, prepared: Path, settings: Settings) -> Iterator[Iterator[Batch]]:
    """Epochs without end."""
    return torch_pil.epochs(torch_pil.Files(workload, settings.source, with_turbo), workload, settings)
