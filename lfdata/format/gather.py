"""Payloads of many rows into one buffer, each compared with its check.

With the native module a whole call runs without the GIL on a few threads: from a mapping where the file lies in the page cache (under
a guard: a file truncated meanwhile is an error, not a SIGBUS), with ``pread`` where it does not, since random faults read far more than
they are asked for. Without it the same is done row by row in Python. All give the same bytes and the same errors.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfdata.errors import CorruptError
from lfdata.format.files import LocalFile, RangeFile, ScatterFile
from lfdata.format.layout import xxh3

try:
    from lfdata.format import _native as _built

    native: ModuleType | None = _built
except ImportError:
    native = None

# Bytes for each thread: waking one costs about what reading and checking 50 KB does.
BYTES_A_THREAD = 1 << 18
MAX_THREADS = 4


def default_threads() -> int:
    """Threads a read may use: the cores this process may use, at most :data:`MAX_THREADS`."""
    return min(MAX_THREADS, len(os.sched_getaffinity(0)))


def locate(
    locators: NDArray[Any],
    counts: NDArray[Any],
    rows: NDArray[np.int64],
    spans: tuple[NDArray[np.uint64], NDArray[np.uint64]],
    unit: int,
    base: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint64], int]:
    """Where the payloads of some rows lie.

    Args:
        locators, counts: columns of the shard, or their elements at ``rows`` (then ``rows`` counts from 0 on): start and check;
            units a payload.
        rows: elements of the columns, in range.
        spans: starts and ends of the ascending ranges, in units, that payloads must lie in.
        unit: bytes of one unit.
        base: where in the file unit 0 lies.

    Returns:
        Offsets and lengths in bytes, checks, and the position of the first row whose payload lies outside, or -1.
    """
    if native is not None:
        offsets, lengths, checks = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64), np.empty(len(rows), np.uint64)
        outside: int = native.locate(locators, counts, rows, *spans, unit, base, offsets, lengths, checks)
        return offsets, lengths, checks, outside
    found, sizes = locators[rows], counts[rows].astype(np.uint64)
    starts = found["offset"]
    ends = spans[1][spans[0].searchsorted(starts, "right") - 1]
    good = (starts <= ends) & (sizes <= ends - starts)
    begin, size = np.uint64(base) + starts * np.uint64(unit), sizes * np.uint64(unit)
    return begin.astype(np.int64), size.astype(np.int64), found["check"], -1 if good.all() else int(np.argmin(good))


def gather(
    file: RangeFile,
    seed: int,
    offsets: NDArray[np.int64],
    lengths: NDArray[np.int64],
    checks: NDArray[np.uint64],
    out: NDArray[np.uint8],
    places: NDArray[np.int64],
    threads: int,
) -> int:
    """Read row i's ``lengths[i]`` bytes at ``offsets[i]`` of the file to ``out[places[i]:]``; rows of length 0 are skipped.

    Args:
        seed: the file's check seed.
        checks: XXH3 of each payload, uint64.
        threads: how many may be used (native module only).

    Returns:
        -1, or the position of a row whose bytes do not match their check.

    Raises:
        TruncatedError, StorageError: the file ended early or could not be read.
    """
    if not isinstance(file, LocalFile) and isinstance(file, ScatterFile):
        return _scattered(file, seed, offsets, lengths, checks, out, places)
    if native is None or not isinstance(file, LocalFile):
        return _in_file_order(_gather_plain, file, seed, offsets, lengths, checks, out, places)
    module, source = native, file
    count = max(1, min(threads, len(out) // BYTES_A_THREAD))
    mapping = source.resident_mapping(module.resident)
    if mapping is not None:
        failed: int = module.read_mapped(mapping, seed, offsets, lengths, np.ascontiguousarray(checks), places, out, count)
    else:

        def read(_file: RangeFile, *arrays: Any) -> int:
            offsets, lengths, checks, out, places = arrays[1:]
            row: int = source.run(lambda fd: module.read_checked(fd, seed, offsets, lengths, checks, places, out, count))
            return row

        failed = _in_file_order(read, file, seed, offsets, lengths, checks, out, places)
    if failed < 0:
        return -1
    # Say why: the same row again, by the path that tells short reads and I/O errors from wrong bytes.
    rest = slice(failed, failed + 1)
    if _gather_plain(file, seed, offsets[rest], lengths[rest], checks[rest], out, places[rest]) < 0:
        reason = "a payload was read wrongly once and rightly the second time: failing storage or memory"
        raise CorruptError(file.name, int(offsets[failed]), reason)
    return failed


def start(
    file: RangeFile,
    seed: int,
    offsets: NDArray[np.int64],
    lengths: NDArray[np.int64],
    checks: NDArray[np.uint64],
    out: NDArray[np.uint8],
    places: NDArray[np.int64],
) -> Any:
    """The same in the background: an object whose ``finish()`` gives what :func:`gather` does, but -1 or any row that failed, whatever the
    reason. ``None`` where that cannot be done: without the native module, and for files that are not in the page cache."""
    if native is None or not isinstance(file, LocalFile):
        return None
    mapping = file.resident_mapping(native.resident)
    if mapping is None:
        return None
    return native.start_mapped(mapping, seed, offsets, lengths, np.ascontiguousarray(checks), places, out, 1)


def _in_file_order(
    read: Callable[..., int],
    file: RangeFile,
    seed: int,
    offsets: NDArray[np.int64],
    lengths: NDArray[np.int64],
    checks: NDArray[np.uint64],
    out: NDArray[np.uint8],
    places: NDArray[np.int64],
) -> int:
    """Read by ascending offset, so that storage is walked one way; the result is a position in the order given."""
    order = np.argsort(offsets, kind="stable")
    failed = read(file, seed, offsets[order], lengths[order], checks[order], out, places[order])
    return int(order[failed]) if failed >= 0 else -1


def _gather_plain(
    file: RangeFile,
    seed: int,
    offsets: NDArray[np.int64],
    lengths: NDArray[np.int64],
    checks: NDArray[np.uint64],
    out: NDArray[np.uint8],
    places: NDArray[np.int64],
) -> int:
    view = out.data
    rows = zip(offsets.tolist(), lengths.tolist(), checks.tolist(), places.tolist(), strict=True)
    for number, (offset, length, check, place) in enumerate(rows):
        if length:
            part = view[place : place + length]
            file.read_into(part, offset)
            if xxh3(part, seed) != check:
                return number
    return -1


def _scattered(
    file: ScatterFile,
    seed: int,
    offsets: NDArray[np.int64],
    lengths: NDArray[np.int64],
    checks: NDArray[np.uint64],
    out: NDArray[np.uint8],
    places: NDArray[np.int64],
) -> int:
    """All at once; rows that do not match are read once more, from where they come."""
    view = out.data
    rows = zip(offsets.tolist(), lengths.tolist(), checks.tolist(), places.tolist(), strict=True)
    wanted = [
        (number, offset, view[place : place + length], check)
        for number, (offset, length, check, place) in enumerate(rows)
        if length
    ]
    for again in (True, False):
        file.read_many([(part, offset) for _, offset, part, _ in wanted])
        wanted = [row for row in wanted if xxh3(row[2], seed) != row[3]]
        if not wanted:
            return -1
        if again:
            for _, offset, part, _ in wanted:
                file.distrust(offset, len(part))
    return wanted[0][0]
