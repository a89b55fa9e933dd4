"""The directory a conversion writes to: lock, leftovers, generations, what the journal proves to be committed."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
from collections.abc import Container
from pathlib import Path
from typing import Any, Self

import msgspec

from lfdata.errors import CorruptError, LfdataError, TargetExistsError
from lfdata.format.durable import Files, is_temporary, storage_error
from lfdata.format.files import LocalFile
from lfdata.format.meta import INDEX, MANIFEST, ShardEntry, read_manifest
from lfdata.format.reader import ShardFile
from shard_builder.journal import journal_path, task_journals, work_directory
from shard_builder.options import Task

ERRORS = "errors.jsonl"
RUN_LOG = "run.log.jsonl"
QUARANTINE = "quarantine"
SHARD_SUFFIX = ".lfd"
_SHARD = re.compile(rf"s(\d+)-\d+-[0-9a-f]+{re.escape(SHARD_SUFFIX)}")


class BusyError(TargetExistsError):
    """Another process is writing there."""


class Target:
    """A target directory under this process's lock. Use as a context manager.

    With a ``task``: other tasks may be at work in the directory, and it holds what is theirs. The lock is on the task's own part of it.
    """

    def __init__(self, path: Path, files: Files, task: Task | None = None) -> None:
        self.path = path
        self.files = files
        self.task = task
        self._descriptors: list[int] = []

    def __enter__(self) -> Self:
        self._make_parents(self.path)
        try:
            # A lock on the directory itself: no lock file to go stale, no pid to be recycled, no clock.
            self._lock(self.path, fcntl.LOCK_EX if self.task is None else fcntl.LOCK_SH)
            self._settle()
            if self.task is not None:
                self._same_count(self.task)
                for path in (work_directory(self.path), self.work):
                    self.files.make_directory(path)
                self._lock(self.work, fcntl.LOCK_EX)
        except BaseException:
            self._unlock()
            raise
        return self

    def _lock(self, path: Path, kind: int) -> None:
        try:
            self._descriptors.append(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        except OSError as error:
            raise storage_error(path, "open", error) from error
        try:
            fcntl.flock(self._descriptors[-1], kind | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise BusyError(f"{path}: another process is writing here; wait for it, or choose another target") from error
            raise storage_error(path, "lock", error) from error

    def _unlock(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())

    @property
    def work(self) -> Path:
        """Where the conversion, or the task, keeps its journal and staged containers."""
        return work_directory(self.path, self.task)

    @property
    def journal(self) -> Path:
        """The journal's file."""
        return journal_path(self.path, self.task)

    def _settle(self) -> None:
        """Make the target's own name durable: a run killed before may have created it and no more."""
        if (self.path / MANIFEST).exists():
            return
        parent = Path(os.path.realpath(self.path)).parent
        if os.access(parent, os.R_OK):
            self.files.sync_directory(parent)

    def __exit__(self, *_: object) -> None:
        self._unlock()

    def _make_parents(self, path: Path) -> None:
        if path.is_dir():
            return
        if path.exists() or path.is_symlink():
            raise TargetExistsError(f"{path}: exists and is not a directory")
        if path.parent != path:
            self._make_parents(path.parent)
        self.files.make_directory(path)

    # -- what is there ------------------------------------------------------------------------------------------------

    def refuse_existing(self) -> None:
        """Refuse a target that holds anything."""
        if (self.path / MANIFEST).exists():
            raise TargetExistsError(f"{self.path}: already holds a data set; use --overwrite to replace it")
        if self.task is None and (begun := task_journals(self.path)):
            raise TargetExistsError(
                f"{self.path}: holds a conversion by {begun[0][0].count} tasks that is not finished: run those that are not done, then "
                "`shard-builder finish`; or use --overwrite to start again"
            )
        if journal_path(self.path).exists():
            raise TargetExistsError(
                f"{self.path}: holds an unfinished conversion; use --resume to go on or --overwrite to start again"
            )
        if self.task is not None:
            self._refuse_other_tasks()
            return
        others = sorted(
            entry.name
            for entry in os.scandir(self.path)
            if not is_temporary(entry.name) and entry.name != work_directory(self.path).name
        )
        if others:
            raise TargetExistsError(f"{self.path}: not empty (it holds {others[0]!r}); choose an empty or new directory")

    def _refuse_other_tasks(self) -> None:
        """Refuse a target that holds what no task has made, or tasks of another number."""
        known = {work_directory(self.path).name, QUARANTINE}
        others = sorted(
            entry.name for entry in os.scandir(self.path) if not is_temporary(entry.name) and entry.name not in known
        )
        if any(not name.endswith(SHARD_SUFFIX) for name in others) or (others and not task_journals(self.path)):
            raise TargetExistsError(f"{self.path}: not empty (it holds {others[0]!r}); choose an empty or new directory")

    def _same_count(self, mine: Task) -> None:
        for task, _ in task_journals(self.path):
            if task.count != mine.count:
                raise TargetExistsError(f"{self.path}: was begun by {task.count} tasks, not {mine.count}")

    def clean(self, *, journal: bool) -> None:
        """Remove leftovers of a killed run: unfinished files, staged containers, and the journal if asked."""
        self.remove_unfinished()
        work = self.work
        if not work.is_dir():
            return
        for entry in list(os.scandir(work)):
            path = Path(entry.path)
            if path == self.journal:
                if journal:
                    self.files.unlink(path)
            elif entry.is_dir(follow_symlinks=False):
                self._remove_tree(path)
            else:
                self.files.unlink(path)
        if journal:
            self.files.remove_directory(work)

    def remove_unfinished(self) -> None:
        """Remove files that were not renamed to their names."""
        for entry in list(os.scandir(self.path)):
            if is_temporary(entry.name) and (self.task is None or self._own(entry.name)):
                self.files.unlink(Path(entry.path))

    def _own(self, name: str) -> bool:
        """Whether an unfinished shard is of this task."""
        found = _SHARD.search(name)
        return found is not None and self.task is not None and self.task.makes(int(found.group(1)))

    def _remove_tree(self, top: Path) -> None:
        for folder, folders, names in os.walk(top, topdown=False):
            for name in names:
                self.files.unlink(Path(folder, name))
            for name in folders:
                inner = Path(folder, name)
                (self.files.unlink if inner.is_symlink() else self.files.remove_directory)(inner)
        self.files.remove_directory(top)

    def shard_files(self) -> list[str]:
        """Names of the shard files that are there, of whatever generation."""
        found = (entry.name for entry in os.scandir(self.path) if not is_temporary(entry.name))
        return sorted(name for name in found if name.endswith(SHARD_SUFFIX))

    def committed(self, entry: dict[str, Any], replaced: Container[str] = ()) -> ShardEntry | None:
        """The shard of a journal line, if it is there as the line says; ``None`` if its commit did not happen.

        ``replaced``: names that an older generation had when the conversion began. A file of that name may still be the old one, so that
        only its digest tells.
        """
        shard: ShardEntry = msgspec.convert(entry["shard"], ShardEntry)
        path = self.path / shard.file
        if shard.file in replaced:
            return shard if _digest(path) == shard.sha256 else None
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            return None
        except OSError as error:
            raise storage_error(path, "stat", error) from error
        if size != shard.bytes:
            raise CorruptError(path, None, f"a committed shard of {size} bytes; the journal says {shard.bytes}")
        ShardFile(LocalFile(path), expect=(bytes.fromhex(shard.id), bytes(16), shard.rows))
        return shard

    def remove_old(self, keep: set[str]) -> None:
        """Remove shards of an older generation, now that the manifest does not name them."""
        old = [name for name in self.shard_files() if name not in keep]
        for name in old:
            self.files.unlink(self.path / name)
        if old:
            # Before the journal goes: it alone knows that these files belong to nothing.
            self.files.sync_directory(self.path)

    def manifest_id(self) -> str | None:
        """Conversion id of the data set that is there, or ``None``."""
        try:
            found = read_manifest(self.path).provenance.get("conversion")
        except LfdataError:
            return None
        return found if isinstance(found, str) else None


def _digest(path: Path) -> str | None:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise storage_error(path, "read", error) from error


__all__ = ["ERRORS", "INDEX", "QUARANTINE", "RUN_LOG", "SHARD_SUFFIX", "Target"]
