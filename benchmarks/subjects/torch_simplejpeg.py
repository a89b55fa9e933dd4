"""torch's DataLoader over a folder of files, decoded by libjpeg-turbo and resized by OpenCV: the fastest decoder without the GIL."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import multimodal
from benchmarks.harness.work import Batch, Settings, Workload
from benchmarks.subjects import torch_pil
from benchmarks.subjects.pixels import turbo, with_turbo

TITLE = "torch DataLoader + simplejpeg + cv2"
IMPORTS = ("torch.utils.data", "simplejpeg", "cv2")
FORMAT = "files"
WORK = ("crop", "centre", "native", "multimodal")
workers = torch_pil.workers
prepare = torch_pil.prepare


def files(workload: Workload, settings: Settings) -> torch_pil.Files:
    """The data set."""
    multi = workload.work == "multimodal"
    return torch_pil.Files(
        workload,
        settings.source,
        lambda: multimodal.with_libraries(settings.source, turbo) if multi else with_turbo(workload),
    )


def batches(workload: Workload, prepared: Path, settings: Settings) -> Iterator[Iterator[Batch]]:
    """Epochs without end."""
    return torch_pil.epochs(files(workload, settings), workload, settings)


def resumable(workload: Workload, prepared: Path, settings: Settings, state: Any) -> tuple[Iterator[Batch], Callable[[], Any]]:
    """Through torchdata's StatefulDataLoader."""
    return torch_pil.stateful(files(workload, settings), workload, settings, state)
