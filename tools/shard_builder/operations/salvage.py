"""``repair --salvage``: the samples of a damaged data set that are whole, in a new one, and a list of what is lost.

A sample is whole if its key and every field it has can be read and match their checks. The index of a shard lies at its end: where that is cut
off or damaged, ``index.lfi`` has a copy of it. What only repeats elsewhere (header, trailer) is put together again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

import lfdata
from lfdata.codecs.base import Encoded
from lfdata.dataset.shard import Shard
from lfdata.errors import CorruptError, FormatError, LfdataError, TruncatedError
from lfdata.format import copies, layout
from lfdata.format.cache import IndexCache
from lfdata.format.copies import Copies
from lfdata.format.durable import Files
from lfdata.format.files import DescriptorPool, LocalFile, RangeFile, read_range
from lfdata.format.index import open_index
from lfdata.format.layout import ENTRY_BYTES, HEADER_BYTES, TRAILER_BYTES, Identity, Trailer, xxh3
from lfdata.format.meta import (
    INDEX,
    MANIFEST,
    FieldMeta,
    Manifest,
    Position,
    ShardEntry,
    ShardMeta,
    SidecarEntry,
    encode_manifest,
    merge_statistics,
    read_manifest,
)
from lfdata.format.reader import ShardFile
from lfdata.format.verify import verify_file
from lfdata.format.writer import ShardWriter
from shard_builder.consolidate import write_consolidated
from shard_builder.operations.build import file_name
from shard_builder.operations.copying import entry_of, take_over
from shard_builder.operations.inputs import describe_input, refuse_overlap, stored_dictionaries, stored_fields, stored_rows
from shard_builder.operations.output import Output, identity_of

LOST = "lost.jsonl"
_BATCH_ROWS = 256
# Directories are looked for this far before the end of a file whose trailer is gone.
_SEARCH_BYTES = layout.MAX_ENTRIES * ENTRY_BYTES
Progress = Callable[[int, int], None]
"""Called with (samples looked at, samples in all)."""


class Loss(msgspec.Struct, omit_defaults=True):
    """One line of ``lost.jsonl``: a sample, or (``row`` absent) all samples of a shard.

    Attributes:
        file: the shard. index: of the sample in the damaged data set. rows: samples, where it is a whole shard.
        key: where it could be read. reason: what is damaged.
    """

    file: str
    reason: str
    row: int | None = None
    index: int | None = None
    key: str | None = None
    rows: int | None = None


@dataclass(frozen=True, slots=True)
class Salvaged:
    """What was saved and lost: samples, shards that were whole, shards written anew, and shards of which nothing is left."""

    rows: int
    lost: int
    whole: int
    rewritten: int
    gone: int


class Mended:
    """A damaged file seen with its header and trailer put right. See :class:`lfdata.format.files.RangeFile`."""

    def __init__(self, file: RangeFile, size: int, patches: Sequence[tuple[int, bytes]]) -> None:
        self.name = file.name
        self.size = size
        self._file, self._patches = file, patches

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Bytes of the file, or of a patch. Raises :class:`TruncatedError`: neither has them."""
        there = min(len(buffer), max(0, self._file.size - offset))
        if there < len(buffer) and not any(start <= offset + there < start + len(data) for start, data in self._patches):
            raise TruncatedError(self.name, self._file.size, f"the file ends before byte {offset + len(buffer)}")
        if there:
            self._file.read_into(buffer[:there], offset)
        for start, data in self._patches:
            low, high = max(start, offset), min(start + len(data), offset + len(buffer))
            if low < high:
                buffer[low - offset : high - offset] = data[low - start : high - start]


def mended(file: RangeFile, expect: tuple[bytes, bytes, int], size: int) -> RangeFile:
    """The file with its header and trailer made again from the manifest and the directory; bytes after its end are left out.

    Args:
        expect: shard id, part id and rows; size: bytes of the whole file, by the manifest.

    Raises:
        FormatError: the index is not there, or damaged where nothing repeats it.
    """
    shard_id, part, rows = expect
    end = size - TRAILER_BYTES
    start = max(HEADER_BYTES, end - _SEARCH_BYTES)
    if file.size < end or end <= start:
        raise CorruptError(
            file.name,
            file.size,
            f"the file ends before its index, which says where everything is, and {INDEX} has no copy of it: {size} bytes by the manifest",
        )
    tail = bytes(read_range(file, start, end - start))
    at = len(tail)
    while at >= ENTRY_BYTES and tail[at - ENTRY_BYTES : at - ENTRY_BYTES + 4] in layout.SECTIONS:
        at -= ENTRY_BYTES
    directory = tail[at:]
    kind = layout.KIND_SIDECAR if any(part) else layout.KIND_BASE
    identity = Identity(layout.MAJOR, layout.MINOR, kind, 0, 0, shard_id, part)
    header = layout.pack_header(identity)
    if _has_trailer(file, size):
        # Then it is the header that is damaged, or the directory: that one must match the check that the trailer has.
        return Mended(file, size, [(0, header)])
    trailer = Trailer(
        identity,
        rows,
        start + at,
        len(directory) // ENTRY_BYTES,
        xxh3(directory, identity.seed),
        size,
        int.from_bytes(header[-8:], "little"),
    )
    return Mended(file, size, [(0, header), (end, layout.pack_trailer(trailer))])


