"""The plain way: torch's DataLoader over files with PIL, and a training loop as people write it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.gpu.data import LENGTH, LINES
from lftrain.runtime.step import Loss

SCALE, RATIO, TRIES = (0.08, 1.0), (3 / 4, 4 / 3), 10
Batch = dict[str, torch.Tensor]


class Files(Dataset[Batch]):
    """JSON lines that name pictures; a random part of the picture, brought to one size."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.size = folder, size
        self.lines = (folder / LINES).read_text().splitlines()

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> Batch:
        found = json.loads(self.lines[index])
        with Image.open(self.folder / found["image"]) as opened:
            image = opened.convert("RGB")
        image = image.resize((self.size, self.size), Image.Resampling.BILINEAR, box=random_part(*image.size))
        tokens = found["tokens"][:LENGTH]
        return {
            "image": torch.from_numpy(np.array(image)),
            "tokens": torch.tensor(tokens + [0] * (LENGTH - len(tokens))),
            "state": torch.tensor(found["state"]),
            "action": torch.tensor(found["action"]),
        }


def random_part(width: int, height: int) -> tuple[float, float, float, float]:
    """As torchvision's RandomResizedCrop draws it; left, top, right, bottom."""
    low, high = np.log(RATIO[0]), np.log(RATIO[1])
    for _ in range(TRIES):
        area = width * height * float(torch.empty(()).uniform_(*SCALE))
        shape = float(torch.empty(()).uniform_(float(low), float(high)).exp())
        w, h = round((area * shape) ** 0.5), round((area / shape) ** 0.5)
        if 0 < w <= width and 0 < h <= height:
            left = int(torch.randint(0, width - w + 1, ()))
            top = int(torch.randint(0, height - h + 1, ()))
            return left, top, left + w, top + h
    side = min(width, height)
    x, y = (width - side) / 2, (height - side) / 2
    return x, y, x + side, y + side


class TorchLoader:
    """A DataLoader as the runtime takes it. It has no state; a run that is measured needs none.

    Args:
        workers: 0 is the default: everything in the trainer's process. pinned: pin_memory.
    """

    def __init__(self, folder: Path, size: int, batch: int, workers: int, pinned: bool) -> None:
        self.epoch = -1
        self.workers = workers
        self.loader: DataLoader[Batch] = DataLoader(
            Files(folder, size),
            batch,
            shuffle=True,
            drop_last=True,
            num_workers=workers,
            pin_memory=pinned,
            persistent_workers=workers > 0,
        )

    def __iter__(self) -> Iterator[Batch]:
        self.epoch += 1
        yield from self.loader

    def state_dict(self) -> dict[str, Any]:
        """How many batches are a step; nothing else."""
        return {"accumulate": 1}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """There is none to be loaded."""

    def close(self) -> None:
        """End the workers."""
        iterator = self.loader._iterator
        if iterator is not None and hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()


class PlainLoop:
    """Training as people write it: nothing of the runtime but the model and its loss.

    Attributes:
        losses: of every step, on the device.
    """

    def __init__(
        self, model: nn.Module, loss: Loss, loader: TorchLoader, optimizer: torch.optim.Optimizer, device: torch.device
    ) -> None:
        self.model, self.loss, self.loader, self.optimizer, self.device = model, loss, loader, optimizer, device
        self.losses: list[torch.Tensor] = []
        self._batches: Iterator[Batch] = iter(())
        self._trained = [one for one in model.parameters() if one.requires_grad]
        for one in model.parameters():
            if not one.requires_grad:
                one.data = one.data.to(torch.bfloat16)

    def advance(self, steps: int) -> None:
        """So many steps."""
        for _ in range(steps):
            batch = next(self._batches, None)
            if batch is None:
                self._batches = iter(self.loader)
                batch = next(self._batches)
            moved = {name: value.to(self.device, non_blocking=True) for name, value in batch.items()}
            self.optimizer.zero_grad()
            with torch.autocast(self.device.type, torch.bfloat16):
                mean, _ = self.loss(self.model, moved)
            mean.backward()
            torch.nn.utils.clip_grad_norm_(self._trained, 1.0)
            self.optimizer.step()
            self.losses.append(mean.detach())
