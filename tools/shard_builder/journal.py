"""The journal of a conversion: what is committed, so that a killed run can go on (docs/convert.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from lfdata.errors import CorruptError
from lfdata.format.durable import Files, OutputFile
from lfdata.format.layout import xxh3
from shard_builder.options import Task

WORK = ".work"
JOURNAL = "journal"


def work_directory(target: Path, task: Task | None = None) -> Path:
    """Where a conversion, or one task of it, keeps its journal and staged containers."""
    return target / WORK if task is None else target / WORK / f"task-{task.number:05d}-of-{task.count:05d}"


def journal_path(target: Path, task: Task | None = None) -> Path:
    """The journal's file."""
    return work_directory(target, task) / JOURNAL


def task_journals(target: Path) -> list[tuple[Task, Path]]:
    """Tasks that have begun, with their journals, by number."""
    found = []
    for path in sorted(work_directory(target).glob(f"task-*-of-*/{JOURNAL}")):
        number, count = path.parent.name.removeprefix("task-").split("-of-")
        found.append((Task(int(number), int(count)), path))
    return found


class Journal:
    """Append-only text lines, each with its check; a line counts once :meth:`append` has returned."""

    def __init__(self, files: Files, output: OutputFile) -> None:
        self._files = files
        self._output = output

    @classmethod
    def create(cls, files: Files, target: Path, head: dict[str, Any], task: Task | None = None) -> Journal:
        """A new journal with its first line, visible only when that line is durable."""
        path = journal_path(target, task)
        files.make_directory(path.parent)
        files.write_file(path, _line(head))
        return cls(files, files.append(path, path.stat().st_size))

    @classmethod
    def resume(cls, files: Files, target: Path, task: Task | None = None) -> tuple[Journal, list[dict[str, Any]]]:
        """An existing journal and its entries; a torn last line is cut off."""
        path = journal_path(target, task)
        entries, size = read(path)
        torn = path.stat().st_size != size
        output = files.append(path, size)
        if torn:
            # Durable before anything follows: the old tail must never show behind a new line.
            output.sync()
        return cls(files, output), entries

    def append(self, entry: dict[str, Any]) -> None:
        """Add an entry and make it durable."""
        self._output.write(_line(entry))
        self._output.sync()

    def close(self) -> None:
        """Close the file."""
        self._output.close()


def _line(entry: dict[str, Any]) -> bytes:
    text = msgspec.json.encode(entry)
    return b"%016x %s\n" % (xxh3(text), text)


def read(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Entries of a journal and the size up to which it is valid.

    Raises:
        CorruptError: a bad line that is not the last: something else than a torn write damaged the file.
    """
    data = path.read_bytes()
    entries: list[dict[str, Any]] = []
    size = 0
    while size < len(data):
        end = data.find(b"\n", size)
        line = data[size:end]
        text = line[17:]
        if end < 0 or line[:17] != b"%016x " % xxh3(text):
            if end >= 0 and end + 1 < len(data):
                raise CorruptError(path, size, "a damaged line in the journal. Convert again with --overwrite")
            break
        entries.append(msgspec.json.decode(text))
        size = end + 1
    if not entries:
        raise CorruptError(path, 0, "the journal has no valid line. Convert again with --overwrite")
    return entries, size
