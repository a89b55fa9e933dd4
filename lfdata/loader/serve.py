"""The decoder process: ``python -m lfdata.loader.serve SOCKET MEMORY HELLO NUMBER`` (three inherited descriptors). Never imports torch."""

from __future__ import annotations

import ctypes
import gc
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from lfdata.codecs.pixels import watch_width
from lfdata.errors import text_of
from lfdata.loader import spec as specs
from lfdata.loader.jobs import STARTED, Done, Failure, Job
from lfdata.loader.produce import Producer
from lfdata.loader.slots import DEPTH, LANES, Slots
from lfdata.loader.task import Task
from lfdata.loader.wire import Receiver, send, unpack
from lfdata.schedule.work import Class, WorkQueue

# How long ending may take.
END_SECONDS = 5.0
# From so many bytes on memory is got from the system and given back to it: in a heap, it would grow in pieces that do not fit each other.
LARGE = 1 << 20
# How often the decoder looks whether the trainer lives.
LOOK_SECONDS = 1.0


class Lanes:
    """Threads that do jobs, stage by stage, in the order of a :class:`WorkQueue`: while one plans, reads or augments, another decodes."""

    def __init__(self, producer: Producer, slots: Slots, deliver: Callable[[Done], None], first_lane: int = 0) -> None:
        self._producer, self._slots, self._deliver = producer, slots, deliver
        self._depths, self._first = [0] * len(Class), first_lane
        self._work: WorkQueue[Task] = WorkQueue(self._tell)
        self._threads = [
            threading.Thread(target=self._run, args=(first_lane + number,), name=f"lfdata-lane-{number}", daemon=True)
            for number in range(LANES)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> None:
        """Have a job done. Jobs are numbered in the order in which they are needed."""
        self._work.open(job.number)
        self._work.put(self._producer.task(job, self._slots, self._producer.spec.threads), Class.DECODE, job.number)

    def _tell(self, kind: int, count: int) -> None:
        """How much work waits, for the loader's statistics."""
        self._depths[kind] = count
        decode, *rest = self._depths
        self._slots.lanes[self._first, DEPTH], self._slots.lanes[self._first + 1, DEPTH] = decode, sum(rest)

    def close(self) -> None:
        """Drop what waits, finish the stages in work, and end. A thread that does not come back is left to itself."""
        self._work.close()
        deadline = time.monotonic() + END_SECONDS
        for thread in self._threads:
            # The garbage collector may close an engine in one of its own threads.
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self, lane: int) -> None:
        while (task := self._work.take()) is not None:
            job = task.job
            try:
                # After a crash the cause of the next must be known: nothing else goes on beside such a job.
                found = self._producer.run(job, self._slots, lane, task.lane.threads) if job.alone else task.advance(lane)
            except BaseException as error:
                # A user's function that calls sys.exit() must not end a lane without an answer.
                found = Done(
                    job.number, 0, failure=Failure.of(RuntimeError(f"{type(error).__name__}: {text_of(error)}"), job.first)
                )
            if isinstance(found, Done):
                self._work.done(job.number)
                self._deliver(found)
            else:
                self._work.put(task, found, job.number)


def keep_memory() -> None:
    """Have the C library keep what is freed: buffers of a batch come again with the next. Large ones are kept by those who use them."""
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        trim, mmap_threshold = -1, -3
        libc.mallopt(mmap_threshold, LARGE)
        libc.mallopt(trim, 1 << 30)


def step_back() -> None:
    """A decoder that has got work does not take the processor from the trainer that gave it: it waits for a free one, or for its turn."""
    with suppress(OSError, AttributeError):
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def main(arguments: list[str]) -> None:
    """Serve until the other end closes the socket."""
    # The trainer decides when to end; Ctrl-C is for it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    keep_memory()
    step_back()
    connection = socket.socket(fileno=int(arguments[0]))
    memory, greeting, number = map(int, arguments[1:])
    lock = threading.Lock()

    def deliver(done: Done) -> None:
        with lock, suppress(OSError):
            try:
                send(connection, done)
            except Exception as error:
                if isinstance(error, OSError):
                    raise
                # A message that cannot travel: say so, in its place.
                send(connection, Done(done.number, 0, failure=Failure.of(error, 0)))

    try:
        hello = unpack(os.pread(greeting, os.fstat(greeting).st_size, 0))
        os.close(greeting)
        sys.path[:] = map(os.fsdecode, hello.path)
        producer = Producer(specs.decode(hello.spec))
        slots = Slots(hello.slots, hello.slot_bytes, memory, hello.lanes)
        watch_width(slots.width)
    except Exception as error:
        deliver(Done(STARTED, 0, failure=Failure.of(error, 0)))
        return
    # What is there now stays: the garbage collector need not look through it again and again.
    gc.freeze()
    deliver(Done(STARTED, 0))
    lanes = Lanes(producer, slots, deliver, number * LANES)
    if producer.spec.exact and not number:
        # Slots that are no larger than what comes: all of them will be filled.
        threading.Thread(target=slots.touch, name="lfdata-touch", daemon=True).start()
    jobs = Receiver(connection, Job)
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    while True:
        if not jobs.ready() and not poll.poll(LOOK_SECONDS * 1000):
            # A child that the trainer forked keeps the socket open when the trainer is killed.
            if os.getppid() != hello.trainer:
                break
            continue
        if (job := jobs.next()) is None:
            break
        lanes.submit(job)
    # The trainer is gone, or done with us. Lanes may be deep in native code: do not wait for them.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
