"""Arrow IPC data by offset: heads of messages are read without their bodies, bodies only when their rows are wanted.

Layout (Arrow columnar format, "Encapsulated message format"): 0xFFFFFFFF, int32 length of the head, the head (a flatbuffer),
the body. A file that begins with ``ARROW1`` holds such a stream from byte 8 on.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import xxhash

from lfdata.errors import SampleError, SourceError
from shard_builder.sources.common import open_regular, read_exactly
from shard_builder.sources.files import show

_FILE_MAGIC = b"ARROW1\0\0"
_MARK = b"\xff\xff\xff\xff"
_MAX_HEAD = 64 << 20
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3
_MAX_ROWS = 1 << 31


@dataclass(frozen=True, slots=True)
class Piece:
    """One record batch: offset of its message, rows, and bytes in all."""

    offset: int
    rows: int
    size: int


class ArrowFile:
    """One IPC stream or file. Raises :class:`SourceError` where it is missing or its schema cannot be read."""

    def __init__(self, root: Path, name: str) -> None:
        self.name = name
        self._file = os.fdopen(open_regular(os.path.join(root, name)), "rb", buffering=0)
        try:
            self._descriptor = self._file.fileno()
            self.size = os.fstat(self._descriptor).st_size
            if self.size == 0:
                raise SourceError(f"{show(name)}: an empty file")
            self._start = 8 if os.pread(self._descriptor, 8, 0) == _FILE_MAGIC else 0
            self.schema = self._read_schema()
        except SampleError as error:
            self._file.close()
            raise SourceError(f"{show(name)}: {error.reason}") from None
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> ArrowFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _read_schema(self) -> Any:
        head, _, self._first = self._head(self._start) or (b"", 0, 0)
        if not head or _message(head)[0] != _SCHEMA:
            raise SourceError(f"{show(self.name)}: not an Arrow stream: no schema at byte {self._start}")
        data = read_exactly(self._descriptor, self._first - self._start, self._start)
        self.digest = xxhash.xxh64_intdigest(data, self.size & (2**64 - 1))
        try:
            return pa.ipc.read_schema(pa.BufferReader(data))
        except (pa.ArrowException, OSError, ValueError) as error:
            raise SourceError(f"{show(self.name)}: the schema cannot be read: {' '.join(str(error).split())[:300]}") from None

    def _head(self, offset: int) -> tuple[bytes, int, int] | None:
        """Head, offset of the body, and offset of the next message; ``None`` at the end mark.

        Raises:
            SampleError: ``truncated``, ``arrow``.
        """
        lead = os.pread(self._descriptor, 8, offset)
        if len(lead) < 8:
            raise SampleError("truncated", f"the Arrow stream is truncated: it ends at byte {self.size} without its end mark")
        if lead[:4] != _MARK:
            raise SampleError("arrow", f"no Arrow message at byte {offset}")
        length = int.from_bytes(lead[4:], "little")
        if length == 0:
            return None
        if length > _MAX_HEAD:
            raise SampleError("arrow", f"a message head of {length} bytes at byte {offset}")
        if offset + 8 + length > self.size:
            raise SampleError("truncated", f"the Arrow stream is truncated: it ends within the message at byte {offset}")
        head = read_exactly(self._descriptor, length, offset + 8)
        body = offset + 8 + length
        held = _message(head)[1]
        if held < 0 or body + held > self.size:
            raise SampleError("truncated", f"the Arrow stream is truncated: the message at byte {offset} claims {held} bytes")
        return head, body, body + held

    def pieces(self, limit: int) -> Iterator[Piece]:
        """Every record batch in order. Raises :class:`SampleError`: ``truncated``, ``arrow``, ``too-large``, ``unsupported``."""
        offset = self._first
        while (found := self._head(offset)) is not None:
            head, _, stop = found
            kind, _, rows = _message(head)
            if kind == _DICTIONARY:
                raise SampleError("unsupported", "columns with dictionaries in an Arrow stream are not read: decode them first")
            if kind != _BATCH:
                raise SampleError("arrow", f"an Arrow message of kind {kind} at byte {offset}, where rows are expected")
            if stop - offset > limit:
                reason = f"a record batch of {stop - offset} bytes; the limit is {limit} (option max_group_bytes)"
                raise SampleError("too-large", reason)
            if not 0 <= rows <= min(_MAX_ROWS, 64 * (stop - offset)):
                raise SampleError("arrow", f"the record batch at byte {offset} claims {rows} rows in {stop - offset} bytes")
            yield Piece(offset, rows, stop - offset)
            offset = stop

    def read(self, offset: int, columns: Sequence[str], limit: int) -> Any:
        """Columns of the record batch at ``offset``. Raises :class:`SampleError`: ``arrow``, ``memory``, ``changed``, ..."""
        found = self._head(offset)
        if found is None or found[2] - offset > limit:
            raise SampleError("changed", "the file changed after it was scanned")
        data = read_exactly(self._descriptor, found[2] - offset, offset)
        wanted = [place for place, name in enumerate(self.schema.names) if name in columns]
        try:
            batch = pa.ipc.read_record_batch(pa.ipc.read_message(data), self.schema).select(wanted)
            batch.validate(full=True)  # offsets and lengths are the file's claims
        except MemoryError as error:
            raise SampleError("memory", f"the record batch at byte {offset}: {error}") from None
        except (pa.ArrowException, OSError, ValueError) as error:
            text = " ".join(str(error).split())[:300]
            raise SampleError("arrow", f"the record batch at byte {offset} cannot be read: {text}") from None
        return batch


def _message(head: bytes) -> tuple[int, int, int]:
    """Kind of a message, length of its body, and rows of a record batch, out of the flatbuffer of its head.

    Raises:
        SampleError: ``arrow``.
    """
    try:
        root = struct.unpack_from("<I", head, 0)[0]
        kind_at, body_at, header_at = _slot(head, root, 1), _slot(head, root, 3), _slot(head, root, 2)
        kind = head[kind_at] if kind_at else 0
        body = struct.unpack_from("<q", head, body_at)[0] if body_at else 0
        rows = 0
        if kind == _BATCH and header_at:
            table = header_at + struct.unpack_from("<I", head, header_at)[0]
            rows_at = _slot(head, table, 0)
            rows = struct.unpack_from("<q", head, rows_at)[0] if rows_at else 0
    except (struct.error, IndexError):
        raise SampleError("arrow", "a message head that is no flatbuffer") from None
    return kind, body, rows


def _slot(data: bytes, table: int, number: int) -> int:
    """Offset of a table's member; 0 where it is absent."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    if vtable < 0:
        raise IndexError
    size = struct.unpack_from("<H", data, vtable)[0]
    place = 4 + 2 * number
    relative = struct.unpack_from("<H", data, vtable + place)[0] if place + 2 <= size else 0
    return table + relative if relative else 0