def overlaid(
    file: RangeFile, expect: tuple[bytes, bytes, int], size: int, index: ShardFile, copied: Copies
) -> RangeFile | None:
    """The file with what lies behind its payloads from the copy in the data set's index; ``None`` where there is no good one.

    Args:
        expect, size: as of :func:`mended`.
    """
    shard_id, part, _ = expect
    places = copied.get((shard_id, part), [])
    kind = layout.KIND_SIDECAR if any(part) else layout.KIND_BASE
    header = layout.pack_header(Identity(layout.MAJOR, layout.MINOR, kind, 0, 0, shard_id, part))
    try:
        patches = sorted(copies.unpack(index, place) for place in places)
        if not patches or sum(len(data) for _, data in patches) != size - patches[0][0]:
            return None
        whole = patches[0][0], b"".join(data for _, data in patches)
        found = Mended(file, size, [(0, header), whole])
        ShardFile(found, expect=expect, cache=IndexCache(0))
    except FormatError:
        return None
    return found


def _has_trailer(file: RangeFile, size: int) -> bool:
    if file.size < size:
        return False
    try:
        layout.parse_trailer(file.name, bytes(read_range(file, size - TRAILER_BYTES, TRAILER_BYTES)), size)
    except FormatError:
        return False
    return True


# -- a data set -----------------------------------------------------------------------------------------------------------


def salvage(
    source: str | Path, target: str | Path, *, progress: Progress | None = None, files: Files | None = None
) -> Salvaged:
    """Write the whole samples of a damaged data set into ``target``, and ``lost.jsonl`` there. The source is only read.

    Shards without damage are taken over as hard links or copies; from others the whole samples are written to new shards.

    Raises:
        FormatError: no manifest (rebuild it first), or nothing at all is whole. TargetExistsError: the target holds something else.
    """
    source, target, files = Path(source), Path(target), files or Files()
    refuse_overlap(target, [source])
    manifest = read_manifest(source)
    about: dict[str, Any] = {
        "operation": "salvage",
        "library": {"lfdata": lfdata.__version__},
        "inputs": [describe_input(manifest)],
    }
    # Damage is no part of the identity: it may grow between two runs. What is finished is kept, the rest is looked at as it is now.
    about["conversion"] = identity_of(about)
    with Output(target, about["conversion"], MANIFEST, _conversion_of, files) as out:
        if out.finished:
            made = read_manifest(target)
            return Salvaged(made.rows, manifest.rows - made.rows, **made.provenance["salvaged"])
        return _Salvage(source, target, manifest, about, files, progress or (lambda _done, _total: None)).run(out)


def _conversion_of(path: Path) -> str | None:
    try:
        found = read_manifest(path).provenance.get("conversion")
    except LfdataError:
        return None
    return found if isinstance(found, str) else None


