"""Micro-batches that are expected to take more than a budget are cut by rows before they are trained on (docs/runtime.md)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from lftrain.memory.measure import kept, peak
from lftrain.memory.model import ActivationModel, Shape
from lftrain.memory.parts import fewest

MB = 1e6
Batch = dict[str, torch.Tensor]
OFFSETS = ".offsets"
_SAMPLE = ("__index__", "__index__" + OFFSETS, "__source__")
# Of a micro-batch: a prediction that is wrong costs a few parts too many, not hundreds.
MOST_PARTS = 16


def shape_of(batch: Batch) -> dict[str, float]:
    """Features of a micro-batch from the shapes of its tensors alone: nothing waits for a device.

    Rows; of every array of values (not those about them, whose names have a dot or begin with two underscores) its elements, and their
    square over the rows, which is what attention takes.
    """
    rows = rows_of(batch) or 1
    found = {"rows": float(rows)}
    for name in _values(batch):
        found[name] = float(batch[name].numel())
        found[f"{name}^2/rows"] = float(batch[name].numel()) ** 2 / rows
    return found


def _values(batch: Batch) -> Iterator[str]:
    """Arrays of values of more than a number a row."""
    for name, value in batch.items():
        if not name.startswith("__") and "." not in name and value.dim() > (0 if name + OFFSETS in batch else 1):
            yield name


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


def on_host(batch: Batch, samples: Batch) -> Batch:
    """A batch with its offsets on the host: those that are known there, in ``samples``; others are waited for."""
    return {
        name: (known if (known := samples.get(name)) is not None and len(known) == len(value) else value).cpu()
        if name.endswith(OFFSETS)
        else value
        for name, value in batch.items()
    }


def cut(batch: Batch, first: int, stop: int, host: Batch | None = None) -> Batch:
    """Some rows of a batch. ``host``: the same with its offsets on the host; without it, ragged values wait for a device."""
    found: Batch = {}
    for name, value in batch.items():
        offsets = _offsets(host or batch, name)
        if offsets is not None:
            begin, end = offsets[[first, stop]].tolist()
            found[name] = value[begin:end]
        elif name.endswith(OFFSETS):
            found[name] = value[first : stop + 1] - value[first]
        else:
            found[name] = value[first:stop]
    return found


def _named(samples: Batch, row: int, rows: int) -> str:
    """A row of a micro-batch, by the index of its sample where that is known."""
    found = f"row {row} of a micro-batch"
    if rows_of(samples) != rows or "__index__" not in samples:
        return found
    one = cut({name: value for name, value in samples.items() if name in _SAMPLE}, row, row + 1)
    indices = one["__index__"].flatten().tolist()
    source = f" of source {one['__source__'].flatten()[0].item()}" if "__source__" in one and indices else ""
    return f"{found} (index {', '.join(map(str, indices[:8]))}{source})"


class Admission:
    """Of one runtime.

    Args:
        budget: bytes of a micro-batch.
        model: what is trained; its ``activation_features(batch)``, if it has one, declares the features: numbers by name, among them what the
            host knows of experts; none falls when rows are added.
        tell: of what cannot be cut, once a kind.
    """

    def __init__(self, budget: float, model: nn.Module, device: torch.device, tell: Callable[[str], None]) -> None:
        self.budget, self._network, self._device, self._tell = budget, model, device, tell
        self._shape: Callable[[Batch], Shape] = getattr(model, "activation_features", shape_of)
        self.model: ActivationModel | None = None
        self.split = 0
        self._told: set[str] = set()

    def admit(self, batches: Sequence[Batch], host: Sequence[Batch]) -> tuple[list[Batch], list[Batch]]:
        """The micro-batches of a step, in parts where need be; and of each what the host knows of its samples."""
        found: list[Batch] = []
        known: list[Batch] = []
        for batch, samples in zip(batches, host, strict=True):
            if (model := self._too_large(batch)) is None:
                found.append(batch)
                known.append(samples)
                continue
            there = on_host(batch, samples)
            bounds = self._bounds(model, batch, there, samples)
            self.split += len(bounds) > 2
            for number, (first, stop) in enumerate(pairwise(bounds)):
                found.append(cut(batch, first, stop, there))
                if samples is batch:
                    known.append(found[-1])
                elif rows_of(samples) == bounds[-1]:
                    known.append(cut(samples, first, stop))
                else:
                    # Packed rows: which samples are whose is not known here.
                    known.append(samples if number == 0 else {})
        return found, known

    def _too_large(self, batch: Batch) -> ActivationModel | None:
        """What foretells parts, if a batch needs and can have any."""
        model, rows = self.model, rows_of(batch)
        if rows is None:
            self._once("rows", "the tensors of a micro-batch do not have a row for each sample each: it cannot be cut")
        if model is None or not rows or model.admits(self._shape(batch), self.budget):
            return None
        return model

    def _bounds(self, model: ActivationModel, batch: Batch, there: Batch, samples: Batch) -> list[int]:
        """Where a batch is cut. ``there``: with its offsets on the host."""
        rows, allowed = rows_of(batch) or 0, self.budget
        reach = (
            self._by_lengths(model, there, rows) if self._shape is shape_of else self._by_features(model, batch, there, rows)
        )
        while (found := fewest(rows, partial(reach, allowed), MOST_PARTS)) is None:
            # Parts of about the same bytes, then.
            allowed *= 1.25
        bounds, alone = found
        if allowed > self.budget:
            self._once(
                "parts", f"a micro-batch of {rows} rows would need more than {MOST_PARTS} parts to stay within {self._limit}"
            )
        if alone:
            self._once(
                "alone",
                f"{_named(samples, alone[0], rows)} is expected to take more than {self._limit} alone: it is trained on alone",
            )
        return bounds

    @staticmethod
    def _by_lengths(model: ActivationModel, batch: Batch, rows: int) -> Callable[[float, int], NDArray[np.bool_]]:
        """What stays within some bytes from a row on, by :func:`shape_of`."""
        ends: dict[str, NDArray[np.floating]] = {}
        for name in _values(batch):
            offsets = _offsets(batch, name)
            ends[name] = (np.arange(rows + 1) if offsets is None else offsets.numpy()) * float(math.prod(batch[name].shape[1:]))

        def reach(most: float, first: int) -> NDArray[np.bool_]:
            count = np.arange(1.0, rows - first + 1)
            shapes = {"rows": count}
            for name, end in ends.items():
                elements = end[first + 1 :] - end[first]
                shapes |= {name: elements, f"{name}^2/rows": np.square(elements) / count}
            return model.admits_each(shapes, most)

        return reach

    def _by_features(
        self, model: ActivationModel, batch: Batch, there: Batch, rows: int
    ) -> Callable[[float, int], NDArray[np.bool_]]:
        """The same by the features that the network declares, which do not fall when rows are added: each is asked for few of the parts."""
        known: dict[tuple[int, int], Shape] = {}

        def fits(most: float, first: int, stop: int) -> bool:
            if (first, stop) not in known:
                known[first, stop] = self._shape(cut(batch, first, stop, there))
            return model.admits(known[first, stop], most)

        def reach(most: float, first: int) -> NDArray[np.bool_]:
            found = np.zeros(rows - first, bool)
            low, high = first, rows + 1
            while high - low > 1:
                stop = rows if high > rows else (low + high) // 2
                if fits(most, first, stop):
                    low, found[stop - first - 1] = stop, True
                else:
                    high = stop
            return found

        return reach

    @property
    def _limit(self) -> str:
        return f"activations.admit_mb = {self.budget / MB:g}"

    def _once(self, what: str, text: str) -> None:
        """Of what cannot be cut, or not enough, the first of each kind."""
        if what not in self._told:
            self._told.add(what)
            self._tell(text)

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
