"""Memory of the slots within a byte budget: what an epoch needs, and where batches beyond the share of a slot are cut (docs/scheduler.md)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lfdata.errors import BudgetError, OptionError, StateError
from lfdata.loader.places import Sizes, ragged_bytes
from lfdata.loader.plan import Work
from lfdata.loader.produce import Producer
from lfdata.loader.rows import Rows
from lfdata.loader.slots import PAGE, aligned

OVER = ("error", "split")
# The batch a consumer has, the one it asks for while it still has the other, and one that is being filled meanwhile. More than these are
# only filled while the consumer holds one batch.
FEWEST_SLOTS = 3
# Slots are larger by a part of this than their epoch needs.
ROOM = 8
LEAST_BYTES = PAGE * (1 + FEWEST_SLOTS)
# Rows that are looked up at a time.
ROWS_AT_ONCE = 1 << 18
_KEPT = 3


class Piece(NamedTuple):
    """A batch of a step that is cut: rows of the rank from ``low`` to ``high`` - 1, which are a part of a micro-batch."""

    low: int
    high: int
    micro: int
    part: int
    parts: int


class Reserved(NamedTuple):
    """Slots, bytes and steps of each."""

    slots: int
    size: int
    steps: int


class Largest(NamedTuple):
    """Of the steps beyond the share: the largest, and whose."""

    bytes: int
    step: int
    rank: int


class Alone(NamedTuple):
    """Of the samples, or packed rows, that are beyond the share alone: the largest, and which it is."""

    bytes: int
    what: str


@dataclass(frozen=True, slots=True, eq=False)
class Epoch:
    """What a rank's steps of an epoch need.

    Attributes:
        steps: bytes of a slot with each step alone, int64 (steps,); 0 where it is cut.
        cut: steps that are cut, in order, with their batches.
        largest: bytes of the largest slot of those.
        accumulate: micro-batches of a step.
    """

    steps: NDArray[np.int64]
    cut: dict[int, tuple[Piece, ...]]
    largest: int
    accumulate: int
    _numbers: NDArray[np.int64]
    _firsts: NDArray[np.int64]

    @classmethod
    def of(cls, steps: NDArray[np.int64], cut: dict[int, tuple[Piece, ...]], largest: int, accumulate: int) -> Epoch:
        """With the number of the first batch of each step that is cut, and of those after them."""
        numbers = np.array([*cut, len(steps)], np.int64)
        more = np.cumsum([0, *(len(pieces) - accumulate for pieces in cut.values())])
        return cls(steps, cut, largest, accumulate, numbers, numbers * accumulate + more)

    @property
    def batches(self) -> int:
        """Of the epoch, parts counted."""
        return int(self._firsts[-1])

    def where(self, batch: int) -> tuple[int, int]:
        """The step of a batch of the epoch, and its number there."""
        at = int(np.searchsorted(self._firsts, batch, side="right")) - 1
        if at < 0:
            return divmod(batch, self.accumulate)
        step, rest = int(self._numbers[at]), batch - int(self._firsts[at])
        if step >= len(self.steps):
            return step + rest // self.accumulate, rest % self.accumulate
        if rest < len(self.cut[step]):
            return step, rest
        further, micro = divmod(rest - len(self.cut[step]), self.accumulate)
        return step + 1 + further, micro

    def first(self, step: int) -> int:
        """The number of a step's first batch."""
        at = int(np.searchsorted(self._numbers, step))
        return int(self._firsts[at]) - (int(self._numbers[at]) - step) * self.accumulate

    def cut_between(self, first: int, stop: int) -> Iterator[tuple[int, tuple[Piece, ...]]]:
        """Steps that are cut from one on up to another."""
        low, high = np.searchsorted(self._numbers[:-1], [first, stop])
        for step in self._numbers[low:high].tolist():
            yield step, self.cut[step]

    def whole_from(self, step: int, most: int) -> int:
        """How many steps from one on, that is not cut, are not cut: up to ``most``."""
        at = int(np.searchsorted(self._numbers, step))
        return min(most, int(self._numbers[at]) - step) if at < len(self._numbers) else most

    def slot(self, steps: int) -> int:
        """Bytes of the largest slot with so many consecutive steps, whichever they begin with."""
        sums = np.concatenate([[0], np.cumsum(self.steps)])
        window = min(steps, len(self.steps))
        return max(self.largest, int((sums[window:] - sums[: len(sums) - window]).max(initial=0)))


