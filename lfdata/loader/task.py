"""A job on its way through the stages of work, which different lanes may do."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Generator

import msgspec

from lfdata.loader.jobs import Done, Job
from lfdata.loader.lane import Lane
from lfdata.loader.slots import IDLE, Slots
from lfdata.loader.spans import Spans
from lfdata.schedule.work import Class

Stages = Generator[Class, None, Done]
"""Work that stops between its stages and gives the class of the next; at last the answer."""


class Task:
    """A job that has begun. One lane at a time may work on it.

    Args:
        job: what is asked.
        slots: where it goes.
        threads: that native parts may use.
        given_up: see :class:`lfdata.loader.spans.Spans`.
    """

    def __init__(self, job: Job, slots: Slots, threads: int, given_up: Callable[[], bool] | None = None) -> None:
        self.job, self._slots = job, slots
        self.lane = Lane(slots.lanes[0], threads, Spans(given_up), job)
        self.stages: Stages | None = None
        self._seconds = 0.0

    def advance(self, lane: int) -> Class | Done:
        """Do the next stage, as a lane: gives the class of the one after it, or the answer."""
        assert self.stages is not None
        began = time.perf_counter()
        self.lane.move(self._slots.lanes[lane], lane)
        try:
            return next(self.stages)
        except StopIteration as end:
            done: Done = end.value
        finally:
            self.lane.phase(IDLE)
            self._seconds += time.perf_counter() - began
        return msgspec.structs.replace(
            done,
            spans=tuple(self.lane.spans.found),
            seconds=self._seconds,
            decoding=self.lane.spans.decoding,
            process=os.getpid(),
            faults=resource.getrusage(resource.RUSAGE_SELF).ru_minflt,
        )

    def finish(self, lane: int) -> Done:
        """Do all that is left, as one lane."""
        while not isinstance(found := self.advance(lane), Done):
            pass
        return found
