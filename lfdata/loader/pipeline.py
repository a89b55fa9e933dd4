"""Keeps an engine busy ahead of the consumer, and hands out filled slots in order."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from lfdata.errors import LfdataError
from lfdata.loader.budget import FEWEST_SLOTS, Budget, Reserved
from lfdata.loader.decoder import uninterrupted
from lfdata.loader.engine import Engine, InlineEngine, ProcessEngine, ThreadEngine
from lfdata.loader.feedback import Feedback, Watching
from lfdata.loader.fields import plain
from lfdata.loader.jobs import Done, Job
from lfdata.loader.places import at
from lfdata.loader.produce import Producer
from lfdata.loader.slots import LANES, Leases, Slots
from lfdata.loader.statistics import Statistics
from lfdata.loader.trace import Trace
from lfdata.loader.turn import CLOSE_SECONDS, ENDED, Turn

# How often a thread that is at work on a batch is told of closing.
TELL_SECONDS = 0.1


@dataclass(slots=True)
class Filled:
    """A slot's arrays: views of it, or copies if the consumer kept too many others."""

    job: Job
    done: Done
    arrays: dict[str, NDArray[Any]]
    copied: bool


class Pipeline:
    """Jobs under way over an engine. ``ahead``: how many at a time; ``lanes``: how many of them are worked on; ``trace``: who is told;
    ``feedback``: what sets the look-ahead; ``budget``: with what is reserved, if there is one."""

    def __init__(
        self,
        producer: Producer,
        engine: Engine,
        ahead: int,
        lanes: int,
        trace: Trace | None,
        feedback: Feedback | None = None,
        budget: tuple[Budget, Reserved] | None = None,
    ) -> None:
        self._producer, self._engine, self._ahead = producer, engine, ahead
        self._leases = Leases(engine.slots)
        self._flying: deque[Job] = deque()
        self._answers: dict[int, Done] = {}
        # Jobs that were asked for and are not wanted any more: their slots come back with their answers.
        self._unwanted: dict[int, Job] = {}
        self._number = 0
        self._trace, self.statistics = trace, Statistics(lanes)
        self.feedback, self._budget = feedback, budget
        self._fits: dict[int, bool] = {}
        self.awaited = self.given_up = False

    @property
    def steps(self) -> int:
        """Steps of a slot, at most."""
        return self._producer.steps if self._budget is None else self._budget[1].steps

    def fits(self, epoch: int) -> bool:
        """Whether the steps of an epoch fit into the slots there are."""
        if self._budget is None:
            return True
        if epoch not in self._fits:
            budget, reserved = self._budget
            self._fits = {epoch - 1: self._fits.get(epoch - 1, False), epoch: budget.fits(epoch, reserved)}
        return self._fits[epoch]

    @property
    def reserved(self) -> Reserved:
        """The slots there are."""
        return Reserved(self.slots.count, self.slots.size, self.steps)

    @property
    def ahead(self) -> int:
        """Jobs that may be under way at a time."""
        return self._ahead if self.feedback is None else self.feedback.controller.ahead

    @property
    def slots(self) -> Slots:
        """The slots."""
        return self._engine.slots

    def give_up(self) -> None:
        """Have the thread that awaits a slot raise soon; nothing is closed."""
        self.given_up = True
        self._engine.give_up()

    def get(self, epoch: int, step: int, row: int = 0) -> Filled:
        """The slot that begins with a step, or with a row of it, and work on those that follow.

        Raises:
            LfdataError: :meth:`give_up` was called meanwhile.
        """
        self.awaited = True
        try:
            filled = self._get(epoch, step, row)
        finally:
            self.awaited = False
        if self.given_up:
            raise LfdataError(ENDED)
        return filled

    def _get(self, epoch: int, step: int, row: int) -> Filled:
        if self._flying and _begin(self._flying[0]) != (epoch, step, row):
            self._drop()
        self._submit(epoch, step, row)
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

    def ready(self, epoch: int, step: int, row: int = 0) -> bool:
        """Whether :meth:`get` would not wait for anybody else. Slots that have come back get work. Raises :class:`DecoderError`."""
        if isinstance(self._engine, InlineEngine):
            return True
        if not self._flying or self._flying[0].number not in self._answers:
            while (done := self._engine.poll()) is not None:
                self._keep(done)
        if not self._flying or _begin(self._flying[0]) != (epoch, step, row):
            return False
        self._submit(epoch, step, row)
        return self._flying[0].number in self._answers

    def _arrays(self, memory: Any, job: Job, done: Done) -> dict[str, NDArray[Any]]:
        if done.at:
            places = at(self._producer.parts, done.at, self._rows(job, done), done.used)
            return {name: place.of(memory) for name, place in places}
        rows, found = job.steps * self._producer.share, {}
        for part in self._producer.parts:
            count = done.used[part.name] if part.by else rows + part.offsets
            found[part.name] = part.place.of(memory)[:count]
        return found

    def _rows(self, job: Job, done: Done) -> int:
        return done.steps * self._producer.share if job.rows is None else job.rows[1] - job.rows[0]

    def _submit(self, epoch: int, step: int, row: int = 0) -> None:
        """Jobs from a step on, after those under way. With none under way, one is made sure of."""
        if self._flying:
            epoch, step, row = self._after(self._flying[-1])
        plan = self._producer.plan
        while len(self._flying) < self.ahead:
            if step >= len(plan.batches(epoch)):
                return
            slot = self._leases.take()
            while slot is None and not self._flying and self._unwanted:
                self._keep(self._engine.take())
                slot = self._leases.take()
            if slot is None:
                return
            self._number += 1
            job = self._job(epoch, step, row, slot)
            self._engine.submit(job)
            self._flying.append(job)
            epoch, step, row = self._after(job)

    def _job(self, epoch: int, step: int, row: int, slot: int) -> Job:
        steps = min(self.steps, len(self._producer.plan.batches(epoch)) - step)
        if self._budget is None:
            return Job(self._number, epoch, step, steps, slot)
        found = self._budget[0].epoch(epoch)
        for piece in found.cut.get(step, ()):
            if piece.low == row:
                rows, part = (piece.low, piece.high), (piece.part, piece.parts)
                return Job(self._number, epoch, step, 1, slot, rows=rows, part=part)
        return Job(self._number, epoch, step, found.whole_from(step, steps), slot)

    def _after(self, job: Job) -> tuple[int, int, int]:
        """The step after a job's, or the next row of its own: of the next epoch where that is known without work and has room."""
        if job.rows is not None and job.rows[1] < self._producer.share:
            return job.epoch, job.first, job.rows[1]
        plan, step = self._producer.plan, job.first + job.steps
        if step < len(plan.batches(job.epoch)) or plan.packing is not None or not self.fits(job.epoch + 1):
            return job.epoch, step, 0
        return job.epoch + 1, 0, 0

    def _keep(self, done: Done) -> None:
        unwanted = self._unwanted.pop(done.number, None)
        job = unwanted or next(job for job in self._flying if job.number == done.number)
        self.statistics.worked(job, done, self._rows(job, done) if done.steps else 0)
        if unwanted is not None:
            self._leases.give(job.slot)
            return
        self._answers[done.number] = done
        if self._trace is not None:
            self._trace.worked(job, done)

    def _drop(self) -> None:
        for job in self._flying:
            if job.number in self._answers:
                del self._answers[job.number]
                self._leases.give(job.slot)
            else:
                self._unwanted[job.number] = job
        self._flying.clear()

    def close(self) -> None:
        """End the engine, and what watches it."""
        try:
            if self.feedback is not None:
                self.feedback.close()
        finally:
            self._engine.close()
            if self._budget is not None:
                self._leases.discard([job.slot for job in (*self._flying, *self._unwanted.values())])


