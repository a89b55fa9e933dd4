"""Reads one shard file: opening and checking it, index columns, payload bytes. Nothing here decodes a payload.

Index columns can be had in two ways. :meth:`ShardFile.column` gives a zero-copy numpy view of a mapping (for scans over a whole
column). Everything a single read needs goes through ``pread`` and an :class:`~lfdata.format.cache.IndexCache`, so reading samples
never touches a mapping.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfdata.errors import ChangedError, CorruptError, FormatError, KeyMissingError, LimitError, TruncatedError, VersionError
from lfdata.format import layout
from lfdata.format.cache import IndexCache
from lfdata.format.files import LocalFile, RangeFile, ScatterFile, read_range
from lfdata.format.gather import locate
from lfdata.format.layout import BLOCK_BYTES, HEADER_BYTES, TRAILER_BYTES, Entry, Identity, Trailer, xxh3
from lfdata.format.meta import FieldMeta, ShardMeta, check_fields, decode_json
from lfdata.format.schema import check_schema, field_ndim


class ShardFile:
    """An open shard, sidecar or index file.

    Args:
        file: where the bytes are.
        tail: tail offset, if known (from the manifest): the file is then opened by one read, without its header.
        expect: ``(shard id, part id, rows)`` from the manifest; anything else is a :class:`ChangedError`.
        cache: shared index cache.

    Raises:
        FormatError: the file is damaged, truncated, of a newer version, or not what the manifest says.
    """

    def __init__(
        self,
        file: RangeFile,
        tail: int | None = None,
        expect: tuple[bytes, bytes, int] | None = None,
        cache: IndexCache | None = None,
    ) -> None:
        self.file = file
        self.name = file.name
        self._cache = cache or IndexCache()
        if file.size < HEADER_BYTES + TRAILER_BYTES:
            raise TruncatedError(self.name, file.size, f"{file.size} bytes are too few for a shard")
        if tail is not None and not HEADER_BYTES <= tail <= file.size - TRAILER_BYTES:
            raise CorruptError(self.name, tail, f"the tail offset {tail} lies outside the file")
        if tail is not None and file.size - tail > layout.MAX_TAIL_BYTES:
            tail = None
        header = None if tail is not None else bytes(read_range(file, 0, HEADER_BYTES))
        start = tail if tail is not None else file.size - TRAILER_BYTES
        self._tail = bytes(read_range(file, start, file.size - start))
        self._tail_start = start
        self.trailer = self._open(header)
        self.identity: Identity = self.trailer.identity
        self.rows: int = self.trailer.rows
        self._expect(expect)
        self._refuse_features()
        self._directory()
        self._tail = b""

    # -- opening ------------------------------------------------------------------------------------------------------

    def _open(self, header: bytes | None) -> Trailer:
        if header is not None:
            identity, check = layout.parse_header(self.name, header)
        trailer = layout.parse_trailer(self.name, self._tail[-TRAILER_BYTES:], self.file.size)
        if header is not None and (identity != trailer.identity or check != trailer.header_check):
            raise CorruptError(self.name, self.file.size - TRAILER_BYTES, "header and trailer belong to different shards")
        return trailer

    def _expect(self, expect: tuple[bytes, bytes, int] | None) -> None:
        found = (self.identity.shard_id, self.identity.part_id, self.rows)
        if expect is not None and found != expect:
            raise ChangedError(
                self.name,
                None,
                f"shard {found[0].hex()} with {found[2]} rows; the manifest says {expect[0].hex()} with {expect[2]}. "
                "The file belongs to another data set or generation",
            )

    def _bytes(self, offset: int, length: int) -> bytes:
        """Bytes of the tail, from memory where they were read already."""
        at = offset - self._tail_start
        if at >= 0:
            return self._tail[at : at + length]
        return bytes(read_range(self.file, offset, length))

    def _directory(self) -> None:
        trailer = self.trailer
        data = self._bytes(trailer.directory_offset, trailer.entries * layout.ENTRY_BYTES)
        self.entries = layout.parse_directory(self.name, data, trailer)
        self.groups = [entry for entry in self.entries if entry.type == b"GRUP"]
        self._by_place: dict[tuple[bytes, int, int], Entry] = {}
        for entry in self.entries:
            if entry.type == b"GRUP" or entry.type not in layout.SECTIONS:
                continue
            place = (entry.type, entry.field, entry.role)
            if place in self._by_place:
                raise CorruptError(
                    self.name, entry.offset, f"section {entry.type.decode()} appears twice for one field and role"
                )
            self._by_place[place] = entry
        section = self._find(b"META")
        self.meta: ShardMeta = self._read_meta(section)
        self.fields: tuple[FieldMeta, ...] = self.meta.fields
        self._ordinals = {field.name: number for number, field in enumerate(self.fields)}
        with self._at(section):
            check_fields(self.name, self.meta.fields)
            check_schema(self.name, trailer.directory_offset, self.identity.kind, self.rows, self.fields, self._by_place)
        self._sums = np.frombuffer(
            self._checked(self._find(b"BSUM"), 8 * sum(e.blocks for e in self.entries if e.blocked)), "<u8"
        )
        self._check_blocked()
        self._check_groups()
        dictionaries = [entry for entry in self.entries if entry.type == b"DICT"]
        total = sum(entry.length for entry in dictionaries)
        if total > layout.MAX_DICTS_BYTES:
            raise LimitError(
                self.name, dictionaries[0].offset, f"{total} bytes of dictionaries; the limit is {layout.MAX_DICTS_BYTES}"
            )
        self.dictionaries = {
            self.fields[entry.field].name: self._checked(entry, layout.MAX_DICT_BYTES) for entry in dictionaries
        }

    def _read_meta(self, entry: Entry) -> ShardMeta:
        index = self.identity.kind == layout.KIND_INDEX
        limit = layout.MAX_MANIFEST_BYTES if index else layout.MAX_META_BYTES
        data = self._checked(entry, limit)
        with self._at(entry):
            meta: ShardMeta = decode_json(self.name, data, ShardMeta, "META")
        return meta

    @contextlib.contextmanager
    def _at(self, entry: Entry) -> Iterator[None]:
        """Errors about what a section says get its offset."""
        try:
            yield
        except FormatError as error:
            if error.offset is not None:
                raise
            raise type(error)(self.name, entry.offset, error.reason) from error

    def _refuse_features(self) -> None:
        """Refuse required features by name. The rest of such a file may break every rule this reader knows, its META included."""
        bits = [bit for bit in range(64) if self.identity.required >> bit & 1]
        if not bits:
            return
        names: dict[str, str] = {}
        trailer = self.trailer
        try:
            data = self._bytes(trailer.directory_offset, trailer.entries * layout.ENTRY_BYTES)
            names = next(
                self._read_meta(e).features for e in layout.parse_directory(self.name, data, trailer) if e.type == b"META"
            )
        except (FormatError, StopIteration):
            names = {}
        wanted = ", ".join(repr(names.get(str(bit), f"bit {bit}")) for bit in bits)
        raise VersionError(self.name, 16, f"needs features that this reader lacks: {wanted}. Update lfdata to read it")

    def _find(self, type_: bytes, field: int = layout.NO_FIELD, role: int = 0) -> Entry:
        entry = self._by_place.get((type_, field, role))
        if entry is None:
            raise CorruptError(self.name, self.trailer.directory_offset, f"no {type_.decode()} section")
        return entry

    def _checked(self, entry: Entry, limit: int) -> bytes:
        if entry.length > limit:
            raise LimitError(
                self.name, entry.offset, f"section {entry.type.decode()} of {entry.length} bytes; the limit is {limit}"
            )
        data = self._bytes(entry.offset, entry.length)
        if xxh3(data, self.identity.seed) != entry.check:
            raise CorruptError(self.name, entry.offset, f"section {entry.type.decode()} does not match its check")
        return data

    def _check_blocked(self) -> None:
        first = 0
        for entry in self.entries:
            if not entry.blocked:
                continue
            if entry.first != first or first + entry.blocks > len(self._sums):
                raise CorruptError(
                    self.name, entry.offset, f"section {entry.type.decode()}: its block checks are not where they should be"
                )
            if xxh3(self._sums[first : first + entry.blocks].tobytes(), self.identity.seed) != entry.check:
                raise CorruptError(self.name, entry.offset, f"section {entry.type.decode()}: its block checks do not match")
            first += entry.blocks
        if first != len(self._sums):
            raise CorruptError(self.name, self.trailer.directory_offset, f"{len(self._sums) - first} block checks too many")

    def _check_groups(self) -> None:
        row = 0
        for group in self.groups:
            if group.first != row or not group.count:
                raise CorruptError(self.name, group.offset, f"row group begins at row {group.first}, expected {row}")
            row += group.count
        payload = any(field.kind in layout.GROUP_KINDS for field in self.fields) and self.identity.kind != layout.KIND_INDEX
        if row != (self.rows if payload else 0):
            raise CorruptError(self.name, None, f"row groups hold {row} rows, the shard {self.rows}")
        self._group_starts = np.array([0, *(group.offset for group in self.groups)], np.uint64)
        self._group_ends = np.array([0, *(group.end for group in self.groups)], np.uint64)

    # -- fields and columns -------------------------------------------------------------------------------------------

    def ordinal(self, field: str) -> int:
        """Ordinal of a field in this file. Raises :class:`KeyMissingError`."""
        found = self._ordinals.get(field)
        if found is None:
            raise KeyMissingError(f"{self.name}: no field {field!r}; there are {sorted(self._ordinals)}")
        return found

    def entry(self, field: str, role: str) -> Entry | None:
        """Directory entry of an index column, or ``None`` if the file has none."""
        return self._by_place.get((b"COLM", self.ordinal(field), layout.ROLE_CODES[role]))

    def view(self, entry: Entry) -> NDArray[Any]:
        """Zero-copy, read-only view of a whole blocked section, every block verified. It keeps its mapping alive.

        A file truncated after this call makes touching the view fatal (SIGBUS), as with every mapping.
        """
        if not isinstance(self.file, LocalFile):
            raise KeyMissingError(f"{self.name}: only local files can be mapped")
        self.file.check_size()
        raw = (
            np.frombuffer(self.file.map(), np.uint8, entry.length, entry.offset)
            if entry.length
            else np.frombuffer(b"", np.uint8)
        )
        for number in self._cache.unverified(self, entry):
            self._check_block(entry, number, raw[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES])
            if entry.dtype == np.bool_ and (raw[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES] > 1).any():
                raise CorruptError(self.name, entry.offset + number * BLOCK_BYTES, "a bool that is neither 0 nor 1")
            self._cache.mark_verified(self, entry, number)
        return raw.view(entry.dtype)

    def column(self, field: str, role: str) -> NDArray[Any] | None:
        """:meth:`view` of an index column (:meth:`read_column` for files that are not local), or ``None`` if the file has none."""
        entry = self.entry(field, role)
        if entry is None:
            return None
        return self.view(entry) if isinstance(self.file, LocalFile) else self._owned(entry)

    def tokens(self, field: str) -> NDArray[Any]:
        """All token ids of the shard as one view: zero-copy if the file is local."""
        entry = self._find(b"TOKN", self.ordinal(field))
        return self.view(entry) if isinstance(self.file, LocalFile) else self._owned(entry)

    def _owned(self, entry: Entry) -> NDArray[Any]:
        data = np.frombuffer(self.read_span(entry, 0, entry.blocks), entry.dtype)
        data.flags.writeable = False
        return data

    def _check_block(self, entry: Entry, number: int, data: Any) -> None:
        if xxh3(data, self.identity.seed) != self._sums[entry.first + number]:
            at = entry.offset + number * BLOCK_BYTES
            raise CorruptError(self.name, at, f"block {number} of section {entry.type.decode()} does not match its check")

    def read_blocks(self, entry: Entry, start: int, stop: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with blocks ``start`` to ``stop`` of a blocked section, each verified."""
        at = entry.offset + start * BLOCK_BYTES
        self.file.read_into(buffer, at)
        if not isinstance(self.file, LocalFile) and isinstance(self.file, ScatterFile):
            try:
                self._check_blocks(entry, start, stop, buffer)
                return
            except CorruptError:
                self.file.distrust(at, len(buffer))
                self.file.read_into(buffer, at)
        self._check_blocks(entry, start, stop, buffer)

    def _check_blocks(self, entry: Entry, start: int, stop: int, buffer: memoryview) -> None:
        for number in range(start, stop):
            at = (number - start) * BLOCK_BYTES
            self._check_block(entry, number, buffer[at : at + BLOCK_BYTES])

    def read_span(self, entry: Entry, start: int, stop: int) -> memoryview:
        """Blocks ``start`` to ``stop`` of a blocked section, owned and verified."""
        buffer = np.empty(min(stop * BLOCK_BYTES, entry.length) - start * BLOCK_BYTES, np.uint8)
        self.read_blocks(entry, start, stop, buffer.data)
        return buffer.data

    def read_column(self, field: str, role: str) -> NDArray[Any] | None:
        """A whole index column as an owned array, read with ``pread``; ``None`` if the file has none."""
        entry = self.entry(field, role)
        return None if entry is None else np.frombuffer(self.read_span(entry, 0, entry.blocks), entry.dtype)

    def section(self, type_: bytes, field: int = layout.NO_FIELD) -> Entry:
        """Directory entry of a section other than a column. Raises :class:`CorruptError` if there is none."""
        return self._find(type_, field)

    def read_section(self, type_: bytes, field: int = layout.NO_FIELD) -> NDArray[Any]:
        """A whole blocked section other than a column, as :meth:`read_column` gives a column."""
        entry = self._find(type_, field)
        return np.frombuffer(self.read_span(entry, 0, entry.blocks), entry.dtype)

    def take(self, entry: Entry, index: NDArray[np.int64]) -> NDArray[Any]:
        """Elements of a blocked section by ordinal, owned, verified; through ``pread``. The ordinals must be in range."""
        return self._cache.take(self, entry, index)

    def gather(self, field: str, role: str, rows: NDArray[np.int64]) -> NDArray[Any] | None:
        """Index column values of some rows (``dims``: shape (rows, ndim)); ``None`` if the file has no such column."""
        entry = self.entry(field, role)
        if entry is None:
            return None
        if role != "dims":
            return self.take(entry, rows)
        ndim = field_ndim(self.name, self.fields[self.ordinal(field)])
        flat = rows[:, None] * ndim + np.arange(ndim)
        return self.take(entry, flat.ravel()).reshape(len(rows), ndim)

    def locate(self, field: str, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint64]]:
        """Offsets in the file, lengths in bytes and checks of the payloads of some rows; bounds are verified."""
        number = self.ordinal(field)
        kind = self.fields[number].kind
        locators, counts = (
            self._find(b"LOCR", number),
            self._find(b"COLM", number, layout.ROLE_CODES["tokens" if kind == "tokens" else "bytes"]),
        )
        if kind == "tokens":
            region = self._find(b"TOKN", number)
            spans = np.zeros(1, np.uint64), np.array([region.count], np.uint64)
            unit, base = region.dtype.itemsize, region.offset
        else:
            # The group before the first is empty and at 0: where values of length 0 are, and values before every group are too long for it.
            spans, unit, base = (self._group_starts, self._group_ends), 1, 0
        table, sizes = self._cache.held(self, locators, rows), self._cache.held(self, counts, rows)
        elements = rows
        if table is None or sizes is None:
            table, sizes = self._cache.rows(self, locators, rows), self._cache.rows(self, counts, rows)
            elements = np.arange(len(rows))
        offsets, lengths, checks, outside = locate(table, sizes, elements, spans, unit, base)
        if outside >= 0:
            row = int(rows[outside])
            raise CorruptError(self.name, None, f"field {field!r}, row {row}: its payload lies outside its section")
        return offsets, lengths, checks

    # -- keys ---------------------------------------------------------------------------------------------------------

    def keys(self, rows: NDArray[np.int64]) -> list[bytes]:
        """Keys of some rows."""
        offsets = self.take(self._find(b"KOFF"), np.concatenate([rows, rows + 1])).astype(np.int64)
        text = self._find(b"KEYS")
        starts, stops = offsets[: len(rows)], offsets[len(rows) :]
        bad = (starts < 0) | (stops < starts) | (stops > text.length) | (stops - starts > layout.MAX_KEY_BYTES)
        if bad.any():
            raise CorruptError(self.name, text.offset, f"key of row {int(rows[np.argmax(bad)])} lies outside the key section")
        return self._cache.spans(self, text, starts, stops)

    def find_hash(self, key: bytes) -> Iterator[int]:
        """Rows whose key has this key's hash, in order."""
        wanted = np.uint64(xxh3(key))
        hashes, order = self._find(b"KHSH"), self._find(b"KROW")
        low, high = 0, self.rows
        while low < high:
            middle = (low + high) // 2
            if self.take(hashes, np.array([middle]))[0] < wanted:
                low = middle + 1
            else:
                high = middle
        while low < self.rows and self.take(hashes, np.array([low]))[0] == wanted:
            row = int(self.take(order, np.array([low]))[0])
            if row >= self.rows:
                raise CorruptError(self.name, order.offset, f"a key hash points at row {row} of {self.rows}")
            yield row
            low += 1

    def find(self, key: bytes) -> int | None:
        """Row of a key, or ``None``. The hash finds candidates, the real key decides."""
        return next((row for row in self.find_hash(key) if self.keys(np.array([row]))[0] == key), None)

    def key_hashes(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """KHSH and KROW as views: hashes in ascending order, and their rows."""
        return self.view(self._find(b"KHSH")), self.view(self._find(b"KROW"))
