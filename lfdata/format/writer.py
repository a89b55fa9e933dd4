"""Writes one shard file: rows in, row groups and index columns out (docs/format.md).

The writer knows nothing of codecs: a value is a payload, sizes by role and optional auxiliary numbers. It is single-threaded and
deterministic: the same rows give the same bytes. Memory is one row group, the index of the shard, and the digests by which
identical payloads are found.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lfdata.errors import LimitError, OptionError
from lfdata.format import layout
from lfdata.format.columns import FieldColumns, scalar_dtype
from lfdata.format.durable import Files, OutputFile, temporary_name
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
    xxh64,
)
from lfdata.format.meta import FieldMeta, ShardMeta, check_fields, encode_meta

GROUP_BYTES = 8 << 20
COPY_BYTES = 1 << 20


class Value(Protocol):
    """What the writer stores: see :class:`lfdata.codecs.base.Encoded`."""

    payload: Any
    sizes: dict[str, Any]
    aux: NDArray[np.uint64] | None


@dataclass(frozen=True, slots=True)
class Written:
    """What the manifest needs to know of a finished file."""

    rows: int
    bytes: int
    tail: int
    sha256: str
    statistics: dict[str, Any]


class ShardWriter:
    """One shard, base or sidecar, written to a temporary name and committed by :meth:`finish`.

    Args:
        path: final path; nothing is visible there before ``finish`` returns.
        fields: schema, in order.
        shard_id: 16 bytes. part_id: 16 bytes, zero for a base shard.
        dictionaries: zstandard dictionary by field name.
        group_bytes: payload bytes of a row group.
        files: the durable file layer.
    """

    def __init__(
        self,
        path: Path,
        fields: Sequence[FieldMeta],
        shard_id: bytes,
        part_id: bytes = bytes(16),
        dictionaries: Mapping[str, bytes] | None = None,
        group_bytes: int = GROUP_BYTES,
        files: Files | None = None,
        kind: int | None = None,
    ) -> None:
        check_fields(path, fields)
        self.path = path
        self.fields = tuple(fields)
        self.files = files or Files()
        self.rows = 0
        if kind is None:
            kind = layout.KIND_BASE if part_id == bytes(16) else layout.KIND_SIDECAR
        self.identity = Identity(layout.MAJOR, layout.MINOR, kind, 0, 0, shard_id, part_id)
        self.seed = self.identity.seed
        self._dictionaries = dict(dictionaries or {})
        self._group_bytes = group_bytes
        self._columns = [FieldColumns(field, self.seed) for field in self.fields]
        self._pending_bytes = 0
        self._group_first = 0
        self._index_bytes = 0
        self._keys = bytearray()
        self._key_offsets = array("Q", [0])
        self._key_hashes = array("Q")
        self._entries: list[Entry] = []
        self._block_sums: list[NDArray[np.uint64]] = []
        self._digest = hashlib.sha256()
        temporary = path.with_name(temporary_name(path.name))
        self.files.unlink(temporary)
        self._out = self.files.create(temporary)
        self._spools: dict[int, OutputFile] = {}
        try:
            header = layout.pack_header(self.identity)
            self._header_check = int.from_bytes(header[-8:], "little")
            self._emit(header)
        except BaseException:
            self.abort()
            raise

    # -- rows ---------------------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Bytes the file would have, within a few KiB, if it were finished now."""
        spooled = sum(spool.position for spool in self._spools.values())
        return self._out.position + self._pending_bytes + spooled + self._index_bytes + len(self._keys)

    def add(self, key: bytes, values: Mapping[str, Value], digests: Mapping[str, bytes] | None = None) -> None:
        """Append a row.

        Args:
            key: at most 65,535 bytes (ignored in a sidecar).
            values: by field name; a field not in it is absent.
            digests: SHA-256 of payloads where the caller has them; computed here otherwise.
        """
        if len(key) > layout.MAX_KEY_BYTES:
            raise LimitError(self.path, None, f"key of {len(key)} bytes; the limit is {layout.MAX_KEY_BYTES}")
        unknown = values.keys() - {field.name for field in self.fields}
        if unknown:
            raise OptionError(f"{self.path}: values for fields that the schema lacks: {sorted(unknown)}")
        incoming = sum(len(v.payload) for name, v in values.items())
        if self._pending_bytes and self._pending_bytes + incoming > self._group_bytes:
            self._flush_group()
        for ordinal, (field, columns) in enumerate(zip(self.fields, self._columns, strict=True)):
            value = values.get(field.name)
            if value is None:
                columns.add_absent()
            elif field.kind == "tokens":
                columns.add_tokens(value, self._spool(ordinal))
            elif field.kind == "scalar":
                columns.add_scalar(value)
            else:
                digest = (digests or {}).get(field.name) or hashlib.sha256(value.payload).digest()
                self._pending_bytes += columns.add_payload(value, digest, self._out)
            self._index_bytes += columns.row_bytes
        self._keys += key
        self._key_offsets.append(len(self._keys))
        self._key_hashes.append(xxh64(key))
        self._index_bytes += 24
        self.rows += 1
        if self._pending_bytes >= self._group_bytes:
            self._flush_group()

    def _spool(self, ordinal: int) -> OutputFile:
        spool = self._spools.get(ordinal)
        if spool is None:
            spool = self.files.scratch(self.path.parent, temporary_name(f"{self.path.name}.tokens{ordinal}"))
            self._spools[ordinal] = spool
        return spool

    # -- bytes --------------------------------------------------------------------------------------------------------

    def _emit(self, data: Any) -> None:
        self._out.write(data)
        self._digest.update(data)

    def _pad(self, step: int) -> int:
        target = align(self._out.position, step)
        if target > self._out.position:
            self._emit(bytes(target - self._out.position))
        return target

    def _section(self, type_: bytes, offset: int, check: int, **fields: int) -> None:
        length = self._out.position - offset
        values = {"field": NO_FIELD, "role": 0, "element": 0, "count": length, "first": 0} | fields
        flags = FLAG_REQUIRED | (FLAG_BLOCKED if layout.SECTIONS[type_] else 0)
        self._entries.append(Entry(type=type_, flags=flags, offset=offset, length=length, check=check, **values))

    def _flush_group(self) -> None:
        if self.rows == self._group_first:
            return
        if not any(field.kind in layout.GROUP_KINDS for field in self.fields):
            self._group_first = self.rows
            return
        start = self._pad(REGION_ALIGN)
        hasher = layout.new_xxh64(self.seed)
        position = start
        for field, columns in zip(self.fields, self._columns, strict=True):
            step = COLUMN_ALIGN if field.kind in layout.ALIGNED_KINDS else 1
            for payload in columns.place(position, step):
                for at in range(0, len(payload), COPY_BYTES):
                    part = memoryview(payload)[at : at + COPY_BYTES] if len(payload) > COPY_BYTES else payload
                    self._emit(part)
                    hasher.update(part)
            position = self._out.position
        first, self._group_first = self._group_first, self.rows
        self._pending_bytes = 0
        self._section(b"GRUP", start, hasher.intdigest(), count=self.rows - first, first=first)

    def _blocked_section(self, type_: bytes, offset: int, sums: NDArray[np.uint64], **fields: int) -> None:
        first = sum(len(part) for part in self._block_sums)
        self._block_sums.append(sums)
        self._section(type_, offset, xxh64(sums.tobytes(), self.seed), first=first, **fields)

    def _emit_column(self, type_: bytes, data: NDArray[Any], **fields: int) -> None:
        start = self._pad(COLUMN_ALIGN)
        raw = memoryview(np.ascontiguousarray(data)).cast("B") if data.size else memoryview(b"")
        sums = [xxh64(raw[at : at + BLOCK_BYTES], self.seed) for at in range(0, len(raw), BLOCK_BYTES)]
        self._emit(raw)
        element = ELEMENT_CODES[data.dtype] if type_ != b"KEYS" else 0
        self._blocked_section(type_, start, np.array(sums, "<u8"), element=element, count=data.size, **fields)

    def _emit_tokens(self, ordinal: int) -> None:
        spool = self._spools.pop(ordinal, None)
        start = self._pad(REGION_ALIGN)
        total = spool.position if spool else 0
        sums = []
        for at in range(0, total, BLOCK_BYTES):
            block = spool.pread(min(BLOCK_BYTES, total - at), at) if spool else b""
            self._emit(block)
            sums.append(xxh64(block, self.seed))
        if spool:
            spool.close()
        dtype = scalar_dtype(self.fields[ordinal])
        self._blocked_section(
            b"TOKN", start, np.array(sums, "<u8"), field=ordinal, element=ELEMENT_CODES[dtype], count=total // dtype.itemsize
        )

    # -- end ----------------------------------------------------------------------------------------------------------

    def finish(self, meta: ShardMeta) -> Written:
        """Write index, tail, directory and trailer, make the file durable and visible. ``meta.fields`` and ``statistics`` are filled in."""
        try:
            self._flush_group()
            for ordinal, field in enumerate(self.fields):
                if field.kind == "tokens":
                    self._emit_tokens(ordinal)
            self._pad(REGION_ALIGN)
            statistics = self._emit_index()
            meta.fields = self.fields
            meta.statistics = statistics
            tail = self._emit_tail(meta)
            written = Written(self.rows, self._out.position, tail, self._digest.hexdigest(), statistics)
            self.files.commit(self._out, self.path)
        except BaseException:
            self.abort()
            raise
        return written

    def _emit_index(self) -> dict[str, Any]:
        statistics = {}
        for ordinal, (field, columns) in enumerate(zip(self.fields, self._columns, strict=True)):
            if field.kind != "scalar":
                self._emit_column(b"LOCR", columns.locators(), field=ordinal)
            for role, data in columns.finished():
                self._emit_column(b"COLM", data, field=ordinal, role=layout.ROLE_CODES[role])
            statistics[field.name] = columns.statistics()
        if self.identity.kind == layout.KIND_BASE:
            hashes = np.frombuffer(self._key_hashes, "<u8")
            order = np.argsort(hashes, kind="stable")
            self._emit_column(b"KEYS", np.frombuffer(self._keys, np.uint8))
            self._emit_column(b"KOFF", np.frombuffer(self._key_offsets, "<u8"))
            self._emit_column(b"KHSH", hashes[order])
            self._emit_column(b"KROW", order.astype("<u8"))
        return statistics

    def _emit_tail(self, meta: ShardMeta) -> int:
        tail = self._pad(REGION_ALIGN)
        for ordinal, field in enumerate(self.fields):
            dictionary = self._dictionaries.get(field.name)
            if dictionary:
                start = self._pad(COLUMN_ALIGN)
                self._emit(dictionary)
                self._section(b"DICT", start, xxh64(dictionary, self.seed), field=ordinal)
        sums = np.concatenate(self._block_sums) if self._block_sums else np.empty(0, "<u8")
        for type_, data in ((b"META", encode_meta(meta)), (b"BSUM", sums.tobytes())):
            start = self._pad(COLUMN_ALIGN)
            self._emit(data)
            extra = {"element": ELEMENT_CODES[np.dtype("<u8")], "count": len(sums)} if type_ == b"BSUM" else {}
            self._section(type_, start, xxh64(data, self.seed), **extra)
        directory = b"".join(layout.pack_entry(entry) for entry in self._entries)
        start = self._pad(COLUMN_ALIGN)
        self._emit(directory)
        size = self._out.position + layout.TRAILER_BYTES
        trailer = Trailer(
            self.identity, self.rows, start, len(self._entries), xxh64(directory, self.seed), size, self._header_check
        )
        self._emit(layout.pack_trailer(trailer))
        return tail

    def abort(self) -> None:
        """Drop the unfinished file."""
        for spool in self._spools.values():
            spool.close()
        self._spools.clear()
        self.files.discard(self._out)
