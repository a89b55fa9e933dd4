"""The plan pass: scan a source once, spill its records to a scratch file, cut segments, find duplicate keys.

Memory does not grow with the source, except for segment boundaries and the duplicates found.
"""

from __future__ import annotations

import hashlib
import heapq
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from lfdata.errors import SourceError
from lfdata.format.durable import Files, OutputFile
from lfdata.format.layout import MAX_KEY_BYTES, xxh3
from shard_builder.hashes import HashGroups
from shard_builder.sources.base import BadRecord, Record, Source

Item = Record | BadRecord
Locator = bytes
DICTIONARY_RECORDS = 2048
_SAMPLE_SEED = 0x6C66_6461_7461_0001  # keys the subset for dictionary training; any fixed number does
_BUFFERED = 1 << 20
_LISTED = 10

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(tuple[int, bool, bytes, bytes, int, int, str, str])


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of records that shards do not cross: ordinals ``first`` to ``stop``, at byte ``place`` of the scratch file."""

    first: int
    stop: int
    unit: int
    place: int


@dataclass(slots=True)
class Plan:
    """What was scanned. ``dropped`` holds the ordinals that the duplicates policy leaves out, ascending."""

    records: int
    bytes: int
    bad: int
    fingerprint: str
    segments: list[Segment]
    sample: list[tuple[int, Locator, int]]
    dropped: NDArray[np.int64]
    warnings: list[str]
    _scratch: OutputFile = field(repr=False)

    def items(self, segment: Segment, first: int) -> Iterator[tuple[int, Item]]:
        """Records of a segment from ordinal ``first`` on, with their ordinals, bad ones included, dropped ones too."""
        place = segment.place
        buffer, at = b"", 0
        end = self._scratch.position
        for ordinal in range(segment.first, segment.stop):
            while len(buffer) - at < 4 or len(buffer) - at - 4 < int.from_bytes(buffer[at : at + 4], "little"):
                more = self._scratch.pread(min(1 << 20, end - place), place)
                place += len(more)
                buffer, at = buffer[at:] + more, 0
            size = int.from_bytes(buffer[at : at + 4], "little")
            if ordinal >= first:
                yield _unpack(buffer[at + 4 : at + 4 + size])
            at += 4 + size

    def is_dropped(self, ordinal: int) -> bool:
        """Whether the duplicates policy leaves a record out."""
        at = int(np.searchsorted(self.dropped, ordinal))
        return at < len(self.dropped) and int(self.dropped[at]) == ordinal

    def close(self) -> None:
        """Drop the scratch file."""
        self._scratch.close()


def _pack(ordinal: int, item: Item) -> bytes:
    if isinstance(item, Record):
        data = _encoder.encode((ordinal, True, item.key, item.locator, item.size, item.unit, "", ""))
    else:
        path = item.path.encode("utf-8", "surrogateescape")
        data = _encoder.encode((ordinal, False, item.key, path, 0, item.unit, item.code, item.reason))
    return len(data).to_bytes(4, "little") + data


def _unpack(data: bytes) -> tuple[int, Item]:
    ordinal, good, key, locator, size, unit, code, reason = _decoder.decode(data)
    if good:
        return ordinal, Record(key, locator, size, unit)
    return ordinal, BadRecord(key, locator.decode("utf-8", "surrogateescape"), code, reason, unit)


def _checked(item: Item) -> Item:
    if isinstance(item, Record) and len(item.key) > MAX_KEY_BYTES:
        reason = f"a key of {len(item.key)} bytes; the limit is {MAX_KEY_BYTES}"
        return BadRecord(item.key[:64], "", "key-too-long", reason, item.unit)
    return item


def _show(key: bytes) -> str:
    return repr(key.decode("utf-8", "backslashreplace"))


class Planner:
    """Scans a source into a :class:`Plan`."""

    def __init__(self, files: Files, directory: Path, segment_bytes: int, segment_rows: int, duplicates: str) -> None:
        self._files, self._directory = files, directory
        self._segment_bytes, self._segment_rows = segment_bytes, segment_rows
        self._duplicates = duplicates
        self._scratch = files.scratch(directory, "plan")
        self._keys = HashGroups(files, directory, "keys")
        self._normal = HashGroups(files, directory, "normal")
        self._digest = hashlib.sha256()
        self._segments: list[Segment] = []
        self._sample: list[tuple[int, int, bytes, int]] = []
        self._records = self._bytes = self._bad = 0
        self._buffer = bytearray()

    def run(self, source: Source) -> Plan:
        """Scan ``source``. Raises :class:`SourceError` for duplicate keys under the policy ``error``."""
        first = place = size = unit = 0
        try:
            for item in source.scan():
                item = _checked(item)
                full = size >= self._segment_bytes or self._records - first >= self._segment_rows
                if self._records > first and (full or item.unit != unit):
                    self._segments.append(Segment(first, self._records, unit, place))
                    first, place, size = self._records, self._scratch.position + len(self._buffer), 0
                unit = item.unit
                size += self._add(item)
            if self._records > first:
                self._segments.append(Segment(first, self._records, unit, place))
            self._flush()
            dropped, warnings = self._resolve(source)
        finally:
            self._keys.close()
            self._normal.close()
        sample = sorted((ordinal, locator, unit) for _, ordinal, locator, unit in self._sample)
        return Plan(
            self._records,
            self._bytes,
            self._bad,
            self._digest.hexdigest(),
            self._segments,
            sample,
            np.array(sorted(dropped), np.int64),
            warnings,
            self._scratch,
        )

    def _add(self, item: Item) -> int:
        place = self._scratch.position + len(self._buffer)
        ordinal, self._records = self._records, self._records + 1
        packed = _pack(ordinal, item)
        self._digest.update(packed)
        self._buffer += packed
        if len(self._buffer) >= _BUFFERED:
            self._flush()
        if isinstance(item, BadRecord):
            self._bad += 1
            return 0
        self._bytes += item.size
        self._keys.add(xxh3(item.key), place)
        if not item.key.isascii():
            normal = _normalised(item.key)
            if normal is not None:
                self._normal.add(xxh3(normal), place)
        # The smallest hashes win: the heap holds them negated, the largest of them first.
        entry = (-xxh3(item.key, _SAMPLE_SEED), ordinal, item.locator, item.unit)
        if len(self._sample) < DICTIONARY_RECORDS:
            heapq.heappush(self._sample, entry)
        elif entry > self._sample[0]:
            heapq.heapreplace(self._sample, entry)
        return item.size

    def _flush(self) -> None:
        self._scratch.write(self._buffer)
        self._buffer = bytearray()

    def close(self) -> None:
        """Drop the scratch file (after a failed scan)."""
        self._scratch.close()

    # -- duplicate keys -----------------------------------------------------------------------------------------------

    def _at(self, place: int) -> tuple[int, Item]:
        size = int.from_bytes(self._scratch.pread(4, place), "little")
        return _unpack(self._scratch.pread(size, place + 4))

    def _resolve(self, source: Source) -> tuple[set[int], list[str]]:
        """Ordinals to leave out, and warnings about keys that differ only by Unicode normalisation."""
        dropped: set[int] = set()
        listed: list[str] = []
        keys = 0
        for places in self._keys.groups():
            by_key: dict[bytes, list[tuple[int, Item]]] = {}
            for ordinal, item in map(self._at, places):
                by_key.setdefault(item.key, []).append((ordinal, item))
            for key, same in by_key.items():
                if len(same) > 1:
                    if len(listed) < _LISTED:
                        shown = ", ".join(source.place(item.locator) for _, item in same[:4] if isinstance(item, Record))
                        listed.append(f"{_show(key)} ({shown}{', ...' if len(same) > 4 else ''})")
                    keys += 1
                    ordinals = [ordinal for ordinal, _ in same]
                    dropped.update(ordinals[1:] if self._duplicates == "first" else ordinals[:-1])
        if dropped and self._duplicates == "error":
            more = f" and {keys - _LISTED} more" if keys > _LISTED else ""
            raise SourceError(
                f"{keys} keys occur more than once: {'; '.join(listed)}{more}. "
                "Keys must be unique: fix the source, or choose --duplicates first or last"
            )
        return dropped, self._collisions()

    def _collisions(self) -> list[str]:
        warnings = []
        for places in self._normal.groups():
            keys: dict[bytes, list[bytes]] = {}
            for _, item in map(self._at, places):
                same = keys.setdefault(_normalised(item.key) or b"", [])
                if item.key not in same:
                    same.append(item.key)
            warnings += [
                f"keys that differ only by Unicode normalisation: {', '.join(ascii(k) for k in same)}"
                for same in keys.values()
                if len(same) > 1
            ]
        return sorted(warnings)


def _normalised(key: bytes) -> bytes | None:
    try:
        return unicodedata.normalize("NFC", key.decode()).encode()
    except UnicodeDecodeError:
        return None
