"""The samples of a job: which rows of which data sets, their stored bytes, and the draws that belong to them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfdata.dataset import Ragged, Readings, ShardDataset
from lfdata.dataset.rows import Memory, scatter
from lfdata.errors import ChangedError, FormatError, RemoteError, SampleError, StorageError, TruncatedError, printable
from lfdata.format.layout import SIZE_ROLES
from lfdata.loader.spans import READ, Spans
from lfdata.order.draws import Draws
from lfdata.order.samples import Samples

EMPTY: Mapping[str, Readings] = {}
# Not a damaged sample: the file is not what it was.
NOT_THE_FILE = (TruncatedError, ChangedError)
GONE = "bring the file back as it was (`shard-builder verify` compares it), and go on from the last state"
TRIES = 3
RETRY_SECONDS = 0.2


@dataclass(slots=True)
class Payloads:
    """Stored bytes of one field.

    Attributes:
        data: one uint8 array a row; empty where absent or unreadable.
        sizes: index columns by role, one element a row.
        present: whether the row has the field.
        bad: rows that could not be read.
    """

    data: Sequence[NDArray[np.uint8]] | Ragged
    sizes: dict[str, NDArray[Any]]
    present: NDArray[np.bool_]
    bad: dict[int, Exception]


class Rows:
    """Rows to fill, in order. ``started``: fields that are being read into their place already; ``turn``: what is needed first is smallest;
    ``spans``: where the time goes; ``anchors``: whose draws are used, where these are frames of windows."""

    def __init__(
        self,
        sources: Sequence[ShardDataset],
        samples: Samples,
        seed: int,
        started: Mapping[str, Readings] = EMPTY,
        turn: int = 0,
        spans: Spans | None = None,
        anchors: Samples | None = None,
    ) -> None:
        self.sources, self.samples, self.seed, self.started, self.turn = sources, samples, seed, started, turn
        self.spans = Spans() if spans is None else spans
        # What a filler keeps between fill() and augment().
        self.kept: dict[str, Any] = {}
        self.anchors = samples if anchors is None else anchors
        self._draws: Draws | None = None

    def __len__(self) -> int:
        return len(self.samples.index)

    def uniform(self, operation: str, count: int) -> NDArray[np.float64]:
        """Draws that belong to the samples: float64 in [0, 1), shape (rows, count)."""
        if self._draws is None:
            self._draws = Draws(self.anchors.epoch, self.anchors.index, self.anchors.occurrence)
        return self._draws.uniform(self.seed, operation, count)

    def take(self, rows: Any) -> Rows:
        """Some of the rows."""
        rows = np.asarray(rows, np.int64)
        samples, anchors = self.samples.take(rows), self.anchors.take(rows)
        return Rows(self.sources, samples, self.seed, turn=self.turn, spans=self.spans, anchors=anchors)

    def without(self, rows: Sequence[int]) -> Rows:
        """The same number of rows, with another sample in place of some: the first that is none of them."""
        if not rows:
            return self
        other = next((row for row in range(len(self)) if row not in rows), None)
        stand_in = np.arange(len(self))
        if other is None:
            return self.take(stand_in[:0])
        stand_in[list(rows)] = other
        return self.take(stand_in)

    def by_source(self) -> list[tuple[int, NDArray[np.int64]]]:
        """Sources that occur, with the rows that are theirs."""
        if len(self.sources) == 1:
            return [(0, np.arange(len(self)))]
        return [(int(number), np.flatnonzero(self.samples.source == number)) for number in np.unique(self.samples.source)]

    def where(self, row: int) -> tuple[str, int, bytes, str]:
        """Shard, index, key and source of a row, for messages."""
        dataset, index = self.sources[int(self.samples.source[row])], int(self.samples.index[row])
        shard = dataset.shard_name(index)
        try:
            key = dataset.keys([index])[0]
        except (FormatError, StorageError):
            key = b""
        return shard, index, key, printable(str(dataset.path))

    def read(self, field: str, memory: Memory | None = None) -> Payloads:
        """Stored bytes of a field, checked. A row whose bytes are damaged is in ``bad``. ``memory``: may be taken for them.

        Raises:
            StorageError: reading failed, three times.
        """
        with self.spans.stage(READ):
            sources = self.by_source()
            parts = [
                (where, self._read_source(number, field, where, memory if len(sources) == 1 else None))
                for number, where in sources
            ]
        if len(parts) == 1:
            return parts[0][1]
        data = [np.empty(0, np.uint8)] * len(self)
        whole = Payloads(data, {}, np.zeros(len(self), bool), {})
        for where, part in parts:
            whole.present[where] = part.present
            for place, payload in zip(where.tolist(), part.data, strict=True):
                data[place] = payload
            scatter(part.sizes, where, len(self), whole.sizes)
            whole.bad.update({int(where[row]): error for row, error in part.bad.items()})
        return whole

    def _read_source(self, number: int, field: str, where: NDArray[np.int64], memory: Memory | None) -> Payloads:
        dataset, indices = self.sources[number], self.samples.index[where]
        try:
            if memory is None:
                ragged = retried(lambda: dataset.read_many(indices, [field], decode=False)[field])
            else:
                ragged = retried(lambda: dataset.read_stored(indices, field, memory))
            sizes = retried(lambda: dataset.sizes(field, indices))
        except FormatError:
            return self._one_by_one(dataset, field, indices)
        return Payloads(ragged, sizes, ragged.present, {})

    def _one_by_one(self, dataset: ShardDataset, field: str, indices: NDArray[np.int64]) -> Payloads:
        """After damage was met: which rows have it."""
        roles = [role for role in SIZE_ROLES[dataset.schema[field].kind] if role not in ("bytes", "value", "dims")]
        sizes: dict[str, NDArray[Any]] = {role: np.zeros(len(indices), np.int64) for role in roles}
        data = [np.empty(0, np.uint8)] * len(indices)
        found = Payloads(data, sizes, np.zeros(len(indices), bool), {})
        for row, index in enumerate(indices.tolist()):
            one = [index]
            try:
                ragged = retried(lambda one=one: dataset.read_many(one, [field], decode=False)[field])
                sizes = retried(lambda one=one: dataset.sizes(field, one))
            except FormatError as error:
                if isinstance(error, NOT_THE_FILE):
                    raise
                found.bad[row] = error
                continue
            data[row], found.present[row] = ragged[0], ragged.present[0]
            scatter(sizes, [row], len(indices), found.sizes)
        return found


def retried(call: Any) -> Any:
    """The call's result; storage errors are tried again."""
    for attempt in range(1, TRIES + 1):
        try:
            return call()
        except StorageError as error:
            # A server was asked again already, until the deadline.
            if attempt == TRIES or isinstance(error, RemoteError):
                raise
            time.sleep(RETRY_SECONDS * attempt)
    raise AssertionError


