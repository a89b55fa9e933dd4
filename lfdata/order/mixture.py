"""Mixtures of sources: fixed shares of every block, each source in its own order and epochs (docs/order.md)."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np

from lfdata.errors import OptionError
from lfdata.order.order import Order
from lfdata.order.permutation import MAX_SAMPLES, Indices, Permutation, make_key
from lfdata.order.samples import Samples, grouped

EXHAUSTION = ("stop", "repeat", "drop")
MAX_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True, order=True)
class _Node:
    """A source, or two nodes whose common share is divided between them."""

    weight: int
    number: int
    halves: tuple[_Node, _Node] | None = None


class _Shares:
    """How many samples of each source the first k blocks hold.

    Args:
        parts: weights of the sources, integers of 1 or more.
    """

    def __init__(self, parts: Sequence[int], block: int) -> None:
        self._sources, self._block, self._total = len(parts), block, sum(parts)
        nodes = [_Node(part, number) for number, part in enumerate(parts)]
        heapq.heapify(nodes)
        number = len(parts)
        while nodes[0].weight * block < self._total:
            light, heavy = heapq.heappop(nodes), heapq.heappop(nodes)
            heapq.heappush(nodes, _Node(light.weight + heavy.weight, number, (light, heavy)))
            number += 1
        self._nodes = sorted(nodes, key=lambda node: node.number)

    def at(self, blocks: int) -> list[int]:
        found = [0] * self._sources
        weight = used = 0
        for node in self._nodes:
            weight += node.weight
            stop = blocks * self._block * weight // self._total
            todo = [(node, stop - used)]
            used = stop
            while todo:
                each, count = todo.pop()
                if each.halves is None:
                    found[each.number] = count
                else:
                    light, heavy = each.halves
                    share = (2 * count * light.weight + each.weight) // (2 * each.weight)
                    todo += [(light, share), (heavy, count - share)]
        return found


@lru_cache(maxsize=32)
def _layout(key: int, counts: tuple[int, ...]) -> tuple[Indices, Indices]:
    """Of every position of a block: which source, and how many of that source come before it in the block."""
    size = sum(counts)
    ends = np.cumsum(counts)
    sources = np.searchsorted(ends, Permutation(size, key)(np.arange(size)), side="right")
    before = np.empty(size, np.int64)
    before[np.argsort(sources, kind="stable")] = np.arange(size) - np.repeat(ends - counts, counts)
    return sources, before


@dataclass(frozen=True, slots=True)
class _Segment:
    """Positions from ``start`` on, in which the same sources take part."""

    number: int
    start: int
    live: tuple[int, ...]
    used: tuple[int, ...]  # by the segments before, of each live source
    shares: _Shares


class Mixture:
    """Samples of several sources by position, for every epoch; the interface of ``Order``.

    Without ``weights`` and ``temperature`` the sources come in proportion to their sizes.

    Args:
        orders: the sources, each with its own order.
        weights: share of each source, in any unit; decimal fractions are taken as written.
        temperature: shares as sizes to the power of 1 / temperature: 1 is proportion, infinity equal shares.
        block: positions of a block, which holds fixed counts of every source.
        exhaustion: when a source is used up: ``stop`` ends the epoch; ``repeat`` begins the source's next epoch, and the mixture's
            epoch is over when every source has been seen once; ``drop`` goes on with the others until all are used up.
        n: positions of an epoch: fewer than would be; with ``repeat`` any number.

    Raises:
        OptionError: options or sizes that make no sense.
    """

    def __init__(
        self,
        orders: Sequence[Order],
        *,
        weights: Sequence[float | Fraction] | None = None,
        temperature: float | None = None,
        block: int = 1024,
        exhaustion: str = "repeat",
        seed: int = 0,
        n: int | None = None,
    ) -> None:
        if exhaustion not in EXHAUSTION:
            raise OptionError(f"exhaustion {exhaustion!r}; there are {', '.join(EXHAUSTION)}")
        if not 1 <= block <= MAX_BLOCK:
            raise OptionError(f"a block of {block} positions; it has 1 to {MAX_BLOCK}")
        make_key(seed)
        self.orders, self.block, self.exhaustion, self.seed = tuple(orders), block, exhaustion, seed
        self.sizes = tuple(order.n for order in self.orders)
        if not self.sizes or not all(self.sizes):
            empty = [number for number, size in enumerate(self.sizes) if not size]
            raise OptionError(
                f"sources {empty} have no samples: leave them out" if empty else "a mixture of no sources: give one"
            )
        self.parts = _parts(self.sizes, weights, temperature)
        self._segments = [_Segment(0, 0, tuple(range(len(self.sizes))), (0,) * len(self.sizes), _Shares(self.parts, block))]
        most = self._plan()
        if n is not None and (n < 1 or (n > most and exhaustion != "repeat")):
            raise OptionError(f"n = {n}; with {exhaustion!r} an epoch has up to {most} positions; 'repeat' allows more")
        if (most if n is None else n) > MAX_SAMPLES:
            raise OptionError("an epoch of more than 2^48 positions: give n, or the rarest source more weight")
        self.n = most if n is None else n
        self._starts = np.array([segment.start for segment in self._segments if segment.start <= MAX_SAMPLES], np.int64)

    def samples(self, epoch: int, positions: Any) -> Samples:
        """Samples at some positions (n,) of an epoch.

        Raises:
            IndexError: a position outside 0 to ``n`` - 1.
            OptionError: an epoch so late that its positions cannot be numbered.
        """
        given: Indices = np.asarray(positions, np.int64).reshape(-1)
        if given.size and (given.min() < 0 or given.max() >= self.n):
            raise IndexError(f"a position outside the {self.n} of an epoch")
        if not 0 <= epoch < (1 << 62) // self.n:
            raise OptionError(f"epoch {epoch}; with {self.n} positions there are 0 to {(1 << 62) // self.n - 1}")
        repeat = self.exhaustion == "repeat"
        if repeat:
            given = given + epoch * self.n
        source, counter = self._counters(given)
        size = np.array(self.sizes, np.int64)[source]
        epochs = counter // size if repeat else np.full(len(given), epoch, np.int64)
        index = np.empty(len(given), np.int64)
        for number, rows in grouped(source):
            for each, inner in grouped(epochs[rows]):
                mine = rows[inner]
                index[mine] = self.orders[number].indices(each, counter[mine] % self.sizes[number])
        return Samples(source, epochs, index, np.zeros(len(given), np.int64))

    def _counters(self, positions: Indices) -> tuple[Indices, Indices]:
        """The source at each position, and how many samples of that source come before it."""
        source, counter = np.empty(len(positions), np.int64), np.empty(len(positions), np.int64)
        for number, rows in grouped(np.searchsorted(self._starts, positions, side="right") - 1):
            segment = self._segments[number]
            inside = positions[rows] - segment.start
            live, used = np.array(segment.live, np.int64), np.array(segment.used, np.int64)
            for block, inner in grouped(inside // self.block):
                first, sources, before = self._block(segment, block)
                place = inside[inner] - block * self.block
                mine = sources[place]
                source[rows[inner]] = live[mine]
                counter[rows[inner]] = (used + first)[mine] + before[place]
        return source, counter

    def _block(self, segment: _Segment, number: int) -> tuple[Indices, Indices, Indices]:
        """Of a block of a segment: samples of each source before it; and the two arrays of ``_layout``."""
        first, stop = segment.shares.at(number), segment.shares.at(number + 1)
        counts = tuple(b - a for a, b in zip(first, stop, strict=True))
        return np.array(first, np.int64), *_layout(make_key(self.seed, segment.number, 4, number), counts)

    def _place(self, segment: _Segment, source: int, sample: int) -> int:
        """The position, from the start of the segment, of a sample (0, 1, ...) of its source number ``source``."""
        high = 1
        while segment.shares.at(high)[source] <= sample:
            high *= 2
        low = 0  # the sample is in block low or later, and before block high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if segment.shares.at(middle)[source] <= sample else (low, middle)
        if low * self.block > 2 * MAX_SAMPLES:
            return low * self.block  # beyond what an epoch may have; its block is not needed
        first, sources, before = self._block(segment, low)
        return low * self.block + int(np.flatnonzero((sources == source) & (before == sample - first[source]))[0])

    def _plan(self) -> int:
        """Positions of an epoch; with ``drop`` this finds the segments after the first."""
        segment = self._segments[0]
        if self.exhaustion == "stop":
            return min(self._place(segment, number, size) for number, size in enumerate(self.sizes))
        if self.exhaustion == "repeat":
            return 1 + max(self._place(segment, number, size - 1) for number, size in enumerate(self.sizes))
        while len(segment.live) > 1:
            left = [self.sizes[source] - used for source, used in zip(segment.live, segment.used, strict=True)]
            last, gone = min((self._place(segment, number, count - 1), number) for number, count in enumerate(left))
            first, sources, _ = self._block(segment, last // self.block)
            here = np.bincount(sources[: last % self.block + 1], minlength=len(left))
            used = [a + int(b) + int(c) for a, b, c in zip(segment.used, first, here, strict=True)]
            keep = [number for number in range(len(left)) if number != gone]
            live = tuple(segment.live[number] for number in keep)
            shares = _Shares([self.parts[source] for source in live], self.block)
            start = segment.start + last + 1
            segment = _Segment(segment.number + 1, start, live, tuple(used[number] for number in keep), shares)
            self._segments.append(segment)
        return sum(self.sizes)


def _parts(sizes: Sequence[int], weights: Sequence[float | Fraction] | None, temperature: float | None) -> tuple[int, ...]:
    """Shares as integers without a common divisor."""
    if weights is not None and temperature is not None:
        raise OptionError("weights and a temperature: give one of them")
    if weights is not None:
        if len(weights) != len(sizes):
            raise OptionError(f"{len(weights)} weights for {len(sizes)} sources: give each one")
        if not all(weight > 0 and math.isfinite(weight) for weight in weights):
            raise OptionError(f"weights {list(weights)}: they must be above 0; leave out a source that should not come")
        exact = [
            Fraction(weight) if isinstance(weight, (int, Fraction)) else Fraction(repr(float(weight))) for weight in weights
        ]
        common = math.lcm(*(weight.denominator for weight in exact))
        found = [int(weight * common) for weight in exact]
    elif temperature is not None and temperature != 1:
        if not temperature > 0:
            raise OptionError(f"temperature {temperature}: it must be above 0; 1 is proportion, more is more even")
        largest = max(sizes)
        found = [max(1, round((size / largest) ** (1 / temperature) * (1 << 32))) for size in sizes]
    else:
        found = list(sizes)
    divisor = math.gcd(*found)
    return tuple(part // divisor for part in found)
