"""Where shard bytes are read from: one small protocol, and local files behind a bounded pool of descriptors.

Bytes are read with ``pread``, or by the native module from a guarded mapping: a file truncated under a plain mapping kills the process
with SIGBUS, a short ``pread`` is an error that names the file.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
import stat
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol, TypeVar, runtime_checkable

from lfdata.errors import ChangedError, StorageError, TruncatedError
from lfdata.format.forking import watch

T = TypeVar("T")

# How many pages are sampled to see whether a file lies in the page cache, how many of them must, and for how many calls the answer holds.
# The system drops single pages of a file in use: a few random faults cost less than a system call a row.
RESIDENT_SAMPLES = 32
RESIDENT_ENOUGH = 30
RESIDENT_CALLS = 256

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class RangeFile(Protocol):
    """Bytes by offset. ``name`` is for messages, ``size`` the length in bytes."""

    name: str
    size: int

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer`` from ``offset`` on. Raises :class:`TruncatedError` if the file ends before."""
        ...


@runtime_checkable
class ScatterFile(RangeFile, Protocol):
    """One whose reads take long, so that many at a time are better."""

    def read_many(self, parts: Iterable[tuple[memoryview, int]]) -> None:
        """Fill buffers, each from an offset on."""
        ...

    def distrust(self, offset: int, length: int) -> None:
        """These bytes do not match their check: whatever copy of them is kept is to be read anew from where it came."""
        ...


def read_range(file: RangeFile, offset: int, length: int) -> bytearray:
    """``length`` bytes at ``offset``, owned. The length is checked against the file before anything is allocated."""
    if offset < 0 or length < 0 or offset + length > file.size:
        raise TruncatedError(file.name, offset, f"{length} bytes wanted, the file has {file.size}")
    data = bytearray(length)
    if length:
        file.read_into(memoryview(data), offset)
    return data


class DescriptorPool:
    """At most ``limit`` open descriptors; the one unused longest is closed. Thread-safe.

    A forked child goes on with its copies of the descriptors: ``pread`` has no shared position. Where the process has no
    descriptors left, the pool gives up its own rather than fail.
    """

    def __init__(self, limit: int = 64) -> None:
        self.limit = min(limit, _share())
        self._lock = threading.Lock()
        self._open: OrderedDict[str, int] = OrderedDict()
        self._busy: dict[int, int] = {}
        self._retired: set[int] = set()
        # A pool nobody refers to any more is in nobody's use: what it holds open goes with it.
        weakref.finalize(self, _close_all, self._open).atexit = False
        watch(self)

    def after_fork(self) -> None:
        """See :class:`lfdata.format.forking.Forked`."""
        self._lock = threading.Lock()
        self._busy.clear()
        for descriptor in self._retired:
            os.close(descriptor)
        self._retired.clear()

    def use(self, path: str, opened: Callable[[int], None], action: Callable[[int], T]) -> T:
        """Run ``action`` on a descriptor of ``path``; ``opened`` checks one that was just opened."""
        descriptor = self._acquire(path, opened)
        try:
            return action(descriptor)
        finally:
            self._release(descriptor)

    def _acquire(self, path: str, opened: Callable[[int], None]) -> int:
        with self._lock:
            descriptor = self._open.get(path)
            if descriptor is None:
                descriptor = self._open_file(path)
                try:
                    opened(descriptor)
                except BaseException:
                    os.close(descriptor)
                    raise
                self._open[path] = descriptor
                while len(self._open) > self.limit:
                    _, oldest = self._open.popitem(last=False)
                    self._close(oldest)
            else:
                self._open.move_to_end(path)
            self._busy[descriptor] = self._busy.get(descriptor, 0) + 1
            return descriptor

    def _open_file(self, path: str) -> int:
        while True:
            try:
                return _open(path)
            except StorageError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._open:
                    raise
                _, oldest = self._open.popitem(last=False)
                self._close(oldest)

    def _release(self, descriptor: int) -> None:
        with self._lock:
            left = self._busy.pop(descriptor, 1) - 1
            if left > 0:
                self._busy[descriptor] = left
            elif descriptor in self._retired:
                self._retired.discard(descriptor)
                os.close(descriptor)

    def _close(self, descriptor: int) -> None:
        if self._busy.get(descriptor):
            self._retired.add(descriptor)
        else:
            os.close(descriptor)

    def close(self, path: str | None = None) -> None:
        """Close the descriptor of one path, or all."""
        with self._lock:
            for name in [path] if path is not None else list(self._open):
                descriptor = self._open.pop(name, None)
                if descriptor is not None:
                    self._close(descriptor)


