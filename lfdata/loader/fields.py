"""A filler for each kind of field."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

import lfdata.transforms as T
from lfdata.dataset import Readings, ShardDataset
from lfdata.dataset.windows import fixed_shape, read_arrays_into
from lfdata.errors import FormatError, OptionError, SampleError, StorageError
from lfdata.format.columns import scalar_dtype
from lfdata.loader.filler import (
    COUNT,
    OFFSETS,
    PRESENT,
    SHAPES,
    Errors,
    Filler,
    flatten,
    refuse,
    single,
)
from lfdata.loader.images import ImageFiller
from lfdata.loader.rows import NOT_THE_FILE, Rows, as_sample_error, retried
from lfdata.loader.slots import Layout
from lfdata.loader.spans import AUGMENT, DECODE, READ
from lfdata.loader.windows import WindowFiller


class ScalarFiller(Filler):
    """(rows,), the field's dtype."""

    def declare(self, layout: Layout) -> None:
        self._dtype = scalar_dtype(self.sources[0].schema[self.name])
        self._params("dtype")
        self._add(layout, "", self._dtype.newbyteorder("="), (self.rows,))
        self._add_present(layout)

    def fill(self, rows: Rows, arrays: dict[str, NDArray[Any]], threads: int) -> Errors:
        del threads
        with rows.spans.stage(READ):
            for number, where in rows.by_source():
                source, indices = self.sources[number], rows.samples.index[where]
                arrays[self.name][where] = retried(partial(source.read_many, indices, [self.name], decode=False))[self.name]
                if self._optional:
                    arrays[self.name + PRESENT][where] = retried(partial(source.present_at, self.name, indices))
        return {}


class TokensFiller(Filler):
    """Fixed length: (rows, length) and counts. Otherwise ids one after the other, and offsets."""

    def __init__(self, sources: Sequence[ShardDataset], name: str, rows: int, ops: Sequence[Any]) -> None:
        super().__init__(sources, name, rows)
        self._op = single(ops, T.Tokens, name)
        self._dtype = np.dtype(self._params("dtype"))

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


