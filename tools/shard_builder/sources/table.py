"""Source: a JSONL, CSV or TSV file whose columns become fields: inline values, or files named by a column."""

from __future__ import annotations

import base64
import binascii
import csv
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from lfdata.errors import OptionError, SampleError, SourceError
from shard_builder.fields import GRAMMAR
from shard_builder.sources.base import BadRecord, FieldSpec, RawSample, Record
from shard_builder.sources.files import MAX_FILE_BYTES, check_relative, read_file, resolve_inside

DELIMITERS = {".csv": ",", ".tsv": "\t"}
KEY_COLUMNS = ("key", "__key__", "id")
MAX_LINE_BYTES = 64 << 20
_BOM = b"\xef\xbb\xbf"
_OPTIONS = ("root", "key", "max_file_bytes", "max_line_bytes")
_locators = msgspec.msgpack.Decoder(tuple[int, int, int])


class Table:
    """Rows of a ``.jsonl``/``.ndjson``, ``.csv`` or ``.tsv`` file, in its order.

    Options (text): ``root``: directory that file references are relative to (default: the file's own); ``key``: the column that
    holds keys (default: key, __key__ or id if the first row has one; otherwise the row number as 12 digits);
    ``max_file_bytes``, ``max_line_bytes``. A column that is missing, null, or (CSV) empty leaves the field absent. The column ``*`` is
    the whole row less the columns that other fields use.
    """

    kind = "table"

    def __init__(self, location: str, fields: Sequence[FieldSpec] | None = None, stage_dir: Path | None = None, **options: str) -> None:
        del stage_dir
        unknown = options.keys() - set(_OPTIONS)
        if unknown:
            raise OptionError(f"table: unknown option {sorted(unknown)[0]!r}; valid: {', '.join(_OPTIONS)}")
        self.path = Path(location)
        self.name = self.path.name
        if not self.path.is_file():
            raise SourceError(f"{location}: no such file")
        self._given = dict(options)
        self._delimiter = DELIMITERS.get(self.path.suffix.lower())
        self.root = Path(options.get("root", self.path.parent))
        if not self.root.is_dir():
            raise SourceError(f"{self.root}: the root of file references is not a directory")
        self._max_file = int(options.get("max_file_bytes", MAX_FILE_BYTES))
        self._max_line = int(options.get("max_line_bytes", MAX_LINE_BYTES))
        self._header = self._read_header() if self._delimiter else None
        self._columns = self._header or self._first_columns()
        if not fields:
            raise OptionError(
                f"{self.name}: say which columns become fields with --field {GRAMMAR}, or --map FILE. Its columns: {', '.join(self._columns) or 'none'}"
            )
        self.fields: Sequence[FieldSpec] = tuple(fields)
        self._key = self._key_column(options.get("key"))
        used = {spec.column for spec in fields if spec.column != "*"} | ({self._key} if self._key else set())
        self._rest_excludes = used
        self._seen: set[str] = set()
        self._bad_header = [spec.column for spec in fields if self._header and spec.column not in (*self._header, "*")]
        if self._bad_header:
            raise SourceError(f"{self.name}: no column {self._bad_header[0]!r}; there are {', '.join(self._columns)}")
        self._descriptor = -1

    def _key_column(self, asked: str | None) -> str | None:
        if asked is not None:
            if self._columns and asked not in self._columns:
                raise SourceError(f"{self.name}: no key column {asked!r}; there are {', '.join(self._columns)}")
            return asked
        return next((name for name in KEY_COLUMNS if name in self._columns), None)

    # -- lines --------------------------------------------------------------------------------------------------------

    def _read_header(self) -> list[str]:
        for row, _, _ in self._csv_records():
            if isinstance(row, SampleError):
                raise SourceError(f"{self.name}: header: {row.reason}")
            doubled = sorted({name for name in row if row.count(name) > 1})
            if doubled:
                raise SourceError(f"{self.name}: the header names column {doubled[0]!r} more than once")
            return row
        return []

    def _first_columns(self) -> list[str]:
        for line, _, _ in self._lines():
            try:
                value = _parse(line)
            except SampleError:
                return []
            return list(value)
        return []

    def _lines(self) -> Iterator[tuple[bytes, int, int]]:
        """Lines that are not empty, with their offset and number (from 1); one beyond the limit comes cut, marked by its length."""
        with open(self.path, "rb") as file:
            offset = number = 0
            if file.read(3) == _BOM:
                offset = 3
            file.seek(offset)
            while line := file.readline(self._max_line + 1):
                number += 1
                start, offset = offset, offset + len(line)
                if len(line) > self._max_line and not line.endswith(b"\n"):
                    while (more := file.readline(1 << 20)) and not more.endswith(b"\n"):
                        offset += len(more)
                    offset += len(more)
                if line.strip():
                    yield line, start, number

    def _csv_records(self) -> Iterator[tuple[list[str] | SampleError, int, int]]:
        """Records with their byte offset and length; quoted line ends stay inside a record."""
        pieces: list[bytes] = []
        start = 0
        for line, offset, _ in self._lines():
            if not pieces:
                start = offset
            pieces.append(line)
            record = b"".join(pieces)
            if len(record) > self._max_line:
                yield SampleError("line-too-long", f"a record of more than {self._max_line} bytes at byte {start}"), start, len(record)
                pieces = []
            elif record.count(b'"') % 2 == 0:
                yield self._split(record, start), start, len(record)
                pieces = []
        if pieces:
            yield SampleError("truncated", f"the file ends inside a quoted value that begins after byte {start}"), start, 0

    def _split(self, record: bytes, start: int) -> list[str] | SampleError:
        try:
            text = record.decode("utf-8")
        except UnicodeDecodeError as error:
            return SampleError("utf-8", f"not UTF-8 at byte {start + error.start}: {error.reason}")
        try:
            rows = list(csv.reader(text.splitlines(keepends=True), delimiter=self._delimiter or ",", strict=True))
        except csv.Error as error:
            return SampleError("csv", f"record at byte {start}: {error}")
        return rows[0] if len(rows) == 1 else SampleError("csv", f"record at byte {start}: a line end outside quotes")

    def _row(self, values: list[str]) -> dict[str, Any] | SampleError:
        header = self._header or []
        if len(values) != len(header):
            return SampleError("columns", f"{len(values)} values for {len(header)} columns")
        return {name: value for name, value in zip(header, values, strict=True) if value != ""}

    # -- plan pass ----------------------------------------------------------------------------------------------------

    def scan(self) -> Iterator[Record | BadRecord]:
        """Every row. Raises :class:`SourceError` at the end if a declared column is in no row."""
        self._seen.clear()
        rows = 0
        for rows, (row, offset, length, line) in enumerate(self._rows(), 1):
            yield self._record(row, offset, length, rows, line)
        missing = [spec.column for spec in self.fields if spec.column not in ("*", *self._seen)]
        if rows and missing and not self._header:
            raise SourceError(f"{self.name}: no row has a column {missing[0]!r}; the first row has {', '.join(self._columns)}")

    def _rows(self) -> Iterator[tuple[dict[str, Any] | SampleError, int, int, int]]:
        if self._delimiter:
            for number, (values, offset, length) in enumerate(self._csv_records()):
                if number:
                    yield (values if isinstance(values, SampleError) else self._row(values)), offset, length, number + 1
            return
        for line, offset, number in self._lines():
            yield self._parsed(line, number), offset, len(line), number

    def _parsed(self, line: bytes, number: int) -> dict[str, Any] | SampleError:
        if len(line) > self._max_line:
            return SampleError("line-too-long", f"line {number} has more than {self._max_line} bytes")
        try:
            return _parse(line)
        except SampleError as error:
            return SampleError(error.code, f"line {number}: {error.reason}")

    def _record(self, row: dict[str, Any] | SampleError, offset: int, length: int, number: int, line: int) -> Record | BadRecord:
        path = f"{self.name}:{line}"
        if isinstance(row, SampleError):
            return BadRecord(b"%012d" % (number - 1), path, row.code, row.reason)
        self._seen.update(row)
        try:
            key = self._key_of(row, number)
        except SampleError as error:
            return BadRecord(b"%012d" % (number - 1), path, error.code, error.reason)
        size = length
        try:
            for spec in self.fields:
                if spec.origin == "file" and row.get(spec.column) is not None:
                    size += self._size_of(row[spec.column])
        except SampleError as error:
            return BadRecord(key, f"{path}: {error.path}" if error.path else path, error.code, error.reason)
        return Record(key, msgspec.msgpack.encode((offset, length, line)), size)

    def _key_of(self, row: Mapping[str, Any], number: int) -> bytes:
        if self._key is None:
            return b"%012d" % (number - 1)
        value = row.get(self._key)
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise SampleError("no-key", f"column {self._key!r} holds no key but {str(value)[:80]!r}; a key is a text or an integer")
        return str(value).encode("utf-8", "surrogatepass")

    def _size_of(self, value: Any) -> int:
        if not isinstance(value, str):
            raise SampleError("not-a-path", f"a path is a text, not {str(value)[:80]!r}")
        check_relative(value)
        try:
            return os.stat(resolve_inside(self.root, value)).st_size
        except OSError as error:
            raise SampleError("unreadable", error.strerror or str(error), path=value) from error

    def describe(self) -> dict[str, Any]:
        """Provenance: kind, file name, options (less the root) and fields."""
        options = {name: value for name, value in self._given.items() if name != "root"}
        fields = [msgspec.structs.asdict(spec) for spec in self.fields]
        for field in fields:
            field["options"] = {n: Path(v).name if n == "tokenizer" else v for n, v in field["options"].items()}
        return {"kind": self.kind, "file": self.name, "key": self._key, "options": options, "fields": fields}

    def notes(self) -> dict[str, Any]:
        """Nothing beyond the records."""
        return {}

    def stage(self, unit: int, directory: Path) -> None:
        """The file is readable as it is."""

    def unstage(self, unit: int, directory: Path) -> None:
        """Nothing was staged."""

    # -- workers ------------------------------------------------------------------------------------------------------

    def load(self, locator: bytes) -> RawSample:
        """Parse one row and read the files it names."""
        offset, length, line = _locators.decode(locator)
        if self._descriptor < 0:
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        data = os.pread(self._descriptor, length, offset)
        path = f"{self.name}:{line}"
        if len(data) != length:
            raise SampleError("changed", "the file became shorter while it was converted", path=path)
        split = self._split(data, offset) if self._delimiter else None
        row = self._parsed(data, line) if split is None else split if isinstance(split, SampleError) else self._row(split)
        if isinstance(row, SampleError):
            row.path = path
            raise row
        values = {}
        for spec in self.fields:
            value = self._rest(row) if spec.column == "*" else row.get(spec.column)
            if value is not None:
                values[spec.name] = self._value(spec, value, path)
        return RawSample(values, path)

    def _rest(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in row.items() if name not in self._rest_excludes}

    def _value(self, spec: FieldSpec, value: Any, path: str) -> Any:
        try:
            if spec.origin == "file":
                if not isinstance(value, str):
                    raise SampleError("not-a-path", f"a path is a text, not {str(value)[:80]!r}")
                return read_file(self.root, value, self._max_file)
            if spec.origin == "base64":
                return _from_base64(value)
        except SampleError as error:
            error.field, error.path = spec.name, f"{path}: {error.path}" if error.path else path
            raise
        # In CSV everything is text, and JSON has no bytes: a ``bytes`` field takes the text's UTF-8.
        return value.encode("utf-8", "surrogatepass") if spec.kind == "bytes" and isinstance(value, str) else value

    def config(self) -> Mapping[str, Any]:
        """Arguments that rebuild this source."""
        options = self._given | {"root": str(self.root.absolute())}
        if self._key is not None:
            options["key"] = self._key
        fields = [msgspec.structs.asdict(spec) for spec in self.fields]
        return {"kind": self.kind, "location": str(self.path.absolute()), "fields": fields, "options": options}


def _parse(line: bytes) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise SampleError("json", str(error) or "nested too deep") from None
    if not isinstance(value, dict):
        raise SampleError("json", f"a row is a JSON object, not {type(value).__name__}")
    return value


def _from_base64(value: Any) -> bytes:
    if not isinstance(value, str):
        raise SampleError("base64", f"base64 is a text, not {str(value)[:80]!r}")
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise SampleError("base64", str(error)) from None