class Budget:
    """Of one loader.

    Args:
        most: bytes of the slots, and of the page before them.
        over: ``"error"`` or ``"split"``: what becomes of a batch beyond the share.
        accumulate: micro-batches of a step.

    Attributes:
        share: bytes that a step may have before it is cut.
    """

    def __init__(self, producer: Producer, most: int, over: str, accumulate: int) -> None:
        self._producer, self._most, self._over, self._accumulate = producer, most, over, accumulate
        self.share = (most - PAGE) // FEWEST_SLOTS // PAGE * PAGE
        self._sizes = Sizes(producer)
        self._kept: dict[int, Epoch] = {}
        # The bound of a single step says whether any step of any rank could be beyond the share.
        self._everyone = producer.bound > self.share or not producer.spec.static
        if over == "split" and producer.batch_ops:
            raise OptionError(
                f"over='split' cuts batches, and {type(producer.batch_ops[0]).__name__} mixes the rows of whole ones: leave one of them out"
            )
        if over == "split" and not producer.spec.static:
            raise OptionError("over='split' needs static=True: every rank must have a row for each part of a batch")

    def anew(self, producer: Producer) -> Budget:
        """The same budget for another producer."""
        return Budget(producer, self._most, self._over, self._accumulate)

    def epoch(self, number: int) -> Epoch:
        """What an epoch needs. Raises :class:`BudgetError` where that is beyond the budget."""
        found = self._kept.get(number)
        if found is None:
            found = self._look(number)
            while len(self._kept) >= _KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[number] = found
        return found

    def reserve(self, epoch: int, wanted: int) -> Reserved:
        """Slots for an epoch: as many as wanted, or as fit; of fewer steps if even the fewest do not."""
        room, steps, found = self._most - PAGE, self._producer.steps, self.epoch(epoch)
        while (size := aligned(max(1, found.slot(steps)), PAGE)) * FEWEST_SLOTS > room:
            steps = -(-steps // 2)
        count = max(FEWEST_SLOTS, min(wanted, room // size))
        # A later epoch's largest batch is seldom much larger: with a little room, if that costs no slot, it needs no other slots.
        roomy = aligned(size + size // ROOM, PAGE)
        return Reserved(count, roomy if roomy * count <= room else size, steps)

    def fits(self, epoch: int, reserved: Reserved) -> bool:
        """Whether all steps of an epoch fit into such slots. One that is beyond the budget does not; :meth:`epoch` says why."""
        try:
            return self.epoch(epoch).slot(reserved.steps) <= reserved.size
        except BudgetError:
            return False

    def state(self, epoch: int, done: int) -> tuple[int, dict[str, Any]]:
        """Whole micro-batches of an epoch that ``done`` batches are, and what a state says of the parts after those."""
        found = self.epoch(epoch)
        step, number = found.where(done)
        if step not in found.cut:
            return step * self._accumulate + number, {}
        piece = found.cut[step][number]
        if not piece.part:
            return step * self._accumulate + piece.micro, {}
        drawn = {"drawn": names} if (names := self._producer.drawn) else {}
        return step * self._accumulate + piece.micro, {"parts": piece.part, "share": self.share, **drawn}

    def done(self, epoch: int, micro: int, parts: int) -> int:
        """Batches of an epoch that so many whole micro-batches and parts of the next are. Raises :class:`StateError`: it has no such parts."""
        found, (step, number) = self.epoch(epoch), divmod(micro, self._accumulate)
        for place, piece in enumerate(found.cut.get(step, ())):
            if (piece.micro, piece.part) == (number, parts):
                return found.first(step) + place
        if parts:
            raise StateError(f"not a state of this Loader: batch {micro} of epoch {epoch} has no part {parts}")
        return found.first(step) + number

    # -- looking an epoch through -------------------------------------------------------------------------------------

    def _look(self, epoch: int) -> Epoch:
        producer, plan = self._producer, self._producer.plan
        spec, count = producer.spec, len(plan.batches(epoch))
        batch = spec.batch if self._everyone else producer.share
        rows_of = plan.batches(epoch).rows
        ranks = [rows_of(rank, spec.world) for rank in range(spec.world)] if self._everyone else [(0, batch)]
        own = spec.rank if self._everyone else 0
        sizes, cut, worst, largest = np.zeros(count, np.int64), dict[int, tuple[Piece, ...]](), Largest(0, 0, 0), 0
        alone = Alone(0, "")
        at_once = max(1, ROWS_AT_ONCE // max(1, batch))
        for first in range(0, count, at_once):
            steps = min(at_once, count - first)
            work = plan.everyone(epoch, first, steps) if self._everyone else plan.work(epoch, first, steps)
            chunk = _Chunk(self, work, ragged_bytes(producer, work))
            found = chunk.of_ranks(steps, batch, ranks)
            sizes[first : first + steps] = found[:, own]
            beyond = np.flatnonzero((found > self.share).any(1)).tolist()
            if beyond:
                alone = chunk.largest_row(alone)
                step, rank = divmod(int(found.argmax()), len(ranks))
                worst = max(worst, Largest(int(found[step, rank]), first + step, rank))
            if alone.bytes or self._over == "error":
                # It ends with an error, which has the largest of the epoch.
                continue
            for step in beyond:
                pieces = chunk.cut(step * batch, ranks, found[step] > self.share, own)
                if pieces is None:
                    continue
                begin = step * batch + ranks[own][0]
                largest = max(largest, *(chunk.size(begin + one.low, begin + one.high) for one in pieces))
                cut[first + step], sizes[first + step] = tuple(pieces), 0
        if alone.bytes:
            raise BudgetError("memory", None, self._too_large(alone, worst))
        if worst.bytes and self._over == "error":
            raise BudgetError("memory", None, self._beyond(epoch, worst))
        return Epoch.of(sizes, cut, largest, self._accumulate)

    def _too_large(self, alone: Alone, worst: Largest) -> str:
        # Under "error" the steps of such samples must fit too.
        needed, why = (
            (worst.bytes, f" (the largest step takes {worst.bytes:,})") if self._over == "error" else (alone.bytes, "")
        )
        return (
            f"{alone.what} takes {alone.bytes:,} bytes, a slot has {self.share:,} (max_bytes={self._most:,} for {FEWEST_SLOTS} slots). "
            f"Raise max_bytes to {_enough(needed):,}{why}, leave it out (where=), or give the field a fixed length"
        )

    def _beyond(self, epoch: int, worst: Largest) -> str:
        enough = _enough(worst.bytes)
        step = self._producer.plan.step(worst.step)
        paths = ", ".join(str(source.path) for source in self._producer.sources).encode("utf-8", "backslashreplace").decode()
        return (
            f"{paths}: step {step} of epoch {epoch} takes {worst.bytes:,} bytes on rank {worst.rank}, the largest of the epoch; "
            f"max_bytes={self._most:,} leaves {self.share:,} for each of {FEWEST_SLOTS} slots. Raise max_bytes to {enough:,}, lower "
            "batch_size, give ragged fields a fixed length, or take over='split', which gives such a batch in parts"
        )


def _enough(size: int) -> int:
    """The budget whose share is so many bytes."""
    return PAGE + FEWEST_SLOTS * aligned(size, PAGE)


class _Chunk:
    """Rows of some steps with their bytes."""

    def __init__(self, budget: Budget, work: Work, ragged: dict[str, NDArray[np.int64]]) -> None:
        self._budget, self._work = budget, work
        self._sums = [np.concatenate([[0], np.cumsum(ragged[name])]) for name in budget._sizes.ragged]

    def size(self, low: int, high: int) -> int:
        """Bytes of a slot with the rows from one on up to another."""
        return int(self._sizes(low, np.array([high]))[0])

    def _sizes(self, low: int, highs: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._budget._sizes.of(highs - low, [sums[highs] - sums[low] for sums in self._sums])

    def of_ranks(self, steps: int, batch: int, ranks: list[tuple[int, int]]) -> NDArray[np.int64]:
        """Bytes of each step of each rank: int64 (steps, ranks)."""
        begins = np.arange(steps)[:, None] * batch
        lows, highs = (begins + np.array(ends)[None] for ends in zip(*ranks, strict=True))
        return self._budget._sizes.of(highs - lows, [sums[highs] - sums[lows] for sums in self._sums])

    def cut(self, begin: int, ranks: list[tuple[int, int]], beyond: NDArray[np.bool_], own: int) -> list[Piece] | None:
        """The batches of a step for the rank ``own``; ``None`` if it is whole."""
        accumulate = self._budget._accumulate
        share = (ranks[own][1] - ranks[own][0]) // accumulate
        pieces, whole = [], not beyond[own]
        for micro in range(accumulate):
            needed, mine = 1, [0, share]
            for rank in np.flatnonzero(beyond).tolist():
                found = self._greedy(begin + ranks[rank][0] + micro * share, share)
                needed = max(needed, len(found) - 1)
                mine = found if rank == own else mine
            while len(mine) <= needed:
                # Half of the largest part, the first of those.
                at = int(np.argmax(np.diff(mine)))
                mine = [*mine[: at + 1], (mine[at] + mine[at + 1] + 1) // 2, *mine[at + 1 :]]
            whole = whole and needed == 1
            low = micro * share
            pieces += [Piece(low + a, low + b, micro, part, needed) for part, (a, b) in enumerate(pairwise(mine))]
        return None if whole else pieces

    def _greedy(self, begin: int, rows: int) -> list[int]:
        """Bounds of the parts of some rows: as many rows as fit, then the next part."""
        bounds, share = [0], self._budget.share
        while bounds[-1] < rows:
            low = begin + bounds[-1]
            fit = int(np.searchsorted(self._sizes(low, np.arange(low + 1, begin + rows + 1)), share, side="right"))
            bounds.append(bounds[-1] + fit)
        return bounds

    def largest_row(self, before: Alone) -> Alone:
        """Of the rows that are beyond the share alone the largest, if it is larger than the one before."""
        rows = np.arange(len(self._work.positions))
        alone = self._budget._sizes.of(np.ones_like(rows), [np.diff(sums) for sums in self._sums])
        row = int(alone.argmax())
        return Alone(int(alone[row]), self._named(row)) if alone[row] > max(self._budget.share, before.bytes) else before

    def _named(self, row: int) -> str:
        work, number, what = self._work, row, "sample"
        if work.bins is not None:
            number, what = sum(len(one.samples) for one in work.bins[:row]), "packed row that begins with it"
        shard, index, key, path = Rows(self._budget._producer.sources, work.samples, 0).where(number)
        return f"{path}/{shard}, index {index}, key {key!r}: the {what}"
