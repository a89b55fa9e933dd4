"""Who produces: decoder processes, threads of this process, or the caller itself. All run the same :class:`Producer`."""

from __future__ import annotations

import logging
import os
import queue
import select
import signal
import time
from collections import deque
from typing import Protocol

import msgspec

from lfdata.errors import DecoderError, LfdataError
from lfdata.loader import spec as specs
from lfdata.loader.decoder import Decoder, in_work, module_path, signal_name, state_of, uninterrupted
from lfdata.loader.early import EarlyLane
from lfdata.loader.jobs import STARTED, Done, Job
from lfdata.loader.produce import Producer
from lfdata.loader.serve import Lanes
from lfdata.loader.slots import (
    IDLE,
    INDEX,
    JOB,
    LANE_BYTES,
    LANES,
    PAGE,
    PHASE,
    SOURCE,
    TRYING,
    Slots,
    anonymous,
)
from lfdata.loader.turn import ENDED
from lfdata.loader.wire import Hello, pack, send

# The first page has a lane of the caller's beside theirs, and one place that is no lane's.
MOST_DECODERS = (PAGE // LANE_BYTES - 2) // LANES
# Starting a program from a network file system takes its time, whatever a batch may take.
START_SECONDS = 60.0
_ASK_SECONDS = 0.5
# How long a process that has closed its connection may take to go, and one that was killed.
EXIT_SECONDS, KILL_SECONDS = 5.0, 2.0
# A decoder that is stopped is told after so long a wait.
STOPPED_SECONDS = 3.0
log = logging.getLogger("lfdata")
# Signals by which a codec ends its process. More crashes than this without a batch between them are no single picture's doing.
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

    def poll(self) -> Done | None:
        """An answer that is there already, if there is one."""
        ...

    def give_up(self) -> None:
        """Another thread has no use for answers any more: :meth:`take` raises :class:`LfdataError` soon."""
        ...

    def close(self) -> None:
        """End everything."""
        ...


class InlineEngine:
    """Jobs are done when an answer is asked for, in the caller's thread; what can be read meanwhile is begun when they are given."""

    def __init__(self, producer: Producer, slots: int, size: int) -> None:
        self._producer, self._jobs = producer, deque[Job]()
        self.slots = Slots(slots, size)

    def submit(self, job: Job) -> None:
        self._jobs.append(job)
        self._producer.begin(job, self.slots)

    def take(self) -> Done:
        return self._producer.run(self._jobs.popleft(), self.slots, 0, self._producer.spec.threads)

    def poll(self) -> Done | None:
        return None

    def give_up(self) -> None:
        # Nobody waits: the job is done by who asks.
        pass

    def close(self) -> None:
        self._jobs.clear()
        self._producer.forget()
        self.slots.close()


class ThreadEngine:
    """Lanes in this process."""

    def __init__(self, producer: Producer, slots: int, size: int, stall_seconds: float) -> None:
        self.slots = Slots(slots, size)
        self._producer, self._stall = producer, stall_seconds
        self._done: queue.SimpleQueue[Done | None] = queue.SimpleQueue()
        self._lanes = Lanes(producer, self.slots, self._done.put)

    def submit(self, job: Job) -> None:
        self._lanes.submit(job)

    def take(self) -> Done:
        try:
            done = self._done.get(timeout=self._stall)
        except queue.Empty:
            raise DecoderError(
                f"no batch for {self._stall:g} s; in work: {in_work(self.slots, self._producer, range(LANES))}"
            ) from None
        if done is None:
            raise LfdataError(ENDED)
        return done

    def poll(self) -> Done | None:
        try:
            return self._done.get_nowait()
        except queue.Empty:
            return None

    def give_up(self) -> None:
        self._done.put(None)

    def close(self) -> None:
        self._lanes.close()
        self.slots.close()


class ProcessEngine:
    """Decoder processes over one piece of shared memory.

    Until the first of them is ready a thread of this process does the jobs, so that the first batches do not wait for programs to start;
    not those with functions of the user's, which may hang or end their process, and none with ``isolate``.

    A decoder that crashes is started again, and tries the samples it was at one by one; the one that crashes it again is a bad sample.
    """

    def __init__(
        self, producer: Producer, slots: int, size: int, stall_seconds: float, processes: int, isolate: bool = False
    ) -> None:
        # One lane more: the caller's.
        lanes = processes * LANES + 1
        self.slots = Slots(slots, size, lanes=lanes)
        self._producer, self._stall = producer, stall_seconds
        self._decoders: list[Decoder] = []
        # Jobs for decoders that are not ready yet, and who does some of them meanwhile.
        self._early: deque[Job] = deque()
        self._lane: EarlyLane | None = None
        self._helps = not isolate and not any(filler.calls_user for filler in producer.fillers)
        self._crashed: list[tuple[int, int]] = []
        self._crashes = self._in_a_row = 0
        self._closing = self._given_up = False
        self._owner, self._began = os.getpid(), time.monotonic()
        try:
            path = tuple(os.fsencode(path) for path in module_path())
            self._greeting = pack(Hello(specs.encode(producer.spec), slots, size, lanes, self._owner, path))
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
                self._decoders[number : number + 1] = [Decoder(self.slots.descriptor, file.fileno(), number, self._stall)]

    @property
    def processes(self) -> list[int]:
        """Process ids of the decoders."""
        return [decoder.process.pid for decoder in self._decoders]

    def submit(self, job: Job) -> None:
        ready = [decoder for decoder in self._decoders if decoder.ready]
        if not ready and self._helps:
            if self._lane is None:
                with uninterrupted():
                    self._lane = EarlyLane(self._do)
            self._lane.submit(job)
            return
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

    def _do(self, job: Job) -> Done:
        return self._producer.run(
            job, self.slots, len(self.slots.lanes) - 1, self._producer.spec.threads, given_up=lambda: self._closing
        )

    def take(self) -> Done:
        # Seconds waited, not seconds gone by: a machine that was frozen for an hour says nothing about the decoder.
        waited, ask, ready = 0.0, min(_ASK_SECONDS, self._stall), self._ready
        while True:
            if self._given_up:
                raise LfdataError(ENDED)
            if (done := self._arrived(0)) is not None:
                return done
            self._check_started()
            began = time.monotonic()
            if (done := self._arrived(ask)) is not None:
                return done
            # A decoder that has just started has had no time yet.
            waited = waited + min(ask, time.monotonic() - began) if self._ready == ready else 0.0
            ready = self._ready
            if waited >= STOPPED_SECONDS:
                self._check_stopped()
            # As long as none is ready, _check_started() looks.
            if waited >= self._stall and ready:
                raise DecoderError(self._hangs([decoder for decoder in self._decoders if decoder.jobs]))

    def poll(self) -> Done | None:
        return self._arrived(0)

    def give_up(self) -> None:
        self._given_up = True

    @property
    def _ready(self) -> int:
        return sum(decoder.ready for decoder in self._decoders)

    def _check_started(self) -> None:
        """A decoder that never becomes ready must not go unnoticed, though the caller can do its work."""
        late = [decoder.process.pid for decoder in self._decoders if not decoder.ready]
        seconds = max(START_SECONDS, self._stall)
        if late and time.monotonic() - self._began > seconds:
            who = ", ".join(map(str, late))
            raise DecoderError(f"the decoder (process {who}) was started {seconds:g} s ago and is not ready")

    def _check_stopped(self) -> None:
        """One that somebody has stopped does not go on by itself, however slow its disk may be. One that has ended leaves its connection open
        where a function of the user has forked."""
        for decoder in list(self._decoders):
            if decoder.ready and decoder.process.poll() is not None:
                self._lost(decoder)
                return
            if decoder.jobs and state_of(decoder.process.pid) in ("T", "t"):
                raise DecoderError(
                    f"the decoder (process {decoder.process.pid}) is stopped (SIGSTOP, or a debugger); in work: {self._in_work(decoder)}"
                )

    def _hangs(self, decoders: list[Decoder]) -> str:
        work = "; ".join(self._in_work(decoder) for decoder in decoders)
        who = ", ".join(str(decoder.process.pid) for decoder in decoders)
        if not decoders:
            who, work = (
                f"{os.getpid()}, this one",
                in_work(self.slots, self._producer, range(len(self.slots.lanes) - 1, len(self.slots.lanes))),
            )
        return (
            f"no batch for {self._stall:g} s from the decoder (process {who}); in work: {work}. "
            "A slow disk needs a larger stall_seconds"
        )

    def _arrived(self, seconds: float) -> Done | None:
        """An answer that comes within some seconds. Decoders that say that they are ready get what waits for them."""
        if not any(decoder.receiver.ready() for decoder in self._decoders):
            if self._lane is not None and (early := self._lane.take()) is not None:
                return early
            poll = select.poll()
            for decoder in self._decoders:
                poll.register(decoder.connection, select.POLLIN)
            if self._lane is not None:
                poll.register(self._lane.descriptor, select.POLLIN)
            found = {number for number, _ in poll.poll(seconds * 1000)}
            if self._lane is not None and (early := self._lane.take()) is not None:
                return early
            self._leave_early_lane()
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
                    self._helps = False
                    waiting, self._early = self._early, deque()
                    for job in (*waiting, *(self._lane.retire() if self._lane is not None else ())):
                        self.submit(job)
                    continue
                decoder.jobs.pop(done.number, None)
                if done.failure is None:
                    self._in_a_row = 0
                return done
        return None

    def _leave_early_lane(self) -> None:
        """Free it once it has done its last job."""
        if self._lane is not None and self._lane.over:
            self._lane.close()
            self._lane = None

    def _lost(self, decoder: Decoder) -> None:
        """One that has ended: after a crash another takes its place, and its jobs. Raises :class:`DecoderError` for any other end."""
        code = decoder.wait(EXIT_SECONDS)
        self._crashes += 1
        self._in_a_row += 1
        crashed = code is not None and (-code in CRASHES or _unknown(code))
        if not crashed or self._in_a_row > MOST_CRASHES or not decoder.ready:
            raise DecoderError(self._epitaph(decoder, code))
        epitaph = self._epitaph(decoder, code)
        lanes = [self.slots.lanes[lane] for lane in decoder.lanes()]
        busy = [state.copy() for state in lanes if state[PHASE] != IDLE]
        if len(busy) == 1 and busy[0][PHASE] == TRYING:
            # Nothing else was going on: this sample did it.
            self._crashed.append((int(busy[0][SOURCE]), int(busy[0][INDEX])))
        for state in lanes:
            state[:] = 0
        at_work = {int(state[JOB]) for state in busy}
        log.warning("%s; another one is started", epitaph)
        decoder.connection.close()
        self._helps, self._began = False, time.monotonic()
        self._start(decoder.number)
        for job in decoder.jobs.values():
            self._early.append(msgspec.structs.replace(job, careful=True) if job.number in at_work else job)

    def _in_work(self, decoder: Decoder) -> str:
        return in_work(self.slots, self._producer, decoder.lanes())

    def _epitaph(self, decoder: Decoder, code: int | None) -> str:
        """How a decoder ended, and what it was doing."""
        how = (
            "closed its connection"
            if code is None
            else "ended (how is not known: SIGCHLD is ignored in this process)"
            if _unknown(code)
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
                # The job that this process is doing ends soon.
                self._closing = True
                if self._lane is not None:
                    self._lane.retire()
                for decoder in self._decoders:
                    decoder.end()
                deadline = time.monotonic() + KILL_SECONDS
                for decoder in self._decoders:
                    decoder.wait(max(0.0, deadline - time.monotonic()))
        finally:
            for decoder in self._decoders:
                decoder.connection.close()
                # Interrupted above: they were killed, and leave nothing if they are waited for.
                if os.getpid() == self._owner:
                    decoder.wait(0.2)
            self._decoders.clear()
            if self._lane is not None:
                self._lane.close()
                self._lane = None
            self.slots.close()


def _unknown(code: int) -> bool:
    """Whether an exit status is none: who ignores SIGCHLD is not told, and subprocess takes that for 0."""
    return not code and signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
