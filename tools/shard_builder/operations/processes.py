"""Runs an operation's tasks, in this process or in several, with their answers in the order of the tasks.

A task writes one file, and what it writes depends on the task alone, so the number of processes cannot matter. Processes speak
:mod:`shard_builder.wire`: nothing is pickled. Errors come back with their own type.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import queue
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

import lfdata
from lfdata import errors
from lfdata.errors import LfdataError, OptionError, SampleError
from lfdata.format.durable import Files
from shard_builder import wire

Task = dict[str, Any]
Run = Callable[[Task], dict[str, Any]]

# What a worker may be told to run: a function ``(setup, files) -> Run``.
JOBS = {
    "export": "shard_builder.sinks.job:open_job",
    "copy": "shard_builder.operations.copying:open_job",
    "field": "shard_builder.operations.fields:open_job",
}
_PR_SET_PDEATHSIG = 1
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
_MAIN = "import sys; sys.path += sys.argv[2:]; from shard_builder.operations.processes import serve; serve(int(sys.argv[1]))"
_GONE = (OSError, ValueError, msgspec.MsgspecError)


def default_workers(asked: int) -> int:
    """Processes to use: ``asked``, or as many as this process has cores."""
    if asked < 0:
        raise OptionError(f"workers must not be negative, got {asked}")
    return asked or len(os.sched_getaffinity(0))


def run_tasks(
    setup: dict[str, Any], tasks: Iterator[Task], workers: int, files: Files
) -> Iterator[tuple[Task, dict[str, Any]]]:
    """Every task with its answer, in order.

    Args:
        setup: names the job (``"job"``, one of :data:`JOBS`) and what it works on.
        workers: processes; with 1 the tasks run here, through ``files``.

    Raises:
        LfdataError: what a task raised, or a process that died.
    """
    if workers <= 1:
        run = _open(setup, files)
        for task in tasks:
            yield task, run(task)
        return
    processes = _Processes(setup, workers)
    pending: deque[tuple[Task, Future[dict[str, Any]]]] = deque()
    with ThreadPoolExecutor(workers) as threads:
        try:
            for task in tasks:
                pending.append((task, threads.submit(processes.run, task)))
                if len(pending) >= 2 * workers:
                    done, future = pending.popleft()
                    yield done, future.result()
            while pending:
                done, future = pending.popleft()
                yield done, future.result()
        finally:
            for _, future in pending:
                future.cancel()
            processes.close()


def _open(setup: dict[str, Any], files: Files) -> Run:
    module, _, name = JOBS[setup["job"]].partition(":")
    run: Run = getattr(importlib.import_module(module), name)(setup, files)
    return run


class _Processes:
    """Up to ``count`` processes, started when they are needed; each runs one task at a time."""

    def __init__(self, setup: dict[str, Any], count: int) -> None:
        self._setup = setup
        self._idle: queue.SimpleQueue[tuple[subprocess.Popen[bytes], socket.socket] | None] = queue.SimpleQueue()
        self._all: list[tuple[subprocess.Popen[bytes], socket.socket]] = []
        for _ in range(count):
            self._idle.put(None)

    def run(self, task: Task) -> dict[str, Any]:
        """Run one task in a process that is free. Called by as many threads as there are processes."""
        process, connection = self._idle.get() or self._start()
        try:
            wire.send(connection, task)
            answer, _ = wire.receive(connection)
        except _GONE as error:
            raise LfdataError(
                f"a worker process died while it made {task.get('name', 'a file')} ({_status(process)}). Run the command again to go on"
            ) from error
        self._idle.put((process, connection))
        if "error" in answer:
            raise _rebuilt(answer["error"])
        found: dict[str, Any] = answer
        return found

    def _start(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        ours, theirs = socket.socketpair()
        roots = [str(Path(__file__).resolve().parents[2]), str(Path(str(lfdata.__file__)).resolve().parents[1])]
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", _MAIN, str(theirs.fileno()), *dict.fromkeys(roots)],
                pass_fds=[theirs.fileno()],
                env=os.environ | _ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C reaches the parent only, which then ends its processes
            )
        self._all.append((process, ours))
        with contextlib.suppress(OSError):  # dead already: found out by the first task
            wire.send(ours, self._setup)
        return process, ours

    def close(self) -> None:
        """End every process now."""
        for process, connection in self._all:
            if process.poll() is None:
                process.kill()
            process.wait()
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for an answer
            connection.close()


def _status(process: subprocess.Popen[bytes]) -> str:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5)
    status = process.returncode
    return signal.Signals(-status).name if status is not None and status < 0 else f"exit status {status}"


def _described(error: LfdataError) -> dict[str, Any]:
    found: dict[str, Any] = {"type": type(error).__name__, "text": str(error), "args": []}
    if isinstance(error, SampleError):
        found["args"] = [error.code, error.reason]
        found["about"] = [error.field, error.key, error.path]
    elif type(error).__reduce__ is not LfdataError.__reduce__:
        found["args"] = list(error.__reduce__()[1])
    else:
        found["args"] = [str(error)]
    return found


def _rebuilt(found: dict[str, Any]) -> LfdataError:
    kind = getattr(errors, found["type"], LfdataError)
    if kind is SampleError:
        code, reason = found["args"]
        field, key, path = found["about"]
        return SampleError(code, reason, field=field, key=key, path=path)
    try:
        error: LfdataError = kind(*found["args"])
    except TypeError:
        return LfdataError(found["text"])
    return error


def serve(descriptor: int) -> None:
    """A worker process: set up once, then one answer a task until the connection ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    connection = socket.socket(fileno=descriptor)
    try:
        setup, _ = wire.receive(connection)
        run: Run | None = None
        while True:
            task, _ = wire.receive(connection)
            try:
                run = run or _open(setup, Files())
                answer = run(task)
            except LfdataError as error:
                answer = {"error": _described(error)}
            wire.send(connection, answer)
    except (wire.ClosedError, BrokenPipeError, ConnectionResetError):
        return
