"""Source: a JSONL, CSV or TSV file whose columns become fields: inline values, base64, or files named by a column."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from lfdata.errors import OptionError, SampleError, SourceError
from shard_builder.fields import GRAMMAR, check_unique
from shard_builder.sources.base import BadRecord, FieldSpec, RawSample, Record
from shard_builder.sources.common import KEY_COLUMNS, ROW_NUMBER, from_base64, reference
from shard_builder.sources.files import MAX_FILE_BYTES, read_file, show, size_inside
from shard_builder.sources.options import SourceOptions
from shard_builder.sources.rows import (
    MAX_LINE_BYTES,
    CsvFormat,
    CsvRows,
    Row,
    json_rows,
    open_table,
    parse_json_row,
    without_mark,
)

_FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".tsv": "tsv"}
_VALID = {
    "root": "<directory that file references are relative to; default: the table's own>",
    "key": f"<column of the keys, or {ROW_NUMBER} for row numbers; default: {', '.join(KEY_COLUMNS)}, else {ROW_NUMBER}>",
    "format": "jsonl|csv|tsv",
    "delimiter": "<one character; default: by format>",
    "quotes": "yes|no",
    "empty": "absent|keep",
    "max_line_bytes": "<largest row, such as 64M>",
    "max_file_bytes": "<largest referenced file, such as 512M; default 4G>",
}
_LISTED = 50

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[int, int, int, int]).decode
_decode_raw = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class Table:
    """Rows of a ``.jsonl``/``.ndjson``, ``.csv`` or ``.tsv`` file, in its order.

    Options (text): ``root``: directory that file references are relative to (default: the file's own); ``key``: the column that
    holds keys, or ``#`` for the row number as 12 digits (default: key, __key__ or id if the first row has one, else ``#``);
    ``format``, ``delimiter``, ``quotes`` (``no``: a quote is a character like any other), ``max_line_bytes``,
    ``max_file_bytes``. A column that is missing or null leaves the field absent, and so does an empty one in CSV unless
    ``empty=keep``. The column ``*`` is the whole row less the key and the columns that other fields use.

    Raises:
        SourceError: at once for a file that cannot be read, a bad header, or a declared column that the header lacks.
        OptionError: fields or options that make no sense; the message lists the columns there are.
    """

    kind = "table"

    def __init__(
        self, location: str, fields: Sequence[FieldSpec] | None = None, stage_dir: Path | None = None, **options: str
    ) -> None:
        del stage_dir
        self._options = reader = SourceOptions(self.kind, options, _VALID)
        self.path = Path(os.path.abspath(location))
        self.name = self.path.name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        self._format = self._which_format()
        self._style = self._csv_format()
        self._keep_empty = reader.choice("empty", ("absent", "keep"), "absent") == "keep"
        self._max_line = reader.size("max_line_bytes", MAX_LINE_BYTES, 1 << 30)
        self._max_file = reader.size("max_file_bytes", MAX_FILE_BYTES)
        self.root = Path(os.path.abspath(reader.text("root") or self.path.parent))
        if not self.root.is_dir():
            raise SourceError(f"{self.root}: the root of file references is not a directory")
        self._columns = self._first_columns()
        self.fields: Sequence[FieldSpec] = self._checked(fields)
        self._key = self._key_column()
        self._rest_excludes = {spec.column for spec in self.fields} | {self._key}
        self._present: Counter[str] = Counter()
        self._descriptor = -1
        # Files of the row being loaded, by field: for error reports.
        self._files: dict[str, str] = {}

    def __del__(self) -> None:
        descriptor, self._descriptor = getattr(self, "_descriptor", -1), -1
        if descriptor >= 0:
            os.close(descriptor)

    # -- what it is ---------------------------------------------------------------------------------------------------

    def _which_format(self) -> str:
        by_name = _FORMATS.get(self.path.suffix.lower())
        if by_name is None and self._options.text("format") is None:
            raise OptionError(f"{self.name}: say its format with the source option format=jsonl|csv|tsv")
        return self._options.choice("format", ("jsonl", "csv", "tsv"), by_name or "")

    def _csv_format(self) -> CsvFormat:
        delimiter = self._options.text("delimiter") or ("\t" if self._format == "tsv" else ",")
        delimiter = {"\\t": "\t", "tab": "\t"}.get(delimiter, delimiter)
        if len(delimiter) != 1 or delimiter in '"\r\n':
            raise self._options.bad("delimiter")
        return CsvFormat(delimiter, self._options.flag("quotes", True))

    def _first_columns(self) -> list[str]:
        """Columns of the header, or of the first good row among the first hundred."""
        with open_table(self.path) as file:
            if self._format != "jsonl":
                return CsvRows(file, self.name, self._style, self._max_line).columns
            for row in json_rows(file, self._max_line):
                if row.values is not None:
                    return list(row.values)
                if row.number >= 100:
                    break
        return []

    def _listing(self) -> str:
        more = ", ..." if len(self._columns) > _LISTED else ""
        return f"its columns: {', '.join(map(repr, self._columns[:_LISTED])) or 'none'}{more}"

    def _checked(self, fields: Sequence[FieldSpec] | None) -> tuple[FieldSpec, ...]:
        if not fields:
            how = f"say which columns become fields with --field {GRAMMAR}, or --map FILE"
            raise OptionError(f"{self.name}: {how}; {self._listing()}")
        check_unique(fields)
        for spec in fields:
            if spec.column == "*" and (spec.kind != "json" or spec.origin != "inline"):
                raise OptionError(f"field {spec.name!r}: '*' (all other columns) can only be of kind json and inline")
            if self._format != "jsonl" and self._columns and spec.column not in ("*", *self._columns):
                raise SourceError(f"{self.name}: field {spec.name!r} needs the column {spec.column!r}; {self._listing()}")
        return tuple(fields)

    def _key_column(self) -> str:
        asked = self._options.text("key")
        if asked is None:
            return next((name for name in KEY_COLUMNS if name in self._columns), ROW_NUMBER)
        if self._columns and asked not in (ROW_NUMBER, *self._columns):
            raise SourceError(f"{self.name}: no key column {asked!r}; {self._listing()}")
        return asked

    # -- plan pass ----------------------------------------------------------------------------------------------------

    def scan(self) -> Iterator[Record | BadRecord]:
        """Every row. Raises :class:`SourceError` at the end if a declared column is in no row."""
        self._present.clear()
        missing = {spec.column for spec in self.fields} - {"*"}
        good = 0
        with open_table(self.path) as file:
            for row in self._rows(file):
                good += row.values is not None
                missing -= (row.values or {}).keys()
                yield self._record(row)
        if good and missing:
            names = ", ".join(map(repr, sorted(missing)))
            raise SourceError(f"{self.name}: no row has the column {names}; {self._listing()}")

    def _rows(self, file: Any) -> Iterator[Row]:
        if self._format == "jsonl":
            return json_rows(file, self._max_line)
        return CsvRows(file, self.name, self._style, self._max_line).rows()

    def _record(self, row: Row) -> Record | BadRecord:
        path = f"{self.name}:{row.line}"
        key = b"%012d" % row.number if self._key == ROW_NUMBER else b""
        if row.error is not None or row.values is None:
            error = row.error or SampleError("row", "unreadable")
            return BadRecord(key, path, error.code, f"line {row.line} at byte {row.offset}: {error.reason}")
        try:
            key = key or self._key_of(row.values)
            size = len(row.data)
            for spec in self.fields:
                if spec.column != "*" and self._holds(row.values.get(spec.column)):
                    self._present[spec.name] += 1
                    if spec.origin == "file":
                        size += self._size_of(row.values[spec.column], spec)
        except SampleError as error:
            where = f"{path}: {error.path}" if error.path else path
            return BadRecord(key, where, error.code, f"field {error.field!r}: {error.reason}" if error.field else error.reason)
        # The row's hash makes a row that changes under the conversion an error, and any change of the table another source.
        return Record(key, _encode((row.offset, len(row.data), row.line, xxhash.xxh64_intdigest(row.data))), size)

    def _holds(self, value: Any) -> bool:
        return value is not None and (value != "" or self._format == "jsonl" or self._keep_empty)

    def _key_of(self, values: Mapping[str, Any]) -> bytes:
        value = values.get(self._key)
        if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
            raise SampleError(
                "no-key",
                f"column {self._key!r} holds no key but {str(value)[:80]!r}; a key is a text that is not empty, or an integer",
            )
        return str(value).encode()

    def _size_of(self, value: Any, spec: FieldSpec) -> int:
        try:
            return size_inside(self.root, reference(value))
        except SampleError as error:
            error.field = spec.name
            raise

    # -- protocol -----------------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """Provenance: kind, file name, options (less the root) and fields."""
        options = {name: value for name, value in self._options.given.items() if name not in ("root", "key", "format")}
        fields = [msgspec.structs.asdict(spec) for spec in self.fields]
        for field in fields:
            field["options"] = {n: Path(v).name if n == "tokenizer" else v for n, v in field["options"].items()}
        named = {"file": self.name, "format": self._format, "key": self._key}
        return {"kind": self.kind, **named, "options": options, "fields": fields}

    def notes(self) -> dict[str, Any]:
        """In how many rows each field's column holds a value."""
        return {"present": {spec.name: self._present[spec.name] for spec in self.fields if spec.column != "*"}}

    def stage(self, unit: int, directory: Path) -> None:
        """The file is readable as it is."""

    def unstage(self, unit: int, directory: Path) -> None:
        """Nothing was staged."""

    def config(self) -> dict[str, Any]:
        """Arguments that rebuild this source."""
        options = self._options.given | {"root": str(self.root), "key": self._key, "format": self._format}
        fields = [msgspec.structs.asdict(spec) for spec in self.fields]
        return {"kind": self.kind, "location": str(self.path), "fields": fields, "options": options}

    def place(self, locator: bytes) -> str:
        """Table and line."""
        return f"{self.name}:{_decode(locator)[2]}"

    # -- workers ------------------------------------------------------------------------------------------------------

    def load(self, locator: bytes) -> RawSample:
        """Parse one row and read the files it names. Raises :class:`SampleError`."""
        offset, length, _, digest = _decode(locator)
        path = self.place(locator)
        try:
            data = without_mark(self._bytes(offset, length, digest), offset)
            self._files = {}
            values = self._json_values(data) if self._format == "jsonl" else self._csv_values(data)
            return RawSample(values, path, self._files)
        except SampleError as error:
            error.path = f"{path}: {error.path}" if error.path else path
            raise

    def _bytes(self, offset: int, length: int, digest: int) -> bytes:
        try:
            if self._descriptor < 0:
                with open_table(self.path) as file:
                    self._descriptor = os.dup(file.fileno())
            data = os.pread(self._descriptor, length, offset)
        except (OSError, SourceError) as error:
            raise SampleError("unreadable", f"the table cannot be read: {error}") from error
        if xxhash.xxh64_intdigest(data) != digest:
            raise SampleError("changed", "the table changed while it was converted")
        return data

    def _json_values(self, data: bytes) -> dict[str, Any]:
        row = parse_json_row(data)
        raw = _decode_raw(data)
        values: dict[str, Any] = {}
        for spec in self.fields:
            if spec.column == "*":
                rest = [(name, bytes(part)) for name, part in raw.items() if name not in self._rest_excludes]
                values[spec.name] = b"{" + b",".join(msgspec.json.encode(name) + b":" + part for name, part in rest) + b"}"
            elif row.get(spec.column) is None:
                continue
            elif spec.kind == "json" and spec.origin == "inline":
                # The codec gets the row's very text, so that its strict rules (duplicate names, ranges of numbers) hold.
                values[spec.name] = bytes(raw[spec.column])
            else:
                values[spec.name] = self._value(spec, row[spec.column])
        return values

    def _csv_values(self, data: bytes) -> dict[str, Any]:
        row = self._style.parse(data, self._columns, self._max_line)
        values: dict[str, Any] = {}
        for spec in self.fields:
            if spec.column == "*":
                values[spec.name] = {n: v for n, v in row.items() if n not in self._rest_excludes and self._holds(v)}
            elif self._holds(row[spec.column]):
                values[spec.name] = self._value(spec, row[spec.column])
        return values

    def _value(self, spec: FieldSpec, value: Any) -> Any:
        try:
            if spec.origin == "file":
                path = reference(value)
                self._files[spec.name] = show(path)
                return read_file(self.root, path, self._max_file)
            if spec.origin == "base64":
                return from_base64(value)
        except SampleError as error:
            error.field = spec.name
            raise
        # JSON and CSV have no bytes: a ``bytes`` field takes the text's UTF-8.
        return value.encode() if spec.kind == "bytes" and isinstance(value, str) else value
