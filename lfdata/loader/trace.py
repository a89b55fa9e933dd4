"""What happened when, for Perfetto and chrome://tracing: their JSON array format, an event a line.

The file can be opened at any time, also of a run that was killed: the viewers do not need the closing bracket.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from lfdata.errors import StorageError
from lfdata.loader.jobs import Done, Job
from lfdata.loader.spans import STAGES
from lfdata.loader.statistics import QUEUES

_CONSUMER = 0


class Trace:
    """Writes events of this process's loader to a file, which is made anew.

    Raises:
        StorageError: the file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], rank: int = 0, world: int = 1) -> None:
        given = Path(path)
        self._path = given if world == 1 else given.with_name(f"{given.stem}-{rank}{given.suffix}")
        self._owner = os.getpid()
        self._known = {(self._owner, _CONSUMER)}
        try:
            # A line at a time, so that a run that is killed leaves its trace.
            self._file = open(self._path, "w", buffering=1, encoding="utf-8")  # noqa: SIM115 - closed by close()
            self._file.write("[\n")
        except OSError as error:
            raise StorageError(self._path, "open", error.errno, error.strerror or str(error)) from error
        self._name("process_name", os.getpid(), _CONSUMER, "trainer")
        self._name("thread_name", os.getpid(), _CONSUMER, "consumer")

    def _write(self, event: dict[str, Any]) -> None:
        if self._file.closed:
            return
        try:
            self._file.write(json.dumps(event) + ",\n")
        except OSError as error:
            raise StorageError(self._path, "write", error.errno, error.strerror or str(error)) from error

    def _name(self, what: str, process: int, thread: int, name: str) -> None:
        self._write({"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}})

    def worked(self, job: Job, done: Done) -> None:
        """The stages of a job, in the threads that did them."""
        about = {"epoch": job.epoch, "step": job.first, "steps": done.steps}
        for stage, begin, seconds, lane in done.spans:
            self._know(done.process, lane)
            self._span(STAGES[stage], begin, seconds, done.process, 1 + lane, about)

    def _know(self, process: int, lane: int) -> None:
        """A lane's name, before its first span."""
        thread = 1 + lane
        if (process, thread) not in self._known:
            self._known.add((process, thread))
            if process != os.getpid():
                self._name("process_name", process, thread, "decoder")
            self._name("thread_name", process, thread, f"lane {lane}")

    def waited(self, begin: float, seconds: float, epoch: int, step: int, ready: int, queued: tuple[int, int]) -> None:
        """The consumer waited for a slot; ``ready`` others were filled, and so much work waited in each queue."""
        self._span("wait", begin, seconds, os.getpid(), _CONSUMER, {"epoch": epoch, "step": step})
        depths = dict(zip(QUEUES, queued, strict=True))
        self._write({"name": "ready", "ph": "C", "ts": begin * 1e6, "pid": os.getpid(), "args": {"slots": ready}})
        self._write({"name": "queued", "ph": "C", "ts": begin * 1e6, "pid": os.getpid(), "args": depths})

    def _span(self, name: str, begin: float, seconds: float, process: int, thread: int, about: dict[str, Any]) -> None:
        span = {"name": name, "ph": "X", "ts": begin * 1e6, "dur": seconds * 1e6, "pid": process, "tid": thread, "args": about}
        self._write(span)

    def close(self) -> None:
        """End the array, so that it is JSON for everybody. The file is not that of a process forked from this one."""
        if not self._file.closed and os.getpid() == self._owner:
            end = {"name": "end", "ph": "M", "pid": os.getpid(), "tid": _CONSUMER, "args": {}}
            try:
                self._file.write(json.dumps(end) + "\n]\n")
            finally:
                self._file.close()
