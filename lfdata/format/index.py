"""The consolidated index ``index.lfi``: data-set-wide columns in one mapping (docs/format.md, section 9)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from lfdata.errors import LfdataError
from lfdata.format import copies, layout
from lfdata.format.cache import IndexCache
from lfdata.format.columns import column_dtype
from lfdata.format.container import ContainerWriter, Written
from lfdata.format.durable import Files
from lfdata.format.files import DescriptorPool, LocalFile
from lfdata.format.layout import BLOCK_BYTES, ELEMENTS, ROLE_CODES, SIZE_ROLES, Identity
from lfdata.format.meta import INDEX, FieldMeta, Manifest, ShardMeta
from lfdata.format.reader import ShardFile

# Hashes sorted at a time when the key index is merged: bounds memory at any number of rows.
MERGE_ROWS = 4_000_000

Column = Callable[[int, str, str], NDArray[Any] | None]
"""``(shard ordinal, field, role)`` -> the shard's column, or ``None`` where it has none (``present``)."""


def shard_list(manifest: Manifest) -> list[list[Any]]:
    """META ``shards`` of the index that belongs to a manifest."""
    return [[shard.id, *(sidecar.part for sidecar in shard.sidecars), shard.rows] for shard in manifest.shards]


def index_identity(manifest: Manifest) -> Identity:
    """Identity of the index that belongs to a manifest: its id is a digest of the list of shards."""
    digest = hashlib.sha256(msgspec.json.encode(shard_list(manifest))).digest()[:16]
    return Identity(layout.MAJOR, layout.MINOR, layout.KIND_INDEX, 0, 0, digest, bytes(16))


def open_index(directory: Path, manifest: Manifest, pool: DescriptorPool, cache: IndexCache) -> ShardFile | None:
    """The data set's index, or ``None`` if there is none, or it is damaged or belongs to other shards: it can be rebuilt at any time."""
    identity = index_identity(manifest)
    path = directory / INDEX
    try:
        if not path.is_file():
            return None
        index = ShardFile(LocalFile(path, pool), expect=(identity.shard_id, bytes(16), manifest.rows), cache=cache)
        return index if index.identity.kind == layout.KIND_INDEX and index.fields == manifest.fields else None
    except LfdataError:
        return None


def write_index(
    path: Path,
    manifest: Manifest,
    column: Column,
    hashes: Callable[[int], tuple[NDArray[Any], NDArray[Any]]],
    files: Files,
    shards: Callable[[int], Iterable[ShardFile]] | None = None,
) -> Written:
    """Write ``index.lfi``; memory is bounded by a shard's column and :data:`MERGE_ROWS`.

    Args:
        column: gives a shard's column of a field and role.
        hashes: gives a shard's KHSH and KROW.
        shards: gives a shard's files, of which copies are kept (:mod:`lfdata.format.copies`); without it, none are.
    """
    container = ContainerWriter(path, index_identity(manifest), files)
    try:
        container.pad(layout.REGION_ALIGN)
        for ordinal, field in enumerate(manifest.fields):
            for role in ("present", *SIZE_ROLES[field.kind]):
                _write_role(container, manifest, column, ordinal, field, role)
        merged = list(_partitions(manifest.rows))
        for type_, part in ((b"KHSH", 0), (b"KROW", 1)):
            container.blocked(type_, _whole_blocks(_merge(hashes, manifest, bounds)[part] for bounds in merged), ELEMENTS[4])
        if shards is not None:
            every = (file for number in range(len(manifest.shards)) for file in shards(number))
            container.optional(copies.SECTION, (piece for file in every for piece in copies.pieces(file)))
        return container.finish(manifest.rows, ShardMeta(fields=manifest.fields, shards=shard_list(manifest)))
    except BaseException:
        container.abort()
        raise


def _write_role(
    container: ContainerWriter, manifest: Manifest, column: Column, ordinal: int, field: FieldMeta, role: str
) -> None:
    parts = [number for number, _ in enumerate(manifest.shards)]
    if role == "present" and all(column(number, field.name, role) is None for number in parts):
        return

    def pieces() -> Iterator[NDArray[Any]]:
        for number in parts:
            data = column(number, field.name, role)
            yield np.ones(manifest.shards[number].rows, "u1") if data is None else data

    container.blocked(b"COLM", _whole_blocks(pieces()), column_dtype(field, role), field=ordinal, role=ROLE_CODES[role])


def _whole_blocks(pieces: Iterator[NDArray[Any]]) -> Iterator[bytes]:
    """The bytes of arrays one after the other, in parts that are multiples of a block."""
    held = b""
    for piece in pieces:
        data = held + np.ascontiguousarray(piece).tobytes()
        cut = len(data) // BLOCK_BYTES * BLOCK_BYTES
        if cut:
            yield data[:cut]
        held = data[cut:]
    if held:
        yield held


def _partitions(rows: int) -> Iterator[tuple[int, int]]:
    """Ranges of hash values, each with about ``MERGE_ROWS`` keys: hashes are uniform."""

    count = max(1, -(-rows // MERGE_ROWS))
    step = -(-(1 << 64) // count)
    for number in range(count):
        yield number * step, min((number + 1) * step, 1 << 64) - 1


def _merge(
    hashes: Callable[[int], tuple[NDArray[Any], NDArray[Any]]], manifest: Manifest, bounds: tuple[int, int]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """All (hash, data-set-wide row) pairs with a hash between the bounds, both included, in order."""
    low, high = np.uint64(bounds[0]), np.uint64(bounds[1])
    found, rows, base = [], [], 0
    for number, shard in enumerate(manifest.shards):
        khsh, krow = hashes(number)
        start, stop = np.searchsorted(khsh, low, "left"), np.searchsorted(khsh, high, "right")
        found.append(khsh[start:stop])
        rows.append(krow[start:stop] + np.uint64(base))
        base += shard.rows
    if not found:
        return np.empty(0, "<u8"), np.empty(0, "<u8")
    keys, places = np.concatenate(found), np.concatenate(rows)
    order = np.argsort(keys, kind="stable")
    return keys[order], places[order]
