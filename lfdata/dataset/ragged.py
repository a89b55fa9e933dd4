"""Values of different lengths as one array and offsets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Ragged:
    """``len(self)`` byte strings in one owned, writable buffer.

    Attributes:
        values: uint8, all bytes one after the other.
        offsets: int64, shape (n + 1,): value i is ``values[offsets[i]:offsets[i + 1]]``.
        present: bool, shape (n,): whether the sample has the field (an absent value has length 0).
    """

    values: NDArray[np.uint8]
    offsets: NDArray[np.int64]
    present: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> NDArray[np.uint8]:
        """A view of one value's bytes."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} of {len(self)} values")
        index %= len(self)
        return self.values[self.offsets[index] : self.offsets[index + 1]]

    def __iter__(self) -> Iterator[NDArray[Any]]:
        for index in range(len(self)):
            yield self[index]