class _Salvage:
    def __init__(
        self, source: Path, target: Path, manifest: Manifest, about: dict[str, Any], files: Files, progress: Progress
    ) -> None:
        self._source, self._target, self._manifest, self._about = source, target, manifest, about
        self._files, self._progress = files, progress
        self._names = [field.name for field in manifest.fields]
        self._schema = {field.name: field for field in manifest.fields}
        # Lines of the list, rather than objects: a shard may lose a million samples.
        self._lost = bytearray()
        self._first: Loss | None = None
        self._shards: list[ShardEntry] = []
        self._statistics: list[dict[str, Any]] = []
        self._counts = {"whole": 0, "rewritten": 0, "gone": 0}
        # Only looked at where a shard is damaged.
        self._index: ShardFile | None = None
        self._copies: Copies | None = None

    def run(self, out: Output) -> Salvaged:
        start = 0
        for number, entry in enumerate(self._manifest.shards):
            self._shard(number, entry, start)
            start += entry.rows
            self._progress(start, self._manifest.rows)
        rows = sum(shard.rows for shard in self._shards)
        if self._manifest.rows and not rows:
            first = f"; the first damage: {self._first.file}: {self._first.reason}" if self._first else ""
            raise FormatError(self._source, None, f"nothing is whole{first}")
        self._remove_strays()
        made = Manifest(
            rows,
            self._manifest.fields,
            tuple(self._shards),
            merge_statistics(self._statistics),
            self._about | {"salvaged": self._counts},
        )
        if rows:
            write_consolidated(self._target, made, self._files)
        else:
            self._files.unlink(self._target / INDEX)
        self._files.write_file(self._target / LOST, bytes(self._lost))
        out.finish(encode_manifest(made))
        return Salvaged(rows, self._manifest.rows - rows, **self._counts)

    def _lose(self, loss: Loss) -> None:
        self._first = self._first or loss
        self._lost += msgspec.json.encode(loss) + b"\n"

    def _remove_strays(self) -> None:
        """Files of an earlier, killed run that has seen other damage."""
        named = {shard.file for shard in self._shards} | {side.file for shard in self._shards for side in shard.sidecars}
        for path in sorted(self._target.glob("*.lfd")):
            if path.name not in named:
                self._files.unlink(path)

    def _shard(self, number: int, entry: ShardEntry, start: int) -> None:
        total = len(self._manifest.shards)
        if self._intact(entry):
            task = {"name": file_name(number, total, entry.id), "shard": number, "fields": self._names}
            answer = take_over(self._source, entry, task, self._target, False, self._files)
            self._shards.append(msgspec.convert(answer["shard"], ShardEntry))
            self._statistics.append(answer["statistics"])
            self._counts["whole"] += 1
            return
        try:
            shard = Shard(entry, self._open(entry), self._schema, IndexCache(0))
        except LfdataError as error:
            if entry.rows:
                self._lose(Loss(entry.file, _reason(error), rows=entry.rows, index=start))
            self._counts["gone"] += 1
            return
        identity = hashlib.sha256(f"{self._about['conversion']} {number}".encode()).digest()[:16]
        made = self._write(shard, number, entry, start, self._target / file_name(number, total, identity.hex()), identity)
        self._counts["rewritten" if made else "gone"] += 1

    def _intact(self, entry: ShardEntry) -> bool:
        """Whether every byte of a shard and its sidecars is as it was written."""
        base = bytes.fromhex(entry.id)
        parts: tuple[ShardEntry | SidecarEntry, ...] = (entry, *entry.sidecars)
        for part in parts:
            identity = bytes(16) if isinstance(part, ShardEntry) else bytes.fromhex(part.part)
            findings = verify_file(self._source / part.file, expect=(base, identity, entry.rows), sha256=part.sha256)
            if next(findings, None) is not None:
                return False
        return True

    def _open(self, entry: ShardEntry) -> Callable[[str, int], RangeFile]:
        parts = {entry.file: bytes(16)} | {sidecar.file: bytes.fromhex(sidecar.part) for sidecar in entry.sidecars}

        def open_file(name: str, size: int) -> RangeFile:
            file = LocalFile(self._source / name, DescriptorPool(1))
            expect = (bytes.fromhex(entry.id), parts[name], entry.rows)
            if (found := self._overlaid(file, expect, size)) is not None:
                return found
            try:
                ShardFile(file, expect=expect, cache=IndexCache(0))
            except FormatError:
                return mended(file, expect, size)
            return file

        return open_file

    def _overlaid(self, file: RangeFile, expect: tuple[bytes, bytes, int], size: int) -> RangeFile | None:
        if self._copies is None:
            self._index = open_index(self._source, self._manifest, DescriptorPool(1), IndexCache(0))
            self._copies = copies.find(self._index) if self._index is not None else {}
        return overlaid(file, expect, size, self._index, self._copies) if self._index is not None else None

    def _write(self, shard: Shard, number: int, entry: ShardEntry, start: int, path: Path, identity: bytes) -> bool:
        fields: tuple[FieldMeta, ...] = stored_fields(shard, self._names)
        writer = ShardWriter(path, fields, identity, dictionaries=stored_dictionaries(shard, self._names), files=self._files)
        try:
            for row, found in self._rows(shard):
                if isinstance(found, LfdataError):
                    self._lose(Loss(entry.file, _reason(found), row=row, index=start + row, key=_key(shard, row)))
                else:
                    writer.add(*found)
            if not writer.rows:
                writer.abort()
                return False
            position = Position(number, len(self._manifest.shards), 0, True)
            writer.finish(ShardMeta(fields, position, provenance=self._about))
        except BaseException:
            writer.abort()
            raise
        made, statistics = entry_of(ShardFile(LocalFile(path, DescriptorPool(1))))
        self._shards.append(made)
        self._statistics.append(statistics)
        return True

    def _rows(self, shard: Shard) -> Iterator[tuple[int, tuple[bytes, dict[str, Encoded]] | LfdataError]]:
        for first in range(0, shard.rows, _BATCH_ROWS):
            yield from self._some(shard, np.arange(first, min(first + _BATCH_ROWS, shard.rows)))

    def _some(
        self, shard: Shard, rows: NDArray[np.int64]
    ) -> Iterator[tuple[int, tuple[bytes, dict[str, Encoded]] | LfdataError]]:
        """Rows in order; where a batch holds damage, what is left of it in halves, down to the samples that cannot be read."""
        done = 0
        try:
            for row, key, values in stored_rows(shard, self._names, rows):
                yield row, (key, values)
                done += 1
        except LfdataError as error:
            left = rows[done:]
            if len(left) == 1:
                yield int(left[0]), error
                return
            middle = len(left) // 2
            yield from self._some(shard, left[:middle])
            yield from self._some(shard, left[middle:])


def _reason(error: LfdataError) -> str:
    return error.reason if isinstance(error, FormatError) else str(error)


def _key(shard: Shard, row: int) -> str | None:
    try:
        return shard.base.keys(np.array([row]))[0].decode("utf-8", "backslashreplace")
    except LfdataError:
        return None
