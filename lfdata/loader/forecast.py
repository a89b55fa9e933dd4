"""What the next batches will take, array by array, from index and order alone (docs/scheduler.md)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lfdata.loader.packed import PackedFiller
from lfdata.loader.plan import Work
from lfdata.loader.produce import Producer
from lfdata.loader.rows import Rows

# Rows that are looked up at a time.
ROWS_AT_ONCE = 1 << 18


@dataclass(frozen=True, slots=True, eq=False)
class Forecast:
    """Bytes of the next n batches of a rank.

    Attributes:
        epoch, batch: where each batch is: its epoch, and its number there; int64 (n,).
        bytes: of every tensor of the batch, by its name: int64 (n,). Exact where no sample is bad; bad ragged samples take less.
    """

    epoch: NDArray[np.int64]
    batch: NDArray[np.int64]
    bytes: dict[str, NDArray[np.int64]]

    def __len__(self) -> int:
        return len(self.epoch)

    @property
    def total(self) -> NDArray[np.int64]:
        """Bytes of each whole batch: int64 (n,)."""
        return np.sum(list(self.bytes.values()), axis=0, dtype=np.int64) if self.bytes else np.zeros(len(self), np.int64)


def forecast(producer: Producer, epoch: int, done: int, batches: int, accumulate: int) -> Forecast:
    """The ``batches`` after the ``done`` batches of an epoch, and on into the epochs that follow."""
    parts: list[dict[str, NDArray[np.int64]]] = []
    epochs: list[NDArray[np.int64]] = []
    numbers: list[NDArray[np.int64]] = []
    at_once = max(1, ROWS_AT_ONCE // max(1, producer.share))
    while batches > 0:
        steps = len(producer.plan.batches(epoch))
        if not steps:
            break
        first, micro = divmod(done, accumulate)
        taken = min(steps - first, at_once, -(-(batches + micro) // accumulate))
        if taken > 0:
            here = slice(micro, min(taken * accumulate, micro + batches))
            found = _of_steps(producer, epoch, first, taken, accumulate)
            parts.append({name: values[here] for name, values in found.items()})
            numbers.append(np.arange(done, done + here.stop - here.start, dtype=np.int64))
            epochs.append(np.full(len(numbers[-1]), epoch, np.int64))
            batches, done = batches - len(numbers[-1]), done + len(numbers[-1])
        if done >= steps * accumulate:
            epoch, done = epoch + 1, 0
    nothing = np.zeros(0, np.int64)
    names = [part.name for part in producer.parts]
    return Forecast(
        np.concatenate([nothing, *epochs]),
        np.concatenate([nothing, *numbers]),
        {name: np.concatenate([nothing, *(part[name] for part in parts)]) for name in names},
    )


def _of_steps(producer: Producer, epoch: int, first: int, steps: int, accumulate: int) -> dict[str, NDArray[np.int64]]:
    """Bytes of each micro-batch of some steps."""
    work, rows = producer.plan.work(epoch, first, steps), producer.share // accumulate
    count = steps * accumulate
    by_row = _packed(producer, work) if work.bins is not None else _plain(producer, work)
    found = {}
    for part in producer.parts:
        if part.offsets:
            found[part.name] = np.full(count, 8 * (rows + 1), np.int64)
        elif part.name in by_row:
            found[part.name] = by_row[part.name].reshape(count, rows).sum(1)
        else:
            found[part.name] = np.full(count, rows * part.place.row_bytes, np.int64)
    return found


def _plain(producer: Producer, work: Work) -> dict[str, NDArray[np.int64]]:
    rows = Rows(producer.sources, work.samples, producer.spec.seed)
    return {name: values for filler in producer.fillers for name, values in filler.ragged_bytes(rows).items()}


def _packed(producer: Producer, work: Work) -> dict[str, NDArray[np.int64]]:
    (filler,) = producer.fillers
    assert isinstance(filler, PackedFiller) and work.bins is not None
    return filler.bin_bytes(np.array([len(one.samples) for one in work.bins], np.int64))
