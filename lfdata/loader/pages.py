"""Pages of the slots' memory: huge ones where the system has them to give, and all of them there before they are filled (docs/scheduler.md)."""

from __future__ import annotations

import ctypes
import mmap
import re
from pathlib import Path

SYSTEM = Path("/sys/kernel/mm/transparent_hugepage")
# Of Linux 5.14; Python has no name for it.
MADV_POPULATE_WRITE = 23
# Without being asked.
GIVEN = ("always", "within_size", "force")


def ask_for_huge(memory: mmap.mmap, slot: int) -> bool:
    """Ask for huge pages where slots of ``slot`` bytes have room for one; whether there may be any."""
    size = _number(SYSTEM / "hpage_pmd_size")
    if not size or slot < size:
        return False
    when = _chosen(SYSTEM / f"hugepages-{size // 1024}kB" / "shmem_enabled")
    if when in ("", "inherit"):
        when = _chosen(SYSTEM / "shmem_enabled")
    if when == "advise":
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            return False
        return True
    return when in GIVEN


def touch(address: int, size: int) -> bool:
    """Have the system find the pages of some memory now, as writing there would; what is in them stays. ``False``: it does not."""
    # Not the method of mmap: that keeps other threads from running meanwhile.
    madvise = ctypes.CDLL(None).madvise
    return bool(madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), MADV_POPULATE_WRITE) == 0)


def _chosen(file: Path) -> str:
    """The word in brackets of a file of the kernel's."""
    found = re.search(r"\[(\w+)\]", _text(file))
    return found[1] if found else ""


def _number(file: Path) -> int:
    text = _text(file).strip()
    return int(text) if text.isdecimal() else 0


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
