"""torch's DataLoader over numpy.memmap, a sequence a sample: what most training scripts for language models do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.work import Batch, Settings, Workload, sequences, sweep

TITLE = "torch DataLoader + numpy.memmap"
IMPORTS = ("torch.utils.data",)
FORMAT = "files"
WORKLOADS = ("W3",)


def workers(workload: Workload, cores: int) -> list[int]:
    """0: in the consumer's process."""
    return [0, *sweep(cores)]


def prepare(workload: Workload, source: Path, target: Path) -> None:
    """The file is read where it lies."""


class Sequences:
    """Map-style data set: one row a sample."""

    def __init__(self, source: Path) -> None:
        self.source = source
        self.rows: Any = sequences(source)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[int, Any]:
        return index, self.rows[index]


def collate(samples: list[tuple[int, Any]]) -> tuple[Any, Any]:
    """A batch as torch tensors."""
    import torch

    return torch.tensor([key for key, _ in samples]), torch.from_numpy(np.stack([row for _, row in samples]))


def batches(workload: Workload, prepared: Path, settings: Settings) -> Iterator[Iterator[Batch]]:
    """Epochs without end."""
    import torch
    from torch.utils.data import DataLoader

    torch.manual_seed(settings.seed)
    loader: Any = DataLoader(
        Sequences(settings.source),  # type: ignore[arg-type]
        workload.batch,
        shuffle=True,
        num_workers=settings.workers,
        collate_fn=collate,
        persistent_workers=settings.workers > 0,
    )
    while True:
        yield (Batch(keys, {"tokens": tokens}) for keys, tokens in loader)
