"""The order of an epoch, and the part of each global batch that a rank takes (docs/order.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfdata.errors import OptionError
from lfdata.order.permutation import Indices, Permutation, make_key
from lfdata.order.samples import Samples
from lfdata.order.selection import Selection

MODES = ("sequential", "full", "block")
TAILS = ("drop_last", "pad")


class Order:
    """Samples by position, for every epoch.

    Args:
        n: samples of an epoch; or the selection of those that take part (blocks are then of selected samples).
        seed: 0 to 2^64 - 1.
        mode: ``sequential``, ``full`` or ``block``.
        block: samples of a block (mode ``block``).
        window: blocks that are shuffled together (mode ``block``).

    Raises:
        OptionError: a mode or a size that makes no sense.
    """

    def __init__(self, n: int | Selection, seed: int = 0, mode: str = "full", *, block: int = 1024, window: int = 16) -> None:
        if mode not in MODES:
            raise OptionError(f"mode {mode!r}; there are {', '.join(MODES)}")
        if block < 1 or window < 1:
            raise OptionError(f"block ({block}) and window ({window}) must be at least 1")
        self.selection = n if isinstance(n, Selection) else None
        self.n = len(n) if isinstance(n, Selection) else n
        self.seed, self.mode, self.block, self.window = seed, mode, block, window
        make_key(seed)

    def indices(self, epoch: int, positions: Any) -> Indices:
        """Samples at some positions of an epoch: int64, of the shape of ``positions``. Raises ``IndexError`` outside 0 to n - 1."""
        given: Indices = np.asarray(positions, np.int64)
        if given.size and (given.min() < 0 or given.max() >= self.n):
            raise IndexError(f"a position outside the {self.n} of an epoch")
        if self.mode == "sequential":
            found = given.copy()
        elif self.mode == "full":
            found = Permutation(self.n, make_key(self.seed, epoch, 0))(given)
        else:
            found = self._blocks(epoch, given.reshape(-1)).reshape(given.shape)
        return found if self.selection is None else self.selection.select(found)

    def samples(self, epoch: int, positions: Any) -> Samples:
        """The same as samples of source 0, which come once an epoch: (n,) for as many positions. Epochs are below 2^63."""
        if epoch >= 1 << 63:
            raise OptionError(f"epoch {epoch}; samples are numbered in epochs 0 to 2^63 - 1")
        index = self.indices(epoch, positions).reshape(-1)
        zeros = np.zeros(len(index), np.int64)
        return Samples(zeros, np.full(len(index), epoch, np.int64), index, zeros)

    def _blocks(self, epoch: int, positions: Indices) -> Indices:
        # Larger ones are no different, and need not fit into 64 bits.
        size = min(self.block, max(1, self.n))
        count = max(1, -(-self.n // size))
        many = min(self.window, count)
        full = size * many
        order = Permutation(count, make_key(self.seed, epoch, 1))
        short = count * size - self.n  # what the last block lacks
        at = int(order.inverse(count - 1))  # its place among the blocks
        at_window = at // many
        # Windows up to the one with the short block begin at multiples of `full`, those after it `short` earlier.
        window = np.where(positions < (at_window + 1) * full - short, positions // full, (positions + short) // full)
        result = np.empty(len(positions), np.int64)
        for number in np.unique(window).tolist():
            mine = window == number
            start = number * full - (short if number > at_window else 0)
            first, stop = number * many, min((number + 1) * many, count)
            length = (stop - first) * size - (short if number == at_window else 0)
            place = Permutation(length, make_key(self.seed, epoch, 2, number))(positions[mine] - start)
            # The short block in the middle of a window: what comes after it lies `short` earlier.
            end = (at - first + 1) * size - short
            if number == at_window:
                place = np.where(place < end, place, place + short)
            blocks = order(np.arange(first, stop))
            result[mine] = blocks[place // size] * size + place % size
        return result


@dataclass(frozen=True, slots=True)
class Batches:
    """Global batches of an epoch of ``n`` samples, and what a rank takes of each.

    Args:
        size: samples of a global batch.
        tail: what becomes of an incomplete last one: ``drop_last``, or ``pad`` (rows beyond the epoch are masked).
        static: whether every rank must have as many rows as every other.
    """

    n: int
    size: int
    tail: str = "drop_last"
    static: bool = True

    def __post_init__(self) -> None:
        if self.size < 1 or self.tail not in TAILS:
            raise OptionError(f"a global batch of {self.size} with tail {self.tail!r}; it has at least 1, and drop_last or pad")

    def __len__(self) -> int:
        """Steps of an epoch."""
        return self.n // self.size if self.tail == "drop_last" else -(-self.n // self.size)

    def rows(self, rank: int, world: int) -> tuple[int, int]:
        """Rows of every global batch that are a rank's: first, and one past the last.

        Raises:
            OptionError: no such rank; or with ``static``, ranks that do not divide the global batch.
        """
        if not 0 <= rank < world:
            raise OptionError(f"rank {rank} of {world}")
        if self.static and self.size % world:
            fit = [count for count in range(1, self.size + 1) if self.size % count == 0]
            near = ", ".join(map(str, fit if len(fit) <= 24 else [*fit[:12], *fit[-12:]]))
            raise OptionError(f"{world} ranks do not divide a global batch of {self.size}; these do: {near}")
        return self.size * rank // world, self.size * (rank + 1) // world

    def share(self, rank: int, world: int) -> int:
        """Rows of a rank."""
        first, stop = self.rows(rank, world)
        return stop - first

    def positions(self, step: int, rank: int = 0, world: int = 1) -> tuple[Indices, NDArray[np.bool_]]:
        """Positions of a rank's rows in a step, and which of them count: int64 and bool, shape (rows,).

        Raises:
            IndexError: no such step.
        """
        if not 0 <= step < len(self):
            raise IndexError(f"step {step} of {len(self)}")
        first, stop = self.rows(rank, world)
        found = np.arange(step * self.size + first, step * self.size + stop)
        return found % self.n, found < self.n