class AudioFiller(Filler):
    """A window: (rows, frames, channels) int16 and counts. Otherwise samples one after the other, offsets, and shapes (frames, channels)."""

    def __init__(self, sources: Sequence[ShardDataset], name: str, rows: int, ops: Sequence[Any]) -> None:
        super().__init__(sources, name, rows)
        self._window = next((op for op in ops if isinstance(op, T.AudioWindow)), None)
        self._gains = [(place, op) for place, op in enumerate(ops) if isinstance(op, T.Gain)]
        if len(self._gains) + (self._window is not None) != len(ops):
            raise OptionError(f"field {name!r}: audio takes one AudioWindow and Gain, not {[type(op).__name__ for op in ops]}")
        self._channels = 0
        if self._window is not None:
            channels = np.unique(
                np.concatenate([source.column(f"{name}.channels")[source.present(name)] for source in sources])
            )
            if len(channels) > 1:
                raise OptionError(
                    f"field {name!r}: recordings of {channels.tolist()} channels; convert with channels=mono for windows"
                )
            self._channels = int(channels[0]) if len(channels) else 1

    def declare(self, layout: Layout) -> None:
        if self._window is None:
            self._add(layout, "", np.int16, (self._most("bytes") // 2,), self.name + OFFSETS)
            self._add(layout, OFFSETS, np.int64, (self.rows + 1,))
            self._add(layout, SHAPES, np.int64, (self.rows, 2))
        else:
            self._add(layout, "", np.int16, (self.rows, self._window.frames, self._channels))
            self._add(layout, COUNT, np.int64, (self.rows,))
        self._add_present(layout)

    def _ragged_bytes(self, rows: Rows) -> NDArray[np.int64]:
        return self._column(rows, "bytes")

    def fill(self, rows: Rows, arrays: dict[str, NDArray[Any]], threads: int) -> Errors:
        del threads
        if self._window is not None:
            with rows.spans.stage(DECODE):
                return self._windows(rows, arrays, self._window)
        found = rows.read(self.name, self._memory)
        self._set_present(arrays, found.present)
        shapes, values = arrays[self.name + SHAPES], [np.empty(0, np.int16)] * len(rows)
        shapes[:] = 0

        def one(row: int, audio: Any) -> None:
            values[row] = audio.samples.reshape(-1)
            shapes[row] = audio.samples.shape

        bad = self._decoder_calls(rows, found, one)
        flatten(values, bad, arrays[self.name], arrays[self.name + OFFSETS])
        offsets = arrays[self.name + OFFSETS]
        for place, gain in self._gains:
            u = rows.uniform(f"{self.name}/{place}/Gain", gain.draws)
            for row in range(len(rows)):
                gain.apply(arrays[self.name][offsets[row] : offsets[row + 1]], u[row])
        return bad

    def _windows(self, rows: Rows, arrays: dict[str, NDArray[Any]], window: Any) -> Errors:
        """Only the chunks that cover each window are read and checked."""
        out, counts = arrays[self.name], arrays[self.name + COUNT]
        bad: Errors = {}
        lengths = np.zeros(len(rows), np.int64)
        present = np.zeros(len(rows), bool)
        for number, where in rows.by_source():
            source, indices = self.sources[number], rows.samples.index[where]
            lengths[where] = retried(partial(source.sizes, self.name, indices))["frames"]
            present[where] = retried(partial(source.present_at, self.name, indices))
        self._set_present(arrays, present)
        starts, taken = window.window(lengths, lambda operation, count: rows.uniform(f"{self.name}/{operation}", count))
        counts[:] = taken
        for row, (start, count) in enumerate(zip(starts.tolist(), taken.tolist(), strict=True)):
            source = self.sources[int(rows.samples.source[row])]
            try:
                if count:
                    read = partial(source.read_audio, int(rows.samples.index[row]), self.name, start, start + count)
                    out[row, :count] = retried(read)
                out[row, count:] = window.pad
            except NOT_THE_FILE:
                raise
            except (FormatError, SampleError, ValueError) as error:
                bad[row] = as_sample_error(error, self.name, rows, row)
        for place, gain in self._gains:
            u = rows.uniform(f"{self.name}/{place}/Gain", gain.draws)
            for row in range(len(rows)):
                gain.apply(out[row], u[row])
        return bad


class ArrayFiller(Filler):
    """A declared shape without ``*``: (rows, *shape). Otherwise values one after the other, offsets, and shapes."""

    def __init__(self, sources: Sequence[ShardDataset], name: str, rows: int, ops: Sequence[Any]) -> None:
        super().__init__(sources, name, rows)
        refuse(ops, name)
        self._dtype = scalar_dtype(sources[0].schema[name])
        self._params("dtype")
        self._ndim = int(self._params("ndim"))
        self._shape = fixed_shape({"shape": self._params("shape")})

    def declare(self, layout: Layout) -> None:
        dtype = self._dtype.newbyteorder("=")
        if self._shape is not None:
            self._add(layout, "", dtype, (self.rows, *self._shape))
        else:
            self._add(layout, "", dtype, (self._most("bytes") // dtype.itemsize,), self.name + OFFSETS)
            self._add(layout, OFFSETS, np.int64, (self.rows + 1,))
            self._add(layout, SHAPES, np.int64, (self.rows, self._ndim))
        self._add_present(layout)

    def _ragged_bytes(self, rows: Rows) -> NDArray[np.int64]:
        return self._column(rows, "bytes")

    def fill(self, rows: Rows, arrays: dict[str, NDArray[Any]], threads: int) -> Errors:
        del threads
        if self._read_fixed(rows, arrays):
            return {}
        found = rows.read(self.name, self._memory)
        self._set_present(arrays, found.present)
        if self._shape is not None:
            arrays[self.name][~found.present] = 0

            def put(row: int, value: Any) -> None:
                arrays[self.name][row] = value

            return self._decoder_calls(rows, found, put)
        shapes, values = arrays[self.name + SHAPES], [np.empty(0, self._dtype)] * len(rows)
        shapes[:] = 0

        def one(row: int, value: Any) -> None:
            values[row] = value.reshape(-1)
            shapes[row] = value.shape

        bad = self._decoder_calls(rows, found, one)
        flatten(values, bad, arrays[self.name], arrays[self.name + OFFSETS])
        return bad

    def _read_fixed(self, rows: Rows, arrays: dict[str, NDArray[Any]]) -> bool:
        """The usual case, read in place: every array of the one source is there and as declared."""
        if self._shape is None or len(self.sources) > 1 or self._optional:
            return False
        with rows.spans.stage(READ):
            try:
                return read_arrays_into(self.sources[0], self.name, rows.samples.index, arrays[self.name])
            except (FormatError, StorageError):
                # Once more, row by row and with another try.
                return False


class BytesFiller(Filler):
    """Text as UTF-8, bytes, and structured values as MessagePack: uint8 values one after the other, and offsets."""

    def __init__(self, sources: Sequence[ShardDataset], name: str, rows: int, ops: Sequence[Any]) -> None:
        super().__init__(sources, name, rows)
        refuse(ops, name)
        self._packed = sources[0].schema[name].kind == "json"

    def declare(self, layout: Layout) -> None:
        self._add(layout, "", np.uint8, (self._most("raw_bytes" if self._packed else "bytes"),), self.name + OFFSETS)
        self._add(layout, OFFSETS, np.int64, (self.rows + 1,))
        self._add_present(layout)

    def _ragged_bytes(self, rows: Rows) -> NDArray[np.int64]:
        return self._column(rows, "raw_bytes" if self._packed else "bytes")

    def fill(self, rows: Rows, arrays: dict[str, NDArray[Any]], threads: int) -> Errors:
        del threads
        found = rows.read(self.name, self._memory)
        self._set_present(arrays, found.present)
        bad, values = dict(found.bad), list(found.data)
        if self._packed:
            values = [np.empty(0, np.uint8)] * len(rows)
            for row in np.flatnonzero(found.present).tolist():
                source = self.sources[int(rows.samples.source[row])]
                decoder = source.decoder(self.name, int(rows.samples.index[row]))
                try:
                    raw = decoder.messagepack(found.data[row].data, {"raw_bytes": found.sizes["raw_bytes"][row]})
                    values[row] = np.frombuffer(raw, np.uint8)
                except SampleError as error:
                    bad[row] = as_sample_error(error, self.name, rows, row)
        flatten(values, bad, arrays[self.name], arrays[self.name + OFFSETS])
        return bad


class MapFiller(Filler):
    """A user's function of the decoded value: (rows, *shape)."""

    def __init__(self, sources: Sequence[ShardDataset], name: str, rows: int, op: Any) -> None:
        super().__init__(sources, name, rows)
        self.calls_user = True
        self._op = op
        op.resolve()

    def declare(self, layout: Layout) -> None:
        self._add(layout, "", np.dtype(self._op.dtype), (self.rows, *self._op.shape))
        self._add_present(layout)

    def fill(self, rows: Rows, arrays: dict[str, NDArray[Any]], threads: int) -> Errors:
        del threads
        out, draws = arrays[self.name], rows.uniform(f"{self.name}/0/Map", self._op.draws)

        def one(row: int, value: Any) -> None:
            out[row] = self._op.apply(value, draws[row])

        if self.sources[0].schema[self.name].kind == "scalar":
            with rows.spans.stage(AUGMENT):
                return self._scalars(rows, arrays, one)
        found = rows.read(self.name)
        self._set_present(arrays, found.present)
        out[~found.present] = 0
        return self._decoder_calls(rows, found, one, AUGMENT)

    def _scalars(self, rows: Rows, arrays: dict[str, NDArray[Any]], one: Callable[[int, Any], None]) -> Errors:
        """Scalars lie in the index: they have no payload and no decoder."""
        bad: Errors = {}
        present = np.ones(len(rows), bool)
        for number, where in rows.by_source():
            source, indices = self.sources[number], rows.samples.index[where]
            present[where] = retried(partial(source.present_at, self.name, indices))
            values = retried(partial(source.read_many, indices, [self.name], decode=False))[self.name]
            for row, value in zip(where.tolist(), values, strict=True):
                if not present[row]:
                    arrays[self.name][row] = 0
                    continue
                try:
                    one(row, value)
                except SampleError as error:
                    bad[row] = as_sample_error(error, self.name, rows, row)
        self._set_present(arrays, present)
        return bad


def plain(filler: Filler) -> bool:
    """Whether a field's values are copied rather than decoded."""
    return isinstance(filler.inner if isinstance(filler, WindowFiller) else filler, ScalarFiller | TokensFiller)


def make_filler(
    sources: Sequence[ShardDataset], name: str, ops: Sequence[Any], rows: int, native: bool | None, repeats: int = 1
) -> Filler:
    """The filler of a field with its transforms, for rows of which up to ``repeats`` may be one sample.

    Raises:
        OptionError: kinds that differ, transforms that do not fit.
    """
    filler: Filler
    if ops and isinstance(ops[0], T.Window):
        make = partial(_filler, sources, name, list(ops[1:]), native=native)
        filler = WindowFiller(sources, name, rows, ops[0], lambda count: make(rows=count))
    else:
        filler = _filler(sources, name, ops, rows, native)
    filler.repeats = repeats
    return filler


def _filler(sources: Sequence[ShardDataset], name: str, ops: Sequence[Any], rows: int, native: bool | None) -> Filler:
    if any(isinstance(op, T.Window) for op in ops):
        raise OptionError(f"field {name!r}: one Window, and first among the field's transforms")
    kinds = {source.schema[name].kind for source in sources}
    if len(kinds) > 1:
        raise OptionError(f"field {name!r} is of kinds {sorted(kinds)} in different sources")
    kind = kinds.pop()
    if len(ops) == 1 and isinstance(ops[0], T.Map):
        return MapFiller(sources, name, rows, ops[0])
    match kind:
        case "image":
            return ImageFiller(sources, name, rows, ops, native)
        case "tokens":
            return TokensFiller(sources, name, rows, ops)
        case "audio":
            return AudioFiller(sources, name, rows, ops)
        case "array":
            return ArrayFiller(sources, name, rows, ops)
        case "scalar":
            refuse(ops, name)
            return ScalarFiller(sources, name, rows)
    return BytesFiller(sources, name, rows, ops)
