"""Shared memory without a name: reserved once, cut into slots."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import weakref
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from lfdata.errors import LimitError

ALIGN = 64
PAGE = 4096
LANES = 2
# What each lane tells about its work, in the first page: job, epoch, first step, steps, phase.
JOB, EPOCH, STEP, STEPS, PHASE = range(5)
PHASES = ("idle", "planning", "reading", "decoding", "finishing")
_CGROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_USED = ("/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory/memory.usage_in_bytes")


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
        return self.offset + int(np.dtype(self.dtype).itemsize * np.prod(self.shape, dtype=np.int64))

    def of(self, slot: Any) -> NDArray[Any]:
        """The array, as a view of the slot's memory."""
        count = int(np.prod(self.shape, dtype=np.int64))
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
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            left = int(line.split()[1]) * 1024
    for limit, used in zip(_CGROUPS, _USED, strict=True):
        try:
            left = min(left, int(Path(limit).read_text()) - int(Path(used).read_text()))
        except (OSError, ValueError):
            continue
    return left


def _anonymous(size: int) -> int:
    """A descriptor of ``size`` bytes of memory that no file system knows."""
    if hasattr(os, "memfd_create"):
        try:
            descriptor = os.memfd_create("lfdata-slots", os.MFD_CLOEXEC)
        except OSError:
            pass
        else:
            os.ftruncate(descriptor, size)
            return descriptor
    room = os.statvfs("/dev/shm")
    free = room.f_bavail * room.f_frsize
    if size > free:
        advice = "Enlarge it (docker: --shm-size), or lower the batch size or prefetch"
        raise LimitError("/dev/shm", None, f"the loader's slots take {size:,} bytes, {free:,} are free. {advice}")
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(size)
        return os.dup(file.fileno())


class Slots:
    """``count`` slots of ``size`` bytes and a first page for what lanes are doing.

    Raises:
        LimitError: more than the machine, the control group or /dev/shm has.
    """

    def __init__(self, count: int, size: int, descriptor: int | None = None, lanes: int = LANES) -> None:
        self.count, self.size = count, aligned(max(1, size), PAGE)
        total = PAGE + self.count * self.size
        if descriptor is None:
            left = available_memory()
            if total > left:
                raise LimitError(
                    "memory",
                    None,
                    f"the loader's {count} slots of {self.size:,} bytes do not fit: {left:,} bytes are available. Lower the batch size, "
                    "the prefetch or the length limits of ragged fields",
                )
            descriptor = _anonymous(total)
        self.descriptor = descriptor
        self._map = mmap.mmap(descriptor, total)
        self.lanes: NDArray[np.int64] = np.frombuffer(self._map, np.int64, lanes * 8).reshape(lanes, 8)

    def slot(self, number: int) -> memoryview:
        """One slot's memory. The mapping lives as long as any view of it."""
        start = PAGE + number * self.size
        return memoryview(self._map)[start : start + self.size]

    def buffer(self, number: int, kind: Any) -> Any:
        """One slot's memory as an instance of a ctypes array type of :attr:`size` bytes."""
        return kind.from_buffer(self._map, PAGE + number * self.size)

    def close(self) -> None:
        """Close the descriptor; the memory goes when the last view of it does."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
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

    def lend(self, number: int) -> Any:
        """The slot's memory as a buffer; when it and all arrays over it are gone, the slot is free."""
        lease = self._slots.buffer(number, self._kind)
        weakref.finalize(lease, self._free.append, number).atexit = False
        return lease
