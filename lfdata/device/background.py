"""A thread that works in the middle of its owner's steps, when those most probably need the interpreter least."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from weakref import WeakMethod

from lfdata.format.forking import watch

# Of the time from one step to the next: when the thread works; when it is too early for that after a step; how often it looks where none came.
WHEN, EARLY, AGAIN = 0.5, 0.25, 0.25
# Seconds between two looks, at least and at most; while nothing is wanted; what closing waits.
SHORTEST, LONGEST, IDLE, CLOSE_SECONDS = 0.0005, 0.05, 0.2, 5.0
# How much the last step counts for the time that one takes.
SMOOTHING = 0.2


log = logging.getLogger("lfdata")


class Background:
    """Has ``work``, a method, called again and again by a thread of its own, never within ``with`` this.

    The owner is not woken up for it, and does not wake it up: it only says when it comes by. The thread ends with :meth:`close`, or once
    nobody has the method's object any more.

    Attributes:
        wanted: whether there is anything to do at present.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = WeakMethod(work)
        # Who holds it may take it again.
        self._lock, self.wanted = threading.RLock(), False
        self._came, self._step = time.perf_counter(), 0.0
        # The last thread, and what ends it: one that does not come to its end soon must not go on with the next one's.
        self._thread: threading.Thread | None = None
        self._end, self._told = threading.Event(), False
        watch(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def came_by(self) -> None:
        """The owner's next step begins, and there is something to do in it."""
        self.wanted = True
        now = time.perf_counter()
        took, self._came = min(now - self._came, 2 * LONGEST), now
        self._step += SMOOTHING * (took - self._step) if self._step else took
        if self._thread is None or not self._thread.is_alive():
            self._start()

    def _start(self) -> None:
        # What it runs must not hold its owner.
        end = threading.Event()
        thread = threading.Thread(target=_run, args=(self, end), name="lfdata-device", daemon=True)
        self._end, self._thread = end, thread
        try:
            thread.start()
        except RuntimeError as error:
            # The system has none left, or the interpreter ends.
            self._thread = None
            if not self._told:
                self._told = True
                log.warning("no thread for batches ahead, which are taken where they are asked for: %s", error)

    def pause(self, seen: float) -> float:
        """Seconds until it is time, 0 if it is. ``seen``: the beginning of the step for which work was done last."""
        if not self.wanted:
            return IDLE
        began, step = self._came, self._step
        since = time.perf_counter() - began
        if began == seen:
            # The next step has not begun. Not looked for before it can be due.
            return min(LONGEST, max(SHORTEST, step * (1 + WHEN) - since, step * AGAIN))
        return 0.0 if since >= EARLY * step else min(LONGEST, max(SHORTEST, WHEN * step - since))

    def turn(self, end: threading.Event) -> bool:
        """One piece of work; false: its owner has gone, or the thread is to end."""
        # Who holds the lock may be waiting for just that: a handler of signals closes the loader.
        while not self._lock.acquire(timeout=LONGEST):
            if end.is_set():
                return False
        try:
            work = self._work()
            if work is None:
                return False
            if self.wanted and not end.is_set():
                work()
        finally:
            self._lock.release()
        return True

    @property
    def came(self) -> float:
        """When the step under way began."""
        return self._came

    def close(self) -> None:
        """End the thread; :meth:`came_by` starts another."""
        thread, self._thread, self.wanted = self._thread, None, False
        self._end.set()
        # A handler of signals may come before the thread begins.
        if thread is not None and thread is not threading.current_thread() and thread.is_alive():
            thread.join(CLOSE_SECONDS)

    def after_fork(self) -> None:
        """The thread is not there, and what it held is held for ever."""
        self._thread, self._end, self.wanted = None, threading.Event(), False
        if self._lock.acquire(blocking=False):
            self._lock.release()
        else:
            self._lock = threading.RLock()


def _run(background: Background, end: threading.Event) -> None:
    seen = 0.0
    while not end.wait(background.pause(seen)):
        # Once more, since the step that was waited for may have begun just now.
        if background.pause(seen) <= SHORTEST or not background.wanted:
            seen = background.came
            if not background.turn(end):
                return
