"""Source: Parquet files. Keys are scanned; workers decode row groups forward in batches, never a file at once."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from lfdata.errors import SampleError, SourceError
from shard_builder.sources.base import BadRecord, FieldSpec, RawSample, Record
from shard_builder.sources.columnar import OPTIONS, ColumnarSource, decode_locator
from shard_builder.sources.common import open_regular
from shard_builder.sources.filelist import FileList
from shard_builder.sources.files import show

SUFFIXES = (".parquet", ".pq")

_VALID = {
    **OPTIONS,
    "max_group_rows": "<most rows of one row group; default 64M>",
    "max_group_bytes": "<most bytes of one row group before compression, all needed columns together; default 16G>",
}
_MAGIC, _ENCRYPTED = b"PAR1", b"PARE"
_MAX_FOOTER = 256 << 20
_SCAN_ROWS = 8192
_BATCH_BYTES = 16 << 20
_BATCH_ROWS = 1024
_BUFFER = 1 << 20


class Parquet(ColumnarSource):
    """The source of kind ``parquet``: one sample a row, files in order.

    Args:
        location: a file, a pattern (``*``, ``?``, ``**``, braces), several joined by ``::``, or a directory.
        fields: the declared fields; without them Hugging Face's features decide, where the files carry them.

    Raises:
        SourceError: a file that is missing or no Parquet; a declared column that is not there; from :meth:`scan`, a file whose
            columns differ. OptionError: fields or options that make no sense.
    """

    kind = "parquet"

    def __init__(
        self, location: str, fields: Sequence[FieldSpec] | None = None, stage_dir: Path | None = None, **options: str
    ) -> None:
        del stage_dir
        super().__init__(location, options, _VALID)
        self._max_rows = self._options.size("max_group_rows", 64 << 20)
        self._max_bytes = self._options.size("max_group_bytes", 16 << 30)
        self.files = FileList(location, SUFFIXES, self._options.text("split"))
        self.root = self.directory_option("root", Path(self.files.root))
        self.single = len(self.files.names) == 1
        self._open: ParquetFile | None = None
        self._rows: GroupRows | None = None
        with ParquetFile(self.files, self.files.names[0]) as first:
            self.set_up(first.schema, first.name, fields)

    def describe(self) -> dict[str, Any]:
        """See :class:`shard_builder.sources.base.Source`."""
        return super().describe() | {"key": self.key, "files": self.files.describe()}

    def scan(self) -> Iterator[Record | BadRecord]:
        """Every row, file by file. Only footers, keys and paths are read."""
        for name in self.files.names:
            with ParquetFile(self.files, name) as file:
                self.check_schema(file.schema, name)
                start = 0
                for group in range(file.groups):
                    rows = self._checked_rows(file, group)
                    yield from self._group(file, group, rows, start)
                    start += rows

    def _checked_rows(self, file: ParquetFile, group: int) -> int:
        rows, held = file.rows(group), file.bytes(group, self.needed)
        for value, limit, what, option in (
            (rows, self._max_rows, "rows", "max_group_rows"),
            (held, self._max_bytes, "bytes in the needed columns", "max_group_bytes"),
        ):
            if not 0 <= value <= limit:
                raise SourceError(
                    f"{show(file.name)}: row group {group} claims {value} {what}; the limit is {limit} (option {option}). "
                    "Write the file with smaller row groups, or raise the limit if the file is to be trusted"
                )
        return rows

    def _group(self, file: ParquetFile, group: int, rows: int, start: int) -> Iterator[Record | BadRecord]:
        columns = self.scanned_columns()
        size = -(-file.bytes(group, self.needed) // rows) if rows else 0
        done = 0
        try:
            if columns:
                for batch in file.batches(group, columns, _SCAN_ROWS):
                    yield from self.records(batch, file.name, file.digest, group, done, start, size)
                    done += batch.num_rows
            else:
                while done < rows:
                    empty = pa.RecordBatch.from_struct_array(pa.nulls(min(rows - done, _SCAN_ROWS), pa.struct([])))
                    yield from self.records(empty, file.name, file.digest, group, done, start, size)
                    done += empty.num_rows
        except SampleError as error:
            place = f"{show(file.name)}: rows {start + done} to {start + rows - 1}"
            yield BadRecord(b"", place, error.code, f"keys or paths cannot be read: {error.reason}")
            return
        if done != rows:
            place = f"{show(file.name)}: row group {group}"
            yield BadRecord(b"", place, "truncated", f"holds {done} rows, its footer says {rows}")

    def load(self, locator: bytes) -> RawSample:
        """One row. Raises :class:`SampleError`."""
        encoded, digest, group, row, _ = decode_locator(locator)
        name, path = os.fsdecode(encoded), self.place(locator)
        try:
            batch, index = self._group_rows(name, digest, group).row(row)
            return self.sample(batch, index, path)
        except SampleError as error:
            error.path = error.path if error.path.startswith(path) else f"{path}: {error.path}" if error.path else path
            raise
        except SourceError as error:
            raise SampleError("unreadable", str(error), path=path) from error

    def _group_rows(self, name: str, digest: int, group: int) -> GroupRows:
        if self._open is None or self._open.name != name:
            if self._open is not None:
                self._open.close()
            self._open = self._rows = None
            self._open = ParquetFile(self.files, name)
        if self._open.digest != digest:
            raise SampleError("changed", "the file changed after it was scanned")
        if self._rows is None or self._rows.group != group:
            self._rows = GroupRows(self._open, group, self.needed)
        return self._rows


class ParquetFile:
    """One file. Raises :class:`SourceError` where it is missing or no Parquet; page checksums are verified where there are any."""

    def __init__(self, files: FileList, name: str) -> None:
        self.name = name
        self._file = os.fdopen(open_regular(files.path(name)), "rb")
        try:
            self.digest = self._check_ends()
            self._reader = pq.ParquetFile(
                self._file, page_checksum_verification=True, buffer_size=_BUFFER, pre_buffer=False, memory_map=False
            )
            self.schema = self._reader.schema_arrow
        except (pa.ArrowException, OSError, ValueError, KeyError, MemoryError) as error:
            self._file.close()
            raise SourceError(f"{show(name)}: the footer cannot be read: {said(error)}") from None
        except BaseException:
            self._file.close()
            raise
        self.groups: int = self._reader.num_row_groups

    def __enter__(self) -> ParquetFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _check_ends(self) -> int:
        """A digest of the footer, which names every page's place and size."""
        descriptor, shown = self._file.fileno(), show(self.name)
        size = os.fstat(descriptor).st_size
        head, tail = os.pread(descriptor, 4, 0), os.pread(descriptor, 8, max(0, size - 8))
        if _ENCRYPTED in (head, tail[4:]):
            raise SourceError(f"{shown}: an encrypted Parquet file; decrypt it first")
        if size == 0:
            raise SourceError(f"{shown}: an empty file")
        if head != _MAGIC:
            raise SourceError(f"{shown}: not a Parquet file: it begins with {head!r}")
        if tail[4:] != _MAGIC or size < 12:
            raise SourceError(f"{shown}: the Parquet file is truncated: it does not end in {_MAGIC!r}, after {size} bytes")
        length = int.from_bytes(tail[:4], "little")
        if length > min(size - 12, _MAX_FOOTER):
            raise SourceError(f"{shown}: the Parquet file is damaged: a footer of {length} bytes in a file of {size}")
        return xxhash.xxh64_intdigest(os.pread(descriptor, length + 8, size - 8 - length), size)

    def rows(self, group: int) -> int:
        """How many rows a group claims to have."""
        return int(self._reader.metadata.row_group(group).num_rows)

    def bytes(self, group: int, columns: Sequence[str]) -> int:
        """Bytes of the columns of a group before compression, as the footer has it."""
        about = self._reader.metadata.row_group(group)
        chunks = [about.column(place) for place in range(about.num_columns)]
        wanted = [(column, column + ".") for column in columns]
        paths = ((chunk, chunk.path_in_schema) for chunk in chunks)
        return sum(
            int(chunk.total_uncompressed_size)
            for chunk, path in paths
            if any(path == column or path.startswith(below) for column, below in wanted)
        )

    def batches(self, group: int, columns: Sequence[str], rows: int) -> Iterator[Any]:
        """Batches of a group. Raises :class:`SampleError`: ``checksum``, ``parquet``, ``memory``."""
        try:
            yield from self._reader.iter_batches(batch_size=rows, row_groups=[group], columns=list(columns), use_threads=False)
        except MemoryError as error:
            raise SampleError("memory", f"row group {group}: {said(error)}") from None
        except (pa.ArrowException, OSError, ValueError, KeyError) as error:
            text = said(error)
            raise SampleError("checksum" if "CRC" in text else "parquet", f"row group {group}: {text}") from None


