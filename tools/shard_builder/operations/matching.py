"""Rows of a table found by the keys of a data set's samples."""

from __future__ import annotations

import hashlib
from array import array

import numpy as np
from numpy.typing import NDArray

from lfdata.dataset import ShardDataset
from lfdata.errors import SampleError, SourceError
from lfdata.format.layout import xxh3
from shard_builder.sources.base import BadRecord, Source


class Matched:
    """Records of a table by sample. Memory: 24 bytes a record, and its locator.

    Attributes:
        digest: SHA-256 over the records' keys and locators. unmatched: records whose key no sample has.
    """

    def __init__(self, data: ShardDataset) -> None:
        self._starts = np.cumsum([0, *(shard.rows for shard in data.manifest.shards)], dtype=np.int64)
        self.digest = ""
        self.unmatched = 0
        self._found = array("q")
        self._ends = array("q", [0])
        self._text = bytearray()
        self._order: NDArray[np.int64] = np.empty(0, np.int64)
        self.indices: NDArray[np.int64] = np.empty(0, np.int64)

    def add(self, index: int, locator: bytes) -> None:
        """Take a record in."""
        self._found.append(index)
        self._text += locator
        self._ends.append(len(self._text))

    def settle(self) -> None:
        """All are in: bring them into the order of the samples."""
        found = np.frombuffer(self._found, np.int64)
        self._order = np.argsort(found, kind="stable")
        self.indices = found[self._order]

    def of(self, shard: int) -> tuple[NDArray[np.int64], list[bytes]]:
        """Rows of a shard that have a record (ascending), and their locators."""
        low, high = np.searchsorted(self.indices, self._starts[shard : shard + 2])
        locators = [bytes(self._text[self._ends[n] : self._ends[n + 1]]) for n in self._order[low:high].tolist()]
        return self.indices[low:high] - self._starts[shard], locators


def match(data: ShardDataset, table: Source) -> Matched:
    """Find every record's sample. Raises :class:`SourceError` for a bad record, or two of one key."""
    found = Matched(data)
    hashes, places = _all_hashes(data)
    digest = hashlib.sha256()
    for record in table.scan():
        if isinstance(record, BadRecord):
            error = SampleError(record.code, record.reason, key=record.key, path=record.path)
            raise SourceError(f"the table has a bad row: {error}")
        for part in (record.key, record.locator):
            digest.update(len(part).to_bytes(8, "little") + part)
        index = _index_of(data, hashes, places, record.key)
        if index is None:
            found.unmatched += 1
        else:
            found.add(index, record.locator)
    found.settle()
    twice = np.flatnonzero(found.indices[1:] == found.indices[:-1])
    if len(twice):
        key = data.keys([int(found.indices[twice[0]])])[0].decode("utf-8", "backslashreplace")
        raise SourceError(f"the table has more than one row of key {key!r}")
    if not len(found.indices) and len(data):
        raise SourceError(f"no row of the table has the key of a sample of {data.path}; its first key is {data.keys([0])[0]!r}")
    found.digest = digest.hexdigest()
    return found


def _all_hashes(data: ShardDataset) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Hashes of all keys in ascending order, and their samples."""
    hashes, places, start = [np.empty(0, np.uint64)], [np.empty(0, np.int64)], 0
    for number, shard in enumerate(data.manifest.shards):
        mine, rows = data.shard(number).base.key_hashes()
        hashes.append(mine)
        places.append(rows.astype(np.int64) + start)
        start += shard.rows
    joined, where = np.concatenate(hashes), np.concatenate(places)
    order = np.argsort(joined, kind="stable")
    return joined[order], where[order]


def _index_of(data: ShardDataset, hashes: NDArray[np.uint64], places: NDArray[np.int64], key: bytes) -> int | None:
    wanted = np.uint64(xxh3(key))
    at = int(np.searchsorted(hashes, wanted))
    while at < len(hashes) and hashes[at] == wanted:
        index = int(places[at])
        if data.keys([index])[0] == key:
            return index
        at += 1
    return None
