"""Equal digests over any number of values, in bounded memory: distributed into buckets by digest, each sorted by itself."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import IO, Any, Self

import numpy as np
from numpy.typing import NDArray

RECORD = np.dtype([("field", "<u2"), ("high", ">u8"), ("low", ">u8"), ("index", "<u8")])
# Few enough files for any limit on descriptors; 10^9 values make 400 MB each.
BUCKETS = 64
# Kept in memory by a bucket before it goes to a file without a name.
SPOOL_BYTES = 1 << 20


def record(field: int, digest: bytes, index: int) -> bytes:
    """One :data:`RECORD`: ordinal of the field, 16 bytes of digest, index of the sample."""
    return field.to_bytes(2, "little") + digest + index.to_bytes(8, "little")


class Buckets:
    """Digests of a whole data set. Use as a context manager."""

    def __init__(self) -> None:
        self._files: dict[int, IO[bytes]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def add(self, records: bytes) -> None:
        """Records of :data:`RECORD`, one after the other."""
        table = np.frombuffer(records, RECORD)
        bucket = (table["high"] % np.uint64(BUCKETS)).astype(np.int64)
        for number in np.unique(bucket).tolist():
            file = self._files.get(number)
            if file is None:
                file = self._files[number] = tempfile.SpooledTemporaryFile(SPOOL_BYTES)  # noqa: SIM115  closed by __exit__
            file.write(table[bucket == number].tobytes())

    def groups(self) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Field ordinal and indices (ascending, two or more) of equal values."""
        for number in sorted(self._files):
            file = self._files[number]
            file.seek(0)
            table: NDArray[Any] = np.frombuffer(file.read(), RECORD)
            table = table[np.lexsort((table["index"], table["low"], table["high"], table["field"]))]
            same = np.ones(len(table) - 1, bool)
            for name in ("field", "high", "low"):
                same &= table[name][1:] == table[name][:-1]
            edges = np.flatnonzero(np.concatenate([[True], ~same, [True]]))
            for at in np.flatnonzero(np.diff(edges) > 1).tolist():
                start, stop = int(edges[at]), int(edges[at + 1])
                yield int(table["field"][start]), table["index"][start:stop].astype(np.int64)