def as_sample_error(error: Exception, field: str, rows: Rows, row: int) -> Exception:
    """The error with its place filled in."""
    if isinstance(error, SampleError):
        shard, index, key, path = rows.where(row)
        error.field, error.key, error.path = field, key, f"{path}/{shard}, index {index}"
    return error


def named(error: Exception, field: str, rows: Rows, row: int) -> Exception:
    """The error that stops a run: damage of a file as what it is, with the sample it hit."""
    if not isinstance(error, FormatError):
        return as_sample_error(error, field, rows, row)
    _, index, key, _ = rows.where(row)
    return type(error)(error.file, error.offset, f"{error.reason} (index {index}, key {key!r}, field {field!r})")


def lost(error: Exception, field: str, rows: Rows) -> Exception:
    """The error of a file that is not what it was, or cannot be read, with the first of the samples that it keeps from being read."""
    if isinstance(error, RemoteError):
        return error
    for row in range(len(rows)):
        dataset, index = rows.sources[int(rows.samples.source[row])], int(rows.samples.index[row])
        try:
            dataset.read_many([index], [field], decode=False)
        except (*NOT_THE_FILE, StorageError):
            shard, index, key, _ = rows.where(row)
            name = f", key {key!r}" if key else ", its key cannot be read either"
            place = f"{shard}, index {index}{name}, field {field!r}: {GONE}"
            if isinstance(error, FormatError):
                return type(error)(error.file, error.offset, f"{error.reason} ({place})")
            if isinstance(error, StorageError):
                return type(error)(error.path, error.operation, error.errno, f"{error.reason} ({place})")
    return error
