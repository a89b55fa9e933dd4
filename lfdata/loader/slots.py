"""Shared memory without a name: reserved once, cut into slots."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from lfdata.errors import LimitError, StorageError
from lfdata.loader.pages import ask_for_huge, touch

ALIGN = 64
PAGE = 4096
LANES = 2
# What each lane tells about its work, in the first page: job, epoch, first step, steps, phase; the sample that is tried alone. And of its
# decoder the work that waits: to be decoded in the first lane's place, to be augmented or mixed in the second's.
JOB, EPOCH, STEP, STEPS, PHASE, SOURCE, INDEX, DEPTH = range(8)
LANE_BYTES = 64
PHASES = ("idle", "planning", "decoding", "trying samples one by one of", "augmenting", "mixing")
IDLE, PLANNING, DECODING, TRYING, AUGMENTING, MIXING = range(6)
ADVICE = "Lower batch_size, prefetch or processes, or give ragged fields a fixed length"
SHARED_MEMORY = "/dev/shm"
_CGROUPS = Path("/sys/fs/cgroup")
# Limit and use: version 2, version 1.
_LIMITS = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))


def aligned(size: int, to: int = ALIGN) -> int:
    """``size`` rounded up."""
    return -(-size // to) * to


@dataclass(frozen=True, slots=True)
class Place:
    """Where an array lies in a slot: offset in bytes, dtype, shape."""

    offset: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.offset + int(np.dtype(self.dtype).itemsize) * math.prod(self.shape)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return int(np.dtype(self.dtype).itemsize) * math.prod(self.shape[1:])

    def of(self, slot: Any) -> NDArray[Any]:
        """The array, as a view of the slot's memory."""
        count = math.prod(self.shape)
        return np.frombuffer(slot, self.dtype, count, self.offset).reshape(self.shape)


class Layout:
    """Puts arrays one after the other."""

    def __init__(self) -> None:
        self.bytes = 0

    def add(self, dtype: DTypeLike, shape: tuple[int, ...]) -> Place:
        """Room for one more array."""
        place = Place(self.bytes, np.dtype(dtype).str, shape)
        self.bytes = aligned(place.end)
        return place


def available_memory() -> int:
    """Bytes that may still be used here: what the machine has, and what the control group allows."""
    left = 1 << 62
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            left = int(line.split()[1]) * 1024
    for group in control_groups():
        for limit, used in _LIMITS:
            try:
                found = int((group / limit).read_text()) - int((group / used).read_text())
                left = min(left, found + _page_cache(group))
            except (OSError, ValueError):
                continue
    return left


def _lines(path: str) -> list[str]:
    """A file of the kernel's; nothing where it cannot be read."""
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def control_groups() -> Iterator[Path]:
    """Directories of the memory control groups this process is in, from its own to the top."""
    for line in _lines("/proc/self/cgroup"):
        _, controllers, name = line.split(":", 2)
        if controllers in ("", "memory"):
            top = _CGROUPS / controllers
            group = top / name.lstrip("/")
            # In a container the path may be that of the host, of which only the top can be seen.
            yield from [one for one in (group, *group.parents) if one.is_relative_to(top) and one.is_dir()]


def _page_cache(group: Path) -> int:
    """Bytes of files among what a group uses: they make room when memory is asked for."""
    found = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return sum(int(found.get(f"total_{name}", found.get(name, 0))) for name in ("active_file", "inactive_file"))


def anonymous(name: str, size: int) -> IO[bytes]:
    """``size`` bytes of memory that no file system knows. Raises :class:`LimitError`: /dev/shm is used, and too small."""
    if hasattr(os, "memfd_create"):
        try:
            descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
        except OSError:
            pass
        else:
            file = os.fdopen(descriptor, "r+b", buffering=0)
            file.truncate(size)
            return file
    return _in_shared_memory(size)


def _in_shared_memory(size: int) -> IO[bytes]:
    """An unlinked file, reserved whole: what /dev/shm lacks is told now, not by a SIGBUS."""
    # Old kernels alone come here; a decoder process that starts is waited for.
    import tempfile

    file = tempfile.TemporaryFile(dir=SHARED_MEMORY, buffering=0)  # noqa: SIM115 - the caller closes it
    try:
        os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        room = os.statvfs(file.fileno())
        file.close()
        free = room.f_bavail * room.f_frsize
        reason = (
            f"the loader takes {size:,} bytes, {free:,} are free ({error.strerror}). Enlarge it (docker: --shm-size). {ADVICE}"
        )
        raise LimitError(SHARED_MEMORY, None, reason) from error
    return file


def mapped(count: int, size: int) -> int:
    """Bytes of the mapping of so many slots of a size."""
    return PAGE + count * aligned(max(1, size), PAGE)


