"""A filler for each kind of field; those of pictures, recordings, tokens and windows have modules of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

import lfdata.transforms as T
from lfdata.dataset import ShardDataset
from lfdata.dataset.windows import fixed_shape, read_arrays_into
from lfdata.errors import FormatError, OptionError, SampleError, StorageError
from lfdata.format.columns import scalar_dtype
from lfdata.loader.audio import AudioFiller
from lfdata.loader.filler import (
    OFFSETS,
    PRESENT,
    SHAPES,
    Errors,
    Filler,
    flatten,
    refuse,
)
from lfdata.loader.images import ImageFiller
from lfdata.loader.rows import Rows, as_sample_error, retried
from lfdata.loader.slots import Layout
from lfdata.loader.spans import AUGMENT, READ
from lfdata.loader.tokens import TokensFiller
from lfdata.loader.windows import WindowFiller
from lfdata.transforms.user import watching_for_ctrl_c


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
            with rows.spans.stage(AUGMENT), watching_for_ctrl_c():
                return self._scalars(rows, arrays, one)
        found = rows.read(self.name)
        self._set_present(arrays, found.present)
        out[~found.present] = 0
        with watching_for_ctrl_c():
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
    sources: Sequence[ShardDataset],
    name: str,
    ops: Sequence[Any],
    rows: int,
    native: bool | None,
    repeats: int = 1,
    stored: bool = False,
) -> Filler:
    """The filler of a field with its transforms, for rows of which up to ``repeats`` may be one sample; ``stored``: its JPEGs are not decoded.

    Raises:
        OptionError: kinds that differ, transforms that do not fit.
    """
    filler: Filler
    if stored:
        # A decoder process that starts is waited for, and most have no use for it.
        from lfdata.loader.stored import StoredImages

        filler = StoredImages(sources, name, rows, ops, native)
    elif ops and isinstance(ops[0], T.Window):
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
