"""Which of any number of hashes occur more than once, in bounded memory."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfdata.format.durable import Files, OutputFile

_BUCKETS = 64
_BUFFERED = 1 << 20


class HashGroups:
    """Pairs (hash, place), spilled into buckets by hash, given back as groups of equal hashes."""

    def __init__(self, files: Files, directory: Path, name: str) -> None:
        self._files, self._directory, self._name = files, directory, name
        self._hashes, self._places = array("Q"), array("Q")
        self._buckets: list[OutputFile] = []

    def add(self, hash_: int, place: int) -> None:
        """Take one pair in."""
        self._hashes.append(hash_)
        self._places.append(place)
        if len(self._hashes) >= _BUFFERED:
            self._spill()

    def extend(self, hashes: NDArray[np.uint64], places: NDArray[np.uint64]) -> None:
        """Take many pairs in: uint64 each."""
        for at in range(0, len(hashes), _BUFFERED):
            self._hashes.frombytes(hashes[at : at + _BUFFERED].tobytes())
            self._places.frombytes(places[at : at + _BUFFERED].tobytes())
            if len(self._hashes) >= _BUFFERED:
                self._spill()

    def _spill(self) -> None:
        if not self._buckets:
            for number in range(_BUCKETS):
                self._buckets.append(self._files.scratch(self._directory, f"{self._name}-{number}"))
        pairs = self._pairs()
        bucket_of = pairs["hash"] >> np.uint64(58)
        for number, bucket in enumerate(self._buckets):
            bucket.write(pairs[bucket_of == number].tobytes())
        self._hashes, self._places = array("Q"), array("Q")

    def _pairs(self) -> NDArray[Any]:
        pairs = np.empty(len(self._hashes), [("hash", "<u8"), ("place", "<u8")])
        pairs["hash"], pairs["place"] = np.frombuffer(self._hashes, np.uint64), np.frombuffer(self._places, np.uint64)
        return pairs

    def groups(self) -> Iterator[list[int]]:
        """Places of every hash that occurs more than once, in the order they were added."""
        if self._buckets:
            self._spill()
        loads = (np.frombuffer(b.pread(b.position, 0), [("hash", "<u8"), ("place", "<u8")]) for b in self._buckets)
        for pairs in loads if self._buckets else [self._pairs()]:
            ordered = pairs[np.argsort(pairs["hash"], kind="stable")]
            same = ordered["hash"][1:] == ordered["hash"][:-1]
            edges = np.flatnonzero(np.diff(np.concatenate([[False], same, [False]]).astype(np.int8)))
            for start, stop in edges.reshape(-1, 2).tolist():
                yield ordered["place"][start : stop + 1].tolist()

    def close(self) -> None:
        """Drop the scratch files."""
        for bucket in self._buckets:
            bucket.close()
