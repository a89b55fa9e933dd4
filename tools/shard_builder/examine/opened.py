"""What a verb was pointed at: a data set directory, its manifest, or one file of the format."""

from __future__ import annotations

import os
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lfdata.dataset.shard import Shard
from lfdata.errors import LfdataError, StorageError
from lfdata.format import layout
from lfdata.format.cache import IndexCache
from lfdata.format.files import DescriptorPool, LocalFile
from lfdata.format.index import index_identity
from lfdata.format.meta import INDEX, MANIFEST, Manifest, ShardEntry, SidecarEntry, read_manifest
from lfdata.format.reader import ShardFile

CACHE_BYTES = 64 << 20
# Descriptors are bounded by the pool; these are small objects and mappings.
OPEN_FILES = 1024


@dataclass(frozen=True)
class Member:
    """One shard or sidecar file, with what the manifest says of it."""

    number: int
    base: ShardEntry
    sidecar: SidecarEntry | None = None

    @property
    def file(self) -> str:
        """Its name in the directory."""
        return self.sidecar.file if self.sidecar else self.base.file

    @property
    def size(self) -> int:
        """Its size in bytes."""
        return self.sidecar.bytes if self.sidecar else self.base.bytes

    @property
    def sha256(self) -> str:
        """Its digest, hexadecimal; empty if unknown."""
        return self.sidecar.sha256 if self.sidecar else self.base.sha256

    @property
    def expect(self) -> tuple[bytes, bytes, int]:
        """Shard id, part id and rows."""
        part = bytes.fromhex(self.sidecar.part) if self.sidecar else bytes(16)
        return bytes.fromhex(self.base.id), part, self.base.rows


def is_data_set(path: Path) -> bool:
    """Whether ``path`` means a data set rather than one file. Raises :class:`StorageError` if there is nothing."""
    if not path.exists():
        raise StorageError(path, "open", None, "no such file or directory")
    return path.is_dir() or path.name == MANIFEST


class DataSet:
    """A data set by its manifest, or one file as if it were one. Files open when asked for.

    Attributes:
        path: the directory. manifest: what it holds. members: every file, each base shard before its sidecars.
        starts: index of the first sample of each shard, then the total. single: whether this is one file alone.
    """

    def __init__(self, path: Path, manifest: Manifest, members: list[Member], single: bool = False) -> None:
        self.path = path
        self.manifest = manifest
        self.members = members
        self.single = single
        self.schema = {item.name: item for item in manifest.fields}
        self.starts = [0]
        for shard in manifest.shards:
            self.starts.append(self.starts[-1] + shard.rows)
        self._pool = DescriptorPool(32)
        self._cache = IndexCache(CACHE_BYTES)
        self._files: OrderedDict[str, ShardFile] = OrderedDict()
        self._shards: OrderedDict[int, Shard] = OrderedDict()

    @classmethod
    def open(cls, path: Path) -> DataSet:
        """A data set, or a file of the format. Raises :class:`lfdata.errors.LfdataError`."""
        if not is_data_set(path):
            return cls._of_file(path)
        path = path.parent if path.name == MANIFEST else path
        manifest = read_manifest(path)
        members = []
        for number, shard in enumerate(manifest.shards):
            members += [Member(number, shard), *(Member(number, shard, sidecar) for sidecar in shard.sidecars)]
        return cls(path, manifest, members)

    @classmethod
    def _of_file(cls, path: Path) -> DataSet:
        found = ShardFile(LocalFile(path), cache=IndexCache(0))
        shard_id, part_id, kind = found.identity.shard_id.hex(), found.identity.part_id.hex(), found.identity.kind
        entry = ShardEntry(path.name, shard_id, found.rows, found.file.size, 0, "")
        names = tuple(item.name for item in found.fields)
        sidecar = SidecarEntry(path.name, part_id, found.file.size, 0, "", names) if kind == layout.KIND_SIDECAR else None
        manifest = Manifest(found.rows, found.fields, () if kind == layout.KIND_INDEX else (entry,))
        return cls(path.parent, manifest, [] if kind == layout.KIND_INDEX else [Member(0, entry, sidecar)], single=True)

    def file(self, member: Member) -> ShardFile:
        """One file, its identity compared with the manifest. Raises :class:`lfdata.errors.LfdataError`."""
        found = self._files.get(member.file)
        if found is None:
            found = ShardFile(LocalFile(self.path / member.file, self._pool), expect=member.expect, cache=self._cache)
            self._files[member.file] = found
            if len(self._files) > OPEN_FILES:
                self._files.popitem(last=False)
        return found

    def shard(self, number: int) -> Shard:
        """One shard with its sidecars. Raises :class:`lfdata.errors.LfdataError`."""
        found = self._shards.get(number)
        if found is None:
            entry = self.manifest.shards[number]
            found = Shard(entry, lambda name, _size: LocalFile(self.path / name, self._pool), self.schema, self._cache)
            self._shards[number] = found
            if len(self._shards) > OPEN_FILES:
                self._shards.popitem(last=False)
        return found

    def plausible_rows(self, member: Member) -> int:
        """Rows the manifest gives a file, or 0 if the file is missing or too small for them: nothing is planned by a bare
        claim."""
        try:
            size = os.stat(self.path / member.file).st_size
        except OSError:
            return 0
        least = 24 if member.sidecar is None else 1  # KOFF, KHSH and KROW; at least a one-byte column
        return member.base.rows if size >= member.base.rows * least else 0

    def base_of(self, member: Member) -> ShardFile | None:
        """The base file of a member's shard; ``None`` for a sidecar alone."""
        if member.sidecar is None:
            return self.file(member)
        return None if self.single else self.file(Member(member.number, member.base))

    def key_of(self, member: Member, row: int) -> bytes | None:
        """The key of a row, or ``None`` if it cannot be read."""
        return self.keys_of(member, [row])[0]

    def keys_of(self, member: Member, rows: list[int]) -> list[bytes | None]:
        """Keys of some rows, each ``None`` if it cannot be read."""
        found: list[bytes | None] = []
        for row in rows:
            try:
                base = self.base_of(member)
                found.append(None if base is None else base.keys(np.array([row], np.int64))[0])
            except LfdataError:
                found.append(None)
        return found

    @property
    def index_path(self) -> Path:
        """Where the consolidated index is, if there is one."""
        return self.path / INDEX

    def open_index(self) -> ShardFile:
        """The consolidated index. Raises :class:`lfdata.errors.LfdataError`; ``ChangedError`` if it belongs to other shards."""
        expect = (index_identity(self.manifest).shard_id, bytes(16), self.manifest.rows)
        return ShardFile(LocalFile(self.index_path, self._pool), expect=expect, cache=self._cache)
