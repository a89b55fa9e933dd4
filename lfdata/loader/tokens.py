"""Sequences of tokens: one after the other, or brought to one length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import lfdata.transforms as T
from lfdata.dataset import Readings, ShardDataset
from lfdata.errors import FormatError, SampleError, StorageError
from lfdata.loader.filler import COUNT, OFFSETS, Errors, Filler, flatten, single
from lfdata.loader.rows import Rows, as_sample_error
from lfdata.loader.slots import Layout
from lfdata.loader.spans import READ


class TokensFiller(Filler):
    """Fixed length: (rows, length) and counts. Otherwise ids one after the other, and offsets."""

    def __init__(self, sources: Sequence[ShardDataset], name: str, rows: int, ops: Sequence[Any]) -> None:
        super().__init__(sources, name, rows)
        self._op = single(ops, T.Tokens, name)
        self._dtype = np.dtype(self._params("dtype"))
        if self._op is not None:
            self._op.declare(T.Declared((None,), self._dtype.name))

    def declare(self, layout: Layout) -> None:
        if self._op is None:
            self._add(layout, "", self._dtype, (self._most("tokens"),), self.name + OFFSETS)
            self._add(layout, OFFSETS, np.int64, (self.rows + 1,))
        else:
            self._add(layout, "", self._dtype, (self.rows, self._op.length))
            self._add(layout, COUNT, np.int64, (self.rows,))
        self._add_present(layout)

    def _ragged_bytes(self, rows: Rows) -> NDArray[np.int64]:
        return self._column(rows, "tokens") * int(self._dtype.itemsize)

    def fill(self, rows: Rows, arrays: dict[str, NDArray[Any]], threads: int) -> Errors:
        del threads
        if self._op is not None and self._fixed(rows, arrays):
            return {}
        found = rows.read(self.name, self._memory)
        self._set_present(arrays, found.present)
        bad = dict(found.bad)
        ids = [
            data.view(self._dtype) if not len(data) % self._dtype.itemsize else data[:0].view(self._dtype)
            for data in found.data
        ]
        lengths = np.array([len(one) for one in ids], np.int64)
        for row in np.flatnonzero(lengths != found.sizes.get("tokens", lengths)).tolist():
            if row not in bad:
                bad[row] = as_sample_error(
                    SampleError("corrupt", "the payload is not as long as the index says"), self.name, rows, row
                )
        if self._op is None:
            flatten(ids, bad, arrays[self.name], arrays[self.name + OFFSETS])
            return bad
        out, counts = arrays[self.name], arrays[self.name + COUNT]
        starts, taken = self._op.place(lengths, lambda operation, count: rows.uniform(f"{self.name}/{operation}", count))
        counts[:] = taken
        out[:] = self._op.pad
        for row, (start, count) in enumerate(zip(starts.tolist(), taken.tolist(), strict=True)):
            if row not in bad:
                at = self._op.length - count if self._op.side == "left" else 0
                out[row, at : at + count] = ids[row][start : start + count]
        return bad

    def start(self, rows: Rows, arrays: dict[str, NDArray[Any]]) -> Readings | None:
        if self._op is None or len(self.sources) > 1 or self._optional:
            return None
        try:
            return self.sources[0].start_read(rows.samples.index, self.name, arrays[self.name].reshape(-1).view(np.uint8))
        except (FormatError, StorageError):
            # Reading it in turn says what it is.
            return None

    def _fixed(self, rows: Rows, arrays: dict[str, NDArray[Any]]) -> bool:
        """The usual case, read in place: every sequence of the one source is as long as asked for."""
        assert self._op is not None
        if len(self.sources) > 1 or self._optional:
            return False
        with rows.spans.stage(READ):
            return self._read_fixed(rows, arrays, self._op.length)

    def _read_fixed(self, rows: Rows, arrays: dict[str, NDArray[Any]], length: int) -> bool:
        out, source, indices = arrays[self.name], self.sources[0], rows.samples.index
        if (reading := rows.started.get(self.name)) is not None and reading.finish():
            arrays[self.name + COUNT][:] = length
            return True
        try:
            if not source.read_into(indices, self.name, out.reshape(-1).view(np.uint8)):
                return False
        except (FormatError, StorageError):
            # Once more, row by row and with another try.
            return False
        arrays[self.name + COUNT][:] = length
        return True
