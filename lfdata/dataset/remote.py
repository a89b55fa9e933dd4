"""What is read of a data set by URL before its shards: manifest and index. Imported where there is one."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Sequence
from concurrent.futures import wait

from lfdata.dataset.shard import Shard, open_shard_file
from lfdata.errors import FormatError, StorageError
from lfdata.format import layout
from lfdata.format.cache import WHOLE_BLOCKS, IndexCache
from lfdata.format.index import index_identity
from lfdata.format.layout import BLOCK_BYTES, MAX_MANIFEST_BYTES
from lfdata.format.meta import INDEX, MANIFEST, Manifest, no_manifest, parse_manifest
from lfdata.format.reader import ShardFile
from lfdata.storage.blocks import UNKNOWN
from lfdata.storage.remote import RemoteFile, RemoteStore


def remote_manifest(store: RemoteStore) -> Manifest:
    """``manifest.json``, from the server. Raises :class:`FormatError` as for local ones; StorageError: it cannot be read."""
    name = f"{store.name}/{MANIFEST}"
    try:
        data = store.read_all(MANIFEST, MAX_MANIFEST_BYTES)
    except StorageError as error:
        if error.errno == errno.ENOENT:
            raise no_manifest(name) from None
        raise
    return parse_manifest(name, data)


def remote_index(store: RemoteStore, manifest: Manifest, cache: IndexCache) -> ShardFile | None:
    """The consolidated index, or ``None`` if there is none that belongs to the manifest. Raises :class:`StorageError`: the server fails."""
    expect = index_identity(manifest)
    try:
        size, tag = store.stat(INDEX)
        file = store.open(INDEX, size, f"{expect.shard_id.hex()} {size} {tag}")
        index = open_shard_file(file, None, (expect.shard_id, bytes(16), manifest.rows), cache)
    except StorageError as error:
        if error.errno == errno.ENOENT:
            return None
        raise
    except FormatError:
        return None
    return index if index.identity.kind == layout.KIND_INDEX and index.fields == manifest.fields else None


def mark_index(shard: Shard) -> None:
    """Tell the shard's files where their payloads end."""
    for opened in shard.files:
        if isinstance(opened.file, RemoteFile):
            index = min((entry.offset for entry in opened.entries if entry.type not in (b"GRUP", b"TOKN")), default=0)
            opened.file.payload_blocks = len(opened.file.blocks_of(0, index))


def warm(files: Iterable[RemoteFile], ranges: Iterable[tuple[int, int]]) -> None:
    """Have ranges (offset, length) of files in the cache, fetched at the same time: reading them one after the other would wait for each."""
    waited = [
        future
        for file, (offset, length) in zip(files, ranges, strict=True)
        for future in file.fetch_ahead(dict.fromkeys(file.blocks_of(offset, length), UNKNOWN))
    ]
    # What failed is told by whoever reads it.
    wait(waited)


def warm_shards(shards: Sequence[Shard], field: str) -> None:
    """Have the index columns of a field in the cache."""
    files, ranges = [], []
    for shard in shards:
        opened = shard.file_of(field)
        number = opened.ordinal(field)
        for entry in opened.entries:
            if entry.field == number and entry.type in (b"COLM", b"LOCR") and isinstance(opened.file, RemoteFile):
                files.append(opened.file)
                ranges.append((entry.offset, min(entry.length, WHOLE_BLOCKS * BLOCK_BYTES)))
    warm(files, ranges)
