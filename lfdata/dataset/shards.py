"""The shards of a data set: opened when they are first touched, kept, and closed together."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lfdata.dataset.rows import by_shard
from lfdata.dataset.shard import Shard
from lfdata.format.cache import IndexCache
from lfdata.format.columns import column_dtype
from lfdata.format.files import DescriptorPool, LocalFile, RangeFile
from lfdata.format.forking import watch
from lfdata.format.index import open_index
from lfdata.format.meta import FieldMeta, Manifest, ShardEntry
from lfdata.format.reader import ShardFile

if TYPE_CHECKING:
    from lfdata.storage.remote import RemoteStore

MAX_OPEN_SHARDS = 4096


class Shards:
    """The shards of one data set. Safe for threads, and after ``fork``.

    Args:
        path: its directory, or what it is called where it is not local.
        store: where its files are read from, if they are not local.
        schema: its fields by name.
        index_cache_bytes: memory for index columns, shared by all shards.
        max_descriptors: open files at a time.

    Attributes:
        starts: index of the first sample of each shard, and the number of samples: int64 (shards + 1,).
        lock: held by whoever changes what is open.
    """

    def __init__(
        self,
        path: Path | str,
        store: RemoteStore | None,
        manifest: Manifest,
        schema: Mapping[str, FieldMeta],
        index_cache_bytes: int,
        max_descriptors: int,
    ) -> None:
        self.path, self.store, self.manifest, self.schema = path, store, manifest, schema
        ends = np.cumsum([shard.rows for shard in manifest.shards], dtype=np.int64)
        self.starts = np.concatenate([[0], ends]).astype(np.int64)
        self._pool = DescriptorPool(max_descriptors)
        self._cache = IndexCache(index_cache_bytes)
        self.lock = threading.RLock()
        self._open: OrderedDict[int, Shard] = OrderedDict()
        self._warmed: set[tuple[int, str]] = set()
        self._index: ShardFile | None = None
        self._index_tried = False
        watch(self)

    def after_fork(self) -> None:
        """See :class:`lfdata.format.forking.Forked`."""
        self.lock = threading.RLock()

    def number(self, index: int) -> int:
        """The shard that holds a sample."""
        return int(self.starts.searchsorted(index, side="right")) - 1

    def shard(self, number: int) -> Shard:
        """An open shard."""
        with self.lock:
            shard = self._open.get(number)
            if shard is None:
                entry = self.manifest.shards[number]
                shard = Shard(entry, self._opener(entry), self.schema, self._cache, remote=self.store is not None)
                if self.store is not None:
                    from lfdata.dataset.remote import mark_index

                    mark_index(shard)
                self._open[number] = shard
                if len(self._open) > MAX_OPEN_SHARDS:
                    self._open.popitem(last=False)
            return shard

    def parts(self, rows: NDArray[np.int64], field: str) -> list[tuple[int, NDArray[np.int64]]]:
        """The shards of some rows, with their positions; ready to be read."""
        parts = by_shard(self.starts, rows)
        if self.store is not None:
            self.warm([number for number, _ in parts], field)
        return parts

    def warm(self, numbers: Iterable[int], field: str) -> None:
        """Of a remote data set: what is read of shards before a field's payloads, for all of them at the same time."""
        store = self.store
        new = [number for number in numbers if (number, field) not in self._warmed]
        if store is None or len(new) < 2:
            return
        from lfdata.dataset.remote import warm, warm_shards

        entries = [self.manifest.shards[number] for number in new if number not in self._open]
        parts = [part for entry in entries for part in entry.files]
        files = [store.open(part.file, part.bytes, part.sha256) for part in parts]
        warm(files, [(part.tail, part.bytes - part.tail) for part in parts])
        warm_shards([self.shard(number) for number in new], field)
        self._warmed.update((number, field) for number in new)

    def _opener(self, entry: ShardEntry) -> Callable[[str, int], RangeFile]:
        store = self.store
        if store is None:
            return lambda name, _size: LocalFile(Path(self.path, name), self._pool)
        digests = {part.file: part.sha256 for part in entry.files}
        return lambda name, size: store.open(name, size, digests[name])

    def index(self) -> ShardFile | None:
        """The consolidated index, if there is one that belongs to this manifest."""
        with self.lock:
            if not self._index_tried:
                self._index = self._find_index()
                self._index_tried = True
            return self._index

    def _find_index(self) -> ShardFile | None:
        if self.store is None:
            return open_index(Path(self.path), self.manifest, self._pool, self._cache)
        from lfdata.dataset.remote import remote_index

        return remote_index(self.store, self.manifest, self._cache)

    def column(self, field: str, role: str) -> NDArray[Any] | None:
        """A whole column, over all shards; ``None`` where no shard has it."""
        index = self.index()
        if index is not None:
            return index.column(field, role)
        count = len(self.manifest.shards)
        if count == 1:
            return self.shard(0).file_of(field).column(field, role)
        self.warm(range(count), field)
        # A copy is made anyway: read it, rather than map every shard.
        parts = [self.shard(number).file_of(field).read_column(field, role) for number in range(count)]
        if all(part is None for part in parts):
            if role == "present":
                return None
            return np.frombuffer(b"", column_dtype(self.schema[field], role))
        filled = [np.ones(s.rows, "u1") if part is None else part for part, s in zip(parts, self.manifest.shards, strict=True)]
        joined = np.concatenate(filled)
        joined.flags.writeable = False
        return joined

    def close(self) -> None:
        """Close descriptors and forget open shards; they open again when they are touched."""
        with self.lock:
            self._open.clear()
            self._index, self._index_tried = None, False
            self._pool.close()
