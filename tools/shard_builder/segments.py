"""Writes the shards of one segment from the ordered results of the worker pool."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from lfdata.codecs.base import Encoded
from lfdata.errors import LfdataError, SampleError
from lfdata.format.container import Written
from lfdata.format.meta import Position, ShardEntry, ShardMeta, SourceRange
from lfdata.format.writer import ShardWriter
from shard_builder.journal import Journal
from shard_builder.plan import Item, Plan, Segment
from shard_builder.pool import Chunk, Pool
from shard_builder.report import quarantine
from shard_builder.sources.base import BadRecord, RawSample, Record
from shard_builder.target import SHARD_SUFFIX

if TYPE_CHECKING:
    from shard_builder.convert import _Conversion

# Small, so that workers end together; a chunk costs well under a millisecond beside its samples.
CHUNK_RECORDS = 16
CHUNK_BYTES = 8 << 20
# Bytes of index a row adds at the least, whatever its fields: enough to decide about the size of a shard.
ROW_BYTES = 64


def shard_id(conversion: str, segment: int, ordinal: int) -> bytes:
    """Id of a shard: a function of the conversion and its place in it."""
    return hashlib.sha256(f"{conversion} {segment} {ordinal}".encode()).digest()[:16]


def shard_name(segment: int, ordinal: int, identity: bytes) -> str:
    """File name of a base shard."""
    return f"s{segment:05d}-{ordinal:04d}-{identity[:4].hex()}{SHARD_SUFFIX}"


class SegmentWriter:
    """Shards of segment ``number``, from shard ``ordinal`` on."""

    def __init__(self, run: _Conversion, plan: Plan, journal: Journal, number: int, ordinal: int) -> None:
        self._run, self._plan, self._journal = run, plan, journal
        self._number, self._ordinal = number, ordinal
        self._writer: ShardWriter | None = None
        self._first = 0

    def run(self, pool: Pool, segment: Segment, first: int) -> None:
        """Encode and write records ``first`` to ``segment.stop``."""
        self._first = first
        # Read a second time rather than kept: what lies between two encoded records may be any number of bad ones.
        records = self._plan.items(segment, first)
        try:
            for result in pool.run(self._chunks(segment, first)):
                self._take(result.heads, result.payloads, records)
            for ordinal, item in records:
                self._skip(ordinal, item)
            if self._writer is not None:
                self._finish(segment.stop, last=True)
        except BaseException:
            if self._writer is not None:
                self._writer.abort()
            raise
        entries = self._run.report.take()
        self._journal.append({"segment": self._number, "errors": entries})
        self._run.made.entries += entries
        self._run.progress(segment.stop, self._plan.records)

    def _chunks(self, segment: Segment, first: int) -> Iterator[Chunk]:
        chunk: Chunk = []
        size = 0
        most = getattr(self._run.source, "chunk_records", CHUNK_RECORDS)
        for ordinal, item in self._plan.items(segment, first):
            if isinstance(item, BadRecord) or self._plan.is_dropped(ordinal):
                continue
            if chunk and (len(chunk) >= most or size + item.size > CHUNK_BYTES):
                yield chunk
                chunk, size = [], 0
            chunk.append((ordinal, item.locator))
            size += item.size
        if chunk:
            yield chunk

    def _take(self, heads: list[Any], payloads: memoryview, records: Iterator[tuple[int, Item]]) -> None:
        place = 0
        for ordinal, head in heads:
            record = self._record(ordinal, records)
            if "error" in head:
                kept: list[tuple[str, bool, memoryview]] = []
                for name, length, is_bytes in head.get("raw", ()):
                    kept.append((name, is_bytes, payloads[place : place + length]))
                    place += length
                code, reason, field, path = head["error"]
                self._bad(ordinal, SampleError(code, reason, field=field, key=record.key, path=path), kept)
                continue
            values: dict[str, Encoded] = {}
            digests: dict[str, bytes] = {}
            for name, length, sizes, aux, warnings, digest in head["values"]:
                packed = None if aux is None else np.frombuffer(aux, "<u8")
                values[name] = Encoded(payloads[place : place + length], sizes, packed, tuple(warnings))
                digests[name] = digest
                place += length
            self._add(ordinal, record.key, values, digests)
            self._warn(ordinal, record.key, values, RawSample({}, head["path"], head["files"]))
        self._run.progress(heads[-1][0] + 1, self._plan.records)

    def _record(self, wanted: int, records: Iterator[tuple[int, Item]]) -> Record:
        """The next encoded record; those before it were not sent to a worker."""
        for ordinal, item in records:
            if ordinal == wanted and isinstance(item, Record):
                return item
            self._skip(ordinal, item)
        raise LfdataError(f"record {wanted} is not in segment {self._number}: a defect of the converter")

    def _skip(self, ordinal: int, item: Item) -> None:
        if isinstance(item, BadRecord):
            self._bad(ordinal, SampleError(item.code, item.reason, key=item.key, path=item.path), [])
        else:
            self._run.report.dropped(ordinal, item.key, self._run.source.place(item.locator))

    def _bad(self, ordinal: int, error: SampleError, kept: list[tuple[str, bool, memoryview]]) -> None:
        self._run.report.error(ordinal, error)
        if self._run.options.on_error == "quarantine":
            quarantine(self._run.files, self._run.quarantine, ordinal, error, kept)

    def _add(self, ordinal: int, key: bytes, values: dict[str, Encoded], digests: dict[str, bytes]) -> None:
        options = self._run.options
        incoming = sum(len(value.payload) for value in values.values()) + len(key) + ROW_BYTES
        writer = self._writer
        if writer is not None and (writer.size + incoming > options.shard_bytes or writer.rows >= options.shard_rows):
            self._finish(ordinal, last=False)
        if self._writer is None:
            self._open()
        assert self._writer is not None
        self._writer.add(key, values, digests)

    def _warn(self, ordinal: int, key: bytes, values: dict[str, Encoded], source: RawSample) -> None:
        for name, value in values.items():
            for warning in value.warnings:
                self._run.report.warning(ordinal, key, source.place(name), name, warning)

    def _open(self) -> None:
        identity = shard_id(self._run.conversion, self._number, self._ordinal)
        self._writer = ShardWriter(
            self._run.target.path / shard_name(self._number, self._ordinal, identity),
            self._run.fields,
            identity,
            dictionaries=self._run.dictionaries,
            group_bytes=self._run.options.group_bytes,
            files=self._run.files,
        )

    def _finish(self, stop: int, *, last: bool) -> None:
        writer = self._writer
        assert writer is not None
        meta = ShardMeta(
            fields=self._run.fields,
            position=Position(self._number, len(self._plan.segments), self._ordinal, last),
            source=SourceRange(self._first, stop),
            provenance=self._run.provenance,
        )
        entries = self._run.report.take(stop)
        identity = shard_id(self._run.conversion, self._number, self._ordinal).hex()

        def entry(written: Written) -> ShardEntry:
            return ShardEntry(
                writer.path.name,
                identity,
                written.rows,
                written.bytes,
                written.tail,
                written.sha256,
                self._number,
                self._ordinal,
            )

        def announce(written: Written) -> None:
            shard = msgspec.to_builtins(entry(written))
            line = {"shard": shard, "statistics": written.statistics, "source": [self._first, stop], "errors": entries}
            self._journal.append(line)

        written = writer.finish(meta, announce)
        self._writer = None
        self._run.made.add(entry(written), written.statistics, entries)
        self._first, self._ordinal = stop, self._ordinal + 1
