"""The decoder process: ``python -m lfdata.loader.serve SOCKET MEMORY`` (two inherited descriptors). Never imports torch."""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from lfdata.loader import spec as specs
from lfdata.loader.produce import STARTED, Done, Failure, Job, Producer
from lfdata.loader.slots import LANES, Slots
from lfdata.loader.wire import Hello, Receiver, send


class Lanes:
    """Threads that take jobs in turn: while one plans and reads, another decodes."""

    def __init__(self, producer: Producer, slots: Slots, deliver: Callable[[Done], None], first_lane: int = 0) -> None:
        self._producer, self._slots, self._deliver = producer, slots, deliver
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, args=(first_lane + number,), name=f"lfdata-lane-{number}", daemon=True)
            for number in range(LANES)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> None:
        """Have a job done."""
        self._jobs.put(job)

    def close(self) -> None:
        """Finish what is in work, and end."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self, lane: int) -> None:
        while (job := self._jobs.get()) is not None:
            self._deliver(self._producer.run(job, self._slots, lane, self._producer.spec.threads))


def keep_memory() -> None:
    """Have the C library keep what is freed: buffers of a batch come again with the next."""
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        trim, mmap_threshold = -1, -3
        libc.mallopt(mmap_threshold, 1 << 30)
        libc.mallopt(trim, 1 << 30)


def main(arguments: list[str]) -> None:
    """Serve until the other end closes the socket."""
    # The trainer decides when to end; Ctrl-C is for it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    keep_memory()
    connection = socket.socket(fileno=int(arguments[0]))
    greeting = Receiver(connection, Hello)
    hello = greeting.next()
    if hello is None:
        return
    lock = threading.Lock()

    def deliver(done: Any) -> None:
        with lock, suppress(OSError):
            send(connection, done)

    try:
        producer = Producer(specs.decode(hello.spec))
        slots = Slots(hello.slots, hello.slot_bytes, int(arguments[1]), hello.lanes)
    except Exception as error:
        deliver(Done(STARTED, 0, failure=Failure.of(error, 0)))
        return
    deliver(Done(STARTED, 0))
    lanes = Lanes(producer, slots, deliver, hello.decoder * LANES)
    jobs = greeting.of(Job)
    while (job := jobs.next()) is not None:
        lanes.submit(job)
    # The trainer is gone, or done with us. Lanes may be deep in native code: do not wait for them.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
