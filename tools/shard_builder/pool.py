"""Worker processes and the ordered stream of their results.

Results come out strictly in the order of the chunks that went in, with a bounded number in flight. A worker that dies or takes too
long has its chunk run again one record at a time, each in a fresh worker: the record that does it again becomes a bad sample.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import msgspec

import lfdata
from lfdata.errors import LfdataError
from shard_builder import wire

Chunk = list[tuple[int, bytes]]
START_SECONDS = 120.0
# Workers killed while they start are started again this often.
MOST_RESTARTS = 3
# Whatever a dying or broken worker may have sent instead of a message.
_BROKEN = (OSError, ValueError, OverflowError, MemoryError, msgspec.MsgspecError)
# One thread a worker: parallelism is between processes, and libraries must not fight over the cores. glibc gives the memory of every
# picture back to the kernel and takes it again for the next, which costs a quarter of the time: here it keeps up to 64 MiB instead.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
_KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(64 << 20), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}
_MAIN = "import sys; sys.path += sys.argv[2:]; from shard_builder.worker import main; main(int(sys.argv[1]))"


def worker_command(descriptor: int) -> list[str]:
    """Command line of a worker. It finds the packages where this process found them, and nothing in the current directory."""
    roots = [str(Path(__file__).resolve().parents[1]), str(Path(str(lfdata.__file__)).resolve().parents[1])]
    return [sys.executable, "-P", "-c", _MAIN, str(descriptor), *dict.fromkeys(roots)]


@dataclass(slots=True)
class Result:
    """What became of one chunk: heads by record, and the payload bytes they describe."""

    heads: list[Any]
    payloads: memoryview


@dataclass(slots=True)
class _Task:
    number: int
    chunk: Chunk
    # Filled when a chunk has to be run record by record.
    parts: dict[int, Result] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Process:
    process: subprocess.Popen[bytes]
    connection: socket.socket
    task: _Task | None = None
    # Position in the chunk of the single record being run, or -1 for the whole chunk.
    position: int = -1
    deadline: float = 0.0
    ready: bool = False


class Pool:
    """``count`` workers set up with ``setup``. Use as a context manager: leaving it ends every worker.

    Entering starts them and does not wait: they import while the caller goes on, and are waited for at the first use.
    """

    def __init__(self, count: int, setup: dict[str, Any], timeout: float) -> None:
        self._count = count
        self._setup = setup
        self._timeout = timeout
        self._mode = "encode"
        self._workers: list[_Process] = []
        self._restarts = 0
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> Self:
        try:
            for _ in range(self._count):
                self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every worker now."""
        for worker in list(self._workers):
            self._stop(worker)
        self._selector.close()

    def set_up(self, setup: dict[str, Any]) -> None:
        """Set the workers up anew, if ``setup`` is another one. Not while a :meth:`run` is under way."""
        if setup == self._setup:
            return
        self._await_all()
        self._setup = setup
        for worker in self._workers:
            self._selector.unregister(worker.connection)
            worker.ready = False
            worker.connection.settimeout(START_SECONDS)
            with contextlib.suppress(OSError):  # dead: _await_ready says so
                wire.send(worker.connection, setup)

    # -- workers ------------------------------------------------------------------------------------------------------

    def _start(self) -> _Process:
        ours, theirs = socket.socketpair()
        with theirs:
            # A process group of its own: Ctrl-C reaches the converter only, which then ends its workers.
            process = subprocess.Popen(
                worker_command(theirs.fileno()),
                pass_fds=[theirs.fileno()],
                env=_KEEP_MEMORY | os.environ | _ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                process_group=0,
            )
        worker = _Process(process, ours)
        self._workers.append(worker)
        ours.settimeout(START_SECONDS)
        with contextlib.suppress(OSError):  # dead already: _await_ready says so
            wire.send(ours, self._setup)
        return worker

    def _await_all(self) -> None:
        for worker in list(self._workers):
            if not worker.ready:
                self._await_ready(worker)

    def _await_ready(self, worker: _Process) -> None:
        """Wait until a worker has its libraries; one that a signal kills before that (out of memory, by hand) is started again."""
        try:
            answer, _ = wire.receive(worker.connection)
        except _BROKEN as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(5)
            status = worker.process.returncode
            if status is not None and status < 0 and self._restarts < MOST_RESTARTS:
                self._restarts += 1
                self._stop(worker)
                self._await_ready(self._start())
                return
            raise LfdataError(
                f"a worker process did not start ({'no answer' if status is None else f'exit status {status}'})"
            ) from error
        if "fatal" in answer:
            raise LfdataError(answer["fatal"])
        worker.ready = True
        worker.connection.settimeout(self._timeout)
        self._selector.register(worker.connection, selectors.EVENT_READ, worker)

    def _stop(self, worker: _Process) -> None:
        if worker.connection in self._selector.get_map():
            self._selector.unregister(worker.connection)
        worker.connection.close()
        if worker.process.poll() is None:
            worker.process.kill()
        worker.process.wait()
        self._workers.remove(worker)

    # -- work ---------------------------------------------------------------------------------------------------------

    def run(self, chunks: Iterator[Chunk], mode: str = "encode") -> Iterator[Result]:
        """Results of ``chunks``, in order. ``mode``: what the workers do with the records (:meth:`shard_builder.worker.Worker.process`)."""
        self._await_all()
        self._mode = mode
        window = 3 * self._count
        todo: deque[tuple[_Task, int]] = deque()
        done: dict[int, Result] = {}
        produced = consumed = 0
        exhausted = False
        while True:
            while not exhausted and produced - consumed < window:
                chunk = next(chunks, None)
                if chunk is None:
                    exhausted = True
                    break
                todo.append((_Task(produced, chunk), -1))
                produced += 1
            self._dispatch(todo)
            while consumed in done:
                yield done.pop(consumed)
                consumed += 1
                # Keep the workers busy while the caller writes.
                self._dispatch(todo)
            if exhausted and consumed == produced:
                return
            if produced - consumed >= window or exhausted or not any(w.task is None for w in self._workers):
                self._collect(todo, done)

    def _dispatch(self, todo: deque[tuple[_Task, int]]) -> None:
        for worker in self._workers:
            if worker.task is not None or not todo:
                continue
            worker.task, worker.position = todo.popleft()
            chunk = worker.task.chunk
            worker.deadline = time.monotonic() + self._timeout
            try:
                wire.send(worker.connection, [self._mode, chunk if worker.position < 0 else [chunk[worker.position]]])
            except OSError:
                continue  # found dead by _collect

    def _collect(self, todo: deque[tuple[_Task, int]], done: dict[int, Result]) -> None:
        busy = [worker for worker in self._workers if worker.task is not None]
        if not busy:
            return
        wait = max(0.0, min(worker.deadline for worker in busy) - time.monotonic())
        for key, _ in self._selector.select(wait):
            worker: _Process = key.data
            try:
                heads, payloads = wire.receive(worker.connection)
            except TimeoutError:
                self._failed(worker, todo, done, "timeout")
                continue
            except _BROKEN:
                self._failed(worker, todo, done, "crash")
                continue
            self._finished(worker, Result(heads, payloads), done)
        now = time.monotonic()
        for worker in [w for w in self._workers if w.task is not None and w.deadline <= now]:
            self._failed(worker, todo, done, "timeout")

    def _finished(self, worker: _Process, result: Result, done: dict[int, Result]) -> None:
        task, position = worker.task, worker.position
        worker.task, worker.position = None, -1
        assert task is not None
        if position < 0:
            done[task.number] = result
        else:
            self._part(task, position, result, done)

    def _part(self, task: _Task, position: int, result: Result, done: dict[int, Result]) -> None:
        task.parts[position] = result
        if len(task.parts) == len(task.chunk):
            parts = [task.parts[number] for number in range(len(task.chunk))]
            joined = memoryview(b"".join(part.payloads for part in parts))
            done[task.number] = Result([head for part in parts for head in part.heads], joined)

    def _failed(self, worker: _Process, todo: deque[tuple[_Task, int]], done: dict[int, Result], code: str) -> None:
        task, position = worker.task, worker.position
        if code == "crash":
            try:
                worker.process.wait(5)
            except subprocess.TimeoutExpired:
                worker.process.kill()
        status = worker.process.poll()
        self._stop(worker)
        self._await_ready(self._start())
        if task is None:
            return
        if position < 0 and len(task.chunk) > 1:
            todo.extendleft((task, number) for number in reversed(range(len(task.chunk))))
            return
        if code == "timeout":
            reason = f"loading and encoding took more than {self._timeout:g} s"
        else:
            name = signal.Signals(-status).name if status is not None and status < 0 else f"exit status {status}"
            reason = f"the worker process died on this sample ({name})"
        ordinal = task.chunk[max(position, 0)][0]
        result = Result([[ordinal, {"error": [code, reason, "", ""]}]], memoryview(b""))
        if position < 0:
            done[task.number] = result
        else:
            self._part(task, position, result, done)