class GroupRows:
    """Rows of one row group, forward in batches of about 16 MiB; a row before the batch in hand starts it again.

    A fault stays: the rows behind it are known to be unreadable without another try.
    """

    def __init__(self, file: ParquetFile, group: int, columns: Sequence[str]) -> None:
        self.group = group
        self._file, self._columns = file, columns
        rows = max(1, file.rows(group))
        width = max(1, file.bytes(group, columns) // rows)
        self._batch_rows = max(1, min(_BATCH_ROWS, _BATCH_BYTES // width))
        self._fault: tuple[int, str, str] | None = None
        self._restart()

    def _restart(self) -> None:
        self._batches = self._file.batches(self.group, self._columns, self._batch_rows)
        self._batch: Any = None
        self._first = self._stop = 0

    def row(self, number: int) -> tuple[Any, int]:
        """The batch with a row, and the row's place in it. Raises :class:`SampleError`."""
        if self._fault is not None and number >= self._fault[0]:
            raise SampleError(self._fault[1], self._fault[2])
        if number < self._first:
            self._restart()
        while number >= self._stop:
            try:
                batch = next(self._batches, None)
            except SampleError as error:
                self._fault = (self._stop, error.code, error.reason)
                raise
            if batch is None:
                raise SampleError("truncated", f"row group {self.group} ends before row {number}")
            self._first, self._stop, self._batch = self._stop, self._stop + batch.num_rows, batch
        return self._batch, number - self._first


def said(error: BaseException) -> str:
    """What the library said, short."""
    return " ".join(str(error).split())[:300] or type(error).__name__
