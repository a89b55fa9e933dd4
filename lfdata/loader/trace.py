"""What happened when, for Perfetto and chrome://tracing: their JSON array format, an event a line.

The file is whole JSON at any time, also of a run that was killed: each write begins over the closing bracket of the one before, and
ends with one of its own. Within a page the kernel does a write whole or not at all; from one page to the next a kill may cut it, which
no order of writes could avoid.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import stat
from pathlib import Path
from typing import Any

from lfdata.errors import OptionError, StorageError
from lfdata.format.forking import watch
from lfdata.loader.jobs import Done, Job
from lfdata.loader.spans import STAGES
from lfdata.loader.statistics import QUEUES

_CONSUMER = 0
_END = b"\n]\n"
_Event = dict[str, Any]
log = logging.getLogger("lfdata")


def beside(path: str | os.PathLike[str], mark: object) -> Path:
    """The file of one of several that were given the same: ``trace-MARK.json``."""
    given = Path(path)
    return given.with_name(f"{given.stem}-{mark}{given.suffix}")


class Trace:
    """Writes events of this process's loader to a file, which is made anew and is nobody else's until it is closed, or until it cannot be
    written any more (a full disk), which is told once.

    Raises:
        OptionError: another loader writes it, here or in another process; it is no regular file.
        StorageError: the file cannot be begun.
    """

    def __init__(self, path: str | os.PathLike[str], rank: int = 0, world: int = 1) -> None:
        self._path = Path(path) if world == 1 else beside(path, rank)
        self._known = {(os.getpid(), _CONSUMER)}
        try:
            self._file = open(self._path, "wb", buffering=0, opener=_opened)  # noqa: SIM115 - closed by close()
        except OSError as error:
            raise StorageError(self._path, "open", error.errno, error.strerror or str(error)) from error
        # Where the next events go, and what comes before them.
        self._at, self._before = 1, b"\n"
        try:
            self._lock()
            self._file.truncate(0)
            self._file.write(b"[" + _END)
            here = os.getpid(), _CONSUMER
            self._append(_named("process_name", *here, "trainer"), _named("thread_name", *here, "consumer"))
        except OSError as error:
            self._file.close()
            raise StorageError(self._path, "write", error.errno, error.strerror or str(error)) from error
        except BaseException:
            self._file.close()
            raise
        watch(self)

    def _lock(self) -> None:
        """The kernel ends the lock with this process, however that ends."""
        if not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
            raise OptionError(f"trace is {os.fspath(self._path)!r}, which is no regular file")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OptionError(
                f"trace is {os.fspath(self._path)!r}, which another loader is writing: close() that one first, or give each a file"
            ) from error
        except OSError as error:
            # There are file systems without locks.
            log.debug("%s: no lock: %s", self._path, error)

    def after_fork(self) -> None:
        """The file, and its lock, are not a child's."""
        self._file.close()

    def _write(self, *events: _Event) -> None:
        try:
            self._append(*events)
        except OSError as error:
            self._lost("write", error)
            self.close()

    def _lost(self, what: str, error: OSError) -> None:
        path = os.fspath(self._path)
        log.warning("%s: %s failed: %s: the trace ends here, training goes on without it", path, what, error.strerror or error)

    def _append(self, *events: _Event) -> None:
        text = self._before + ",\n".join(map(json.dumps, events)).encode()
        try:
            self._put(text + _END)
            self._at, self._before = self._at + len(text), b",\n"
        except BaseException:
            # A full disk, or Ctrl-C in between: what was there before is whole again.
            with contextlib.suppress(OSError, ValueError):
                self._put(_END)
                self._file.truncate()
            raise

    def _put(self, data: bytes) -> None:
        """Over the end of what is there; nothing happens once the file is closed, which another thread may do meanwhile."""
        with contextlib.suppress(ValueError):
            self._file.seek(self._at)
            while data:
                data = data[self._file.write(data) :]

    def worked(self, job: Job, done: Done) -> None:
        """The stages of a job, in the threads that did them."""
        about = {"epoch": job.epoch, "step": job.first, "steps": done.steps}
        events = []
        for stage, begin, seconds, lane in done.spans:
            events += self._unknown(done.process, lane)
            events.append(_span(STAGES[stage], begin, seconds, done.process, 1 + lane, about))
        if events:
            self._write(*events)

    def _unknown(self, process: int, lane: int) -> list[_Event]:
        """A lane's name, before its first span."""
        thread = 1 + lane
        if (process, thread) in self._known:
            return []
        self._known.add((process, thread))
        names = [] if process == os.getpid() else [_named("process_name", process, thread, "decoder")]
        return [*names, _named("thread_name", process, thread, f"lane {lane}")]

    def waited(self, begin: float, seconds: float, epoch: int, step: int, ready: int, queued: tuple[int, int]) -> None:
        """The consumer waited for a slot; ``ready`` others were filled, and so much work waited in each queue."""
        process, depths = os.getpid(), dict(zip(QUEUES, queued, strict=True))
        self._write(
            _span("wait", begin, seconds, process, _CONSUMER, {"epoch": epoch, "step": step}),
            {"name": "ready", "ph": "C", "ts": begin * 1e6, "pid": process, "args": {"slots": ready}},
            {"name": "queued", "ph": "C", "ts": begin * 1e6, "pid": process, "args": depths},
        )

    def close(self) -> None:
        """Let go of the file."""
        # By itself, since a process that is being started may still have a copy of the descriptor.
        with contextlib.suppress(OSError, ValueError):
            fcntl.flock(self._file, fcntl.LOCK_UN)
        try:
            self._file.close()
        except OSError as error:
            self._lost("close", error)


def _opened(path: str, flags: int) -> int:
    """Not cut before it is locked; no wait for who reads a pipe."""
    return os.open(path, flags & ~os.O_TRUNC | os.O_NONBLOCK, 0o666)


def _named(what: str, process: int, thread: int, name: str) -> _Event:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def _span(name: str, begin: float, seconds: float, process: int, thread: int, about: _Event) -> _Event:
    return {"name": name, "ph": "X", "ts": begin * 1e6, "dur": seconds * 1e6, "pid": process, "tid": thread, "args": about}
