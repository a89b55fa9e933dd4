"""Where the arrays of a slot lie when each slot has exactly the room that its samples need (docs/scheduler.md)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lfdata.loader.filler import Part
from lfdata.loader.packed import PackedFiller
from lfdata.loader.plan import Work
from lfdata.loader.rows import Rows
from lfdata.loader.slots import ALIGN, Layout, Place

if TYPE_CHECKING:
    from lfdata.loader.produce import Producer

Bytes = NDArray[np.int64]


def ragged_bytes(producer: Producer, work: Work) -> dict[str, Bytes]:
    """Bytes of each row in the arrays whose rows differ in length: int64 (rows,) by name."""
    if work.bins is None:
        rows = Rows(producer.sources, work.samples, producer.spec.seed)
        return {name: values for filler in producer.fillers for name, values in filler.ragged_bytes(rows).items()}
    (filler,) = producer.fillers
    assert isinstance(filler, PackedFiller)
    return filler.bin_bytes(np.array([len(one.samples) for one in work.bins], np.int64))


def exact(producer: Producer, work: Work) -> tuple[list[Part], Place]:
    """The producer's parts with the places they have for some rows alone, and the place of the rows' status."""
    ragged, rows, layout = ragged_bytes(producer, work), len(work.positions), Layout()
    found = []
    for part in producer.parts:
        dtype = np.dtype(part.place.dtype)
        values = int(ragged[part.name].sum()) // dtype.itemsize if part.by else 0
        shape = (values,) if part.by else (rows + part.offsets, *part.place.shape[1:])
        found.append(Part(part.name, layout.add(dtype, shape), part.by, part.offsets))
    return found, layout.add(np.uint8, (rows,))


def at(parts: Sequence[Part], offsets: Iterable[int], rows: int, used: dict[str, int]) -> list[tuple[str, Place]]:
    """The arrays of a slot that was filled so, by name."""
    return [
        (
            part.name,
            Place(
                offset,
                part.place.dtype,
                (used[part.name],) if part.by else (rows + part.offsets, *part.place.shape[1:]),
            ),
        )
        for part, offset in zip(parts, offsets, strict=True)
    ]


class Sizes:
    """Bytes of slots that are laid out so, for many numbers of rows at once."""

    def __init__(self, producer: Producer) -> None:
        self.ragged = [part.name for part in producer.parts if part.by]
        self._offsets = sum(part.offsets for part in producer.parts)
        # A row's status is a byte.
        self._rows = [part.place.row_bytes for part in producer.parts if not part.by and not part.offsets] + [1]

    def of(self, rows: Any, ragged: Iterable[Any]) -> Bytes:
        """Of slots of so many rows whose ragged arrays have so many bytes (one array an array, in the order of :attr:`ragged`)."""
        count = np.asarray(rows, np.int64)
        total = self._offsets * _aligned(8 * (count + 1)) + sum(_aligned(size * count) for size in self._rows)
        for values in ragged:
            total = total + _aligned(np.asarray(values, np.int64))
        return np.asarray(total, np.int64)


def _aligned(size: Any) -> Any:
    return -(-size // ALIGN) * ALIGN
