"""Writes the container every file of the format shares: header, sections in order, tail, directory, trailer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfdata.format import layout
from lfdata.format.durable import Files, temporary_name
from lfdata.format.layout import (
    BLOCK_BYTES,
    COLUMN_ALIGN,
    ELEMENT_CODES,
    FLAG_BLOCKED,
    FLAG_REQUIRED,
    NO_FIELD,
    REGION_ALIGN,
    Entry,
    Identity,
    Trailer,
    align,
    xxh3,
)
from lfdata.format.meta import ShardMeta, encode_meta

COPY_BYTES = 1 << 20
_U64 = ELEMENT_CODES[np.dtype("<u8")]


@dataclass(frozen=True, slots=True)
class Written:
    """What the manifest needs to know of a finished file."""

    rows: int
    bytes: int
    tail: int
    sha256: str
    statistics: dict[str, Any]


class ContainerWriter:
    """One file in the making, under a temporary name until :meth:`finish`. The digest of the whole is computed on the way."""

    def __init__(self, path: Path, identity: Identity, files: Files) -> None:
        self.path = path
        self.identity = identity
        self.files = files
        self.seed = identity.seed
        self._entries: list[Entry] = []
        self._block_sums: list[NDArray[np.uint64]] = []
        self._blocks = 0
        self._digest = hashlib.sha256()
        temporary = path.with_name(temporary_name(path.name))
        files.unlink(temporary)
        self.out = files.create(temporary)
        header = layout.pack_header(identity)
        self._header_check = int.from_bytes(header[-8:], "little")
        try:
            self.emit(header)
        except BaseException:
            self.abort()
            raise

    @property
    def position(self) -> int:
        """Bytes written so far."""
        return self.out.position

    def emit(self, data: Any) -> None:
        """Append bytes."""
        self.out.write(data)
        self._digest.update(data)

    def pad(self, step: int) -> int:
        """Append zeros up to a multiple of ``step``; returns the offset."""
        target = align(self.out.position, step)
        if target > self.out.position:
            self.emit(bytes(target - self.out.position))
        return target

    def section(self, type_: bytes, offset: int, check: int, **fields: int) -> None:
        """Enter everything since ``offset`` into the directory."""
        length = self.out.position - offset
        values = {"field": NO_FIELD, "role": 0, "element": 0, "count": length, "first": 0} | fields
        # What no reader needs to know has a type of its own.
        flags = FLAG_REQUIRED | (FLAG_BLOCKED if layout.SECTIONS[type_] else 0) if type_ in layout.SECTIONS else 0
        self._entries.append(Entry(type=type_, flags=flags, offset=offset, length=length, check=check, **values))

    def group(self, first: int, rows: int, parts: Iterable[Any]) -> None:
        """Write a row group from its parts; the caller has computed their offsets from the next multiple of ``REGION_ALIGN``."""
        start = self.pad(REGION_ALIGN)
        hasher = layout.new_xxh3(self.seed)
        for part in _chunks(parts):
            self.emit(part)
            hasher.update(part)
        self.section(b"GRUP", start, hasher.intdigest(), count=rows, first=first)

    def optional(self, type_: bytes, parts: Iterable[Any]) -> None:
        """Write a section that readers may skip."""
        start = self.pad(COLUMN_ALIGN)
        hasher = layout.new_xxh3(self.seed)
        for part in parts:
            self.emit(part)
            hasher.update(part)
        self.section(type_, start, hasher.intdigest())

    def blocked(self, type_: bytes, blocks: Iterable[Any], dtype: np.dtype[Any] | None, **fields: int) -> None:
        """Write a blocked section; every part but the last must be a multiple of ``BLOCK_BYTES`` long."""
        start = self.pad(REGION_ALIGN if type_ == b"TOKN" else COLUMN_ALIGN)
        sums = []
        for part in blocks:
            view = memoryview(part)
            sums += [xxh3(view[at : at + BLOCK_BYTES], self.seed) for at in range(0, len(view), BLOCK_BYTES)]
            self.emit(view)
        table = np.array(sums, "<u8")
        first, self._blocks = self._blocks, self._blocks + len(table)
        self._block_sums.append(table)
        width = dtype.itemsize if dtype is not None else 1
        count = (self.position - start) // width
        element = ELEMENT_CODES[dtype] if dtype is not None else 0
        self.section(type_, start, xxh3(table.tobytes(), self.seed), first=first, element=element, count=count, **fields)

    def column(self, type_: bytes, data: NDArray[Any], **fields: int) -> None:
        """Write an array as a blocked section."""
        raw = [np.ascontiguousarray(data).data.cast("B")] if data.size else []
        self.blocked(type_, raw, data.dtype if type_ != b"KEYS" else None, **fields)

    def finish(
        self,
        rows: int,
        meta: ShardMeta,
        dictionaries: Sequence[tuple[int, bytes]] = (),
        announce: Callable[[Written], None] | None = None,
    ) -> Written:
        """Write tail, directory and trailer, make the file durable and visible. ``announce`` is called just before that."""
        tail = self.pad(REGION_ALIGN)
        for ordinal, dictionary in dictionaries:
            start = self.pad(COLUMN_ALIGN)
            self.emit(dictionary)
            self.section(b"DICT", start, xxh3(dictionary, self.seed), field=ordinal)
        sums = np.concatenate(self._block_sums) if self._block_sums else np.empty(0, "<u8")
        for type_, data in ((b"META", encode_meta(meta)), (b"BSUM", sums.tobytes())):
            start = self.pad(COLUMN_ALIGN)
            self.emit(data)
            extra: Mapping[str, int] = {"element": _U64, "count": len(sums)} if type_ == b"BSUM" else {}
            self.section(type_, start, xxh3(data, self.seed), **extra)
        directory = b"".join(layout.pack_entry(entry) for entry in self._entries)
        start = self.pad(COLUMN_ALIGN)
        self.emit(directory)
        size = self.position + layout.TRAILER_BYTES
        check = xxh3(directory, self.seed)
        self.emit(layout.pack_trailer(Trailer(self.identity, rows, start, len(self._entries), check, size, self._header_check)))
        written = Written(rows, self.position, tail, self._digest.hexdigest(), meta.statistics)
        if announce is not None:
            announce(written)
        self.files.commit(self.out, self.path)
        return written

    def abort(self) -> None:
        """Drop the unfinished file."""
        self.files.discard(self.out)


def _chunks(parts: Iterable[Any]) -> Iterator[Any]:
    """The same bytes in pieces of about ``COPY_BYTES``: fewer system calls for small parts, bounded ones for large."""
    held: list[Any] = []
    size = 0
    for part in parts:
        if len(part) < COPY_BYTES:
            held.append(part)
            size += len(part)
        if held and (size >= COPY_BYTES or len(part) >= COPY_BYTES):
            yield b"".join(held)
            held, size = [], 0
        if len(part) >= COPY_BYTES:
            view = memoryview(part)
            for at in range(0, len(view), COPY_BYTES):
                yield view[at : at + COPY_BYTES]
    if held:
        yield b"".join(held)
