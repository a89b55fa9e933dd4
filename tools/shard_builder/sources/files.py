"""Safe reading of files below a root: regular files only, nothing outside the root, bounded, never blocking."""

from __future__ import annotations

import functools
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
        shown = show(path)
        raise SampleError(
            "outside-root", f"{shown!r} is not a path below the root; the option root=DIR sets the root", path=shown
        )


def resolve_inside(root: Path, path: str) -> Path:
    """The real path of a file, which must lie below ``root`` after following links. Raises :class:`SampleError`."""
    check_relative(path)
    base = _real_root(str(root))
    real = base.rstrip("/")
    try:
        for part in path.split("/"):
            if part not in ("", "."):
                real += "/" + part
                if stat.S_ISLNK(os.lstat(real).st_mode):
                    break
        else:
            return Path(
                real
            )  # no link on the way, so it is where it seems to be; resolving it all would take ten times as long
        real = os.path.realpath(os.path.join(base, path), strict=True)
    except OSError as error:
        raise _unreadable(error, path) from error
    if not _is_below(real, base):
        raise SampleError("outside-root", "a link that leads outside the root", path=show(path))
    return Path(real)


@functools.lru_cache(maxsize=16)
def _real_root(root: str) -> str:
    return os.path.realpath(root)


def _is_below(real: str, base: str) -> bool:
    return real.startswith(base.rstrip("/") + "/") or real == base


def size_inside(root: Path, path: str) -> int:
    """Length in bytes of a regular file below ``root``. Raises :class:`SampleError` as :func:`read_file`."""
    return _regular(resolve_inside(root, path), path).st_size


def _regular(real: Path, path: str) -> os.stat_result:
    try:
        found = os.stat(real, follow_symlinks=False)
    except OSError as error:
        raise _unreadable(error, path) from error
    if not stat.S_ISREG(found.st_mode):
        raise SampleError("not-a-file", f"not a regular file but a {kind_of(found.st_mode)}", path=show(path))
    return found


def _unreadable(error: OSError, path: str) -> SampleError:
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return SampleError("missing-file", f"no such file: {show(path)!r}", path=show(path))
    # ELOOP, ENAMETOOLONG, EACCES, EIO: the path cannot be walked, or the file not be read.
    return SampleError("unreadable", error.strerror or str(error), path=show(path))


def read_file(root: Path, path: str, limit: int = MAX_FILE_BYTES) -> bytes:
    """Contents of a regular file below ``root``.

    Raises:
        SampleError: ``outside-root``, ``missing-file``, ``not-a-file``, ``unreadable``, ``too-large`` (more than
            ``limit`` bytes), ``changed`` while it was read, ``lfs-pointer``.
    """
    real = resolve_inside(root, path)
    _regular(real, path)  # before it is opened: opening a device can already do something
    try:
        # Should it have become a FIFO since, opening would hang without O_NONBLOCK.
        descriptor = os.open(real, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY)
    except OSError as error:
        raise _unreadable(error, path) from error
    try:
        _check_opened(descriptor, root, path)
        data = _read(descriptor, path, limit)
    except OSError as error:
        raise _unreadable(error, path) from error
    finally:
        os.close(descriptor)
    refuse_pointer(data, path)
    return data


def _check_opened(descriptor: int, root: Path, path: str) -> None:
    """Where the descriptor really is: a directory on the way may have become a link after the path was resolved."""
    try:
        real = os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return  # no /proc: the check of the resolved path stands alone
    if not _is_below(real, _real_root(str(root))):
        raise SampleError("outside-root", "the file was replaced by a link that leads outside the root", path=show(path))


def _read(descriptor: int, path: str, limit: int) -> bytes:
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise SampleError("not-a-file", f"not a regular file but a {kind_of(found.st_mode)}", path=show(path))
    if found.st_size > limit:
        raise SampleError("too-large", f"a file of {found.st_size} bytes; the limit is {limit}", path=show(path))
    parts = []
    left = found.st_size
    while left:
        part = os.read(descriptor, min(left, 1 << 26))
        if not part:
            reason = f"the file became shorter while it was read ({left} bytes are missing)"
            raise SampleError("changed", reason, path=show(path))
        parts.append(part)
        left -= len(part)
    if os.read(descriptor, 1):
        raise SampleError("changed", "the file became longer while it was read", path=show(path))
    return parts[0] if len(parts) == 1 else b"".join(parts)


def refuse_pointer(data: bytes, path: str) -> None:
    """Raise :class:`SampleError` if ``data`` is a Git LFS pointer instead of the file it stands for."""
    if len(data) < _LFS_MAX and data.startswith(LFS_HEAD):
        raise SampleError("lfs-pointer", "this is a Git LFS pointer, not the file itself: run git lfs pull", path=show(path))


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
