"""Who produces: decoder processes, threads of this process, or the caller itself. All run the same :class:`Producer`."""

from __future__ import annotations

import logging
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Protocol

import msgspec

from lfdata.errors import DecoderError
from lfdata.loader import spec as specs
from lfdata.loader.jobs import STARTED, Done, Job
from lfdata.loader.produce import Producer, identity
from lfdata.loader.serve import END_SECONDS, Lanes
from lfdata.loader.slots import (
    EPOCH,
    IDLE,
    JOB,
    LANE_BYTES,
    LANES,
    PAGE,
    PHASE,
    PHASES,
    ROW,
    STEP,
    STEPS,
    TRYING,
    Slots,
    anonymous,
)
from lfdata.loader.wire import Hello, Receiver, pack, send

# The first page has a lane of the caller's beside theirs.
MOST_DECODERS = (PAGE // LANE_BYTES - 1) // LANES
# Starting a program from a network file system takes its time, whatever a batch may take.
START_SECONDS = 60.0
_ASK_SECONDS = 0.5
log = logging.getLogger("lfdata")
# Signals by which a codec ends its process. More crashes than this are no single picture's doing.
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)
MOST_CRASHES = 8


class Engine(Protocol):
    """Takes jobs, gives answers in any order."""

    slots: Slots

    def submit(self, job: Job) -> None:
        """Have a job done."""
        ...

    def take(self) -> Done:
        """The next answer. Raises :class:`DecoderError`."""
        ...

    def close(self) -> None:
        """End everything."""
        ...


class InlineEngine:
    """Jobs are done when an answer is asked for, in the caller's thread; what can be read meanwhile is begun when they are given."""

    def __init__(self, producer: Producer, slots: int) -> None:
        self._producer, self._jobs = producer, deque[Job]()
        self.slots = Slots(slots, producer.layout.bytes)

    def submit(self, job: Job) -> None:
        self._jobs.append(job)
        self._producer.begin(job, self.slots)

    def take(self) -> Done:
        return self._producer.run(self._jobs.popleft(), self.slots, 0, self._producer.spec.threads)

    def close(self) -> None:
        self._jobs.clear()
        self._producer.forget()
        self.slots.close()


class ThreadEngine:
    """Lanes in this process."""

    def __init__(self, producer: Producer, slots: int, stall_seconds: float) -> None:
        self.slots = Slots(slots, producer.layout.bytes)
        self._producer, self._stall = producer, stall_seconds
        self._done: queue.SimpleQueue[Done] = queue.SimpleQueue()
        self._lanes = Lanes(producer, self.slots, self._done.put)

    def submit(self, job: Job) -> None:
        self._lanes.submit(job)

    def take(self) -> Done:
        try:
            return self._done.get(timeout=self._stall)
        except queue.Empty:
            raise DecoderError(
                f"no batch for {self._stall:g} s; in work: {in_work(self.slots, self._producer, range(LANES))}"
            ) from None

    def close(self) -> None:
        self._lanes.close()
        self.slots.close()


