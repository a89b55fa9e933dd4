"""The trainer's own lane: makes the first batches, ahead of the consumer, while decoder processes start."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from lfdata.errors import text_of
from lfdata.loader.jobs import Done, Failure, Job

# How long ending may take: one job.
END_SECONDS = 5.0


class EarlyLane:
    """A thread that does jobs in turn, until it is retired.

    Args:
        work: does a job.

    Attributes:
        descriptor: can be read (``poll``) when an answer is there.
    """

    def __init__(self, work: Callable[[Job], Done]) -> None:
        self._work = work
        self._waiting: deque[Job] = deque()
        self._answers: deque[Done] = deque()
        self._changed, self._ending = threading.Condition(), False
        self.descriptor, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="lfdata-early", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Have a job done."""
        with self._changed:
            self._waiting.append(job)
            self._changed.notify()

    def take(self) -> Done | None:
        """An answer, if there is one."""
        with suppress(BlockingIOError):
            os.read(self.descriptor, 1)
        return self._answers.popleft() if self._answers else None

    def retire(self) -> list[Job]:
        """Begin no more jobs; gives those that were not begun."""
        with self._changed:
            self._ending, left = True, list(self._waiting)
            self._waiting.clear()
            self._changed.notify()
        return left

    @property
    def over(self) -> bool:
        """Retired, nothing in work, all answers taken."""
        return not self._thread.is_alive() and not self._answers

    def close(self) -> None:
        """Retire, wait for the job in work, and free everything."""
        self.retire()
        self._thread.join(END_SECONDS)
        if not self._thread.is_alive():
            # One that is still at work will tell its answer: its descriptor must not be somebody else's by then.
            os.close(self.descriptor)
            os.close(self._wake)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._ending:
                    self._changed.wait()
                if self._ending:
                    return
                job = self._waiting.popleft()
            try:
                done = self._work(job)
            except BaseException as error:
                done = Done(
                    job.number, 0, failure=Failure.of(RuntimeError(f"{type(error).__name__}: {text_of(error)}"), job.first)
                )
            self._answers.append(done)
            with suppress(BlockingIOError):
                os.write(self._wake, b"\0")