def _begin(job: Job) -> tuple[int, int, int]:
    return job.epoch, job.first, 0 if job.rows is None else job.rows[0]


def reserve(
    producer: Producer, kind: str, processes: int, prefetch: int, budget: Budget | None, epoch: int
) -> tuple[str, int, Reserved]:
    """What :func:`start` does: the engine's kind, jobs under way at a time, slots. Raises :class:`LimitError`: beyond the budget."""
    if kind == "auto":
        kind = "inline" if all(plain(filler) for filler in producer.fillers) and not producer.batch_ops else "process"
    ahead = 1 if kind == "inline" else prefetch * processes
    slots = max(FEWEST_SLOTS, ahead + 1)
    if budget is None:
        return kind, ahead, Reserved(slots, producer.layout.bytes, producer.steps)
    found = budget.reserve(epoch, slots)
    return kind, min(ahead, found.slots - 1), found


def start(
    producer: Producer,
    kind: str,
    processes: int,
    prefetch: int,
    stall_seconds: float,
    isolate: bool,
    trace: Trace | None,
    feedback: Watching,
    budget: Budget | None = None,
    epoch: int = 0,
) -> Pipeline:
    """An engine of a kind, under a pipeline; within a budget with slots for an epoch."""
    kind, ahead, reserved = reserve(producer, kind, processes, prefetch, budget, epoch)
    slots, size, within = reserved.slots, reserved.size, None if budget is None else (budget, reserved)
    if kind == "inline":
        return Pipeline(producer, InlineEngine(producer, slots, size), ahead, 1, trace, budget=within)
    if kind == "thread":
        return Pipeline(producer, ThreadEngine(producer, slots, size, stall_seconds), ahead, LANES, trace, budget=within)
    engine = ProcessEngine(producer, slots, size, stall_seconds, processes, isolate)
    watching = None if feedback is False else Feedback(feedback, producer.spec.threads, ahead, processes, engine.slots)
    return Pipeline(producer, engine, ahead, LANES * processes, trace, watching, within)


def stop(pipelines: list[Pipeline]) -> None:
    """End the pipeline there is, if there is one."""
    while pipelines:
        pipeline = pipelines.pop()
        try:
            pipeline.close()
        except BaseException:
            # Interrupted: what is half closed would never be. What takes time is over.
            with uninterrupted():
                pipeline.close()
            raise


def stop_in_turn(pipelines: list[Pipeline], turn: Turn) -> None:
    """The same while another thread may be awaiting a slot: it is told, and nothing is closed under its feet.

    One that does not come back within :data:`CLOSE_SECONDS`, or that a handler of signals has interrupted, ends the pipeline after that slot.
    """
    deadline = time.monotonic() + CLOSE_SECONDS
    while not turn.take(TELL_SECONDS):
        for pipeline in list(pipelines):
            pipeline.give_up()
        if time.monotonic() >= deadline:
            return
    try:
        if pipelines and pipelines[0].awaited:
            pipelines[0].give_up()
        else:
            stop(pipelines)
    finally:
        turn.over()
