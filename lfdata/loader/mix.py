"""MixUp, CutMix, Mosaic over the global batch, after its rows have been decoded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import lfdata.transforms as T
from lfdata.loader.fields import make_filler
from lfdata.loader.jobs import Job
from lfdata.loader.lane import MASKED, BadRow, Lane
from lfdata.loader.plan import Work
from lfdata.loader.slots import Layout
from lfdata.loader.spans import Spans
from lfdata.order.draws import uniform

if TYPE_CHECKING:
    from lfdata.loader.produce import Producer


class Mixer:
    """Mixes a producer's rows."""

    def __init__(self, producer: Producer) -> None:
        self._producer = producer

    def mix(self, job: Job, work: Work, arrays: dict[str, NDArray[Any]], bad: NDArray[np.bool_], lane: Lane) -> None:
        """MixUp, CutMix, Mosaic: partners by global position; those of other ranks are decoded here too.

        A row whose partner is bad has itself as its partner, and so has a bad row (``bad``): nothing of a bad sample reaches a good one.
        """
        first, stop = self._producer.plan.batches(job.epoch).rows(self._producer.spec.rank, self._producer.spec.world)
        for number, op in enumerate(self._producer.batch_ops):
            for step in range(job.steps):
                here = slice(step * self._producer.share, (step + 1) * self._producer.share)
                at = self._producer.plan.step(job.first + step)
                partners = T.partners(
                    op, self._producer.spec.seed, job.epoch, at, np.arange(first, stop), self._producer.spec.batch
                )
                own = {name: arrays[name][here] for name in (op.field, *op.labels)}
                kept = self._partners(job, job.first + step, partners, own, bad[here], lane)
                found = work.samples.take(here)
                name = f"batch/{number}/{type(op).__name__}"
                draws = uniform(self._producer.spec.seed, found.epoch, found.index, found.occurrence, name, op.draws)
                for extra, values in op.apply(own[op.field], kept[op.field], draws).items():
                    arrays[f"{op.field}.{extra}"][here] = values
                for label in op.labels:
                    arrays[f"{label}.partner"][here] = kept[label]

    def _partners(
        self,
        job: Job,
        step: int,
        partners: NDArray[np.int64],
        own: dict[str, NDArray[Any]],
        bad: NDArray[np.bool_],
        lane: Lane,
    ) -> dict[str, NDArray[Any]]:
        """Partners' arrays, (rows, partners, ...): this rank's rows are there, those of other ranks are decoded as they are there."""
        first, stop = self._producer.plan.batches(job.epoch).rows(self._producer.spec.rank, self._producer.spec.world)
        outside = (partners < first) | (partners >= stop)
        inside = np.clip(partners - first, 0, len(bad) - 1)
        kept = {name: mine[inside] for name, mine in own.items()}
        wrong = bad[inside] & ~outside
        others = np.unique(partners[outside])
        if len(others):
            foreign, foreign_bad = self._foreign(job, step, others, lane)
            at = np.searchsorted(others, partners[outside])
            wrong[outside] = foreign_bad[at]
            for name in own:
                kept[name][outside] = foreign[name][at]
        wrong |= bad[:, None]
        for name, mine in own.items():
            kept[name][wrong] = mine[np.nonzero(wrong)[0]]
        return kept

    def _foreign(
        self, job: Job, step: int, rows: NDArray[np.int64], lane: Lane
    ) -> tuple[dict[str, NDArray[Any]], NDArray[np.bool_]]:
        """Rows of other ranks, in memory of their own, and which of them are bad. All fields: a bad one is replaced as its rank does it."""
        layout, parts = Layout(), []
        repeats = self._producer.plan.repeats
        fillers = [
            make_filler(self._producer.sources, name, ops, len(rows), self._producer.spec.native, repeats)
            for name, ops in self._producer.ops.items()
        ]
        for filler in fillers:
            filler.declare(layout)
            parts += filler.parts
        memory = bytearray(layout.bytes)
        arrays = {part.name: part.place.of(memory) for part in parts}
        work, status = self._producer.plan.rows_of(job.epoch, step, rows), np.empty(len(rows), np.uint8)
        try:
            # At once, whatever stages it has; its time is in the span of mixing.
            for _ in self._producer.decode(
                job, work, fillers, arrays, status, Lane(lane.tell, lane.threads, Spans(lane.spans.given_up), job)
            ):
                pass
        except BadRow as bad:
            raise BadRow((step - job.first) * self._producer.share, bad.error) from None
        return arrays, (status == MASKED) & work.mask
