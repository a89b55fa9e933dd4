"""How fast a storage is: sequential and random reads of files that are there, with the page cache told to forget them first."""

from __future__ import annotations

import contextlib
import os
import stat
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

SEQUENTIAL_BYTES = 256 << 20
READ_BYTES = 1 << 20
RANDOM_BYTES = 4096
RANDOM_READS = 256
SMALL_FILES = 256
SMALL_BYTES = 1 << 20
SECONDS = 5.0
MAX_LISTED = 100_000
_LARGEST = 16


@dataclass(frozen=True, slots=True)
class Found:
    """A file: path and size in bytes."""

    path: str
    size: int


@dataclass(slots=True)
class Listing:
    """Regular files below a place: how many, their bytes, some of them. ``complete``: whether all were counted."""

    files: int = 0
    bytes: int = 0
    complete: bool = True
    largest: list[Found] | None = None
    some: list[Found] | None = None


def list_files(place: Path, limit: int = MAX_LISTED) -> Listing:
    """Count files below ``place`` (or the one it is), as far as ``limit`` of them."""
    found = Listing(largest=[], some=[])
    assert found.largest is not None and found.some is not None
    step = 1
    for item in _walk(place):
        if found.files >= limit:
            found.complete = False
            break
        found.files += 1
        found.bytes += item.size
        found.largest.append(item)
        if len(found.largest) > 4 * _LARGEST:
            found.largest = sorted(found.largest, key=lambda each: (-each.size, each.path))[:_LARGEST]
        # Every so many files, thinned out as more come: an even choice in bounded memory.
        if found.files % step == 0 and item.size <= SMALL_BYTES:
            found.some.append(item)
            if len(found.some) > 2 * SMALL_FILES:
                found.some, step = found.some[::2], step * 2
    found.largest = sorted(found.largest, key=lambda each: (-each.size, each.path))[:_LARGEST]
    return found


def _walk(place: Path) -> Iterator[Found]:
    if not place.is_dir():
        yield Found(os.fspath(place), place.stat().st_size)
        return
    for folder, folders, names in os.walk(place):
        folders.sort()
        for name in sorted(names):
            path = os.path.join(folder, name)
            with contextlib.suppress(OSError):
                status = os.stat(path, follow_symlinks=False)
                if stat.S_ISREG(status.st_mode) and status.st_size:
                    yield Found(path, status.st_size)


def measure(listing: Listing, seconds: float = SECONDS) -> dict[str, Any]:
    """Rates of this storage, from the files listed.

    Returns:
        JSON-able: ``sequential`` and ``sequential_again`` (MB/s, bytes read; the second finds what it can in the page cache), ``random``
        (reads of 4 KiB: median and 95th percentile in ms), ``small_files`` (files/s and MB/s of opening and reading whole small ones).
        A part is ``None`` where there is nothing to measure it on.
    """
    largest, some = listing.largest or [], listing.some or []
    first = _sequential(largest, seconds, drop=True)
    return {
        "sequential": first,
        "sequential_again": _sequential(largest, seconds, drop=False) if first else None,
        "random": _random(largest, seconds),
        "small_files": _small(some[:SMALL_FILES], seconds),
        "note": "the page cache was asked to forget the files first; a file system may not obey, and then the rates are those of memory",
    }


@contextlib.contextmanager
def _opened(path: str, *, drop: bool) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    try:
        if drop:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        yield descriptor
    finally:
        os.close(descriptor)


def _sequential(files: Sequence[Found], seconds: float, *, drop: bool) -> dict[str, Any] | None:
    buffer = bytearray(READ_BYTES)
    total, begun = 0, time.perf_counter()
    for item in files:
        with contextlib.suppress(OSError), _opened(item.path, drop=drop) as descriptor:
            offset = 0
            while total < SEQUENTIAL_BYTES and time.perf_counter() - begun < seconds:
                count = os.preadv(descriptor, [buffer], offset)
                if not count:
                    break
                offset += count
                total += count
    elapsed = time.perf_counter() - begun
    return {"mb_per_s": round(total / 1e6 / elapsed, 1), "bytes": total} if total else None


def _random(files: Sequence[Found], seconds: float) -> dict[str, Any] | None:
    usable = [item for item in files if item.size >= 64 * RANDOM_BYTES]
    if not usable:
        return None
    places = np.random.default_rng(0)
    buffer = bytearray(RANDOM_BYTES)
    times: list[float] = []
    begun = time.perf_counter()
    for number in range(RANDOM_READS):
        item = usable[number % len(usable)]
        with contextlib.suppress(OSError), _opened(item.path, drop=True) as descriptor:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
            offset = int(places.integers(0, item.size // RANDOM_BYTES)) * RANDOM_BYTES
            start = time.perf_counter()
            os.preadv(descriptor, [buffer], offset)
            times.append((time.perf_counter() - start) * 1000)
        if time.perf_counter() - begun > seconds:
            break
    if not times:
        return None
    times.sort()
    return {
        "reads": len(times),
        "median_ms": round(statistics.median(times), 4),
        "p95_ms": round(times[int(len(times) * 0.95)], 4),
    }


def _small(files: Sequence[Found], seconds: float) -> dict[str, Any] | None:
    for item in files:
        with contextlib.suppress(OSError), _opened(item.path, drop=True):
            pass
    total = count = 0
    begun = time.perf_counter()
    for item in files:
        with contextlib.suppress(OSError), _opened(item.path, drop=False) as descriptor:
            total += len(os.pread(descriptor, SMALL_BYTES, 0))
            count += 1
        if time.perf_counter() - begun > seconds:
            break
    elapsed = time.perf_counter() - begun
    return (
        {"files": count, "files_per_s": round(count / elapsed, 1), "mb_per_s": round(total / 1e6 / elapsed, 2)}
        if count
        else None
    )
