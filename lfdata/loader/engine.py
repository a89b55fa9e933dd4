"""Who produces: decoder processes, threads of this process, or the caller itself. All run the same :class:`Producer`."""

from __future__ import annotations

import os
import queue
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from contextlib import suppress
from typing import Protocol

from lfdata.errors import DecoderError
from lfdata.loader import spec as specs
from lfdata.loader.produce import STARTED, Done, Job, Producer
from lfdata.loader.serve import Lanes
from lfdata.loader.slots import EPOCH, JOB, LANES, PAGE, PHASE, PHASES, STEP, STEPS, Slots
from lfdata.loader.wire import Hello, Receiver, send

MOST_DECODERS = PAGE // (LANES * 64)
_ASK_SECONDS = 0.5
_END_SECONDS = 5.0


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
    """Jobs are done when an answer is asked for, in the caller's thread."""

    def __init__(self, producer: Producer, slots: int) -> None:
        self._producer, self._jobs = producer, deque[Job]()
        self.slots = Slots(slots, producer.layout.bytes)

    def submit(self, job: Job) -> None:
        self._jobs.append(job)

    def take(self) -> Done:
        return self._producer.run(self._jobs.popleft(), self.slots, 0, self._producer.spec.threads)

    def close(self) -> None:
        self._jobs.clear()
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
    """One decoder process, as the loader sees it."""

    def __init__(self, memory: int, number: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "lfdata.loader.serve", str(theirs.fileno()), str(memory)],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), memory),
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
                process_group=0,
            )
        self.connection, self.receiver, self.number, self.jobs, self.ready = ours, Receiver(ours, Done), number, 0, False

    def lanes(self) -> range:
        return range(self.number * LANES, (self.number + 1) * LANES)

    def end(self) -> None:
        """Close the socket, which ends it; kill it if it does not go."""
        self.connection.close()
        deadline = time.monotonic() + _END_SECONDS
        while self.process.poll() is None and time.monotonic() < deadline:
            # A stopped process does not see that its socket closed.
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGCONT)
            time.sleep(0.001)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


class ProcessEngine:
    """Decoder processes over one piece of shared memory.

    Until the first of them is ready the caller does the jobs itself, so that the first batch does not wait for programs to start.
    """

    def __init__(self, producer: Producer, slots: int, stall_seconds: float, processes: int) -> None:
        # One lane more: the caller's.
        lanes = processes * LANES + 1
        self.slots = Slots(slots, producer.layout.bytes, lanes=lanes)
        self._producer, self._stall = producer, stall_seconds
        self._decoders: list[_Decoder] = []
        self._early: deque[Job] = deque()
        try:
            for number in range(processes):
                self._decoders.append(_Decoder(self.slots.descriptor, number))
            spec = specs.encode(producer.spec)
            for decoder in self._decoders:
                hello = Hello(spec, slots, producer.layout.bytes, lanes, decoder.number)
                with suppress(BrokenPipeError, ConnectionResetError):
                    send(decoder.connection, hello)
        except BaseException:
            self.close()
            raise

    @property
    def processes(self) -> list[int]:
        """Process ids of the decoders."""
        return [decoder.process.pid for decoder in self._decoders]

    def submit(self, job: Job) -> None:
        ready = [decoder for decoder in self._decoders if decoder.ready]
        if not ready:
            self._early.append(job)
            return
        decoder = min(ready, key=lambda one: one.jobs)
        decoder.jobs += 1
        # One that has gone is noticed when its answer is awaited.
        with suppress(BrokenPipeError, ConnectionResetError):
            send(decoder.connection, job)

    def take(self) -> Done:
        deadline = time.monotonic() + self._stall
        while True:
            if (done := self._arrived(0)) is not None:
                return done
            if self._early:
                return self._producer.run(
                    self._early.popleft(), self.slots, len(self.slots.lanes) - 1, self._producer.spec.threads
                )
            if (done := self._arrived(_ASK_SECONDS)) is not None:
                return done
            if time.monotonic() > deadline:
                waiting = [decoder for decoder in self._decoders if decoder.jobs]
                work = "; ".join(self._in_work(decoder) for decoder in waiting)
                who = ", ".join(str(decoder.process.pid) for decoder in waiting)
                raise DecoderError(
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
                    raise DecoderError(self._epitaph(decoder))
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
                decoder.jobs -= 1
                return done
        return None

    def _in_work(self, decoder: _Decoder) -> str:
        return in_work(self.slots, self._producer, decoder.lanes())

    def _epitaph(self, decoder: _Decoder) -> str:
        """How a decoder ended, and what it was doing."""
        with suppress(subprocess.TimeoutExpired):
            decoder.process.wait(_END_SECONDS)
        code = decoder.process.returncode
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
        for decoder in self._decoders:
            decoder.end()
        self._decoders.clear()
        self.slots.close()


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
        epoch, step, steps = int(state[EPOCH]), int(state[STEP]), int(state[STEPS])
        found = producer.plan.work(epoch, step, steps).samples
        shards = dict.fromkeys(
            producer.sources[source].shard_name(index)
            for source, index in zip(found.source.tolist(), found.index.tolist(), strict=True)
        )
        names = ", ".join(list(shards)[:4]) + (f" and {len(shards) - 4} more" if len(shards) > 4 else "")
        told.append(
            f"{PHASES[int(state[PHASE])]} epoch {epoch}, step {step}"
            + (f" to {step + steps - 1}" if steps > 1 else "")
            + f" from {names}"
        )
    return "; ".join(told) or "nothing"
