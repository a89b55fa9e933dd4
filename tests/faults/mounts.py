"""File systems of a test's own: mounts in a private namespace of a forked child."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from killkit import in_child

CLONE_NEWNS = 0x20000
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def mount(source: str, target: Path, kind: str, flags: int = 0, data: str = "") -> None:
    """mount(2)."""
    _check(_libc.mount(source.encode(), bytes(target), kind.encode(), ctypes.c_ulong(flags), data.encode()))


def tmpfs(target: Path, size: int) -> None:
    """A file system in memory of ``size`` bytes."""
    mount("tmpfs", target, "tmpfs", 0, f"size={size}")


def resize(target: Path, size: int) -> None:
    """Change the size of a :func:`tmpfs`."""
    mount("tmpfs", target, "tmpfs", MS_REMOUNT, f"size={size}")


def read_only(target: Path) -> None:
    """Mount a directory over itself, read-only."""
    mount(str(target), target, "none", MS_BIND)
    mount(str(target), target, "none", MS_BIND | MS_REMOUNT | MS_RDONLY)


def _private() -> None:
    _check(_libc.unshare(CLONE_NEWNS))
    mount("none", Path("/"), "none", MS_REC | MS_PRIVATE)


def in_private_namespace(function: Callable[[], None]) -> None:
    """Run in a child whose mounts nobody else sees; its failure fails the test. Skips where mounting is not permitted."""
    if in_child(_private) != 0:
        pytest.skip("mounting in a private namespace is not permitted here (it needs CAP_SYS_ADMIN)")

    def inside() -> None:
        _private()
        function()

    assert in_child(inside) == 0, "failed in the child: its message is above"
