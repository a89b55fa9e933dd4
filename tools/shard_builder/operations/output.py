"""The directory an operation writes: refused, begun, gone on with, or finished already.

A file is there under its name only when it is complete, and what every file holds follows from the operation's identity. So a killed
operation is gone on with by running it again: names that are there are kept, and the file that says the whole is finished is written last.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import msgspec

from lfdata.errors import LfdataError, TargetExistsError
from lfdata.format.durable import Files, is_temporary
from lfdata.format.files import read_small
from shard_builder.journal import work_directory
from shard_builder.target import Target

MARKER = "operation"


def identity_of(description: Mapping[str, Any]) -> str:
    """Id of an operation: a digest of everything that determines its bytes, in hexadecimal."""
    return hashlib.sha256(msgspec.json.encode(description, order="sorted")).hexdigest()


class Output:
    """A target directory under this process's lock. Use as a context manager.

    Args:
        path: the directory, made if it is missing.
        identity: the operation's id (:func:`identity_of`).
        final: name of the file whose presence means that the operation is finished.
        finished_id: reads the id that the final file holds; ``None`` if it holds none.

    Attributes:
        finished: whether this very operation was finished here before: nothing is left to do.

    Raises:
        TargetExistsError: the directory holds anything else, or another process writes to it.
    """

    def __init__(self, path: Path, identity: str, final: str, finished_id: Any, files: Files) -> None:
        self.path = path
        self.files = files
        self.finished = False
        self._identity, self._final, self._finished_id = identity, final, finished_id
        self._target = Target(path, files)
        self._marker = work_directory(path) / MARKER

    def __enter__(self) -> Self:
        self._target.__enter__()
        try:
            self._begin()
        except BaseException:
            self._target.__exit__()
            raise
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        try:
            if kind is not None and not self.finished:
                with contextlib.suppress(LfdataError, OSError):  # what failed is what has to be told
                    self._leave()
        finally:
            self._target.__exit__()

    def _leave(self) -> None:
        """After a failure: what is complete stays, to go on with; where nothing is, the directory is as it was."""
        self._target.remove_unfinished()
        if self._nothing_yet():
            self._target.clean(journal=True)

    def _nothing_yet(self) -> bool:
        work = work_directory(self.path).name
        return all(is_temporary(entry.name) or entry.name == work for entry in os.scandir(self.path))

    def _begin(self) -> None:
        if (self.path / self._final).exists():
            if self._finished_id(self.path) != self._identity:
                raise TargetExistsError(f"{self.path}: already holds something else ({self._final}); choose another directory")
            self.finished = True
            self._target.remove_unfinished()
            if work_directory(self.path).is_dir():
                self._target.clean(journal=True)
            return
        if self._marker.exists() and not self._nothing_yet():
            if self._marker_id() != self._identity:
                raise TargetExistsError(
                    f"{self.path}: holds an unfinished operation with other inputs or options. Repeat that one exactly to go on, "
                    "or remove the directory"
                )
            self._target.remove_unfinished()
            return
        self._target.refuse_existing()
        self._target.clean(journal=True)
        self.files.make_directory(work_directory(self.path))
        self.files.write_file(self._marker, self._identity.encode())

    def _marker_id(self) -> str:
        try:
            return read_small(self._marker).decode("ascii", "replace")
        except OSError:
            return ""

    def has(self, name: str) -> bool:
        """Whether a file is there already, complete."""
        return os.path.lexists(self.path / name)

    def finish(self, data: bytes) -> None:
        """Write the final file, then drop what was only needed to go on."""
        self.files.sync_directory(self.path)
        self.files.write_file(self.path / self._final, data)
        self.finished = True
        self._target.clean(journal=True)
