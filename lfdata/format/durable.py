"""The one layer for everything this package writes durably.

Every system call that changes the disk goes through :meth:`Files.call`, so tests can make operation N fail, log the calls and
replay their reorderings. Rules kept here and nowhere else:

- a file appears under its final name only after its bytes are on the disk: write, fsync, rename, fsync of the directory;
- a failed fsync is never retried: the kernel may have dropped the pages and marked them clean. The file is abandoned;
- short writes are continued, EINTR is retried on writes only;
- a rename that reports ENOENT or ESTALE but happened (NFS retransmission) counts as done: the commit is idempotent.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from lfdata.errors import DiskFullError, StorageError

T = TypeVar("T")
Buffer = bytes | bytearray | memoryview

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Errors after which a rename may have happened all the same (network file systems resend a lost reply).
_RENAME_UNSURE = (errno.ENOENT, errno.ESTALE, errno.EIO, errno.ETIMEDOUT)
_MAX_INTERRUPTIONS = 1000  # in one write: a system that answers nothing else is broken, and waiting for ever is no answer
_VISIBILITY_WAITS = (0.01, 0.05, 0.2, 0.5, 1.0)


def storage_error(path: object, operation: str, error: OSError) -> StorageError:
    """The typed error for an ``OSError``."""
    reason = error.strerror or str(error)
    if error.errno in _FULL:
        return DiskFullError(
            path,
            operation,
            error.errno,
            f"{reason}. Free space (or raise the quota or file-size limit), then run the command again (convert: with --resume)",
        )
    return StorageError(path, operation, error.errno, reason)


class OutputFile:
    """A file being written from its start to its end. ``position`` is the number of bytes written."""

    def __init__(self, files: Files, path: Path, descriptor: int, position: int = 0) -> None:
        self.files = files
        self.path = path
        self.position = position
        self._descriptor = descriptor

    def write(self, data: Buffer) -> None:
        """Append all of ``data``. Raises :class:`StorageError`; the file is then of no use."""
        view = memoryview(data).cast("B")
        interruptions = 0
        while len(view):
            try:
                written = self.files.call(
                    "write", self.path, partial(os.write, self._descriptor, view), offset=self.position, data=view
                )
            except InterruptedError as error:
                interruptions += 1
                if interruptions > _MAX_INTERRUPTIONS:
                    raise storage_error(self.path, "write", error) from error
                continue
            except OSError as error:
                raise storage_error(self.path, "write", error) from error
            if written <= 0:
                raise StorageError(self.path, "write", errno.EIO, "the system wrote nothing")
            self.position += written
            view = view[written:]

    def sync(self) -> None:
        """Force the bytes to the disk. Never called again after it failed."""
        try:
            self.files.call("fsync", self.path, lambda: os.fsync(self._descriptor))
        except OSError as error:
            raise storage_error(self.path, "fsync", error) from error

    def pread(self, length: int, offset: int) -> bytes:
        """Read back bytes written before (for byte comparison and spooled data)."""
        parts = []
        while length:
            try:
                part = os.pread(self._descriptor, length, offset)
            except OSError as error:
                raise storage_error(self.path, "read", error) from error
            if not part:
                raise StorageError(
                    self.path, "read", errno.EIO, f"the file is shorter than what was written: nothing at byte {offset}"
                )
            parts.append(part)
            offset += len(part)
            length -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def stat(self) -> os.stat_result:
        """``fstat`` of the open file."""
        return os.fstat(self._descriptor)

    def close(self) -> None:
        """Close the descriptor; safe to call twice."""
        if self._descriptor < 0:
            return
        descriptor, self._descriptor = self._descriptor, -1
        try:
            self.files.call("close", self.path, lambda: os.close(descriptor))
        except OSError as error:
            raise storage_error(self.path, "close", error) from error


class Files:
    """The real file system. Tests subclass it and override :meth:`call`."""

    def call(self, operation: str, path: Path, function: Callable[[], T], **detail: object) -> T:
        """Run one operation. ``detail`` (offset, data, target) is for subclasses that log or fail."""
        del operation, path, detail
        return function()

    def _do(self, operation: str, path: Path, function: Callable[[], T], **detail: object) -> T:
        try:
            return self.call(operation, path, function, **detail)
        except OSError as error:
            raise storage_error(path, operation, error) from error

    def create(self, path: Path) -> OutputFile:
        """A new file; an existing one is an error."""
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC
        return OutputFile(self, path, self._do("create", path, lambda: os.open(path, flags, 0o666)))

    def append(self, path: Path, size: int) -> OutputFile:
        """An existing file, cut to ``size`` bytes, to be written on from there."""
        descriptor = self._do("open", path, lambda: os.open(path, os.O_RDWR | os.O_CLOEXEC))
        try:
            self._do("truncate", path, lambda: os.ftruncate(descriptor, size), size=size)
            os.lseek(descriptor, size, os.SEEK_SET)
        except BaseException:
            os.close(descriptor)
            raise
        return OutputFile(self, path, descriptor, size)

    def scratch(self, directory: Path, name: str) -> OutputFile:
        """A file without a name: gone when closed or when the process dies."""
        path = directory / name
        output = self.create(path)
        try:
            self.unlink(path)
        except BaseException:
            output.close()
            raise
        return output

    def make_directory(self, path: Path) -> None:
        """Create a directory if it is not there, and make its name durable."""
        if path.is_dir():
            return
        self._do("mkdir", path, lambda: path.mkdir(exist_ok=True))
        self.sync_directory(path.parent)

    def sync_directory(self, path: Path) -> None:
        """Make names in the directory durable."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise storage_error(path, "open", error) from error
        try:
            self._do("syncdir", path, lambda: os.fsync(descriptor))
        finally:
            os.close(descriptor)

    def link(self, source: Path, final: Path) -> None:
        """Give a complete, durable file of the same file system a second name; the name is durable afterwards."""
        self._do("link", source, lambda: os.link(source, final), target=final)
        self.sync_directory(final.parent)

    def unlink(self, path: Path) -> None:
        """Remove a name; one that is not there is no error."""
        self._do("unlink", path, lambda: path.unlink(missing_ok=True))

    def remove_directory(self, path: Path) -> None:
        """Remove an empty directory."""
        self._do("rmdir", path, path.rmdir)

    def commit(self, output: OutputFile, final: Path) -> None:
        """Make ``output`` durable under the name ``final`` (same directory), replacing what is there, and close it."""
        output.sync()
        identity = output.stat()
        try:
            self.call("rename", output.path, lambda: os.rename(output.path, final), target=final)
        except OSError as error:
            if error.errno not in _RENAME_UNSURE or not _became(final, identity):
                raise storage_error(output.path, "rename", error) from error
        else:
            if not _became(final, identity):
                raise StorageError(final, "rename", errno.ENOENT, "the file did not appear under its name")
        output.close()
        self.sync_directory(final.parent)

    def write_file(self, path: Path, data: Buffer) -> None:
        """Write a whole small file atomically and durably."""
        temporary = path.with_name(temporary_name(path.name))
        self.unlink(temporary)
        output = self.create(temporary)
        try:
            output.write(data)
            self.commit(output, path)
        except BaseException:
            self.discard(output)
            raise

    def discard(self, output: OutputFile) -> None:
        """Drop an unfinished file as well as can be; what remains is a temporary name that the next run removes."""
        for step in (output.close, lambda: self.unlink(output.path)):
            try:
                step()
            except StorageError:
                continue


def temporary_name(name: str) -> str:
    """Name of a file that is not yet (or never will be) visible under ``name``."""
    return f".tmp-{name}"


def is_temporary(name: str) -> bool:
    """Whether a directory entry is a leftover of an unfinished write."""
    return name.startswith(".tmp-")


def _became(final: Path, identity: os.stat_result) -> bool:
    """Whether ``final`` is the file that was written; waits for late visibility on network file systems."""
    for wait in (0.0, *_VISIBILITY_WAITS):
        time.sleep(wait)
        try:
            found = os.stat(final, follow_symlinks=False)
        except FileNotFoundError:
            continue
        except OSError as error:
            if error.errno == errno.ESTALE:
                continue
            raise storage_error(final, "stat", error) from error
        if (found.st_ino, found.st_dev, found.st_size) == (identity.st_ino, identity.st_dev, identity.st_size):
            return True
    return False