class Slots:
    """``count`` slots of ``size`` bytes and a first page for what lanes are doing.

    Raises:
        LimitError: more than the machine, the control group or /dev/shm has.
    """

    def __init__(self, count: int, size: int, descriptor: int | None = None, lanes: int = LANES) -> None:
        self.count, self.size = count, aligned(max(1, size), PAGE)
        total = mapped(count, size)
        if descriptor is None:
            left = available_memory()
            if total > left:
                raise LimitError(
                    "memory",
                    None,
                    f"the loader's {count} slots of {self.size:,} bytes do not fit: {left:,} bytes are available. {ADVICE}",
                )
            try:
                self._file = anonymous("lfdata-slots", total)
            except OSError as error:
                raise StorageError(SHARED_MEMORY, "reserve", error.errno, error.strerror or str(error)) from error
        else:
            self._file = os.fdopen(descriptor, "r+b", buffering=0)
        self.descriptor = self._file.fileno()
        try:
            self._map = mmap.mmap(self.descriptor, total)
        except OSError as error:
            self._file.close()
            reason = f"the loader's {count} slots of {self.size:,} bytes cannot be mapped: {error.strerror}. {ADVICE}"
            raise LimitError("memory", None, reason) from error
        # Whether some of its pages may be huge.
        self.huge = ask_for_huge(self._map, self.size)
        width = LANE_BYTES // 8
        self.lanes: NDArray[np.int64] = np.frombuffer(self._map, np.int64, lanes * width).reshape(lanes, width)
        # The last lane's place is nobody's: how many threads of a decoder may decode at a time (0: all).
        self.width: NDArray[np.int64] = np.frombuffer(self._map, np.int64, 1, PAGE - LANE_BYTES)
        # And how busy the GPU is (lfdata.schedule.sampler).
        self.board: NDArray[np.int64] = np.frombuffer(self._map, np.int64, 2, PAGE - LANE_BYTES + 8)

    def queued(self) -> tuple[int, int]:
        """Pieces of work that wait in all decoders: to be decoded, and to be augmented or mixed."""
        decode = augment = 0
        # By number: for so few, sums of arrays take longer.
        for lane in range(0, len(self.lanes) // LANES * LANES, LANES):
            decode += self.lanes.item(lane, DEPTH)
            augment += self.lanes.item(lane + 1, DEPTH)
        return decode, augment

    def memory(self) -> NDArray[np.uint8]:
        """The whole mapping: the first page, then the slots."""
        return np.frombuffer(self._map, np.uint8)

    def slot(self, number: int) -> memoryview:
        """One slot's memory. The mapping lives as long as any view of it."""
        start = PAGE + number * self.size
        return memoryview(self._map)[start : start + self.size]

    def buffer(self, number: int, kind: Any) -> Any:
        """One slot's memory as an instance of a ctypes array type of :attr:`size` bytes."""
        return kind.from_buffer(self._map, PAGE + number * self.size)

    def touch(self) -> None:
        """Have all memory there, slot by slot, before it is filled; where the system does not do that, it comes as it is filled."""
        memory = self.memory()
        for number in range(self.count):
            if not touch(memory.ctypes.data + PAGE + number * self.size, self.size):
                return

    def discard(self, numbers: Iterable[int]) -> None:
        """Give the memory of slots that nobody uses back, though others keep the mapping."""
        for number in numbers:
            self._map.madvise(mmap.MADV_REMOVE, PAGE + number * self.size, self.size)

    def close(self) -> None:
        """Close the descriptor; the memory goes when the last view of it does."""
        self._file.close()
        self.descriptor = -1


class Leases:
    """Which slots are free. A slot that was handed out comes back when nothing sees its memory any more."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._free = deque(range(slots.count))
        # A subclass, since ctypes' own arrays take no weak references.
        self._kind = type("Lease", (ctypes.c_ubyte * slots.size,), {})

    def take(self) -> int | None:
        """A free slot, if there is one."""
        try:
            return self._free.popleft()
        except IndexError:
            return None

    def give(self, number: int) -> None:
        """Make a slot free."""
        self._free.append(number)

    @property
    def free(self) -> int:
        """Free slots."""
        return len(self._free)

    def discard(self, others: Iterable[int]) -> None:
        """Give the memory of free slots back, and of others that were never lent. None of them is used again."""
        self._slots.discard({*self._free, *others})

    def lend(self, number: int) -> Any:
        """The slot's memory as a buffer; when it and all arrays over it are gone, the slot is free."""
        lease = self._slots.buffer(number, self._kind)
        weakref.finalize(lease, self._free.append, number).atexit = False
        return lease
