"""Export to Parquet: one column a field, and ``__key__``.

text and json are strings (json as its text), bytes, images (a file) and audio (a WAV file) are binary, scalars are numbers, token ids and
one-dimensional arrays are lists of numbers; other arrays are ``.npy`` files in binary. An absent value is null. The schema's metadata say what
each field was.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from lfdata.codecs.base import Encoded
from lfdata.errors import MissingExtraError, SampleError
from lfdata.format.meta import FieldMeta
from shard_builder.sinks.base import ExportOptions
from shard_builder.sinks.values import FileForms, npy, tokens, wav

KEY_COLUMN = "__key__"
METADATA = b"lfdata"
_MAX_CELL = (1 << 31) - 1  # what one cell of Arrow's common types can hold
_MAX_GROUP_ROWS = 1 << 20


def _pyarrow() -> tuple[Any, Any]:
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise MissingExtraError("export to Parquet needs pyarrow: pip install 'lfdata[arrow]'") from error


class ParquetSink:
    """See :class:`shard_builder.sinks.base.Sink`. Raises :class:`MissingExtraError` without pyarrow."""

    suffix = ".parquet"

    def __init__(self, fields: Sequence[FieldMeta], options: ExportOptions) -> None:
        self.arrow, self.parquet = _pyarrow()
        self._fields = tuple(fields)
        self._options = options
        columns = [self.arrow.field(KEY_COLUMN, self.arrow.binary(), nullable=False)]
        columns += [self.arrow.field(field.name, self._type(field)) for field in fields]
        about = msgspec.json.encode({"fields": msgspec.to_builtins(self._fields)}, order="sorted")
        self.schema = self.arrow.schema(columns, metadata={METADATA: about})
        # Images and recordings are compressed already, or by nothing that is general; what is text is worth it.
        self.compression = {
            column.name: "none" if item is not None and item.kind in ("image", "bytes") else "zstd"
            for column, item in zip(columns, (None, *fields), strict=True)
        }

    def _type(self, field: FieldMeta) -> Any:
        arrow = self.arrow
        match field.kind:
            case "text" | "json":
                return arrow.string()
            case "scalar":
                return self._number(field)
            case "tokens":
                return arrow.list_(self._number(field))
            case "array" if int(field.params["ndim"]) == 1:
                return arrow.list_(self._number(field))
        return arrow.binary()

    def _number(self, field: FieldMeta) -> Any:
        return self.arrow.from_numpy_dtype(np.dtype(str(field.params["dtype"])))

    def open(self, output: Any) -> ParquetWriter:
        """See :class:`shard_builder.sinks.base.Sink`."""
        return ParquetWriter(self, output, self._fields, self._options)

    def row_overhead(self) -> int:
        """Levels and offsets."""
        return 8 * (1 + len(self._fields))

    def describe(self) -> list[dict[str, Any]]:
        """The column type of each field."""
        return [{"name": f.name, "kind": f.kind, "type": str(self.schema.field(f.name).type)} for f in self._fields]


class _Stream:
    """What pyarrow writes to."""

    closed = False
    dead = False

    def __init__(self, output: Any) -> None:
        self._output = output

    def write(self, data: Any) -> int:
        if not self.dead:
            self._output.write(memoryview(data))
        return len(data)

    def tell(self) -> int:
        return int(self._output.position)

    def flush(self) -> None:
        """Nothing is held back."""

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False

    def close(self) -> None:
        self.closed = True


class ParquetWriter:
    """Writes one file, a row group at a time."""

    def __init__(self, sink: ParquetSink, output: Any, fields: Sequence[FieldMeta], options: ExportOptions) -> None:
        self._sink, self._fields = sink, tuple(fields)
        self._limit = options.row_group_bytes
        self.forms = FileForms(options.raw_images)
        self._stream = _Stream(output)
        self._writer = sink.parquet.ParquetWriter(
            self._stream, sink.schema, compression=sink.compression, use_dictionary=False, write_statistics=True
        )
        self._keys: list[bytes] = []
        self._columns: dict[str, list[Any]] = {field.name: [] for field in fields}
        self._bytes = 0

    def add(self, key: bytes, fields: Mapping[str, FieldMeta], values: Mapping[str, Encoded]) -> None:
        """See :class:`shard_builder.sinks.base.Writer`."""
        cells: dict[str, Any] = {}
        for field in fields.values():
            value = values.get(field.name)
            try:
                cells[field.name] = cell = None if value is None else self._cell(field, value)
                if isinstance(cell, bytes | memoryview) and len(cell) > _MAX_CELL:
                    raise SampleError("too-large", f"{len(cell)} bytes; a cell holds at most {_MAX_CELL}")
            except SampleError as error:
                error.field = field.name
                raise
        incoming = len(key) + sum(_size(cell) for cell in cells.values())
        if self._keys and (self._bytes + incoming > self._limit or len(self._keys) >= _MAX_GROUP_ROWS):
            self._flush()
        self._bytes += incoming
        self._keys.append(key)
        for name, cell in cells.items():
            self._columns[name].append(cell)

    def _cell(self, field: FieldMeta, value: Encoded) -> Any:
        match field.kind:
            case "image":
                return bytes(self.forms.image(field, value)[1])
            case "audio":
                return wav(value)
            case "json":
                return self.forms.json(field, value)
            case "tokens":
                return tokens(field, value).copy()
            case "array":
                array = self.forms.decode(field, value)
                return array if array.ndim == 1 else npy(array)
            case "scalar":
                return np.frombuffer(value.payload, np.dtype(field.params["dtype"]).newbyteorder("<"))[0]
            case "text":
                return _valid(bytes(value.payload))
        return bytes(value.payload)

    def _flush(self) -> None:
        arrow = self._sink.arrow
        arrays = [arrow.array(self._keys, arrow.binary())]
        for field in self._fields:
            arrays.append(self._array(field, self._columns[field.name]))
            self._columns[field.name] = []  # let go before the next column is copied
        self._keys, self._bytes = [], 0
        self._writer.write_batch(arrow.RecordBatch.from_arrays(arrays, schema=self._sink.schema))

    def _array(self, field: FieldMeta, cells: list[Any]) -> Any:
        arrow, type_ = self._sink.arrow, self._sink.schema.field(field.name).type
        mask = np.array([cell is None for cell in cells], bool)
        if field.kind == "scalar":
            dtype = np.dtype(str(field.params["dtype"]))
            filled = np.array([dtype.type(0) if cell is None else cell for cell in cells], dtype)
            return arrow.array(filled, type_, mask=mask)
        if arrow.types.is_list(type_):
            dtype = np.dtype(str(field.params["dtype"]))
            lengths = np.array([0 if cell is None else len(cell) for cell in cells], np.int64)
            parts = [cell for cell in cells if cell is not None]
            flat = np.concatenate(parts).astype(dtype, copy=False) if parts else np.empty(0, dtype)
            offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
            marks = arrow.array(mask) if mask.any() else None
            return arrow.ListArray.from_arrays(
                arrow.array(offsets), arrow.array(flat, type_.value_type), type=type_, mask=marks
            )
        return arrow.array(cells, arrow.binary()).cast(type_)

    def finish(self) -> None:
        """The last row group, and the footer."""
        if self._keys:
            self._flush()
        self._writer.close()

    def abandon(self) -> None:
        """pyarrow writes a footer whenever its writer goes: let it go into nothing."""
        self._stream.dead = True
        with contextlib.suppress(Exception):
            self._writer.close()


def _size(cell: Any) -> int:
    return 1 if cell is None else int(cell.nbytes) if isinstance(cell, np.ndarray | np.generic) else len(cell)


def _valid(text: bytes) -> bytes:
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SampleError("utf8", f"not UTF-8 at byte {error.start}") from None
    return text
