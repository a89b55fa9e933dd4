"""Safe reading of files below a root: regular files only, nothing outside the root, bounded, never blocking."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from lfdata.errors import SampleError

MAX_FILE_BYTES = 4 << 30
LFS_HEAD = b"version https://git-lfs.github.com/spec/"
_LFS_MAX = 1024


def show(path: bytes | str) -> str:
    """A path or name as text for people and reports; bytes that are not UTF-8 come escaped."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def check_relative(path: str) -> None:
    """Refuse a path that could lead outside the root: absolute, with ``..``, or with a NUL. Raises :class:`SampleError`."""
    if not path or "\0" in path or path.startswith("/") or ".." in path.split("/"):
        raise SampleError("outside-root", f"{path!r} is not a path below the root", path=path)


def resolve_inside(root: Path, path: str) -> Path:
    """The real path of a file, which must lie below ``root`` after following links. Raises :class:`SampleError`."""
    check_relative(path)
    try:
        real = os.path.realpath(root / path, strict=True)
    except FileNotFoundError:
        raise SampleError("missing-file", "no such file", path=path) from None
    except OSError as error:
        # ELOOP, ENOTDIR, ENAMETOOLONG, EACCES: the path itself cannot be walked.
        raise SampleError("unreadable", error.strerror or str(error), path=path) from error
    base = os.path.realpath(root)
    if os.path.commonpath([base, real]) != base:
        raise SampleError("outside-root", "a link that leads outside the root", path=path)
    return Path(real)


def read_file(root: Path, path: str, limit: int = MAX_FILE_BYTES) -> bytes:
    """Contents of a regular file below ``root``.

    Raises:
        SampleError: outside the root, missing, not a regular file, unreadable, larger than ``limit``, changed while it was read, or a
            Git LFS pointer.
    """
    real = resolve_inside(root, path)
    try:
        # Without O_NONBLOCK opening a FIFO would hang.
        descriptor = os.open(real, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise SampleError("missing-file", "no such file", path=path) from None
    except OSError as error:
        raise SampleError("unreadable", error.strerror or str(error), path=path) from error
    try:
        data = _read(descriptor, path, limit)
    except OSError as error:
        raise SampleError("unreadable", error.strerror or str(error), path=path) from error
    finally:
        os.close(descriptor)
    refuse_pointer(data, path)
    return data


def _read(descriptor: int, path: str, limit: int) -> bytes:
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise SampleError("not-a-file", f"not a regular file but a {kind_of(found.st_mode)}", path=path)
    if found.st_size > limit:
        raise SampleError("too-large", f"{found.st_size} bytes; the limit is {limit}", path=path)
    parts = []
    left = found.st_size
    while left:
        part = os.read(descriptor, min(left, 1 << 30))
        if not part:
            raise SampleError("changed", f"the file became shorter while it was read ({left} bytes are missing)", path=path)
        parts.append(part)
        left -= len(part)
    if os.read(descriptor, 1):
        raise SampleError("changed", "the file became longer while it was read", path=path)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def refuse_pointer(data: bytes, path: str) -> None:
    """Raise :class:`SampleError` if ``data`` is a Git LFS pointer instead of the file it stands for."""
    if len(data) < _LFS_MAX and data.startswith(LFS_HEAD):
        raise SampleError("lfs-pointer", "a Git LFS pointer, not the file itself: run git lfs pull", path=path)


def kind_of(mode: int) -> str:
    """What a directory entry is, in a word."""
    kinds = (
        (stat.S_ISDIR, "directory"),
        (stat.S_ISLNK, "link"),
        (stat.S_ISFIFO, "pipe"),
        (stat.S_ISSOCK, "socket"),
        (stat.S_ISCHR, "device"),
        (stat.S_ISBLK, "device"),
    )
    return next((name for test, name in kinds if test(mode)), "file")
