"""Runs tasks over shards in worker processes that may die or hang, and names the value that did it.

A worker notes in a shared page which row and field it is about to decode. When it dies, or the page stands still for too
long, the value is known at once: it is
reported, and the rest of the task runs again without it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Self

from lfdata.errors import LfdataError
from shard_builder import wire

Task = dict[str, Any]
"""``op`` and its arguments. A task over rows has ``start`` and ``stop``; ``skip`` lists field ordinals of a single row."""

NOTE = struct.Struct("<QQQ")  # a counter that moves, row + 1 (0: none), field ordinal
START_SECONDS = 120.0
# Every death costs a new process: a data set that kills more decoders than this is hopeless, and is left sooner.
MAX_DEATHS = 1000
_LOOK_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Failure:
    """A task, or one value of it, that killed its worker. ``row`` and ``field`` (ordinal) are -1 where unknown."""

    task: Task
    code: str
    reason: str
    row: int = -1
    field: int = -1


@dataclass(slots=True, eq=False)
class _Job:
    task: Task
    pending: int = 1
    answers: list[tuple[int, Any]] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Process:
    process: subprocess.Popen[bytes]
    connection: socket.socket
    note: mmap.mmap
    job: _Job | None = None
    task: Task = field(default_factory=dict)
    counter: int = 0
    deadline: float = 0.0


class Pool:
    """``count`` worker processes set up with ``setup``. Use as a context manager: leaving it ends every worker.

    Args:
        timeout: seconds one value (or one step of any other task) may take.
    """

    def __init__(self, count: int, setup: dict[str, Any], timeout: float, module: str = "shard_builder.examine.worker") -> None:
        self._count = count
        self._setup = setup
        self._timeout = timeout
        self._module = module
        self._workers: list[_Process] = []
        self._deaths = 0
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in list(self._workers):
            self._stop(worker)
        self._selector.close()

    def run(self, tasks: Iterator[Task]) -> Iterator[tuple[Task, list[Any], list[Failure]]]:
        """Every task with its answers (more than one if it was split, in row order) and failures, in the order of ``tasks``."""
        jobs: deque[_Job] = deque()
        todo: deque[tuple[_Job, Task]] = deque()
        exhausted = False
        while True:
            while not exhausted and len(jobs) < 4 * self._count:
                task = next(tasks, None)
                if task is None:
                    exhausted = True
                    break
                job = _Job(task)
                jobs.append(job)
                todo.append((job, task))
            self._dispatch(todo)
            while jobs and not jobs[0].pending:
                job = jobs.popleft()
                yield job.task, [answer for _, answer in sorted(job.answers, key=lambda pair: pair[0])], job.failures
            if jobs and jobs[0].pending and (exhausted or len(jobs) >= 4 * self._count):
                self._collect(todo)
            elif exhausted and not jobs:
                return

    # -- workers ------------------------------------------------------------------------------------------------------

    def _start(self) -> _Process:
        ours, theirs = socket.socketpair()
        with theirs, tempfile.TemporaryFile() as page:
            page.truncate(mmap.PAGESIZE)
            note = mmap.mmap(page.fileno(), mmap.PAGESIZE)
            command = [sys.executable, "-m", self._module, str(theirs.fileno()), str(page.fileno())]
            # One thread a worker: parallelism is between processes.
            environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
            # The same modules as here, wherever they were found.
            environment["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
            process = subprocess.Popen(
                command, pass_fds=[theirs.fileno(), page.fileno()], env=environment, stdin=subprocess.DEVNULL
            )
        worker = _Process(process, ours, note)
        self._workers.append(worker)
        ours.settimeout(START_SECONDS)
        try:
            wire.send(ours, self._setup)
            answer, _ = wire.receive(ours)
        except (OSError, TimeoutError) as error:
            raise LfdataError(f"a worker process did not start (exit status {process.poll()})") from error
        if "fatal" in answer:
            raise LfdataError(answer["fatal"])
        self._selector.register(ours, selectors.EVENT_READ, worker)
        return worker

    def _stop(self, worker: _Process) -> None:
        if worker.connection in self._selector.get_map():
            self._selector.unregister(worker.connection)
        worker.connection.close()
        if worker.process.poll() is None:
            worker.process.kill()
        worker.process.wait()
        worker.note.close()
        self._workers.remove(worker)

    def _dispatch(self, todo: deque[tuple[_Job, Task]]) -> None:
        while todo:
            worker = next((w for w in self._workers if w.job is None), None)
            if worker is None:
                if len(self._workers) >= self._count:
                    return
                worker = self._start()
            worker.job, worker.task = todo.popleft()
            NOTE.pack_into(worker.note, 0, 0, 0, 0)
            worker.counter, worker.deadline = 0, time.monotonic() + self._allowed(worker.task)
            with contextlib.suppress(OSError):  # found dead by _collect
                wire.send(worker.connection, worker.task)

    def _allowed(self, task: Task) -> float:
        return max(self._timeout, float(task.get("seconds", 0.0)))

    # -- answers ------------------------------------------------------------------------------------------------------

    def _collect(self, todo: deque[tuple[_Job, Task]]) -> None:
        for key, _ in self._selector.select(min(_LOOK_SECONDS, self._timeout / 4)):
            worker: _Process = key.data
            try:
                answer, _ = wire.receive(worker.connection)
            except (OSError, ValueError):
                self._failed(worker, todo, "crash")
                continue
            job, worker.job = worker.job, None
            assert job is not None
            job.answers.append((int(worker.task.get("start", 0)), answer))
            job.pending -= 1
        now = time.monotonic()
        for worker in [w for w in self._workers if w.job is not None]:
            counter = NOTE.unpack_from(worker.note)[0]
            if counter != worker.counter:
                worker.counter, worker.deadline = counter, now + self._allowed(worker.task)
            elif worker.deadline <= now:
                self._failed(worker, todo, "timeout")

    def _failed(self, worker: _Process, todo: deque[tuple[_Job, Task]], code: str) -> None:
        job, task = worker.job, worker.task
        _, row, ordinal = NOTE.unpack_from(worker.note)
        if code == "crash":
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(5)
        status = worker.process.poll()
        self._stop(worker)
        if job is None:
            return
        reason = f"no end after {self._timeout:g} s" if code == "timeout" else f"the process died ({_status(status)})"
        job.pending -= 1
        if not row or "start" not in task:
            job.failures.append(Failure(task, code, reason))
            return
        row -= 1
        self._deaths += 1
        job.failures.append(Failure(task, code, reason, row, ordinal))
        if self._deaths > MAX_DEATHS:
            left = f"not looked at, after {MAX_DEATHS} processes died"
            job.failures.append(Failure(task | {"start": row}, "unchecked", left))
            return
        rest = [task | {"start": row, "stop": row + 1, "skip": [*task.get("skip", ()), ordinal]}]
        if task["start"] < row:
            rest.append(task | {"stop": row})
        if row + 1 < task["stop"]:
            rest.append(task | {"start": row + 1})
        job.pending += len(rest)
        todo.extendleft((job, part) for part in rest)


def _status(status: int | None) -> str:
    if status is None or status >= 0:
        return f"exit status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"
