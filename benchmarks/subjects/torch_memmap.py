"""torch's DataLoader over numpy.memmap, a sequence a sample: what most training scripts for language models do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness.work import Batch, Settings, Workload, sequences
from benchmarks.subjects import torch_pil

TITLE = "torch DataLoader + numpy.memmap"
IMPORTS = ("torch.utils.data",)
FORMAT = "files"
WORK = ("tokens",)
workers = torch_pil.workers
prepare = torch_pil.prepare


class Sequences:
    """Map-style data set: one row a sample."""

    def __init__(self, source: Path) -> None:
        self.source = source
        self.rows: Any = sequences(source)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[int, Any]:
        return index, self.rows[index]


def batches(workload: Workload, prepared: Path, settings: Settings) -> Iterator[Iterator[Batch]]:
    """Epochs without end."""
    return torch_pil.epochs(Sequences(settings.source), workload, settings)
