"""What Parquet files and Arrow files have in common as sources: columns, keys, fields, and rows as samples. Needs pyarrow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.types as pt

from lfdata.errors import OptionError, SampleError, SourceError
from shard_builder.fields import GRAMMAR, check_unique
from shard_builder.sources import arrow_features, arrow_values
from shard_builder.sources.base import BadRecord, FieldSpec, RawSample, Record
from shard_builder.sources.common import KEY_COLUMNS, ROW_NUMBER, PlainSource, as_key
from shard_builder.sources.files import show, size_inside

OPTIONS = {
    "root": "<directory that paths in columns are relative to; default: the source's own>",
    "key": f"<column of the keys, or {ROW_NUMBER} for row numbers; default: {', '.join(KEY_COLUMNS)}, else {ROW_NUMBER}>",
    "split": "<name of a split; default: all>",
    "max_file_bytes": "<largest file that a column names, such as 512M; default 4G>",
}
_LISTED = 50

encode_locator = msgspec.msgpack.Encoder().encode
decode_locator = msgspec.msgpack.Decoder(tuple[bytes, int, int, int, int]).decode
"""(file, digest of its head or foot, part: row group or batch, row in it, row in the file)"""


class Columns:
    """The columns of a schema, by name or by a path of names joined by dots into structs."""

    def __init__(self, schema: Any, name: str) -> None:
        self.schema, self.name = schema, name
        try:
            self.names: list[str] = list(schema.names)
            self.types = [arrow_values.plain_type(kind) for kind in schema.types]
        except (UnicodeDecodeError, RecursionError, pa.ArrowException) as error:
            raise SourceError(f"{show(name)}: the schema is damaged: {error}") from None
        twice = [column for column, count in Counter(self.names).items() if count > 1]
        if twice:
            raise SourceError(f"{show(name)}: two columns are named {twice[0]!r}")
        self._by_name = dict(zip(self.names, self.types, strict=True))

    def path_of(self, column: str) -> list[str]:
        """A column as the names from the top to it. Raises :class:`KeyError`."""
        if column in self.names:
            return [column]
        parts = column.split(".")
        for length in range(len(parts) - 1, 0, -1):
            top = ".".join(parts[:length])
            if top in self.names:
                kind = self._by_name[top]
                for part in parts[length:]:
                    place = kind.get_field_index(part) if pt.is_struct(kind) else -1
                    if place < 0:
                        raise KeyError(column)
                    kind = kind.field(place).type
                return [top, *parts[length:]]
        raise KeyError(column)

    def type_of(self, column: str) -> Any:
        """The plain type of a column. Raises :class:`KeyError`."""
        top, *rest = self.path_of(column)
        kind = self._by_name[top]
        for part in rest:
            kind = kind.field(kind.get_field_index(part)).type
        return kind

    def listing(self) -> str:
        """The columns and their types, for messages."""
        more = ", ..." if len(self.names) > _LISTED else ""
        shown = ", ".join(f"{name!r} ({str(self._by_name[name])[:60]})" for name in self.names[:_LISTED])
        return f"its columns: {shown or 'none'}{more}"


class ColumnarSource(PlainSource):
    """Rows of columnar files. A source of this kind gives the first schema, scans files and finds rows."""

    def set_up(self, schema: Any, name: str, fields: Sequence[FieldSpec] | None) -> None:
        """Take the first file's schema: it decides about columns, fields and keys.

        Raises:
            SourceError: a declared column is not there. OptionError: fields that make no sense, or none where they cannot be
            guessed.
        """
        self.columns = Columns(schema, name)
        features = arrow_features.parse_features(schema.metadata, show(name))
        self.classes = arrow_features.class_names(features) if features else {}
        self.key = self._key_column(name)
        if fields is None and features:
            fields = arrow_features.guess({n: f for n, f in features.items() if n in self.columns.names}, self.key, show(name))
        if not fields:
            how = f"say which columns become fields with --field {GRAMMAR}, or --map FILE"
            raise OptionError(f"{show(name)}: {how}; {self.columns.listing()}")
        check_unique(fields)
        self.fields = tuple(fields)
        for spec in self.fields:
            if spec.column == "*" and (spec.kind != "json" or spec.origin != "inline"):
                raise OptionError(f"field {spec.name!r}: '*' (all other columns) can only be of kind json and inline")
            if spec.column != "*":
                try:
                    arrow_values.refuse_unstorable(self.columns.type_of(spec.column), spec.column)
                except KeyError:
                    raise SourceError(
                        f"{show(name)}: field {spec.name!r} needs the column {spec.column!r}; {self.columns.listing()}"
                    ) from None
        used = {self.columns.path_of(spec.column)[0] for spec in self.fields if spec.column != "*"} | {self.key}
        self.rest = [n for n in self.columns.names if n not in used] if any(s.column == "*" for s in self.fields) else []
        self.needed = [n for n in self.columns.names if (n in used and n != self.key) or n in self.rest]
        if self.key in self.columns.names and any(self._top(spec) == self.key for spec in self.fields):
            self.needed.append(self.key)
        self._references = [spec for spec in self.fields if spec.origin == "file" and self._is_text(spec.column)]

    def _top(self, spec: FieldSpec) -> str:
        return "" if spec.column == "*" else self.columns.path_of(spec.column)[0]

    def _is_text(self, column: str) -> bool:
        return bool(pt.is_string(self.columns.type_of(column)))

    def _key_column(self, name: str) -> str:
        key = self._options.text("key")
        if key is None:
            return next((n for n in KEY_COLUMNS if n in self.columns.names and self._is_key(n)), ROW_NUMBER)
        if key != ROW_NUMBER and key not in self.columns.names:
            raise SourceError(f"{show(name)}: no column {key!r} for the keys; {self.columns.listing()}")
        if key != ROW_NUMBER and not self._is_key(key):
            raise OptionError(f"{show(name)}: column {key!r} holds {self.columns.type_of(key)}; keys are texts or integers")
        return key

    def _is_key(self, column: str) -> bool:
        kind = self.columns.type_of(column)
        return bool(pt.is_string(kind) or pt.is_integer(kind) or pt.is_binary(kind))

    def check_schema(self, schema: Any, name: str) -> Columns:
        """Refuse a file whose columns differ from the first file's, as far as they are used. Raises :class:`SourceError`."""
        columns = Columns(schema, name)
        for column in dict.fromkeys([*self.needed, *([self.key] if self.key != ROW_NUMBER else [])]):
            if column not in columns.names:
                raise SourceError(
                    f"{show(name)}: has no column {column!r}, which {show(self.columns.name)} has; {columns.listing()}"
                )
            first, here = self.columns.type_of(column), columns.type_of(column)
            if first != here and not pt.is_null(here) and not pt.is_null(first):
                raise SourceError(
                    f"{show(name)}: column {column!r} holds {here}, in {show(self.columns.name)} {first}; "
                    "make them equal, or convert the files one by one"
                )
        return columns

    def scanned_columns(self) -> list[str]:
        """Columns that the scan reads: the keys, and paths of files."""
        found = [self.columns.path_of(spec.column)[0] for spec in self._references]
        return list(dict.fromkeys([*([self.key] if self.key != ROW_NUMBER else []), *found]))

    def records(self, batch: Any, name: str, digest: int, part: int, first: int, start: int, size: int) -> Iterator[Any]:
        """Records of rows whose scanned columns are in ``batch``.

        Args:
            first: the batch's first row within the part. start: the part's first row within the file. size: bytes a row.
        """
        file = name.encode("utf-8", "surrogateescape")
        for index in range(batch.num_rows):
            row = start + first + index
            try:
                key = (
                    self.row_key(name, row)
                    if self.key == ROW_NUMBER
                    else as_key(self._cell(batch, [self.key], index), self.key)
                )
                more = sum(self._size_of(spec, batch, index) for spec in self._references)
            except SampleError as error:
                where = f"{show(name)}: row {row}"
                reason = f"field {error.field!r}: {error.reason}" if error.field else error.reason
                yield BadRecord(b"", f"{where}: {error.path}" if error.path else where, error.code, reason)
                continue
            yield Record(key, encode_locator((file, digest, part, first + index, row)), size + more)

    def row_key(self, name: str, row: int) -> bytes:
        """The key of a row where no column holds one."""
        number = b"%012d" % row
        return number if self.single else name.encode("utf-8", "surrogateescape") + b"#" + number

    single = True
    """Whether there is one file only."""

    def _cell(self, batch: Any, path: Sequence[str], index: int, kind: str = "") -> Any:
        value = batch.column(batch.schema.get_field_index(path[0]))[index]
        for part in path[1:]:
            while isinstance(value, pa.ExtensionScalar | pa.DictionaryScalar):
                value = value.value
            if value is None or not value.is_valid:
                return None
            value = value[part]
        return arrow_values.take(value, kind)

    def _size_of(self, spec: FieldSpec, batch: Any, index: int) -> int:
        value = self._cell(batch, self.columns.path_of(spec.column), index)
        if value is None:
            return 0
        try:
            return size_inside(self.root, value)
        except SampleError as error:
            error.field = spec.name
            raise

    def place(self, locator: bytes) -> str:
        """File and row."""
        file, _, _, _, row = decode_locator(locator)
        return f"{show(file)}: row {row}"

    def sample(self, batch: Any, index: int, path: str) -> RawSample:
        """The values of one row of a batch. Raises :class:`SampleError`."""
        values: dict[str, Any] = {}
        files: dict[str, str] = {}
        for spec in self.fields:
            try:
                if spec.column == "*":
                    rest = {name: self._cell(batch, [name], index) for name in self.rest}
                    values[spec.name] = {name: value for name, value in rest.items() if value is not None}
                    continue
                value = self._cell(batch, self.columns.path_of(spec.column), index, spec.kind)
            except SampleError as error:
                error.field, error.path = spec.name, path
                raise
            if isinstance(value, Mapping) and spec.origin == "file" and set(value) <= {"bytes", "path"}:
                value = value["bytes"] if value.get("bytes") is not None else value.get("path")
            if value is not None:
                values[spec.name] = self.taken(spec, value, files)
        return RawSample(values, path, files)

    def notes(self) -> dict[str, Any]:
        """Names of classes, by field."""
        names = {spec.name: self.classes[spec.column] for spec in self.fields if spec.column in self.classes}
        return {"class_names": names} if names else {}
