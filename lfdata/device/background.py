"""A thread that works in the middle of its owner's steps, when those most probably need the interpreter least."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from weakref import WeakMethod

# Of the time from one step to the next: when the thread works; when it is too early for that after a step; how often it looks where none came.
WHEN, EARLY, AGAIN = 0.5, 0.25, 0.25
# Seconds between two looks, at least and at most; while nothing is wanted; what closing waits.
SHORTEST, LONGEST, IDLE, CLOSE_SECONDS = 0.0005, 0.05, 0.2, 5.0
# How much the last step counts for the time that one takes.
SMOOTHING = 0.2


class Background:
    """Has ``work``, a method, called again and again by a thread of its own, never while somebody holds :attr:`lock`.

    The owner is not woken up for it, and does not wake it up: it only says when it comes by. The thread ends with :meth:`close`, or once
    nobody has the method's object any more.

    Attributes:
        lock: of what the work changes; who holds it may take it again.
        wanted: whether there is anything to do at present.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = WeakMethod(work)
        self.lock, self.wanted = threading.RLock(), False
        self._came, self._step = time.perf_counter(), 0.0
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def came_by(self) -> None:
        """The owner's next step begins, and there is something to do in it."""
        self.wanted = True
        now = time.perf_counter()
        took, self._came = now - self._came, now
        self._step += SMOOTHING * (min(took, 2 * LONGEST) - self._step) if self._step else took
        if self._thread is None:
            self._end.clear()
            # What it runs must not hold its owner.
            self._thread = threading.Thread(target=_run, args=(self,), name="lfdata-device", daemon=True)
            self._thread.start()

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

    def turn(self) -> bool:
        """One piece of work; false: its owner has gone."""
        with self.lock:
            work = self._work()
            if work is None:
                return False
            if self.wanted and not self._end.is_set():
                work()
        return True

    def over(self, seconds: float) -> bool:
        """Whether the thread is to end within some seconds."""
        return self._end.wait(seconds)

    @property
    def came(self) -> float:
        """When the step under way began."""
        return self._came

    def close(self) -> None:
        """End the thread; :meth:`came_by` starts another."""
        thread, self._thread, self.wanted = self._thread, None, False
        self._end.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(CLOSE_SECONDS)


def _run(background: Background) -> None:
    seen = 0.0
    while not background.over(background.pause(seen)):
        # Once more, since the step that was waited for may have begun just now.
        if background.pause(seen) <= SHORTEST or not background.wanted:
            seen = background.came
            if not background.turn():
                return
