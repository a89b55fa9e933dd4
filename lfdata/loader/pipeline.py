"""Keeps an engine busy ahead of the consumer, and hands out filled slots in order."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from lfdata.loader.engine import Engine, InlineEngine, ProcessEngine, ThreadEngine
from lfdata.loader.feedback import Feedback, Wanted
from lfdata.loader.fields import plain
from lfdata.loader.jobs import Done, Job
from lfdata.loader.produce import Producer
from lfdata.loader.slots import LANES, Leases, Slots
from lfdata.loader.statistics import Statistics
from lfdata.loader.trace import Trace

# The batch a consumer has, the one it asks for while it still has the other, and one that is being filled meanwhile. More than these are
# only filled while the consumer holds one batch.
FEWEST_SLOTS = 3


@dataclass(slots=True)
class Filled:
    """A slot's arrays: views of it, or copies if the consumer kept too many others."""

    job: Job
    done: Done
    arrays: dict[str, NDArray[Any]]
    copied: bool


class Pipeline:
    """Jobs under way over an engine. ``ahead``: how many at a time; ``lanes``: how many of them are worked on; ``trace``: who is told;
    ``feedback``: what sets the look-ahead."""

    def __init__(
        self, producer: Producer, engine: Engine, ahead: int, lanes: int, trace: Trace | None, feedback: Feedback | None = None
    ) -> None:
        self._producer, self._engine, self._ahead = producer, engine, ahead
        self._leases = Leases(engine.slots)
        self._flying: deque[Job] = deque()
        self._answers: dict[int, Done] = {}
        # Jobs that were asked for and are not wanted any more: their slots come back with their answers.
        self._unwanted: dict[int, int] = {}
        self._number = 0
        self._trace, self.statistics = trace, Statistics(lanes)
        self.feedback = feedback

    @property
    def ahead(self) -> int:
        """Jobs that may be under way at a time."""
        return self._ahead if self.feedback is None else self.feedback.controller.ahead

    @property
    def slots(self) -> Slots:
        """The slots."""
        return self._engine.slots

    def get(self, epoch: int, step: int) -> Filled:
        """The slot that begins with a step, and work on those that follow."""
        if self._flying and (self._flying[0].epoch, self._flying[0].first) != (epoch, step):
            self._drop()
        self._submit(epoch, step)
        began = time.perf_counter()
        while (done := self._engine.poll()) is not None:
            self._keep(done)
        ready, queued = len(self._answers), self.slots.queued()
        while self._flying[0].number not in self._answers:
            self._keep(self._engine.take())
        waited = time.perf_counter() - began
        self.statistics.waited(waited, ready, queued)
        if self._trace is not None:
            self._trace.waited(began, waited, epoch, step, ready, queued)
        job = self._flying.popleft()
        done = self._answers.pop(job.number)
        if self.feedback is not None:
            self.feedback.tick(done, waited, ready)
        if done.failure is not None:
            raise done.failure.error()
        # What can still be filled while this slot is out; if nothing, the batch is copied.
        copied = not (self._leases.free or self._flying or self._unwanted)
        memory: Any = self.slots.slot(job.slot) if copied else self._leases.lend(job.slot)
        arrays = self._arrays(memory, job, done)
        if copied:
            arrays = {name: array.copy() for name, array in arrays.items()}
            self._leases.give(job.slot)
        self._submit(*self._after(job))
        return Filled(job, done, arrays, copied)

    def ready(self, epoch: int, step: int) -> bool:
        """Whether :meth:`get` would not wait for anybody else. Slots that have come back get work. Raises :class:`DecoderError`."""
        if isinstance(self._engine, InlineEngine):
            return True
        while (done := self._engine.poll()) is not None:
            self._keep(done)
        if not self._flying or (self._flying[0].epoch, self._flying[0].first) != (epoch, step):
            return False
        self._submit(epoch, step)
        return self._flying[0].number in self._answers

    def _arrays(self, memory: Any, job: Job, done: Done) -> dict[str, NDArray[Any]]:
        rows, found = job.steps * self._producer.share, {}
        for part in self._producer.parts:
            count = done.used[part.name] if part.by else rows + part.offsets
            found[part.name] = part.place.of(memory)[:count]
        return found

    def _submit(self, epoch: int, step: int) -> None:
        """Jobs from a step on, after those under way. With none under way, one is made sure of."""
        if self._flying:
            epoch, step = self._after(self._flying[-1])
        plan = self._producer.plan
        while len(self._flying) < self.ahead:
            steps = len(plan.batches(epoch))
            if step >= steps:
                return
            slot = self._leases.take()
            while slot is None and not self._flying and self._unwanted:
                self._keep(self._engine.take())
                slot = self._leases.take()
            if slot is None:
                return
            self._number += 1
            job = Job(self._number, epoch, step, min(self._producer.steps, steps - step), slot)
            self._engine.submit(job)
            self._flying.append(job)
            epoch, step = self._after(job)

    def _after(self, job: Job) -> tuple[int, int]:
        """The step after a job's: of the next epoch where that is known without work."""
        plan, step = self._producer.plan, job.first + job.steps
        if step < len(plan.batches(job.epoch)) or plan.packing is not None:
            return job.epoch, step
        return job.epoch + 1, 0

    def _keep(self, done: Done) -> None:
        self.statistics.worked(done, done.steps * self._producer.share)
        if done.number in self._unwanted:
            self._leases.give(self._unwanted.pop(done.number))
            return
        self._answers[done.number] = done
        if self._trace is not None:
            self._trace.worked(next(job for job in self._flying if job.number == done.number), done)

    def _drop(self) -> None:
        for job in self._flying:
            if job.number in self._answers:
                del self._answers[job.number]
                self._leases.give(job.slot)
            else:
                self._unwanted[job.number] = job.slot
        self._flying.clear()

    def close(self) -> None:
        """End the engine, and what watches it."""
        try:
            if self.feedback is not None:
                self.feedback.close()
        finally:
            self._engine.close()


def start(
    producer: Producer,
    kind: str,
    processes: int,
    prefetch: int,
    stall_seconds: float,
    isolate: bool,
    trace: Trace | None,
    feedback: Wanted,
) -> Pipeline:
    """An engine of a kind, under a pipeline."""
    if kind == "auto":
        kind = "inline" if all(plain(filler) for filler in producer.fillers) and not producer.batch_ops else "process"
    ahead = 1 if kind == "inline" else prefetch * processes
    slots = max(FEWEST_SLOTS, ahead + 1)
    if kind == "inline":
        return Pipeline(producer, InlineEngine(producer, slots), ahead, 1, trace)
    if kind == "thread":
        return Pipeline(producer, ThreadEngine(producer, slots, stall_seconds), ahead, LANES, trace)
    engine = ProcessEngine(producer, slots, stall_seconds, processes, isolate)
    watching = None if feedback is False else Feedback(feedback, producer.spec.threads, ahead, processes, engine.slots)
    return Pipeline(producer, engine, ahead, LANES * processes, trace, watching)


def stop(pipelines: list[Pipeline]) -> None:
    """End the pipeline there is, if there is one."""
    while pipelines:
        pipelines.pop().close()
