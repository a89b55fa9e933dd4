"""Writes one shard file: rows in, row groups and index columns out (docs/format.md).

The writer knows nothing of codecs: a value is a payload, sizes by role and optional auxiliary numbers. It is single-threaded and
deterministic: the same rows give the same bytes. Memory is one row group, the index of the shard, and the digests by which
identical payloads are found.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lfdata.errors import LimitError, OptionError
from lfdata.format import layout
from lfdata.format.columns import FieldColumns, scalar_dtype
from lfdata.format.container import ContainerWriter, Written
from lfdata.format.durable import Files, OutputFile, temporary_name
from lfdata.format.layout import BLOCK_BYTES, COLUMN_ALIGN, REGION_ALIGN, Identity, align, xxh3
from lfdata.format.meta import FieldMeta, ShardMeta, check_fields

GROUP_BYTES = 8 << 20
SPOOL_READ_BYTES = 16 * BLOCK_BYTES


class Value(Protocol):
    """What the writer stores: see :class:`lfdata.codecs.base.Encoded`."""

    payload: Any
    sizes: dict[str, Any]
    aux: NDArray[np.uint64] | None


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
    ) -> None:
        check_fields(path, fields)
        self.path = path
        self.fields = tuple(fields)
        self.files = files or Files()
        self.rows = 0
        kind = layout.KIND_BASE if part_id == bytes(16) else layout.KIND_SIDECAR
        identity = Identity(layout.MAJOR, layout.MINOR, kind, 0, 0, shard_id, part_id)
        self._dictionaries = [(n, d) for n, f in enumerate(fields) if (d := (dictionaries or {}).get(f.name))]
        self._group_bytes = group_bytes
        self._columns = [FieldColumns(field, identity.seed) for field in self.fields]
        self._has_groups = any(field.kind in layout.GROUP_KINDS for field in self.fields)
        self._pending_bytes = 0
        self._group_first = 0
        self._index_bytes = 0
        self._keys = bytearray()
        self._key_offsets = array("Q", [0])
        self._key_hashes = array("Q")
        self._spools: dict[int, OutputFile] = {}
        self._container = ContainerWriter(path, identity, self.files)

    # -- rows ---------------------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Bytes the file would have, within a few KiB, if it were finished now."""
        spooled = sum(spool.position for spool in self._spools.values())
        return self._container.position + self._pending_bytes + spooled + self._index_bytes + len(self._keys)

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
                self._pending_bytes += columns.add_payload(value, digest, self._container.out)
            self._index_bytes += columns.row_bytes
        self._keys += key
        self._key_offsets.append(len(self._keys))
        self._key_hashes.append(xxh3(key))
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

    def _flush_group(self) -> None:
        first, self._group_first = self._group_first, self.rows
        if self.rows == first or not self._has_groups:
            return
        self._pending_bytes = 0
        self._container.group(first, self.rows - first, self._group_parts(align(self._container.position, REGION_ALIGN)))

    def _group_parts(self, position: int) -> Iterator[Any]:
        for field, columns in zip(self.fields, self._columns, strict=True):
            step = COLUMN_ALIGN if field.kind in layout.ALIGNED_KINDS else 1
            for payload in columns.place(position, step):
                position += len(payload)
                yield payload

    # -- end ----------------------------------------------------------------------------------------------------------

    def finish(self, meta: ShardMeta, announce: Callable[[Written], None] | None = None) -> Written:
        """Write the rest, make the file durable and visible.

        ``meta.fields`` and ``meta.statistics`` are filled in here. ``announce`` is called when all is written, before the file is
        committed (for a journal).
        """
        try:
            self._flush_group()
            for ordinal, field in enumerate(self.fields):
                if field.kind == "tokens":
                    spool = self._spools.pop(ordinal, None)
                    self._container.blocked(b"TOKN", _spooled(spool), scalar_dtype(field), field=ordinal)
            self._container.pad(REGION_ALIGN)
            meta.statistics = self._emit_index()
            meta.fields = self.fields
            return self._container.finish(self.rows, meta, self._dictionaries, announce)
        except BaseException:
            self.abort()
            raise

    def _emit_index(self) -> dict[str, Any]:
        statistics = {}
        emit = self._container.column
        for ordinal, (field, columns) in enumerate(zip(self.fields, self._columns, strict=True)):
            if field.kind != "scalar":
                emit(b"LOCR", columns.locators(), field=ordinal)
            for role, data in columns.finished():
                emit(b"COLM", data, field=ordinal, role=layout.ROLE_CODES[role])
            statistics[field.name] = columns.statistics()
        if self._container.identity.kind == layout.KIND_BASE:
            hashes = np.frombuffer(self._key_hashes, "<u8")
            order = np.argsort(hashes, kind="stable")
            emit(b"KEYS", np.frombuffer(self._keys, np.uint8))
            emit(b"KOFF", np.frombuffer(self._key_offsets, "<u8"))
            emit(b"KHSH", hashes[order])
            emit(b"KROW", order.astype("<u8"))
        return statistics

    def abort(self) -> None:
        """Drop the unfinished file."""
        for spool in self._spools.values():
            spool.close()
        self._spools.clear()
        self._container.abort()


def _spooled(spool: OutputFile | None) -> Iterator[bytes]:
    if spool is not None:
        for at in range(0, spool.position, SPOOL_READ_BYTES):
            yield spool.pread(min(SPOOL_READ_BYTES, spool.position - at), at)
        spool.close()
