"""Empties the page cache of files, and says how far that went."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np

from lfdata.loader.slots import control_groups

_libc = ctypes.CDLL(None, use_errno=True)


def files_below(folder: Path) -> list[Path]:
    """All files of a folder, with something in them."""
    return [path for path in sorted(folder.rglob("*")) if path.is_file() and path.stat().st_size]


def empty(paths: Iterable[Path]) -> tuple[str, float]:
    """Write back and drop the pages of some files.

    Returns:
        How (``drop_caches`` where the system allows it, else ``fadvise``), and the share of the files' pages still in memory.
    """
    how, paths = "fadvise", list(paths)
    os.sync()
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    with suppress(OSError):
        Path("/proc/sys/vm/drop_caches").write_text("1\n")
        how = "drop_caches"
    resident = [_resident(path) for path in paths]
    pages = sum(total for _, total in resident)
    return how, sum(count for count, _ in resident) / max(1, pages)


def memory_limit() -> int:
    """Bytes of memory, page cache included, that this process may use: the least limit of its control groups, or all there is."""
    limits = [os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE]
    for group in control_groups():
        for name in ("memory.max", "memory.limit_in_bytes"):
            with suppress(OSError, ValueError):
                limits.append(int((group / name).read_text()))
    return min(limits)


def _resident(path: Path) -> tuple[int, int]:
    """Pages of a file in memory, and all its pages."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping:
        view = np.frombuffer(mapping, np.uint8)
        pages = -(-len(view) // mmap.PAGESIZE)
        found = np.zeros(pages, np.uint8)
        failed = _libc.mincore(
            ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(len(view)), ctypes.c_void_p(found.ctypes.data)
        )
        del view
        if failed:
            raise OSError(ctypes.get_errno(), "mincore", str(path))
        return int((found & 1).sum()), pages
