"""Rows of JSON-lines and CSV files with their exact places, read as a stream with bounded memory."""

from __future__ import annotations

import codecs
import csv
import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from lfdata.errors import SampleError, SourceError
from shard_builder.sources.files import refuse_pointer

MAX_LINE_BYTES = 64 << 20

_HEADS = (
    (b"\x1f\x8b", "gzip data: decompress it first"),
    (b"\x28\xb5\x2f\xfd", "zstandard data: decompress it first"),
    (b"PK\3\4", "a zip file or spreadsheet: export it as CSV first"),
    (b"PAR1", "a Parquet file, not a table of text"),
    (b"\xff\xfe", "UTF-16 text: convert it to UTF-8 first"),
    (b"\xfe\xff", "UTF-16 text: convert it to UTF-8 first"),
)
_SPACE = b" \t\r\n"
_SKIP = 1 << 20
_ESCAPED_NAME = re.compile(rb'\\.[^"\\]*"\s*:')
_POSITION = re.compile(r"\(byte (\d+)\)")


def open_table(path: Path) -> BinaryIO:
    """The table, open for reading. Raises :class:`SourceError` for anything but a regular file that may hold text."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise SourceError(f"{path}: cannot be opened: {getattr(error, 'strerror', error)}") from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise SourceError(f"{path}: not a regular file")
        head = os.pread(descriptor, 1024, 0)
        refuse_pointer(head, path.name)
        for magic, what in _HEADS:
            if head.startswith(magic):
                raise SourceError(f"{path}: this is {what}")
        return os.fdopen(descriptor, "rb", buffering=1 << 20)
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, SampleError):
            raise SourceError(f"{path}: {error.reason}") from None
        raise


class Row(msgspec.Struct, frozen=True):
    """One row, good or bad.

    ``offset`` and ``data`` are the bytes of the file it is made of (line ending included), ``line`` its first line, from 1,
    ``number`` its ordinal among the rows, from 0. ``values`` holds the columns; where the row is bad it is ``None`` and
    ``error`` says why.
    """

    number: int
    line: int
    offset: int
    data: bytes
    values: dict[str, Any] | None
    error: SampleError | None = None


class Lines:
    """Lines of a binary file, each at most ``limit`` bytes; keeps what was given out since :meth:`begin`."""

    def __init__(self, file: BinaryIO, limit: int) -> None:
        self._file, self._limit = file, limit
        self.offset = 0
        self.line = 0
        self._record = bytearray()

    def begin(self) -> None:
        """A new record starts with the next line."""
        self._record = bytearray()

    @property
    def record(self) -> bytes:
        """The bytes since :meth:`begin`."""
        return bytes(self._record)

    def next(self) -> bytes:
        """The next line, empty at the end. Raises :class:`SampleError` (``line-too-long``) after skipping what is too long."""
        line = self._file.readline(self._limit + 1)
        self.offset += len(line)
        self.line += bool(line)
        if len(line) + len(self._record) > self._limit:
            while line and not line.endswith(b"\n"):
                line = self._file.readline(_SKIP)
                self.offset += len(line)
            raise SampleError("line-too-long", f"a row of more than {self._limit} bytes (option max_line_bytes)")
        self._record += line
        return line


def without_mark(data: bytes, offset: int) -> bytes:
    """``data`` without the byte order mark that a file may begin with."""
    return data.removeprefix(codecs.BOM_UTF8) if offset == 0 else data


# -- JSON lines ---------------------------------------------------------------------------------------------------------


def json_rows(file: BinaryIO, limit: int) -> Iterator[Row]:
    """Rows of a JSON-lines file; empty lines are skipped."""
    lines, number = Lines(file, limit), 0
    while True:
        offset, line = lines.offset, lines.line + 1
        lines.begin()
        try:
            data = lines.next()
            if not data:
                return
            if not without_mark(data, offset).strip(_SPACE):
                continue
            yield Row(number, line, offset, data, parse_json_row(without_mark(data, offset)))
        except SampleError as error:
            yield Row(number, line, offset, lines.record, None, error)
        number += 1


def parse_json_row(data: bytes) -> dict[str, Any]:
    """The columns of one line. Raises :class:`SampleError` (``json``, ``duplicate-key``)."""
    try:
        values = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise SampleError("json", _json_reason(data, error)) from None
    if not isinstance(values, dict):
        hint = "; a file of one JSON array is not JSON lines" if data.lstrip(_SPACE)[:1] == b"[" else ""
        raise SampleError("json", f"an object with columns is expected, found {type(values).__name__}{hint}")
    _refuse_duplicates(data, values)
    return values


def _json_reason(data: bytes, error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "not JSON: nested too deeply"
    try:
        data.decode()
    except UnicodeDecodeError as bad:
        return f"not JSON: not UTF-8 at byte {bad.start} of the line (0x{data[bad.start]:02x})"
    hint = "; a file of one JSON array is not JSON lines" if data.strip(_SPACE) in (b"[", b"]") else ""
    found = _POSITION.search(str(error))
    if found is None:
        return f"not JSON: {error}{hint}"
    return f"not JSON: {_POSITION.sub('', str(error)).strip()} at byte {found[1]} of the line{hint}"


def _refuse_duplicates(data: bytes, values: dict[str, Any]) -> None:
    """Refuse a column given twice, of which the parser silently kept the last.

    Counting the quoted names settles nearly every row; only where a name occurs again, or is written with escapes, is the row
    parsed again.
    """
    once = all(data.count(b'"' + name.encode() + b'"') == 1 for name in values)
    if once and not _ESCAPED_NAME.search(data):
        return
    pairs = _pairs(data)
    names = [name for name, _ in pairs]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise SampleError("duplicate-key", f"column {twice[:80]!r} occurs twice in one row")


def _pairs(data: bytes) -> list[tuple[str, Any]]:
    # The outermost object is the last one the hook sees; inner ones are reduced to nothing.
    outer: list[list[tuple[str, Any]]] = [[]]

    def keep(pairs: list[tuple[str, Any]]) -> None:
        outer[0] = pairs

    try:
        json.loads(data, object_pairs_hook=keep)
    except (ValueError, RecursionError) as error:
        raise SampleError("json", f"not JSON: {str(error)[:200]}") from None
    return outer[0]


# -- CSV ----------------------------------------------------------------------------------------------------------------


class CsvFormat(msgspec.Struct, frozen=True):
    """How a CSV file is written."""

    delimiter: str = ","
    quotes: bool = True

    def reader(self, lines: Iterator[str], limit: int) -> Any:
        """A strict ``csv.reader``."""
        if csv.field_size_limit() < limit:
            csv.field_size_limit(limit)  # its default of 128 KiB would refuse honest texts; records are bounded here
        if self.quotes:
            return csv.reader(lines, delimiter=self.delimiter, doublequote=True, strict=True)
        return csv.reader(lines, delimiter=self.delimiter, quoting=csv.QUOTE_NONE, strict=True)

    def parse(self, data: bytes, columns: list[str], limit: int) -> dict[str, Any]:
        """The columns of one record from its bytes. Raises :class:`SampleError` (``utf8``, ``csv``, ``columns``)."""
        try:
            rows = list(self.reader(iter(_split(_strict(data))), limit))
        except csv.Error as error:
            raise SampleError("csv", f"not CSV: {_said(error)}") from None
        return _named(rows[0] if rows else [], columns)


def _said(error: csv.Error) -> str:
    """What the csv module says, but for what only its caller in Python could follow."""
    text = str(error)
    return "a carriage return alone inside a line: lines must end in LF or CR LF" if "new-line character" in text else text


def _split(text: str) -> list[str]:
    parts = text.split("\n")
    return [part + "\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])


def _strict(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise SampleError("utf8", f"not UTF-8: byte 0x{data[error.start]:02x} at byte {error.start} of the row") from None


def _named(row: list[str], columns: list[str]) -> dict[str, Any]:
    if len(row) != len(columns):
        raise SampleError("columns", f"{len(row)} columns, the header has {len(columns)}")
    return dict(zip(columns, row, strict=True))


class CsvRows:
    """Rows of a CSV file. Making one reads the header.

    Raises:
        SourceError: a header that cannot be read, or that names a column twice.
    """

    def __init__(self, file: BinaryIO, name: str, style: CsvFormat, limit: int) -> None:
        self._style, self._limit = style, limit
        self._lines = Lines(file, limit)
        self._reader = style.reader(self._texts(), limit)
        try:
            header: list[str] = next(self._reader, [])
            _strict(self._lines.record)
        except (csv.Error, SampleError) as error:
            said = error.reason if isinstance(error, SampleError) else _said(error)
            raise SourceError(f"{name}: the header cannot be read: {said}") from None
        twice = sorted({column for column in header if header.count(column) > 1}) if len(set(header)) != len(header) else []
        if twice:
            raise SourceError(f"{name}: the header names {twice[0]!r} more than once; columns: {', '.join(header[:50])}")
        self.columns: list[str] = header

    def _texts(self) -> Iterator[str]:
        while line := self._lines.next():
            yield without_mark(line, self._lines.offset - len(line)).decode("utf-8", "surrogateescape")

    def rows(self) -> Iterator[Row]:
        """The rows after the header; empty lines are skipped."""
        lines, number = self._lines, 0
        while True:
            offset, line = lines.offset, lines.line + 1
            lines.begin()
            error = row = None
            try:
                row = next(self._reader)
            except StopIteration:
                return
            except csv.Error as bad:
                error = SampleError("csv", f"not CSV: {_said(bad)} (the row ends before byte {lines.offset})")
            except SampleError as bad:
                error = bad
                self._reader = self._style.reader(self._texts(), self._limit)  # a generator that raised is finished
            if row == []:
                continue
            values, data = None, lines.record
            try:
                if error is None:
                    _strict(data)
                    values = _named(row or [], self.columns)
            except SampleError as bad:
                error = bad
            yield Row(number, line, offset, data, values, error)
            number += 1
