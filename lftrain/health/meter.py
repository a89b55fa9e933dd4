"""Where a step's time goes, without waiting for the device: marks are clock readings on CPU, events on a GPU that are read later."""

from __future__ import annotations

import itertools
import time
from collections import deque

import torch

PARTS = ("data", "copy", "forward", "backward", "sync", "optimizer", "graph", "other")
# Steps whose events may be outstanding before the host waits for the oldest: the device is never that far behind.
MOST_PENDING = 8


class Meter:
    """Splits steps into :data:`PARTS`. The time since the last mark belongs to the part that is marked.

    ``data`` on a GPU is the time it had nothing to do between two steps: what the host waited for the loader less what the device was
    still busy with.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self.paused = False  # while a graph is captured, no clock may be read
        self._last = time.perf_counter()
        self._parts: dict[str, float] = {}
        self._marks: list[tuple[str, torch.cuda.Event]] = []
        self._end: torch.cuda.Event | None = None
        self._free: list[torch.cuda.Event] = []
        self._pending: deque[list[tuple[str, torch.cuda.Event]]] = deque()
        self._done: deque[dict[str, float]] = deque()

    def begin(self) -> None:
        """A step begins; time since the last one's end is left out until the first mark."""
        self._last = time.perf_counter()
        self._parts = {}
        if self._cuda:
            self._marks = [("", self._end if self._end is not None else self._event())]
            self._end = None

    def mark(self, part: str) -> None:
        """What was done since the last mark was ``part``. Callable from the threads that run backward passes and hooks."""
        if self.paused:
            return
        if self._cuda:
            self._marks.append((part, self._event()))
            return
        now = time.perf_counter()
        self._parts[part] = self._parts.get(part, 0.0) + now - self._last
        self._last = now

    def end(self) -> None:
        """The step is over; its times come out of :meth:`take`, on a GPU later."""
        self.mark("other")
        if self._cuda:
            self._pending.append(self._marks)
            self._end = self._event()
            self._collect()
        else:
            self._done.append({part: 1e3 * seconds for part, seconds in self._parts.items()})

    def interrupt(self) -> None:
        """Something else was done after a step (an evaluation, a checkpoint): its time is nobody's."""
        self._end = None

    def take(self) -> list[dict[str, float]]:
        """Milliseconds by part of the steps that are known by now, oldest first."""
        self._collect()
        found = list(self._done)
        self._done.clear()
        return found

    def _event(self) -> torch.cuda.Event:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _collect(self) -> None:
        while self._pending:
            marks = self._pending[0]
            if len(self._pending) > MOST_PENDING:
                marks[-1][1].synchronize()
            if not marks[-1][1].query():
                return
            parts: dict[str, float] = {}
            for (_, before), (part, after) in itertools.pairwise(marks):
                parts[part] = parts.get(part, 0.0) + before.elapsed_time(after)
            self._done.append(parts)
            self._free += [event for _, event in marks]
            self._pending.popleft()
