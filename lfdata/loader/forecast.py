"""What the next batches will take, array by array, from index and order alone (docs/scheduler.md)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lfdata.loader.budget import Budget
from lfdata.loader.places import ragged_bytes
from lfdata.loader.produce import Producer

# Rows that are looked up at a time.
ROWS_AT_ONCE = 1 << 18


@dataclass(frozen=True, slots=True, eq=False)
class Forecast:
    """Bytes of the next n batches of a rank.

    Attributes:
        epoch, batch: where each batch is: its epoch, and its number there; int64 (n,).
        bytes: of every tensor of the batch, by its name: int64 (n,). Exact where no sample is bad; bad ragged samples take less.
        device: the same of the tensors that a :class:`lfdata.DeviceLoader` hands out; empty of a loader alone, as the rest is.
        place: of the batch's place on the device: int64 (n,).
        reserved: int64 (n,) by name: of all memory that there is when the batch is made, ``"slots"`` and what of them is ``"registered"``;
            and when it is copied, the ``"ring"`` of places and the ``"staging"`` area.
    """

    epoch: NDArray[np.int64]
    batch: NDArray[np.int64]
    bytes: dict[str, NDArray[np.int64]]
    device: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    place: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    reserved: dict[str, NDArray[np.int64]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.epoch)

    @property
    def total(self) -> NDArray[np.int64]:
        """Bytes of each whole batch: int64 (n,)."""
        return np.sum(list(self.bytes.values()), axis=0, dtype=np.int64) if self.bytes else np.zeros(len(self), np.int64)


def forecast(
    producer: Producer, epoch: int, done: int, batches: int, accumulate: int, budget: Budget | None = None
) -> Forecast:
    """The ``batches`` after the ``done`` batches of an epoch, and on into the epochs that follow."""
    parts: list[dict[str, NDArray[np.int64]]] = []
    epochs: list[NDArray[np.int64]] = []
    numbers: list[NDArray[np.int64]] = []
    at_once = max(1, ROWS_AT_ONCE // max(1, producer.share))
    while batches > 0:
        steps = len(producer.plan.batches(epoch))
        if not steps:
            break
        first, micro = divmod(done, accumulate) if budget is None else budget.epoch(epoch).where(done)
        taken = min(steps - first, at_once, -(-(batches + micro) // accumulate))
        if taken > 0:
            bounds = _bounds(producer, epoch, first, taken, accumulate, budget)
            here = slice(micro, min(len(bounds) - 1, micro + batches))
            found = _of_steps(producer, epoch, first, taken, bounds)
            parts.append({name: values[here] for name, values in found.items()})
            numbers.append(np.arange(done, done + here.stop - here.start, dtype=np.int64))
            epochs.append(np.full(len(numbers[-1]), epoch, np.int64))
            batches, done = batches - len(numbers[-1]), done + len(numbers[-1])
        if done >= (steps * accumulate if budget is None else budget.epoch(epoch).batches):
            epoch, done = epoch + 1, 0
    nothing = np.zeros(0, np.int64)
    names = [part.name for part in producer.parts]
    return Forecast(
        np.concatenate([nothing, *epochs]),
        np.concatenate([nothing, *numbers]),
        {name: np.concatenate([nothing, *(part[name] for part in parts)]) for name in names},
    )


def _bounds(
    producer: Producer, epoch: int, first: int, steps: int, accumulate: int, budget: Budget | None
) -> NDArray[np.int64]:
    """Where the batches of some steps begin among their rows, and where the last ends."""
    rows = producer.share // accumulate
    found = np.arange(steps * accumulate + 1, dtype=np.int64) * rows
    if budget is None:
        return found
    more = [
        (step - first) * producer.share + piece.low
        for step, pieces in budget.epoch(epoch).cut_between(first, first + steps)
        for piece in pieces
        if piece.low % rows
    ]
    return np.sort(np.concatenate([found, np.array(more, np.int64)]))


def _of_steps(
    producer: Producer, epoch: int, first: int, steps: int, bounds: NDArray[np.int64]
) -> dict[str, NDArray[np.int64]]:
    """Bytes of each batch of some steps."""
    by_row, rows = ragged_bytes(producer, producer.plan.work(epoch, first, steps)), np.diff(bounds)
    found = {}
    for part in producer.parts:
        if part.offsets:
            found[part.name] = 8 * (rows + 1)
        elif part.name in by_row:
            found[part.name] = np.diff(np.concatenate([[0], np.cumsum(by_row[part.name])])[bounds])
        else:
            found[part.name] = rows * part.place.row_bytes
    return found
