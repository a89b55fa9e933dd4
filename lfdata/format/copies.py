"""Copies of what lies behind the payloads of every shard, kept in ``index.lfi`` (docs/format.md, section 9.1).

A shard that was cut has lost its index, which says where its payloads are and what they must be. With a copy of it, every payload that is
still there can be found and proved.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

import zstandard

from lfdata.errors import CorruptError
from lfdata.format.files import RangeFile, read_range
from lfdata.format.layout import HEADER_BYTES, Entry, xxh3
from lfdata.format.reader import ShardFile

SECTION = b"COPY"
PIECE_BYTES = 4 << 20
# Token regions are copied too where they are small beside the row groups: without them no sample of such a shard would be whole.
_TOKEN_SHARE = 16
_LEVEL = 3
_HEAD = struct.Struct("<16s16sQQQQ")

Copies = dict[tuple[bytes, bytes], list[tuple[int, int, int]]]
"""By (shard id, part id): where pieces of that file belong, where in the index they lie, and their bytes there."""


def copied_from(shard: ShardFile) -> int:
    """Offset in a file from which on it is copied."""
    groups = [entry for entry in shard.entries if entry.type == b"GRUP"]
    tokens = [entry for entry in shard.entries if entry.type == b"TOKN"]
    small = sum(entry.length for entry in tokens) * _TOKEN_SHARE <= sum(entry.length for entry in groups)
    return max((entry.end for entry in (groups if small else groups + tokens)), default=HEADER_BYTES)


def pieces(shard: ShardFile) -> Iterator[bytes]:
    """The copy of one file, as the section holds it. Raises :class:`lfdata.errors.FormatError`, ``StorageError``: it cannot be read."""
    identity, end = shard.identity, shard.file.size
    for offset in range(copied_from(shard), end, PIECE_BYTES):
        data = bytes(read_range(shard.file, offset, min(PIECE_BYTES, end - offset)))
        packed = zstandard.ZstdCompressor(_LEVEL).compress(data)
        head = _HEAD.pack(identity.shard_id, identity.part_id, offset, len(data), len(packed), 0)
        yield head[:-8] + struct.pack("<Q", xxh3(head + packed)) + packed


def find(index: ShardFile) -> Copies:
    """What copies an index holds; those behind a damaged head are not found."""
    found: Copies = {}
    for entry in index.entries:
        if entry.type == SECTION:
            for key, place in _heads(index.file, entry):
                found.setdefault(key, []).append(place)
    return found


def _heads(file: RangeFile, entry: Entry) -> Iterable[tuple[tuple[bytes, bytes], tuple[int, int, int]]]:
    at = entry.offset
    while at + _HEAD.size <= entry.end:
        shard_id, part_id, offset, length, packed, _ = _HEAD.unpack(read_range(file, at, _HEAD.size))
        stop = at + _HEAD.size + packed
        if length > PIECE_BYTES or stop > entry.end:
            return
        yield (shard_id, part_id), (offset, at, stop - at)
        at = stop


def unpack(index: ShardFile, place: tuple[int, int, int]) -> tuple[int, bytes]:
    """One piece: where in its file it belongs, and its bytes. Raises :class:`CorruptError`."""
    data = bytes(read_range(index.file, place[1], place[2]))
    head, packed = data[: _HEAD.size], data[_HEAD.size :]
    *_, offset, length, _, check = _HEAD.unpack(head)
    if xxh3(head[:-8] + bytes(8) + packed) != check:
        raise CorruptError(index.name, place[1], "the copy of a shard's index does not match its check")
    try:
        found = zstandard.ZstdDecompressor().decompress(packed, max_output_size=PIECE_BYTES)
    except zstandard.ZstdError as error:
        raise CorruptError(index.name, place[1], f"the copy of a shard's index cannot be unpacked: {error}") from error
    if len(found) != length:
        raise CorruptError(index.name, place[1], "the copy of a shard's index has another length than it says")
    return offset, found
