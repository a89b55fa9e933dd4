"""Tables: JSON-lines, CSV or TSV, whose columns hold values, base64, or paths of files below a root."""

from __future__ import annotations

import base64
import binascii
import os
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from lfdata.errors import OptionError, SampleError, SourceError
from lfdata.format.layout import xxh64
from shard_builder.sources.base import BadRecord, FieldSpec, RawSample, Record
from shard_builder.sources.files import DEFAULT_LIMIT, Root, check_lfs, show
from shard_builder.sources.options import SourceOptions
from shard_builder.sources.rows import MAX_LINE_BYTES, CsvFormat, CsvRows, Row, json_rows, parse_json_row, without_mark

ROW_NUMBER = "#"

_VALID = {
    "root": "<directory that file references are relative to; default: the table's own>",
    "key": f"<column whose values are the keys, or {ROW_NUMBER} for row numbers; default: key, else id, else {ROW_NUMBER}>",
    "format": "jsonl|csv|tsv",
    "delimiter": "<one character; default: by format>",
    "quotes": "yes|no",
    "empty": "absent|keep",
    "max_line_bytes": "<largest row, such as 64M>",
    "max_file_bytes": "<largest referenced file, such as 512M; default 4G>",
}
_FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".tsv": "tsv"}
_HEADS = (
    (b"\x1f\x8b", "gzip data: decompress it first"),
    (b"\x28\xb5\x2f\xfd", "zstandard data: decompress it first"),
    (b"PK\3\4", "a zip file or spreadsheet: export it as CSV first"),
    (b"PAR1", "a Parquet file, which is no table of text"),
    (b"\xff\xfe", "UTF-16 text: convert it to UTF-8 first"),
    (b"\xfe\xff", "UTF-16 text: convert it to UTF-8 first"),
)
_LISTED = 50

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[int, int, int, int]).decode
_decode_raw = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class Table:
    """The source of kind ``table``.

    Args:
        location: path of the table.
        fields: the declared fields; columns are names of the table's columns, or ``*`` (kind json) for all that no other field takes.
        options: ``root``, ``key``, ``format``, ``delimiter``, ``quotes``, ``empty``, ``max_line_bytes``, ``max_file_bytes``.

    Raises:
        SourceError: at once for a file that cannot be read or has a bad header; from :meth:`scan` when a declared column is in no row.
        OptionError: fields or options that make no sense; the message lists the columns there are.
    """

    kind = "table"

    def __init__(self, location: str, fields: list[FieldSpec] | None, options: dict[str, Any]) -> None:
        self._options = reader = SourceOptions(self.kind, options, _VALID)
        self._path = os.path.abspath(location)
        self._name = show(os.path.basename(self._path))
        by_name = _FORMATS.get(os.path.splitext(self._path)[1].lower())
        if by_name is None and reader.text("format") is None:
            raise OptionError(f"{location}: say its format with format=jsonl|csv|tsv")
        self._format = reader.choice("format", ("jsonl", "csv", "tsv"), by_name or "jsonl")
        self._style = self._csv_format()
        self._keep_empty = reader.choice("empty", ("absent", "keep"), "absent") == "keep"
        self._line_limit = reader.size("max_line_bytes", MAX_LINE_BYTES, 1 << 30)
        self._file_limit = reader.size("max_file_bytes", DEFAULT_LIMIT)
        self._descriptor = _open_regular(self._path, location)
        self._columns = self._first_columns()
        self._key = self._choose_key()
        self.fields: Sequence[FieldSpec] = self._check(fields)
        self._rest_taken = {spec.column for spec in self.fields} | {self._key}
        self._root_path = os.path.realpath(reader.text("root") or os.path.dirname(self._path))
        self._root = Root(self._root_path) if any(spec.origin == "file" for spec in self.fields) else None
        self._counts: Counter[str] = Counter()

    def __del__(self) -> None:
        descriptor, self._descriptor = getattr(self, "_descriptor", -1), -1
        if descriptor >= 0:
            os.close(descriptor)

    def _csv_format(self) -> CsvFormat:
        delimiter = self._options.text("delimiter") or ("\t" if self._format == "tsv" else ",")
        delimiter = {"\\t": "\t", "tab": "\t"}.get(delimiter, delimiter)
        if len(delimiter) != 1 or delimiter in '"\r\n':
            raise self._options.bad("delimiter")
        return CsvFormat(delimiter, self._options.flag("quotes", True))

    def _first_columns(self) -> list[str]:
        """Columns of the header, or of the first good row."""
        with self._file() as file:
            if self._format != "jsonl":
                return CsvRows(file, self._name, self._style, self._line_limit).columns
            for row in json_rows(file, self._line_limit):
                if row.values is not None:
                    return list(row.values)
                if row.number >= 100:
                    break
        return []

    def _choose_key(self) -> str:
        key = self._options.text("key")
        if key is None:
            return next((name for name in ("key", "id") if name in self._columns), ROW_NUMBER)
        if self._format != "jsonl" and self._columns and key not in (ROW_NUMBER, *self._columns):
            raise OptionError(f"{self._name}: there is no key column {key!r}; {self._listing()}")
        return key

    def _listing(self) -> str:
        names = ", ".join(repr(name) for name in self._columns[:_LISTED])
        return f"columns: {names or 'none'}{', ...' if len(self._columns) > _LISTED else ''}"

    def _check(self, fields: list[FieldSpec] | None) -> list[FieldSpec]:
        if not fields:
            raise OptionError(f"{self._name}: declare what its columns hold, for example --field caption:text=COLUMN; {self._listing()}")
        for spec in fields:
            if spec.column == "*" and (spec.kind != "json" or spec.origin != "inline"):
                raise OptionError(f"field {spec.name!r}: '*' (all other columns) can only be of kind json and inline")
            if self._format != "jsonl" and self._columns and spec.column not in ("*", *self._columns):
                raise SourceError(f"{self._name}: field {spec.name!r} wants column {spec.column!r}; {self._listing()}")
        return fields

    # -- protocol -----------------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """See :class:`shard_builder.sources.base.Source`."""
        return {
            "kind": self.kind,
            "fields": [msgspec.structs.asdict(spec) for spec in self.fields],
            "format": self._format,
            "key": self._key,
            "empty": "keep" if self._keep_empty else "absent",
            "csv": msgspec.structs.asdict(self._style) if self._format != "jsonl" else None,
            "limits": [self._line_limit, self._file_limit],
        }

    def notes(self) -> dict[str, Any]:
        """Rows, and in how many of them each declared column holds a value."""
        return {"columns": self._columns[:_LISTED], "present": dict(sorted(self._counts.items())), "warnings": []}

    def config(self) -> dict[str, Any]:
        """See :class:`shard_builder.sources.base.Source`."""
        fields = [msgspec.structs.asdict(spec) for spec in self.fields]
        options = self._options.given | {"root": self._root_path, "key": self._key, "format": self._format}
        return {"kind": self.kind, "location": self._path, "fields": fields, "options": options}

    def stage(self, unit: int, directory: Path) -> None:
        """Nothing to do: rows are read from their places."""

    def unstage(self, unit: int, directory: Path) -> None:
        """Nothing to do."""

    def scan(self) -> Iterator[Record | BadRecord]:
        """Every row, in the order of the table. Raises :class:`SourceError` at the end when a declared column was in no row."""
        self._counts.clear()
        missing = {spec.column for spec in self.fields} - {"*"}
        rows = 0
        with self._file() as file:
            source = (
                json_rows(file, self._line_limit)
                if self._format == "jsonl"
                else CsvRows(file, self._name, self._style, self._line_limit).rows()
            )
            for row in source:
                rows += row.values is not None
                missing -= (row.values or {}).keys()
                yield self._record(row)
        if rows and missing:
            names = ", ".join(map(repr, sorted(missing)))
            raise SourceError(f"{self._name}: no row has the column {names}; {self._listing()}")

    def load(self, locator: bytes) -> RawSample:
        """One row's values. Raises :class:`SampleError`."""
        offset, length, line, digest = _decode(locator)
        path = f"{self._name}:{line}"
        try:
            data = os.pread(self._descriptor, length, offset)
            if len(data) != length or xxh64(data) != digest:
                raise SampleError("changed", "the table changed after it was scanned")
            data = without_mark(data, offset)
            if self._format == "jsonl":
                return RawSample(self._json_values(data), path)
            return RawSample(self._csv_values(self._style.parse(data, self._columns, self._line_limit)), path)
        except OSError as error:
            raise SampleError("unreadable", f"the table cannot be read: {error.strerror}", path=path) from error
        except SampleError as error:
            # The row is what a person looks up; a referenced file is named in the reason.
            error.path = f"{path} ({error.path})" if error.path else path
            raise

    # -- rows ---------------------------------------------------------------------------------------------------------

    def _file(self) -> Any:
        return os.fdopen(_open_regular(self._path, self._path), "rb", buffering=1 << 20)

    def _record(self, row: Row) -> Record | BadRecord:
        path = f"{self._name}:{row.line}"
        if row.values is None:
            reason = row.error.reason if row.error else "unreadable"
            return BadRecord(b"", path, row.error.code if row.error else "row", f"line {row.line}, byte {row.offset}: {reason}")
        key = b""
        try:
            key = self._key_of(row)
            size = len(row.data)
            for spec in self.fields:
                value = row.values.get(spec.column)
                if spec.column == "*" or not self._holds(value):
                    continue
                self._counts[spec.name] += 1
                if spec.origin == "file":
                    size += self._need_root().size(_reference(value, spec))
        except SampleError as error:
            reason = f"field {error.field!r}: {error.reason}" if error.field else error.reason
            return BadRecord(key, f"{path} ({error.path})" if error.path else path, error.code, reason)
        return Record(key, _encode((row.offset, len(row.data), row.line, xxh64(row.data))), size)

    def _holds(self, value: Any) -> bool:
        return value is not None and (value != "" or self._format == "jsonl" or self._keep_empty)

    def _need_root(self) -> Root:
        if self._root is None:
            self._root = Root(self._root_path)
        return self._root

    def _key_of(self, row: Row) -> bytes:
        if self._key == ROW_NUMBER:
            return b"%010d" % row.number
        value = (row.values or {}).get(self._key)
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value).encode()
        if not isinstance(value, str):
            what = "is missing" if value is None else f"holds a {type(value).__name__}; text or an integer is expected"
            raise SampleError("no-key", f"the key column {self._key!r} {what}")
        if not value:
            raise SampleError("no-key", f"the key column {self._key!r} is empty")
        return value.encode()

    def _json_values(self, data: bytes) -> dict[str, Any]:
        row = parse_json_row(data)
        raw = _decode_raw(data)
        values: dict[str, Any] = {}
        for spec in self.fields:
            if spec.column == "*":
                rest = [(name, bytes(part)) for name, part in raw.items() if name not in self._rest_taken]
                values[spec.name] = b"{" + b",".join(msgspec.json.encode(name) + b":" + part for name, part in rest) + b"}"
            elif row.get(spec.column) is None:
                continue
            elif spec.kind == "json" and spec.origin == "inline":
                # The codec gets the very text of the row, so that its own strict rules (duplicate keys, number ranges) hold.
                values[spec.name] = bytes(raw[spec.column])
            else:
                values[spec.name] = self._value(row[spec.column], spec)
        return values

    def _csv_values(self, row: dict[str, Any]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for spec in self.fields:
            if spec.column == "*":
                values[spec.name] = {n: v for n, v in row.items() if n not in self._rest_taken and self._holds(v)}
            elif self._holds(row[spec.column]):
                values[spec.name] = self._value(row[spec.column], spec)
        return values

    def _value(self, value: Any, spec: FieldSpec) -> Any:
        if spec.origin == "inline":
            return value
        if spec.origin == "file":
            try:
                return self._need_root().read(_reference(value, spec), self._file_limit)
            except SampleError as error:
                error.field = spec.name
                raise
        try:
            if not isinstance(value, str):
                raise SampleError("base64", f"text is expected, found {type(value).__name__}", field=spec.name)
            return base64.b64decode(value.encode("ascii"), validate=True)
        except (binascii.Error, UnicodeEncodeError) as error:
            raise SampleError("base64", f"not base64: {error}", field=spec.name) from None


def _reference(value: Any, spec: FieldSpec) -> bytes:
    if not isinstance(value, str):
        raise SampleError("type", f"a path is expected, found {type(value).__name__}", field=spec.name)
    return value.encode()


def _open_regular(path: str, shown: str) -> int:
    """A descriptor of the table. Raises :class:`SourceError` for anything but a regular file of text."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise SourceError(f"{shown}: cannot be opened: {getattr(error, 'strerror', error)}") from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise SourceError(f"{shown}: not a regular file")
        head = os.pread(descriptor, 1023, 0)
        check_lfs(head)
        for magic, what in _HEADS:
            if head.startswith(magic):
                raise SourceError(f"{shown}: this is {what}")
    except SampleError as error:
        os.close(descriptor)
        raise SourceError(f"{shown}: {error.reason}") from None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