class _Decoder:
    """One decoder process, as the loader sees it.

    ``memory``, ``hello``: descriptors of the slots, and of an anonymous file with a :class:`Hello` (a spec may be larger than a socket's
    buffer, and a decoder that does not read must not make anybody wait).
    """

    def __init__(self, memory: int, hello: int, number: int, stall_seconds: float) -> None:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                inherited = (theirs.fileno(), memory, hello)
                self.process = subprocess.Popen(
                    # -P: the trainer's path and nothing before it; a file in the working directory must not hide a module.
                    [sys.executable, "-P", "-m", "lfdata.loader.serve", *map(str, inherited), str(number)],
                    stdin=subprocess.DEVNULL,
                    pass_fds=inherited,
                    env=os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
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


class ProcessEngine:
    """Decoder processes over one piece of shared memory.

    Until the first of them is ready the caller does the jobs itself, so that the first batch does not wait for programs to start;
    not those with functions of the user's, which may hang or end their process, and none with ``isolate``.

    A decoder that crashes is started again, and tries the samples it was at one by one; the one that crashes it again is a bad sample.
    """

    def __init__(self, producer: Producer, slots: int, stall_seconds: float, processes: int, isolate: bool = False) -> None:
        # One lane more: the caller's.
        lanes = processes * LANES + 1
        self.slots = Slots(slots, producer.layout.bytes, lanes=lanes)
        self._producer, self._stall = producer, stall_seconds
        self._decoders: list[_Decoder] = []
        self._early: deque[Job] = deque()
        self._helps = not isolate and not any(filler.calls_user for filler in producer.fillers)
        self._crashed: list[tuple[int, int]] = []
        self._crashes = 0
        self._owner, self._began = os.getpid(), time.monotonic()
        try:
            self._greeting = pack(Hello(specs.encode(producer.spec), slots, producer.layout.bytes, lanes, self._owner))
            for number in range(processes):
                self._start(number)
        except OSError as error:
            self.close()
            raise DecoderError(f"the decoder cannot be started: {error}") from error
        except BaseException:
            self.close()
            raise

    def _start(self, number: int) -> None:
        """A decoder, in the place of one that is there under its number."""
        with anonymous("lfdata-hello", len(self._greeting)) as file:
            file.write(self._greeting)
            file.flush()
            with uninterrupted():
                self._decoders[number : number + 1] = [_Decoder(self.slots.descriptor, file.fileno(), number, self._stall)]

    @property
    def processes(self) -> list[int]:
        """Process ids of the decoders."""
        return [decoder.process.pid for decoder in self._decoders]

    def submit(self, job: Job) -> None:
        ready = [decoder for decoder in self._decoders if decoder.ready]
        if not ready:
            self._early.append(job)
            return
        decoder = min(ready, key=lambda one: len(one.jobs))
        if self._crashes:
            job = msgspec.structs.replace(job, crashed=tuple(self._crashed), alone=True)
        decoder.jobs[job.number] = job
        try:
            send(decoder.connection, job)
        except TimeoutError:
            raise DecoderError(self._hangs([decoder])) from None
        except ConnectionError:
            # One that has gone is noticed when its answer is awaited.
            pass

    def take(self) -> Done:
        # Seconds waited, not seconds gone by: a machine that was frozen for an hour says nothing about the decoder.
        waited, ask = 0.0, min(_ASK_SECONDS, self._stall)
        while True:
            if (done := self._arrived(0)) is not None:
                return done
            self._check_started()
            if self._early and self._helps:
                return self._producer.run(
                    self._early.popleft(), self.slots, len(self.slots.lanes) - 1, self._producer.spec.threads
                )
            began = time.monotonic()
            if (done := self._arrived(ask)) is not None:
                return done
            waited += min(ask, time.monotonic() - began)
            if waited >= self._stall and not self._early:
                raise DecoderError(self._hangs([decoder for decoder in self._decoders if decoder.jobs]))

    def _check_started(self) -> None:
        """A decoder that never becomes ready must not go unnoticed, though the caller can do its work."""
        late = [decoder.process.pid for decoder in self._decoders if not decoder.ready]
        seconds = max(START_SECONDS, self._stall)
        if late and time.monotonic() - self._began > seconds:
            who = ", ".join(map(str, late))
            raise DecoderError(f"the decoder (process {who}) was started {seconds:g} s ago and is not ready")

    def _hangs(self, decoders: list[_Decoder]) -> str:
        work = "; ".join(self._in_work(decoder) for decoder in decoders)
        who = ", ".join(str(decoder.process.pid) for decoder in decoders)
        return (
            f"no batch for {self._stall:g} s from the decoder (process {who}); in work: {work}. "
            "A slow disk needs a larger stall_seconds"
        )

    def _arrived(self, seconds: float) -> Done | None:
        """An answer that comes within some seconds. Decoders that say that they are ready get what waits for them."""
        if not any(decoder.receiver.ready() for decoder in self._decoders):
            poll = select.poll()
            for decoder in self._decoders:
                poll.register(decoder.connection, select.POLLIN)
            found = {number for number, _ in poll.poll(seconds * 1000)}
            for decoder in self._decoders:
                if decoder.connection.fileno() in found and not decoder.receiver.fill():
                    self._lost(decoder)
                    return None
        for decoder in self._decoders:
            while decoder.receiver.ready():
                done: Done = decoder.receiver.next()
                if done.number == STARTED:
                    if done.failure is not None:
                        raise done.failure.error()
                    decoder.ready = True
                    early, self._early = self._early, deque()
                    for job in early:
                        self.submit(job)
                    continue
                decoder.jobs.pop(done.number, None)
                return done
        return None

    def _lost(self, decoder: _Decoder) -> None:
        """One that has ended: after a crash another takes its place, and its jobs. Raises :class:`DecoderError` for any other end."""
        code = decoder.wait(END_SECONDS)
        self._crashes += 1
        if code is None or -code not in CRASHES or self._crashes > MOST_CRASHES or not decoder.ready:
            raise DecoderError(self._epitaph(decoder))
        epitaph = self._epitaph(decoder)
        lanes = [self.slots.lanes[lane] for lane in decoder.lanes()]
        busy = [state.copy() for state in lanes if state[PHASE] != IDLE]
        if len(busy) == 1 and busy[0][PHASE] == TRYING:
            # Nothing else was going on: this sample did it.
            _, epoch, step, steps, _, row = busy[0][: ROW + 1].tolist()
            self._crashed.append(identity(self._producer.plan.work(epoch, step, steps).samples, row))
        for state in lanes:
            state[:] = 0
        at_work = {int(state[JOB]) for state in busy}
        log.warning("%s; another one is started", epitaph)
        decoder.connection.close()
        self._helps, self._began = False, time.monotonic()
        self._start(decoder.number)
        for job in decoder.jobs.values():
            self._early.append(msgspec.structs.replace(job, careful=True) if job.number in at_work else job)

    def _in_work(self, decoder: _Decoder) -> str:
        return in_work(self.slots, self._producer, decoder.lanes())

    def _epitaph(self, decoder: _Decoder) -> str:
        """How a decoder ended, and what it was doing."""
        code = decoder.wait(END_SECONDS)
        how = (
            "closed its connection"
            if code is None
            else f"exited with {code}"
            if code >= 0
            else f"was killed by {signal_name(-code)}"
        )
        hint = " (the kernel does that when memory runs out)" if code == -signal.SIGKILL else ""
        return f"the decoder (process {decoder.process.pid}) {how}{hint}; in work: {self._in_work(decoder)}"

    def close(self) -> None:
        try:
            # In a process forked from the one that made them they are not this one's to end.
            if os.getpid() == self._owner:
                for decoder in self._decoders:
                    decoder.end()
                for decoder in self._decoders:
                    decoder.wait(END_SECONDS)
        finally:
            for decoder in self._decoders:
                decoder.connection.close()
                # Interrupted above: they were killed, and leave nothing if they are waited for.
                if os.getpid() == self._owner:
                    decoder.wait(0.2)
            self._decoders.clear()
            self.slots.close()


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
