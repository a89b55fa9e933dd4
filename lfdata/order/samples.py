"""What an order answers: which sample of which source, in which of its epochs (docs/order.md)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """Samples by source: four arrays, int64 of shape (n,).

    Attributes:
        source: number of the source; 0 where there is one.
        epoch: epoch of that source, not of the mixture.
        index: index in that source.
        occurrence: how often the sample has come before in that epoch of its source.
    """

    source: Indices
    epoch: Indices
    index: Indices
    occurrence: Indices

    def __len__(self) -> int:
        return len(self.index)

    def take(self, rows: Any) -> Samples:
        """Some of them: by number, slice or mask."""
        return Samples(self.source[rows], self.epoch[rows], self.index[rows], self.occurrence[rows])


class Ordered(Protocol):
    """What gives samples by position: ``Order``, ``Mixture`` and ``Buckets``."""

    n: int

    def samples(self, epoch: int, positions: Any) -> Samples:
        """Samples at some positions (n,) of an epoch. Raises ``IndexError`` outside 0 to ``n`` - 1."""


def grouped(values: Indices) -> Iterator[tuple[int, Indices]]:
    """Every different value, ascending, with the rows that have it, ascending."""
    if len(values) and values[0] == values[-1] and (values == values[0]).all():
        yield int(values[0]), np.arange(len(values))
        return
    order = np.argsort(values, kind="stable")
    bounds = np.flatnonzero(np.diff(values[order])) + 1
    for rows in np.split(order, bounds) if len(values) else []:
        yield int(values[rows[0]]), rows