def _close_all(descriptors: dict[str, int]) -> None:
    while descriptors:
        os.close(descriptors.popitem()[1])


def _share() -> int:
    """A quarter of the descriptors the process may have: the rest is the program's."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if soft == resource.RLIM_INFINITY else max(1, soft // 4)


def read_small(path: str | Path) -> bytes:
    """A whole regular file. Raises ``OSError``; anything else than a file (a pipe would block for ever) is one too."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        return file.read()


def _open(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise StorageError(
            path, "open", error.errno, "the shard file is missing. Was the data set replaced or moved?"
        ) from error
    except OSError as error:
        raise StorageError(path, "open", error.errno, error.strerror or str(error)) from error


def map_file(descriptor: int, size: int) -> memoryview:
    """A read-only, shared mapping of ``size`` bytes that keeps no descriptor (``mmap.mmap`` keeps one); unmapped when dropped."""
    address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    owner = (ctypes.c_ubyte * size).from_address(address)
    weakref.finalize(owner, _libc.munmap, address, size).atexit = False
    return memoryview(owner).cast("B").toreadonly()


class LocalFile:
    """A local file of a :class:`DescriptorPool`. It must stay the same file: one replaced in between is refused."""

    def __init__(self, path: str | Path, pool: DescriptorPool | None = None) -> None:
        self.name = os.fspath(path)
        self._pool = pool or DescriptorPool(1)
        self._identity: tuple[int, int, int] | None = None
        self._mapping: memoryview | None = None
        self._resident = False
        self._looked = 0
        self.size = self._pool.use(self.name, self._opened, lambda fd: os.fstat(fd).st_size)

    def _opened(self, descriptor: int) -> None:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise StorageError(self.name, "open", None, "not a regular file")
        identity = (found.st_dev, found.st_ino, found.st_size)
        if self._identity is None:
            self._identity = identity
        elif identity[:2] != self._identity[:2]:
            raise ChangedError(self.name, None, "the file was replaced while it was in use. Open the data set again")
        elif identity[2] != self._identity[2]:
            raise TruncatedError(
                self.name, min(identity[2], self._identity[2]), f"the file had {self._identity[2]} bytes, now {identity[2]}"
            )

    def run(self, action: Callable[[int], T]) -> T:
        """Run ``action`` on an open descriptor."""
        return self._pool.use(self.name, self._opened, action)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """See :class:`RangeFile`."""
        self.run(lambda descriptor: self._fill(descriptor, buffer, offset))

    def _fill(self, descriptor: int, buffer: memoryview, offset: int) -> None:
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(descriptor, [buffer[done:]], offset + done)
            except OSError as error:
                raise StorageError(
                    self.name, f"read at byte {offset + done}", error.errno, error.strerror or str(error)
                ) from error
            if not count:
                end = min(os.fstat(descriptor).st_size, offset + done)
                raise TruncatedError(
                    self.name, end, f"the file ends here; {offset + len(buffer) - end} more bytes were expected"
                )
            done += count

    def map(self) -> memoryview:
        """A read-only mapping of the whole file, made once. It holds no descriptor, and lives as long as anything refers to it."""
        if self._mapping is None:
            self.check_size()
            self._mapping = self.run(lambda descriptor: map_file(descriptor, self.size))
        return self._mapping

    def resident_mapping(self, resident: Callable[[memoryview, int, int], int]) -> memoryview | None:
        """The mapping, if the file seems to lie in the page cache, looked at again now and then; ``resident`` counts sampled pages."""
        if self._looked <= 0:
            self._looked = RESIDENT_CALLS
            self._resident = resident(self.map(), RESIDENT_SAMPLES, time.monotonic_ns()) >= RESIDENT_ENOUGH
        self._looked -= 1
        return self.map() if self._resident else None

    def check_size(self) -> None:
        """Raise :class:`TruncatedError` if the file has become shorter (so that a mapping must not be touched)."""
        found = self.run(lambda descriptor: os.fstat(descriptor).st_size)
        if found < self.size:
            raise TruncatedError(self.name, found, f"the file had {self.size} bytes and was truncated")

    def close(self) -> None:
        """Give the descriptor back."""
        self._pool.close(self.name)
