"""The tars of a source: from a path, brace patterns, a list joined by ``::``, or a directory."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Iterator
from typing import Any

from lfdata.errors import SourceError
from shard_builder.sources.files import show
from shard_builder.sources.grouping import expand
from shard_builder.sources.tarstream import GZIP_MAGIC, GzipStream, PlainStream

SUFFIXES = (b".tar", b".tar.gz", b".tgz")

_OPEN = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class Tars:
    """Tars by ordinal (the *unit*).

    Raises:
        SourceError: a tar is missing, is no regular file or cannot be opened; a pattern that cannot be expanded; a directory
            without tars.
    """

    def __init__(self, location: str) -> None:
        self._paths: list[bytes] = []
        for pattern in location.split("::"):
            self._paths += self._expanded(pattern)
        self._compressed: dict[int, bool] = {}
        missing = [path for path in self._paths if not _is_regular(path)]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise SourceError(f"{show(missing[0])}{more}: no such file, or not a regular one (of {len(self._paths)} tars)")
        for unit in (0, len(self._paths) - 1):
            os.close(self.open(unit))

    @staticmethod
    def _expanded(pattern: str) -> list[bytes]:
        if not pattern or "\0" in pattern:
            raise SourceError(f"{pattern!r} is not a path")
        if os.path.isdir(pattern):
            return _in_directory(os.path.abspath(os.fsencode(pattern)), pattern)
        if "{" not in pattern or os.path.exists(pattern):
            return [os.path.abspath(os.fsencode(pattern))]
        try:
            return [os.path.abspath(os.fsencode(name)) for name in expand(pattern)]
        except ValueError as error:
            raise SourceError(
                f"{pattern}: a pattern that cannot be expanded: {error}; write for example train-{{000000..000123}}.tar"
            ) from None

    def __len__(self) -> int:
        return len(self._paths)

    @property
    def absolute(self) -> str:
        """A location that names the same tars from any working directory."""
        return "::".join(map(os.fsdecode, self._paths))

    def name(self, unit: int) -> str:
        """A tar's name without its directory, for people."""
        return show(os.path.basename(self._paths[unit]))

    def describe(self) -> dict[str, Any]:
        """How many tars, the names of the first and last, and a digest of all names; no directories."""
        names = [os.path.basename(path) for path in self._paths]
        digest = hashlib.sha256(b"\0".join(names)).hexdigest()
        return {"count": len(names), "first": show(names[0]), "last": show(names[-1]), "names_sha256": digest}

    def open(self, unit: int) -> int:
        """A descriptor. Raises :class:`SourceError`."""
        path = self._paths[unit]
        try:
            descriptor = os.open(path, _OPEN)
        except OSError as error:
            raise SourceError(f"{show(path)}: cannot be opened: {error.strerror}") from error
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise SourceError(f"{show(path)}: not a regular file")
        return descriptor

    def compressed(self, unit: int) -> bool:
        """Whether a tar is gzip; told from its first bytes, not its name."""
        if unit not in self._compressed:
            descriptor = self.open(unit)
            try:
                self._compressed[unit] = os.pread(descriptor, 2, 0) == GZIP_MAGIC
            finally:
                os.close(descriptor)
        return self._compressed[unit]

    @contextlib.contextmanager
    def stream(self, unit: int, limit: int) -> Iterator[PlainStream | GzipStream]:
        """A tar's uncompressed bytes, at most ``limit`` of them where it is compressed."""
        compressed = self.compressed(unit)
        descriptor = self.open(unit)
        stream = None
        try:
            stream = GzipStream(descriptor, limit) if compressed else PlainStream(descriptor)
            yield stream
        finally:
            if isinstance(stream, GzipStream):
                stream.close()
            os.close(descriptor)


def _is_regular(path: bytes) -> bool:
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return False


def _in_directory(directory: bytes, shown: str) -> list[bytes]:
    try:
        with os.scandir(directory) as entries:
            names = sorted(e.name for e in entries if e.name.lower().endswith(SUFFIXES) and not e.name.startswith(b"."))
    except OSError as error:
        raise SourceError(f"{shown}: cannot be listed: {error.strerror}") from error
    if not names:
        raise SourceError(f"{shown}: holds no .tar, .tar.gz or .tgz file")
    return [os.path.join(directory, name) for name in names]
