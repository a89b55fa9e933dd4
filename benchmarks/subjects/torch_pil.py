"""torch's DataLoader over a folder of files, decoded by PIL: the plain way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.work import Batch, Settings, Workload, image_files, sweep
from benchmarks.subjects.pixels import with_pil

TITLE = "torch DataLoader + PIL"
IMPORTS: tuple[str, ...] = ("torch.utils.data", "PIL.Image")
FORMAT = "files"
WORKLOADS = ("W1", "W2")


def workers(workload: Workload, cores: int) -> list[int]:
    """0: in the consumer's process."""
    return [0, *sweep(cores)]


def prepare(workload: Workload, source: Path, target: Path) -> None:
    """Files are read where they lie."""


class Files:
    """Map-style data set: one file a sample."""

    def __init__(self, work: Workload, source: Path, decoder: Callable[[Workload], Callable[[bytes], Any]]) -> None:
        self.paths = [str(path) for path in image_files(source)]
        self.work, self.decoder = work, decoder
        self.decode: Callable[[bytes], Any] | None = None

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[int, Any]:
        if self.decode is None:
            self.decode = self.decoder(self.work)
        with open(self.paths[index], "rb") as file:
            return index, self.decode(file.read())


def collate(samples: list[tuple[int, Any]]) -> tuple[Any, Any]:
    """A batch as torch tensors."""
    import torch

    return torch.tensor([key for key, _ in samples]), torch.from_numpy(np.stack([image for _, image in samples]))


def loop(loader: Any, name: str = "image") -> Iterator[Iterator[Batch]]:
    """Epochs of a loader of (keys, arrays)."""
    while True:
        yield (Batch(keys, {name: arrays}) for keys, arrays in loader)


def epochs(dataset: Any, work: Workload, settings: Settings) -> Iterator[Iterator[Batch]]:
    """A shuffled DataLoader, workers kept between epochs."""
    import torch
    from torch.utils.data import DataLoader

    torch.manual_seed(settings.seed)
    loader: Any = DataLoader(
        dataset,
        work.batch,
        shuffle=True,
        num_workers=settings.workers,
        collate_fn=collate,
        persistent_workers=settings.workers > 0,
    )
    (name,) = work.arrays
    return loop(loader, name)


def batches(workload: Workload, prepared: Path, settings: Settings) -> Iterator[Iterator[Batch]]:
    """Epochs without end."""
    return epochs(Files(workload, settings.source, with_pil), workload, settings)
