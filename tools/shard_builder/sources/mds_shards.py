"""MDS directories: ``index.json`` and shards, as MosaicML Streaming writes them; hashes, sizes and offsets are checked.

A shard: uint32 number of samples, uint32 offsets of the samples and of the end, a description, the samples. A sample: uint32 sizes
of the columns whose encoding does not fix them, then the columns.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from lfdata.errors import SampleError, SourceError
from shard_builder.sources.common import open_regular, read_exactly, read_small
from shard_builder.sources.files import check_relative, show
from shard_builder.sources.inflate import inflate
from shard_builder.sources.mds_values import fixed_size

INDEX = "index.json"
_MAX_INDEX = 1 << 30
_STEP = 4 << 20
_XXHASHES = {
    "xxh32": xxhash.xxh32,
    "xxh64": xxhash.xxh64,
    "xxh128": xxhash.xxh3_128,
    "xxh3_64": xxhash.xxh3_64,
    "xxh3_128": xxhash.xxh3_128,
}


class FileEntry(msgspec.Struct):
    """A file as the index has it."""

    basename: str
    bytes: int
    hashes: dict[str, str] = {}


class ShardEntry(msgspec.Struct):
    """A shard as the index has it."""

    format: str
    version: int
    samples: int
    raw_data: FileEntry
    column_names: list[str] = []
    column_encodings: list[str] = []
    column_sizes: list[int | None] = []
    compression: str | None = None
    zip_data: FileEntry | None = None


class _Index(msgspec.Struct):
    shards: list[ShardEntry]
    version: int = 2


def read_index(folder: Path) -> tuple[list[ShardEntry], int]:
    """The shards of a directory, and a digest of its index. Raises :class:`SourceError`."""
    data = read_small(folder / INDEX, _MAX_INDEX)
    if not data.strip():
        raise SourceError(f"{INDEX}: an empty file; the copy of the data set is incomplete")
    try:
        found = msgspec.json.decode(data, type=_Index)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise SourceError(f"{INDEX}: not an MDS index: {error}") from None
    for number, shard in enumerate(found.shards):
        where = f"{INDEX}: shard {number}"
        if shard.format != "mds" or shard.version != 2 or found.version != 2:
            raise SourceError(f"{where}: format {shard.format!r} of version {shard.version}; MDS of version 2 is read")
        if not len(shard.column_names) == len(shard.column_encodings) == len(shard.column_sizes) > 0:
            raise SourceError(f"{where}: names, encodings and sizes of columns do not go together")
        if len(set(shard.column_names)) != len(shard.column_names):
            raise SourceError(f"{where}: two columns have one name")
        files = [shard.raw_data, *([shard.zip_data] if shard.zip_data else [])]
        if not 0 <= shard.samples < 1 << 32 or any(not 0 <= file.bytes < 1 << 40 for file in files):
            raise SourceError(f"{where}: counts that cannot be")
        try:
            for file in files:
                check_relative(file.basename)
        except SampleError as error:
            raise SourceError(f"{where}: {error.reason}") from None
    return found.shards, xxhash.xxh64_intdigest(data)


class Shard:
    """One shard, opened: a plain one is read in place, a compressed one decompressed to memory.

    Raises:
        SampleError: ``missing-file``, ``truncated`` (of another size than the index says), ``too-large``, ``mds`` (a table of offsets that
            cannot be), and what :func:`~shard_builder.sources.inflate.inflate` raises.
    """

    def __init__(self, folder: Path, entry: ShardEntry, limit: int) -> None:
        self.entry = entry
        raw = folder / entry.raw_data.basename
        self.packed = not raw.exists() and entry.zip_data is not None
        file = entry.zip_data if self.packed and entry.zip_data else entry.raw_data
        self.name = show(file.basename)
        self._descriptor = -1
        self._data = b""
        try:
            self._descriptor = open_regular(folder / file.basename)
        except SourceError as error:
            code = "missing-file" if not os.path.lexists(folder / file.basename) else "unreadable"
            code = "lfs-pointer" if "git lfs pull" in str(error) else code
            raise SampleError(code, str(error), path=self.name) from None
        size = os.fstat(self._descriptor).st_size
        if size != file.bytes:
            raise SampleError("truncated", f"a file of {size} bytes, the index says {file.bytes}", path=self.name)
        self.size = entry.raw_data.bytes
        if self.packed:
            if max(self.size, size) > limit:
                reason = f"a shard of {max(self.size, size)} bytes to be held in memory; the limit is {limit} (option max_shard_bytes)"
                raise SampleError("too-large", reason, path=self.name)
            self._packed = read_exactly(self._descriptor, size, 0)
            self._data = inflate(str(entry.compression).partition(":")[0], self._packed, self.size)
        self._sizes = [size or fixed_size(code) for code, size in zip(entry.column_encodings, entry.column_sizes, strict=True)]

    def __del__(self) -> None:
        descriptor, self._descriptor = getattr(self, "_descriptor", -1), -1
        if descriptor >= 0:
            os.close(descriptor)

    def read(self, offset: int, size: int) -> bytes:
        """Bytes of the shard, decompressed. Raises :class:`SampleError`."""
        if not self.packed:
            return read_exactly(self._descriptor, size, offset)
        return self._data[offset : offset + size]

    def verify(self) -> None:
        """Compare every hash that the index has. Raises :class:`SampleError`: ``checksum``, ``unsupported``."""
        if self.packed and self.entry.zip_data is not None:
            self._compare(self.entry.zip_data, iter([self._packed]))
            self._packed = b""
            self._compare(self.entry.raw_data, iter([self._data]))
        else:
            parts = (self.read(at, min(_STEP, self.size - at)) for at in range(0, self.size, _STEP))
            self._compare(self.entry.raw_data, parts)

    def _compare(self, file: FileEntry, parts: Iterator[bytes]) -> None:
        if not file.hashes:
            return
        found = {name: _hasher(name) for name in file.hashes}
        for part in parts:
            for hasher in found.values():
                hasher.update(part)
        for name, hasher in found.items():
            if hasher.hexdigest() != file.hashes[name].lower():
                raise SampleError("checksum", f"{show(file.basename)}: its {name} is not what the index says")

    def offsets(self) -> NDArray[np.int64]:
        """Where samples begin, and where the last ends. Raises :class:`SampleError` (``mds``)."""
        head = 4 + 4 * (self.entry.samples + 1)
        if head > self.size:
            raise SampleError("mds", f"{self.entry.samples} samples in {self.size} bytes")
        data = np.frombuffer(self.read(0, head), "<u4").astype(np.int64)
        if int(data[0]) != self.entry.samples:
            raise SampleError("mds", f"holds {int(data[0])} samples, the index says {self.entry.samples}")
        found: NDArray[np.int64] = data[1:]
        if int(found[0]) < head or int(found[-1]) != self.size or bool((np.diff(found) < 0).any()):
            raise SampleError("mds", "its offsets of samples are out of range or out of order")
        return found

    def columns(self, data: bytes) -> dict[str, bytes]:
        """The columns of one sample. Raises :class:`SampleError` (``mds``)."""
        free = sum(size is None for size in self._sizes)
        if len(data) < 4 * free:
            raise SampleError("mds", f"a sample of {len(data)} bytes, too few for the sizes of its columns")
        stated = iter(np.frombuffer(data, "<u4", count=free).tolist())
        sizes = [next(stated) if size is None else size for size in self._sizes]
        place = 4 * free
        if place + sum(sizes) != len(data):
            raise SampleError("mds", f"columns of {sum(sizes)} bytes in a sample of {len(data) - place}")
        found = {}
        for name, size in zip(self.entry.column_names, sizes, strict=True):
            found[name] = data[place : place + size]
            place += size
        return found


def _hasher(name: str) -> Any:
    if name in _XXHASHES:
        return _XXHASHES[name]()
    try:
        hasher = hashlib.new(name, usedforsecurity=False)
    except ValueError:
        raise SampleError(
            "unsupported", f"hashes of the kind {name!r} are not known; hashes=skip leaves them unchecked"
        ) from None
    if not hasher.digest_size:
        raise SampleError("unsupported", f"hashes of the kind {name!r} have no fixed length; hashes=skip leaves them unchecked")
    return hasher
