"""Length buckets and sequence packing, window by window, with nothing carried over (docs/order.md)."""

from __future__ import annotations

import hashlib
import json
import os
from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lfdata.errors import OptionError
from lfdata.order.permutation import Indices, Permutation, make_key
from lfdata.order.samples import Ordered, Samples, grouped

TOO_LONG = ("truncate", "drop", "split")
MAX_WINDOW = 1 << 20
Lengths = Callable[[Samples], Indices]
_KEPT = 4  # windows kept, so that the batches of one do not work it out again


class Buckets:
    """Batches of samples of about the same length: the order inside windows is changed. The interface of ``Order``.

    Args:
        order: what gives the samples.
        lengths: length of each of some samples: int64 (n,), 0 or more; a pure function.
        window: positions that are sorted together; a multiple of ``group``.
        group: samples of like length that stay together: the global batch.

    Raises:
        OptionError: sizes that make no sense.
    """

    def __init__(self, order: Ordered, lengths: Lengths, window: int, group: int, seed: int = 0) -> None:
        if group < 1 or not group <= window <= MAX_WINDOW or window % group:
            near = max(1, window // max(1, group)) * max(1, group)
            raise OptionError(
                f"a window of {window} with groups of {group}: it must be a multiple, such as {near}, up to {MAX_WINDOW}"
            )
        make_key(seed)
        self.order, self.lengths, self.window, self.group, self.seed = order, lengths, window, group, seed
        self.n = order.n
        self._kept: dict[tuple[int, int], Samples] = {}

    def samples(self, epoch: int, positions: Any) -> Samples:
        """Samples at some positions (n,) of an epoch. Raises ``IndexError`` outside 0 to ``n`` - 1."""
        given: Indices = np.asarray(positions, np.int64).reshape(-1)
        if given.size and (given.min() < 0 or given.max() >= self.n):
            raise IndexError(f"a position outside the {self.n} of an epoch")
        found = np.empty((4, len(given)), np.int64)
        for number, rows in grouped(given // self.window):
            window = self._window(epoch, number)
            places = given[rows] - number * self.window
            for row, values in zip(found, (window.source, window.epoch, window.index, window.occurrence), strict=True):
                row[rows] = values[places]
        return Samples(*found)

    def _window(self, epoch: int, number: int) -> Samples:
        found = self._kept.get((epoch, number))
        if found is None:
            start, group = number * self.window, self.group
            samples = self.order.samples(epoch, np.arange(start, min(start + self.window, self.n)))
            lengths = _checked(self.lengths(samples), len(samples))
            whole = len(samples) // group * group
            rows = np.argsort(lengths[:whole], kind="stable").reshape(-1, group)
            rows = rows[Permutation(len(rows), make_key(self.seed, epoch, 5, number))(np.arange(len(rows)))]
            rest = whole + np.argsort(lengths[whole:], kind="stable")
            found = samples.take(np.concatenate([rows.reshape(-1), rest]))
            _keep(self._kept, (epoch, number), found)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """A row of packed samples.

    Attributes:
        samples: the k samples (or pieces of them), in the order of their positions.
        starts: where each begins in the row, and where the last ends: int64 (k + 1,).
        begin: first token that is taken of each: int64 (k,); 0 but for pieces.
    """

    samples: Samples
    starts: Indices
    begin: Indices

    def position_ids(self) -> Indices:
        """Place of every token in its sample's part of the row, from 0: int64 (tokens,)."""
        result: Indices = np.arange(self.starts[-1]) - np.repeat(self.starts[:-1], np.diff(self.starts))
        return result


@dataclass(frozen=True, slots=True, eq=False)
class _Window:
    """A packed window: samples and pieces row after row; ``bounds`` says where each row begins among them."""

    samples: Samples
    taken: Indices
    begin: Indices
    bounds: Indices


class Packing:
    """Samples packed into rows of up to ``capacity`` tokens, the same rows whoever asks for which.

    Args:
        order: what gives the samples.
        lengths: tokens of each of some samples: int64 (n,), 0 or more; a pure function.
        window: samples that are packed together.
        capacity: tokens of a row.
        too_long: of a sample with more tokens than that: ``truncate`` takes the first, ``drop`` none, ``split`` all, in pieces.
        max_samples_per_row: samples or pieces of a row, at most.
        cache: a folder that keeps how many rows each window of an epoch has; needs ``digest``.
        digest: whatever identifies order and lengths (the data set's fingerprint with the order's options).

    Raises:
        OptionError: options that make no sense.
    """

    def __init__(
        self,
        order: Ordered,
        lengths: Lengths,
        window: int,
        capacity: int,
        *,
        too_long: str = "truncate",
        max_samples_per_row: int | None = None,
        seed: int = 0,
        cache: str | os.PathLike[str] | None = None,
        digest: str = "",
    ) -> None:
        if too_long not in TOO_LONG:
            raise OptionError(f"too_long {too_long!r}; there are {', '.join(TOO_LONG)}")
        most = window if max_samples_per_row is None else max_samples_per_row
        if not 1 <= window <= MAX_WINDOW or not 1 <= capacity < 1 << 31 or most < 1:
            raise OptionError(
                f"window {window}, capacity {capacity}, max_samples_per_row {max_samples_per_row}: each must be at least 1, "
                f"the window at most {MAX_WINDOW}, the capacity below 2^31"
            )
        if cache is not None and not digest:
            raise OptionError("a cache without a digest: give what identifies the order and the lengths")
        make_key(seed)
        self.order, self.lengths, self.window, self.capacity, self.seed = order, lengths, window, capacity, seed
        self.too_long, self.max_samples_per_row = too_long, max_samples_per_row
        self._cache, self._digest = None if cache is None else Path(cache), digest
        self._kept: dict[tuple[int, int], _Window] = {}
        self._counts: dict[int, Indices] = {}

    def rows(self, epoch: int) -> int:
        """Rows of an epoch. The first time this packs every window of it, or reads the counts from the cache."""
        return int(self._totals(epoch)[0, -1])

    def efficiency(self, epoch: int) -> float:
        """Tokens of an epoch's rows over the tokens they could hold; 1 where there are no rows."""
        rows, tokens = self._totals(epoch)[:, -1].tolist()
        return tokens / (rows * self.capacity) if rows else 1.0

    def row(self, epoch: int, numbers: Any) -> list[Row]:
        """Some rows (0 to ``rows(epoch)`` - 1) of an epoch, in the order asked for. Raises ``IndexError`` outside those."""
        before = self._totals(epoch)[0]
        given: Indices = np.asarray(numbers, np.int64).reshape(-1)
        if given.size and (given.min() < 0 or given.max() >= before[-1]):
            raise IndexError(f"a row outside the {before[-1]} of epoch {epoch}")
        found: list[Row] = [None] * len(given)  # type: ignore[list-item]
        for number, rows in grouped(np.searchsorted(before, given, side="right") - 1):
            window = self._window(epoch, number)
            count = len(window.bounds) - 1
            order = Permutation(count, make_key(self.seed, epoch, 6, number))(given[rows] - before[number])
            for row, place in zip(rows.tolist(), order.tolist(), strict=True):
                part = slice(int(window.bounds[place]), int(window.bounds[place + 1]))
                starts = np.concatenate([[0], np.cumsum(window.taken[part])])
                found[row] = Row(window.samples.take(part), starts, window.begin[part])
        return found

    def _items(self, epoch: int, number: int) -> tuple[Samples, Indices, Indices, Indices]:
        """Of a window: its samples; and of what is packed, in order: the sample's place, tokens taken and first token."""
        start = number * self.window
        samples = self.order.samples(epoch, np.arange(start, min(start + self.window, self.order.n)))
        lengths, most = _checked(self.lengths(samples), len(samples)), self.capacity
        places = np.arange(len(samples))
        if self.too_long == "split":
            pieces = np.maximum(1, -(-lengths // most))
            places = np.repeat(places, pieces)
            begin = (np.arange(len(places)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * most
            return samples, places, np.minimum(lengths[places] - begin, most), begin
        if self.too_long == "drop":
            places = np.flatnonzero(lengths <= most)
        return samples, places, np.minimum(lengths[places], most), np.zeros(len(places), np.int64)

    def _window(self, epoch: int, number: int) -> _Window:
        found = self._kept.get((epoch, number))
        if found is None:
            samples, places, taken, begin = self._items(epoch, number)
            of, count = pack(taken, self.capacity, self.max_samples_per_row)
            order = np.argsort(of, kind="stable")
            bounds = np.searchsorted(of[order], np.arange(count + 1))
            found = _Window(samples.take(places[order]), taken[order], begin[order], bounds)
            _keep(self._kept, (epoch, number), found)
        return found

    def _totals(self, epoch: int) -> Indices:
        """Rows and tokens of the windows before each: int64 (2, windows + 1)."""
        found = self._counts.get(epoch)
        if found is not None:
            return found
        windows = -(-self.order.n // self.window)
        found = self._read(epoch, windows)
        if found is None:
            found = np.zeros((2, windows + 1), np.int64)
            for number in range(windows):
                taken = self._items(epoch, number)[2]
                found[:, number + 1] = pack(taken, self.capacity, self.max_samples_per_row)[1], taken.sum()
            found = found.cumsum(1)
            self._write(epoch, found)
        _keep(self._counts, epoch, found)
        return found

    def _name(self, epoch: int) -> tuple[str, bytes]:
        """What a cache file is about, as its name and as bytes."""
        about = [2, self._digest, epoch, self.order.n, self.window, self.capacity, self.too_long, self.max_samples_per_row]
        text = json.dumps(about).encode()
        return f"packing-{hashlib.sha256(text).hexdigest()[:32]}", text

    def _read(self, epoch: int, windows: int) -> Indices | None:
        """The counts of an epoch from the cache; ``None`` where there are none or they are damaged."""
        if self._cache is None:
            return None
        name, text = self._name(epoch)
        try:
            data = (self._cache / name).read_bytes()
        except OSError:
            return None
        body, check = data[:-32], data[-32:]
        if len(body) != 16 * (windows + 1) or hashlib.sha256(text + body).digest() != check:
            return None
        return np.frombuffer(body, "<i8").astype(np.int64).reshape(2, -1)

    def _write(self, epoch: int, counts: Indices) -> None:
        """Keeps them. A folder that cannot be written is no error: they are counted again next time."""
        if self._cache is None:
            return
        import tempfile

        name, text = self._name(epoch)
        body = counts.astype("<i8").tobytes()
        try:
            self._cache.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(prefix=name, suffix=".tmp", dir=self._cache)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(body + hashlib.sha256(text + body).digest())
                os.replace(temporary, self._cache / name)
            except OSError:
                os.unlink(temporary)
        except OSError:
            return


def pack(lengths: Indices, capacity: int, most: int | None = None) -> tuple[Indices, int]:
    """Best fit, longest first: the row of every length, int64 (n,), and the number of rows.

    Args:
        lengths: int64 (n,), each from 0 to ``capacity``.
        most: how many a row may have.
    """
    order = np.argsort(-lengths, kind="stable")
    shortest = int(lengths.min()) if len(lengths) else 0
    shift = max(1, len(lengths).bit_length())  # an open row is free << shift | number: the list is sorted by both
    mask = (1 << shift) - 1
    opened: list[int] = []
    held: list[int] = []
    found: list[int] = []
    for length in lengths[order].tolist():
        at = bisect_left(opened, length << shift)
        if at < len(opened):
            chosen = opened.pop(at)
            row, free = chosen & mask, (chosen >> shift) - length
        else:
            row, free = len(held), capacity - length
            held.append(0)
        found.append(row)
        held[row] += 1
        if free >= shortest and held[row] != most:
            insort(opened, free << shift | row)
    rows = np.empty(len(lengths), np.int64)
    rows[order] = found
    return rows, len(held)


def _checked(lengths: Indices, count: int) -> Indices:
    found: Indices = np.asarray(lengths)
    if found.shape != (count,) or found.dtype.kind not in "iu" or (count and found.min() < 0):
        raise OptionError(
            f"lengths of {count} samples are integers of shape ({count},), 0 or more; got {found.dtype} {found.shape}"
        )
    return found.astype(np.int64)


def _keep(kept: dict[Any, Any], key: Any, value: Any) -> None:
    """Remembers a value; all others are forgotten once there are a few."""
    if len(kept) >= _KEPT:
        kept.clear()
    kept[key] = value
