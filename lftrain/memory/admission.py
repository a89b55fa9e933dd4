"""Micro-batches that are expected to take more than a budget are cut by rows before they are trained on (docs/runtime.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from lftrain.memory.measure import kept, peak
from lftrain.memory.model import ActivationModel, Shape

Batch = dict[str, torch.Tensor]
OFFSETS = ".offsets"
# One step of splitting: a prediction that is wrong costs a few parts too many, not hundreds.
MOST_PARTS = 16


def shape_of(batch: Batch) -> dict[str, float]:
    """Features of a micro-batch from the shapes of its tensors alone: nothing waits for a device.

    Rows; of every array of values (not those about them, whose names have a dot or begin with two underscores) its elements, and their
    square over the rows, which is what attention takes.
    """
    rows = rows_of(batch) or 1
    found = {"rows": float(rows)}
    for name, value in batch.items():
        if not name.startswith("__") and "." not in name and value.dim() > (0 if name + OFFSETS in batch else 1):
            found[name] = float(value.numel())
            found[f"{name}^2/rows"] = float(value.numel()) ** 2 / rows
    return found


def rows_of(batch: Batch) -> int | None:
    """Rows of a batch; ``None``: its tensors do not agree on that, so it cannot be cut."""
    counts = {
        len(value) - name.endswith(OFFSETS) if value.dim() else None
        for name, value in batch.items()
        if _offsets(batch, name) is None
    }
    return counts.pop() if len(counts) == 1 else None


def _offsets(batch: Batch, name: str) -> torch.Tensor | None:
    """Where the rows of an array begin, if they differ in length. Packed rows name the sources of their samples by the offsets of these."""
    return batch.get(("__index__" if name == "__source__" else name) + OFFSETS)


def cut(batch: Batch, first: int, stop: int) -> Batch:
    """Some rows of a batch. Ragged values need their offsets on the host, which waits for a device."""
    found: Batch = {}
    for name, value in batch.items():
        offsets = _offsets(batch, name)
        if offsets is not None:
            begin, end = offsets[[first, stop]].tolist()
            found[name] = value[begin:end]
        elif name.endswith(OFFSETS):
            found[name] = value[first : stop + 1] - value[first]
        else:
            found[name] = value[first:stop]
    return found


class Admission:
    """Of one runtime.

    Args:
        budget: bytes of a micro-batch.
        model: what is trained; its ``activation_features(batch)``, if it has one, declares the features: numbers by name, among them what the
            host knows of experts.
        tell: of what cannot be cut, once.
    """

    def __init__(self, budget: float, model: nn.Module, device: torch.device, tell: Callable[[str], None]) -> None:
        self.budget, self._network, self._device, self._tell = budget, model, device, tell
        self._shape: Callable[[Batch], Shape] = getattr(model, "activation_features", shape_of)
        self.model: ActivationModel | None = None
        self.split = 0
        self._told = False

    def admit(self, batches: Sequence[Batch], host: Sequence[Batch]) -> tuple[list[Batch], list[Batch]]:
        """The micro-batches of a step, in parts where need be; and of each what the host knows of its samples."""
        found: list[Batch] = []
        known: list[Batch] = []
        for batch, samples in zip(batches, host, strict=True):
            bounds = self._bounds(batch)
            for number, (first, stop) in enumerate(pairwise(bounds)):
                whole = len(bounds) == 2
                found.append(batch if whole else cut(batch, first, stop))
                if whole or samples is batch:
                    known.append(samples if whole else found[-1])
                elif rows_of(samples) == bounds[-1]:
                    known.append(cut(samples, first, stop))
                else:
                    # Packed rows: which samples are whose is not known here.
                    known.append(samples if number == 0 else {})
        return found, known

    def _bounds(self, batch: Batch) -> list[int]:
        rows = rows_of(batch)
        if self.model is None or rows is None or rows < 2:
            if rows is None and not self._told:
                self._told = True
                self._tell("the tensors of a micro-batch do not have a row for each sample each: it cannot be cut")
            return [0, rows or 0]
        parts = self.model.split(self._shape(batch), self.budget, min(rows, MOST_PARTS))
        self.split += parts > 1
        return [rows * part // parts for part in range(parts + 1)]

    @contextmanager
    def watching(self, batch: Batch) -> Iterator[None]:
        """Around forward and backward pass of a micro-batch: what it takes is learnt."""
        shape = self._shape(batch)
        if self.model is None:
            self.model = ActivationModel(tuple(shape))
        with self._measure(batch) as taken:
            yield
        self.model.observe(shape, taken.bytes)

    def _measure(self, batch: Batch) -> AbstractContextManager[Any]:
        if self._device.type == "cuda":
            return peak(self._device)
        return kept((*self._network.parameters(), *batch.values()))

    def report(self) -> dict[str, float]:
        """Micro-batches that were cut, and how well they are foretold."""
        return {"split": self.split, **(self.model.report() if self.model is not None else {})}
