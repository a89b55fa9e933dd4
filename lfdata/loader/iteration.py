"""Where the iteration over a loader is, and the batches from there."""

from __future__ import annotations

import logging
import os
import weakref
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any

from numpy.typing import NDArray

from lfdata.errors import BadSamplesError, LfdataError
from lfdata.loader.batch import Names, cut
from lfdata.loader.budget import Budget
from lfdata.loader.decoder import uninterrupted
from lfdata.loader.feedback import Watching
from lfdata.loader.jobs import Event
from lfdata.loader.pipeline import Pipeline, start, stop
from lfdata.loader.produce import Producer
from lfdata.loader.statistics import Statistics
from lfdata.loader.trace import Trace
from lfdata.loader.turn import Batches, Turn

MOST_EVENTS = 1000
# The rate of bad samples means nothing before this many rows.
FEWEST_ROWS = 1000
log = logging.getLogger("lfdata")


class Iteration:
    """Of a :class:`lfdata.Loader`: epochs, batches, the pipeline that makes them, bad samples met."""

    # Of the engine: kind, processes, prefetch, stall_seconds, isolate, trace, feedback.
    _options: tuple[str, int, int, float, bool, Trace | None, Watching]

    def __init__(self, producer: Producer, accumulate: int, budget: Budget | None, make: Callable[[NDArray[Any]], Any]) -> None:
        self._spec, self._producer, self._accumulate, self._budget = producer.spec, producer, accumulate, budget
        # Where batches are cut, if they may be.
        self._cuts = budget if producer.spec.parts else None
        self._names, self._make = Names(producer.parts), make
        self._pipelines: list[Pipeline] = []
        weakref.finalize(self, stop, self._pipelines)
        # Of the engine that was started last.
        self._statistics = Statistics(1)
        self._owner, self._turn = os.getpid(), Turn()
        self._epoch, self._done, self._loaded, self._generation = 0, 0, False, 0
        self._bad, self._rows, self._copied = 0, 0, 0
        # The GPU that somebody copies the batches to.
        self._gpu: int | None = None
        # Batches that the slot handed out last still has.
        self._left = 0
        self._events: deque[Event] = deque(maxlen=MOST_EVENTS)

    def __len__(self) -> int:
        """Batches of the epoch, parts counted; the same on every rank."""
        return self._length(self._epoch)

    def _length(self, epoch: int) -> int:
        if self._cuts is not None:
            return self._cuts.epoch(epoch).batches
        return len(self._producer.plan.batches(epoch)) * self._accumulate

    def __iter__(self) -> Batches:
        """One epoch: from a loaded state on if one was loaded since, from its start otherwise; the next one if all batches of this one were
        taken. Ends any iteration that is under way."""
        if self._loaded:
            self._move(self._epoch, self._done, loaded=True)
        elif self._done and self._done >= len(self) > 0:
            self._move(self._epoch + 1, 0, loaded=False)
        else:
            self._move(self._epoch, 0, loaded=False)
        return Batches(self._iterate(self._generation), self._turn)

    def _move(self, epoch: int, done: int, loaded: bool) -> None:
        self._epoch, self._done, self._loaded = epoch, done, loaded
        self._generation, self._left = self._generation + 1, 0
        self._turn.move()

    def _iterate(self, generation: int) -> Generator[dict[str, Any]]:
        epoch, total = self._epoch, len(self)
        try:
            if self._budget is not None:
                self._budget.epoch(epoch)
            while self._done < total and generation == self._generation:
                step, micro = self._where(epoch, self._done)
                for batch in self._batches(epoch, step, micro):
                    if generation != self._generation:
                        break
                    self._done += 1
                    # A state that was loaded is used up with its first batch, not by asking for an iterator.
                    self._loaded = False
                    yield batch
            if generation == self._generation:
                self._move(epoch + 1, 0, loaded=False)
                generation = self._generation
            else:
                self._turn.ended()
        except GeneratorExit:
            # A consumer that counts batches leaves after the last one: that epoch is over, and the next one comes.
            if generation == self._generation:
                if self._done < total:
                    stop(self._pipelines)
                else:
                    self._move(epoch + 1, 0, loaded=False)
            raise
        except BaseException:
            # Broken off by a signal or a failure. Nothing stays.
            if generation == self._generation:
                stop(self._pipelines)
            raise

    def _where(self, epoch: int, done: int) -> tuple[int, int]:
        """The step of the batch after so many, and its number there."""
        return divmod(done, self._accumulate) if self._cuts is None else self._cuts.epoch(epoch).where(done)

    def _row(self, epoch: int, step: int, number: int) -> int:
        """With which row of a step the slot of one of its batches begins."""
        pieces = () if self._cuts is None else self._cuts.epoch(epoch).cut.get(step, ())
        return pieces[number].low if pieces else 0

    def _batches(self, epoch: int, step: int, micro: int) -> Generator[dict[str, Any]]:
        """The batches of the slot that begins with a step, from a micro-batch on."""
        if os.getpid() != self._owner:
            raise LfdataError("a Loader cannot be used in a process forked from the one that made it: make one there")
        if self._pipelines and not self._pipelines[0].fits(epoch):
            stop(self._pipelines)
        if not self._pipelines:
            with uninterrupted():
                self._pipelines.append(start(self._producer, *self._options, self._budget, epoch))
            self._statistics = self._pipelines[0].statistics
            if (watching := self._pipelines[0].feedback) is not None:
                watching.device = self._gpu
        pipeline = self._pipelines[0]
        try:
            filled = pipeline.get(epoch, step, self._row(epoch, step, micro))
        finally:
            if pipeline.given_up:
                stop(self._pipelines)
        self._copied += filled.copied
        if filled.job.rows is not None:
            rows, self._left = filled.job.rows[1] - filled.job.rows[0], 0
            self._rows += rows
            self._note(filled.done.events)
            yield cut(filled.arrays, self._names, 0, rows, self._make)
            return
        # Fewer steps than the job has if the next one has failed: it is asked for again then, and raises.
        accumulate, arrays, names = self._accumulate, filled.arrays, self._names
        share, count = self._producer.share // accumulate, filled.done.steps * accumulate
        noted = -1
        for number in range(micro, count):
            if number // accumulate != noted:
                noted = number // accumulate
                self._rows += self._producer.share
                if filled.done.events:
                    at = self._producer.plan.step(step + noted)
                    self._note([event for event in filled.done.events if event.step == at])
            self._left = count - number - 1
            yield cut(arrays, names, number * share, (number + 1) * share, self._make)

    def _note(self, events: Sequence[Event]) -> None:
        """A step's bad samples, and whether there are too many by now."""
        self._bad += len(events)
        self._events.extend(events)
        for event in events:
            log.warning("%s: %s: %s", event.place, event.reason, event.action)
        limits = self._spec.bad
        if events and (self._bad > limits.most or self._bad > limits.rate * max(self._rows, FEWEST_ROWS)):
            raise BadSamplesError(
                f"{self._bad} bad samples in {self._rows} rows; the limits are {limits.most} (most_bad) and {limits.rate:g} of the rows "
                f"(most_bad_rate). The last: {events[-1].place}: {events[-1].reason}"
            )
