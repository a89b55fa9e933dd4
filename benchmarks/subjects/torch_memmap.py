"""torch's DataLoader over numpy.memmap: a batch of sequences in one step of fancy indexing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.work import Batch, Settings, Workload, sequences
from benchmarks.subjects import torch_pil

TITLE = "torch DataLoader + numpy.memmap"
IMPORTS = ("torch.utils.data",)
FORMAT = "files"
WORK = ("tokens",)
workers = torch_pil.workers
prepare = torch_pil.prepare


class Sequences:
    """Map-style data set that is asked for a batch at a time."""

    def __init__(self, source: Path) -> None:
        self.source = source
        self.rows: Any = sequences(source)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.__getitems__([index])

    def __getitems__(self, indices: list[int]) -> tuple[Any, Any]:
        """Keys and rows of a batch."""
        return np.array(indices), self.rows[indices]


def tensors(found: tuple[Any, Any]) -> tuple[Any, Any]:
    """A batch, which is one already, as torch tensors."""
    import torch

    keys, rows = found
    return torch.from_numpy(keys), torch.from_numpy(rows)


def batches(workload: Workload, prepared: Path, settings: Settings) -> Iterator[Iterator[Batch]]:
    """Epochs without end."""
    return torch_pil.epochs(Sequences(settings.source), workload, settings, tensors)
