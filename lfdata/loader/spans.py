"""Where the time of a job goes: spans of its stages, told with its answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STAGES = ("plan", "read", "decode", "augment", "mix")
PLAN, READ, DECODE, AUGMENT, MIX = range(5)


class GivenUp(Exception):
    """Nobody waits for a job any more."""


class Spans:
    """The stages of one job, as they come. ``given_up``: asked now and then; the job ends when it says so."""

    def __init__(self, given_up: Callable[[], bool] | None = None) -> None:
        self.found: list[tuple[int, float, float, int]] = []
        self.decoding, self.lane = 0.0, 0
        self.given_up = given_up

    def check(self) -> None:
        """Raise :class:`GivenUp` if it is so."""
        if self.given_up is not None and self.given_up():
            raise GivenUp

    def work(self, seconds: float) -> None:
        """Threads decoded so long, all together."""
        self.decoding += seconds

    @contextmanager
    def stage(self, number: int) -> Iterator[None]:
        """Stage, beginning (``time.perf_counter``), seconds and lane of what is done within."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.found.append((number, begin, time.perf_counter() - begin, self.lane))
