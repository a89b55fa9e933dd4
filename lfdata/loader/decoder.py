"""A decoder process as the loader sees it, and what can be told of one that is in trouble."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from lfdata.loader.jobs import Done, Job
from lfdata.loader.produce import Producer
from lfdata.loader.slots import EPOCH, JOB, LANES, PHASE, PHASES, STEP, STEPS, Slots
from lfdata.loader.wire import Receiver


class Decoder:
    """One decoder process, as the loader sees it.

    ``memory``, ``hello``: descriptors of the slots, and of an anonymous file with a :class:`Hello` (a spec may be larger than a socket's
    buffer, and a decoder that does not read must not make anybody wait).
    """

    def __init__(self, memory: int, hello: int, number: int, stall_seconds: float) -> None:
        ours, theirs = socket.socketpair()
        try:
            # Inherited: until the decoder has seen to it itself, a SIGINT waits, and is dropped then.
            with theirs, blocked({signal.SIGINT}):
                inherited = (theirs.fileno(), memory, hello)
                self.process = subprocess.Popen(
                    # -P: the trainer's path and nothing before it; a file in the working directory must not hide a module.
                    [sys.executable, "-P", "-m", "lfdata.loader.serve", *map(str, inherited), str(number)],
                    stdin=subprocess.DEVNULL,
                    pass_fds=inherited,
                    # Threads for linear algebra take a tenth of a second to start, and it needs none; who does sets the variable.
                    env={"OPENBLAS_NUM_THREADS": "1"}
                    | os.environ
                    | {"PYTHONPATH": os.pathsep.join(path for path in module_path() if os.pathsep not in path)},
                    process_group=0,
                )
        except BaseException:
            ours.close()
            raise
        ours.settimeout(stall_seconds)
        self.connection, self.receiver, self.number, self.ready = ours, Receiver(ours, Done), number, False
        self.jobs: dict[int, Job] = {}

    def lanes(self) -> range:
        return range(self.number * LANES, (self.number + 1) * LANES)

    def end(self) -> None:
        """Kill it: it has nothing to save, and may be starting, stopped or deep in native code."""
        self.process.kill()
        self.connection.close()

    def wait(self, seconds: float) -> int | None:
        """Its exit status (minus the signal), if it ends within some seconds."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        return self.process.returncode


def module_path() -> list[str]:
    """Where this process finds modules. Python passes over what is no text, and over a working directory that is gone."""
    found = []
    for path in list(sys.path):
        with suppress(OSError):
            if isinstance(path, str):
                found.append(path or os.getcwd())
    return found


@contextmanager
def blocked(signals: set[signal.Signals]) -> Iterator[None]:
    """Signals that this thread, and a process that it starts, do not get."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C takes effect afterwards: while a process is being started it would leave one that nobody knows, and waits for."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            handler(*came[0])


def state_of(process: int) -> str:
    """The letter that /proc has for a process; nothing where it cannot be read."""
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def signal_name(number: int) -> str:
    """SIGKILL for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def in_work(slots: Slots, producer: Producer, lanes: range) -> str:
    """What lanes are doing: phase, epoch, steps and the shards those read from."""
    told = []
    for lane in lanes:
        state = slots.lanes[lane]
        if not state[PHASE] or not state[JOB]:
            continue
        phase, epoch, step, steps = (int(state[number]) for number in (PHASE, EPOCH, STEP, STEPS))
        told.append(
            f"{PHASES[phase % len(PHASES)]} epoch {epoch}, step {step}"
            + (f" to {step + steps - 1}" if steps > 1 else "")
            + f" from {shards(producer, epoch, step, steps)}"
        )
    return "; ".join(told) or "nothing"


def shards(producer: Producer, epoch: int, step: int, steps: int) -> str:
    """The shards that some steps read from."""
    try:
        found = producer.plan.work(epoch, step, steps).samples
        names = dict.fromkeys(
            producer.sources[source].shard_name(index)
            for source, index in zip(found.source.tolist(), found.index.tolist(), strict=True)
        )
    except Exception as error:
        # A decoder that was killed while it wrote leaves numbers that do not go together.
        return f"shards unknown ({error!r})"
    return ", ".join(list(names)[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
