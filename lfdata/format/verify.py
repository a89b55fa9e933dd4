"""Full verification of one file: every byte is covered by a check, and everything the index says is consistent.

Findings are yielded, not raised, so that one run lists all damage. Nothing is decoded here unless the caller gives a decoder.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from lfdata.errors import CorruptError, FormatError, LfdataError
from lfdata.format import layout
from lfdata.format.cache import IndexCache
from lfdata.format.consistency import check_field, check_keys
from lfdata.format.files import DescriptorPool, LocalFile, RangeFile, read_range
from lfdata.format.layout import BLOCK_BYTES, HEADER_BYTES, TRAILER_BYTES, Entry, is_zero, new_xxh3, xxh3
from lfdata.format.meta import FieldMeta
from lfdata.format.reader import ShardFile
from lfdata.format.schema import chunk_frames

PIECE_BYTES = 1 << 20
INDEX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Damage:
    """One finding.

    Attributes:
        file: path of the file.
        section: ``header``, ``trailer``, ``directory``, ``padding``, ``file`` (size, digest, identity) or a section type.
        offset: byte offset in the file, where there is one.
        reason: what is wrong.
        field, row: the value concerned, where there is one.
    """

    file: str
    section: str
    offset: int | None
    reason: str
    field: str = ""
    row: int | None = None

    def __str__(self) -> str:
        where = f"{self.file}: byte {self.offset}" if self.offset is not None else self.file
        value = f" field {self.field!r}," if self.field else ""
        value += f" row {self.row}," if self.row is not None else ""
        return f"{where}: {self.section}:{value} {self.reason}"


class ValueDecoder(Protocol):
    """See :class:`lfdata.codecs.base.Decoder`."""

    def decode(self, payload: Any, sizes: Mapping[str, Any]) -> Any:
        """Decode one value or raise :class:`lfdata.errors.SampleError`."""
        ...


MakeDecoder = Callable[[str, Mapping[str, Any], bytes | None], ValueDecoder]
"""``(kind, params, dictionary)`` -> decoder: :func:`lfdata.codecs.registry.make_decoder`."""


def verify_file(
    path: str | Path,
    *,
    expect: tuple[bytes, bytes, int] | None = None,
    sha256: str | None = None,
    quick: bool = False,
    decoders: MakeDecoder | None = None,
) -> Iterator[Damage]:
    """Verify a shard, sidecar or index file.

    Checked: header, trailer, directory, META, BSUM, DICT, padding, every block of every index column and token region, order and
    hashes of the keys, and that columns, locators and sections agree; unless ``quick``, also the bytes of every row group, the
    check of every value and audio chunk, and the digest of the file.

    Args:
        expect: ``(shard id, part id, rows)`` from the manifest. sha256: the file's digest from it, in hexadecimal.
        quick: leave out everything that reads payloads.
        decoders: decode every value too (not with ``quick``).

    Yields:
        :class:`Damage`. A file that cannot be opened gives one finding, and the digest if it differs.
    """
    try:
        file = LocalFile(path, DescriptorPool(1))
    except LfdataError as error:
        yield Damage(str(path), "file", None, str(error))
        return
    yield from verify_bytes(file, expect=expect, sha256=sha256, quick=quick, decoders=decoders)
    file.close()


def verify_bytes(
    file: RangeFile,
    *,
    expect: tuple[bytes, bytes, int] | None = None,
    sha256: str | None = None,
    quick: bool = False,
    decoders: MakeDecoder | None = None,
) -> Iterator[Damage]:
    """:func:`verify_file` of a file that is open already, wherever it lies."""
    name = file.name
    try:
        shard = ShardFile(file, None, expect, IndexCache(INDEX_BYTES))
    except FormatError as error:
        yield Damage(name, _region(error.offset, file.size), error.offset, error.reason)
    except LfdataError as error:
        yield Damage(name, "file", None, str(error))
    else:
        yield from _Verifier(shard, decoders).run(quick)
    if sha256 is not None and not quick:
        yield from _digest(file, sha256)


def _region(offset: int | None, size: int) -> str:
    if offset is None:
        return "file"
    return "header" if offset < HEADER_BYTES else "trailer" if offset >= size - TRAILER_BYTES else "directory"


def _digest(file: RangeFile, wanted: str) -> Iterator[Damage]:
    digest = hashlib.sha256()
    try:
        for at in range(0, file.size, PIECE_BYTES):
            digest.update(read_range(file, at, min(PIECE_BYTES, file.size - at)))
    except LfdataError as error:
        yield Damage(file.name, "file", None, str(error))
        return
    if digest.hexdigest() != wanted:
        yield Damage(file.name, "file", None, f"SHA-256 is {digest.hexdigest()}; the manifest says {wanted}")


class _Verifier:
    def __init__(self, shard: ShardFile, decoders: MakeDecoder | None) -> None:
        self.shard = shard
        self.decoders = decoders
        self.seed = shard.identity.seed

    def run(self, quick: bool) -> Iterator[Damage]:
        """All findings."""
        stages: list[tuple[str, str, Iterator[Damage]]] = [("padding", "", self._padding()), ("index", "", self._blocks())]
        if not quick:
            stages.append(("GRUP", "", self._plain()))
        stages.append(("KEYS", "", self._consistency("", lambda: check_keys(self.shard))))
        for field in self.shard.fields:
            check = self._consistency(field.name, functools.partial(check_field, self.shard, field))
            stages.append(("COLM", field.name, check))
            if not quick and field.kind != "scalar" and self.shard.identity.kind != layout.KIND_INDEX:
                stages.append(("GRUP", field.name, self._values(field)))
        told: set[tuple[int | None, str]] = set()
        for section, name, stage in stages:
            try:
                for damage in stage:
                    told.add((damage.offset, damage.reason))
                    yield damage
            except LfdataError as error:
                offset, reason = (error.offset, error.reason) if isinstance(error, FormatError) else (None, str(error))
                if (offset, reason) not in told:  # a block that an earlier stage has found damaged
                    yield Damage(self.shard.name, section, offset, reason, name)

    def _damage(self, entry: Entry, offset: int, reason: str) -> Damage:
        field = self.shard.fields[entry.field].name if entry.field < len(self.shard.fields) else ""
        return Damage(self.shard.name, entry.type.decode("ascii", "backslashreplace"), offset, reason, field)

    def _padding(self) -> Iterator[Damage]:
        end = HEADER_BYTES
        places = [(entry.offset, entry.end) for entry in self.shard.entries]
        for start, stop in [*places, (self.shard.trailer.directory_offset, 0)]:
            gap = read_range(self.shard.file, end, start - end)
            if gap and not is_zero(memoryview(gap)):
                bad = end + int(np.flatnonzero(np.frombuffer(gap, np.uint8))[0])
                yield Damage(self.shard.name, "padding", bad, "a byte between sections is not zero")
            end = stop

    def _blocks(self) -> Iterator[Damage]:
        for entry in self.shard.entries:
            if not entry.blocked:
                continue
            for number in range(entry.blocks):
                try:
                    self.shard.read_span(entry, number, number + 1)
                except CorruptError as error:
                    yield self._damage(entry, entry.offset + number * BLOCK_BYTES, error.reason)

    def _plain(self) -> Iterator[Damage]:
        """Row groups, and sections of unknown types (the others were verified by opening)."""
        for entry in self.shard.entries:
            if entry.blocked or (entry.type in layout.SECTIONS and entry.type != b"GRUP"):
                continue
            hasher = new_xxh3(self.seed)
            for at in range(entry.offset, entry.end, PIECE_BYTES):
                hasher.update(read_range(self.shard.file, at, min(PIECE_BYTES, entry.end - at)))
            if hasher.intdigest() != entry.check:
                yield self._damage(entry, entry.offset, f"the {entry.length} bytes of the section do not match its check")

    def _consistency(self, field: str, check: Callable[[], Iterator[tuple[str, int | None, str]]]) -> Iterator[Damage]:
        for section, row, reason in check():
            yield Damage(self.shard.name, section, None, reason, field, row)

    # -- values -------------------------------------------------------------------------------------------------------

    def _values(self, field: FieldMeta) -> Iterator[Damage]:
        shard = self.shard
        rows = np.arange(shard.rows)
        offsets, lengths, checks = shard.locate(field.name, rows)
        present = shard.read_column(field.name, "present")
        there = np.ones(shard.rows, bool) if present is None else present.astype(bool)
        decode = self._decoder(field)
        order = np.lexsort((rows, lengths, offsets))
        last: tuple[int, int, int] | None = None
        good = True
        payload: bytearray | None = None
        for row in order[there[order]].tolist():
            place = (int(offsets[row]), int(lengths[row]), int(checks[row]))
            if place != last:
                # Neighbours in this order with the same place are one stored payload: read and checked once.
                payload = bytearray(read_range(shard.file, *place[:2])) if decode else None
                good, last = self._check_value(place, payload), place
            if not good:
                yield self._bad(field, row, place[0], "the payload does not match its check")
                continue
            yield from self._check_aux(field, row, place)
            if decode:
                try:
                    decode(memoryview(payload or b""), row)
                except LfdataError as error:
                    yield self._bad(field, row, place[0], str(error))

    def _bad(self, field: FieldMeta, row: int, offset: int, reason: str) -> Damage:
        return Damage(self.shard.name, "TOKN" if field.kind == "tokens" else "GRUP", offset, reason, field.name, row)

    def _check_value(self, place: tuple[int, int, int], payload: bytearray | None) -> bool:
        offset, length, check = place
        if payload is not None:
            return xxh3(payload, self.seed) == check
        hasher = new_xxh3(self.seed)
        for at in range(offset, offset + length, PIECE_BYTES):
            hasher.update(read_range(self.shard.file, at, min(PIECE_BYTES, offset + length - at)))
        return bool(hasher.intdigest() == check)

    def _check_aux(self, field: FieldMeta, row: int, place: tuple[int, int, int]) -> Iterator[Damage]:
        entry = self.shard.entry(field.name, "aux")
        if entry is None:
            return
        where = np.array([row])
        first, count = (self.shard.gather(field.name, role, where) for role in ("aux_first", "aux_count"))
        assert first is not None and count is not None
        start, number = int(first[0]), int(count[0])
        if not number or number > entry.count or start > entry.count - number:
            return  # reported by the consistency check
        values = self.shard.take(entry, np.arange(start, start + number))
        if field.kind == "image":
            if int(values[-1]) >= place[1] or (values[1:] <= values[:-1]).any():
                yield self._bad(field, row, place[0], "offsets of its MCU rows are not ascending or lie outside it")
            return
        channels = self.shard.gather(field.name, "channels", where)
        assert channels is not None
        step = chunk_frames(self.shard.name, field) * int(channels[0]) * 2
        for chunk, check in enumerate(values.tolist()):
            at = place[0] + chunk * step
            data = read_range(self.shard.file, at, max(0, min(step, place[0] + place[1] - at)))
            if xxh3(data, self.seed) != check:
                yield self._bad(field, row, at, f"audio chunk {chunk} does not match its check")

    def _decoder(self, field: FieldMeta) -> Callable[[memoryview, int], None] | None:
        if self.decoders is None:
            return None
        try:
            decoder = self.decoders(field.kind, field.params, self.shard.dictionaries.get(field.name))
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            raise CorruptError(
                self.shard.name, None, f"field {field.name!r} cannot be decoded as its schema says: {error}"
            ) from error
        roles = layout.SIZE_ROLES[field.kind]

        def decode(payload: memoryview, row: int) -> None:
            where = np.array([row])
            sizes: dict[str, Any] = {}
            for role in roles:
                data = self.shard.gather(field.name, role, where)
                if data is not None:
                    sizes[role] = tuple(data[0].tolist()) if role == "dims" else int(data[0])
            decoder.decode(payload, sizes)

        return decode
