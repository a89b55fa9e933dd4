"""Fills a slot with some consecutive steps: what comes out depends on the spec, epoch and steps alone."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

import lfdata.transforms as T
from lfdata.dataset import ShardDataset
from lfdata.dataset.dataset import Readings
from lfdata.errors import FormatError, OptionError, SampleError
from lfdata.loader.fields import make_filler, plain
from lfdata.loader.filler import Filler, Part
from lfdata.loader.jobs import Done, Event, Failure, Job
from lfdata.loader.packed import PackedFiller
from lfdata.loader.plan import Plan, Work
from lfdata.loader.rows import EMPTY, Rows, named
from lfdata.loader.slots import DECODING, EPOCH, IDLE, JOB, PHASE, PLANNING, ROW, STEP, STEPS, TRYING, Layout, Slots
from lfdata.loader.spec import COPIED_SLOT_BYTES, MOST_STEPS_A_SLOT, SLOT_BYTES, Spec
from lfdata.order.draws import uniform
from lfdata.order.packing import Row
from lfdata.order.samples import Samples

INDEX, SOURCE, MASK = "__index__", "__source__", "__mask__"
POISON, OK, MASKED = 0xA5, 1, 0
MOST_ATTEMPTS = 100


Bad = dict[int, tuple[str, Exception]]
"""Rows that failed, with the field and the error."""


class BadRow(Exception):
    """A bad sample stops the run: which row of the job, and the error to report."""

    def __init__(self, row: int, error: Exception) -> None:
        super().__init__(row, error)
        self.row, self.error = row, error


class Producer:
    """Opened sources, fillers and plan of a spec. Safe for several threads."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        names = [field.name for field in spec.fields]
        self.sources = [
            ShardDataset(Path(os.fsdecode(source.path)), names, read_threads=spec.threads) for source in spec.sources
        ]
        self.plan = Plan(spec, self.sources)
        self.share = self.plan.batches(0).share(spec.rank, spec.world)
        self.batch_ops = [op for op in T.from_spec(spec.batch_ops) if isinstance(op, T.BatchTransform)]
        if len(self.batch_ops) != len(spec.batch_ops):
            raise OptionError("batch_transforms takes MixUp, CutMix and Mosaic; others belong to a field")
        self.ops = {field.name: T.from_spec(field.transforms) for field in spec.fields}
        self._alone = threading.Lock()
        self._started: dict[int, dict[str, Readings]] = {}
        self.steps = self._steps_a_slot()
        self.layout, self.fillers, self.parts = self._layout(self.steps)

    def _layout(self, steps: int) -> tuple[Layout, list[Filler], list[Part]]:
        rows, layout = self.share * steps, Layout()
        fillers: list[Filler] = []
        if self.plan.packing is not None:
            return self._packed_layout(rows, layout)
        parts = [Part(INDEX, layout.add(np.int64, (rows,))), Part(MASK, layout.add(bool, (rows,)))]
        if len(self.sources) > 1:
            parts.append(Part(SOURCE, layout.add(np.int64, (rows,))))
        self.status = layout.add(np.uint8, (rows,))
        for name, ops in self.ops.items():
            filler = make_filler(self.sources, name, ops, rows, self.spec.native, self.plan.repeats)
            filler.declare(layout)
            fillers.append(filler)
            parts += filler.parts
        for op in self.batch_ops:
            parts += [Part(name, layout.add(dtype, (rows, *shape))) for name, (dtype, shape) in self._extra(op, parts).items()]
        return layout, fillers, parts

    def _packed_layout(self, rows: int, layout: Layout) -> tuple[Layout, list[Filler], list[Part]]:
        packing, options = self.plan.packing, self.spec.order.packing
        assert packing is not None and options is not None
        if list(self.ops) != [options["field"]] or self.ops[options["field"]] or self.batch_ops:
            raise OptionError(
                f"packing gives the field {options['field']!r} alone, without transforms; fields= names {list(self.ops)}"
            )
        filler = PackedFiller(self.sources, options["field"], rows, packing)
        filler.declare(layout)
        self.status = layout.add(np.uint8, (rows,))
        mask = Part(MASK, layout.add(bool, (rows,)))
        return layout, [filler], [mask, *filler.parts]

    def _extra(self, op: Any, parts: Sequence[Part]) -> dict[str, tuple[Any, tuple[int, ...]]]:
        """Arrays that a batch operation adds: its own, and its partners' values of the fields it names."""
        found = {part.name: part for part in parts}
        if op.field not in found or any(label not in found for label in op.labels):
            raise OptionError(f"{type(op).__name__}: the loader gives no field {op.field!r} with labels {op.labels}")
        if ragged := [label for label in op.labels if found[label].by or found[label].offsets]:
            raise OptionError(f"{type(op).__name__}: labels of different lengths cannot be mixed: {ragged}")
        op.declare(T.Declared(found[op.field].place.shape[1:], np.dtype(found[op.field].place.dtype).name))
        extra: dict[str, tuple[Any, tuple[int, ...]]] = {
            f"{op.field}.{name}": (what.dtype, tuple(map(int, what.shape))) for name, what in op.extras().items()
        }
        for label in op.labels:
            place = found[label].place
            extra[f"{label}.partner"] = (place.dtype, (op.partners, *place.shape[1:]))
        if clash := [name for name in extra if name in found]:
            raise OptionError(f"{type(op).__name__}: {clash[0]} is there already; one batch transform a field")
        return extra

    def _steps_a_slot(self) -> int:
        layout, fillers, _ = self._layout(1)
        most = SLOT_BYTES if self.batch_ops or not all(map(plain, fillers)) else COPIED_SLOT_BYTES
        return max(1, min(MOST_STEPS_A_SLOT, most // max(1, layout.bytes)))

    def begin(self, job: Job, slots: Slots) -> None:
        """Begin to read for a job what can be read while the caller does something else; :meth:`run` waits for it."""
        if self.batch_ops or self.plan.packing is not None or self.spec.poison:
            return
        try:
            samples = self.plan.work(job.epoch, job.first, job.steps).samples
        except Exception:
            # It is told in its turn, after the batches before it.
            return
        rows, slot = Rows(self.sources, samples, self.spec.seed), slots.slot(job.slot)
        found = {}
        for filler in self.fillers:
            arrays = {part.name: part.place.of(slot)[: len(rows)] for part in filler.parts if not part.by and not part.offsets}
            if (reading := filler.start(rows, arrays)) is not None:
                found[filler.name] = reading
        self._started[job.number] = found

    def forget(self) -> None:
        """Give up what was begun."""
        self._started.clear()

    def run(self, job: Job, slots: Slots, lane: int, threads: int) -> Done:
        """One job, failures included: they go to the loader as what they are."""
        with self._alone if job.alone else nullcontext():
            return self._run(job, slots, lane, threads)

    def _run(self, job: Job, slots: Slots, lane: int, threads: int) -> Done:
        tell = slots.lanes[lane]
        tell[EPOCH], tell[STEP], tell[STEPS], tell[JOB] = job.epoch, job.first, job.steps, job.number
        try:
            while True:
                try:
                    return self._fill(job, slots.slot(job.slot), tell, threads)
                except BadRow as bad:
                    # The steps before it come first. What was good may have turned bad meanwhile: again, then.
                    steps = bad.row // max(1, self.share)
                    if not steps:
                        return Done(job.number, 0, failure=Failure.of(bad.error, job.first))
                    job = msgspec.structs.replace(job, steps=steps)
        except Exception as error:
            return Done(job.number, 0, failure=Failure.of(error, job.first))
        finally:
            self._started.pop(job.number, None)
            tell[PHASE] = IDLE

    def _fill(self, job: Job, slot: Any, tell: NDArray[np.int64], threads: int) -> Done:
        tell[PHASE] = PLANNING
        work = self.plan.work(job.epoch, job.first, job.steps)
        count = len(work.positions)
        arrays = {part.name: part.place.of(slot) for part in self.parts}
        row_arrays = {
            part.name: arrays[part.name] if part.by else arrays[part.name][: count + part.offsets] for part in self.parts
        }
        status = self.status.of(slot)[:count]
        status[:] = POISON
        if self.spec.poison:
            for part in self.parts:
                arrays[part.name].view(np.uint8)[...] = POISON
        if job.careful:
            self._try_each(job, work, tell)
        tell[PHASE] = DECODING
        if work.bins is not None:
            return self._fill_packed(job, work, row_arrays)
        events = self._decode(job, work, self.fillers, row_arrays, status, threads)
        if self.batch_ops:
            self._mix(job, work, row_arrays, threads)
        row_arrays[INDEX][:] = work.samples.index
        if SOURCE in row_arrays:
            row_arrays[SOURCE][:] = work.samples.source
        row_arrays[MASK][:] = status == OK
        if (status == POISON).any():
            raise AssertionError(f"rows {np.flatnonzero(status == POISON).tolist()} of step {job.first} were not filled")
        used = {part.name: int(arrays[part.by][count]) for part in self.parts if part.by}
        return Done(job.number, job.steps, used, tuple(events))

    def _fill_packed(self, job: Job, work: Work, arrays: dict[str, NDArray[Any]]) -> Done:
        """Packed rows; bad samples are masked where they are."""
        assert work.bins is not None
        (filler,) = self.fillers
        assert isinstance(filler, PackedFiller)
        rows = Rows(self.sources, work.samples, self.spec.seed)
        bad = {row: (filler.name, error) for row, error in filler.fill_bins(rows, work.bins, arrays).items()}
        if bad and self.spec.bad.policy == "stop":
            row = min(bad)
            ends = np.cumsum([len(one.samples) for one in work.bins])
            raise BadRow(int(np.searchsorted(ends, row, side="right")), named(bad[row][1], filler.name, rows, row))
        arrays[MASK][:] = work.mask
        events = tuple(self._event(job, rows, row, found, "mask", work.bins) for row, found in sorted(bad.items()))
        count = len(work.positions)
        used = {part.name: int(arrays[part.by][count]) for part in self.parts if part.by}
        return Done(job.number, job.steps, used, events)

    def _decode(
        self,
        job: Job,
        work: Work,
        fillers: Sequence[Filler],
        arrays: dict[str, NDArray[Any]],
        status: NDArray[np.uint8],
        threads: int,
    ) -> list[Event]:
        """All fields of all rows; bad rows by policy. Gives the events."""
        samples, events = work.samples, []
        policy = self.spec.bad.policy
        if policy == "replace" and any(part.by for filler in fillers for part in filler.parts):
            policy = "mask"  # ragged samples are masked in place: a slot has room for those it was planned for
        # With rows left out the places are those of other samples: what was begun is given up (that waits for it).
        started = self._started.pop(job.number, EMPTY)
        if job.crashed:
            started = EMPTY
        for attempt in range(MOST_ATTEMPTS):
            rows = Rows(self.sources, samples, self.spec.seed, started)
            crashed = [row for row in range(len(rows)) if identity(samples, row) in job.crashed] if job.crashed else []
            bad = fill_all(fillers, rows.without(crashed), arrays, threads, crashed)
            started = EMPTY
            events += [self._event(job, rows, row, found, policy) for row, found in sorted(bad.items())]
            if not bad or policy == "mask" or policy == "stop":
                break
            index = samples.index.copy()
            for row in bad:
                position, source = int(work.positions[row]), int(samples.source[row])
                index[row] = self.plan.substitute(job.epoch, position, source, attempt + 1)
            samples = Samples(samples.source, samples.epoch, index, samples.occurrence)
        else:
            row = min(bad)
            error = SampleError("replacements", f"{MOST_ATTEMPTS} replacements in turn were bad: {bad[row][1]}")
            raise BadRow(row, named(error, bad[row][0], rows, row))
        if bad and policy == "stop":
            raise BadRow(min(bad), named(bad[min(bad)][1], bad[min(bad)][0], rows, min(bad)))
        work.samples = samples
        status[:] = np.where(work.mask, OK, MASKED)
        for row in bad:
            status[row] = MASKED
        return events

    def _try_each(self, job: Job, work: Work, tell: NDArray[np.int64]) -> None:
        """Decode every sample alone, saying which: if that ends this process, the next one is told."""
        layout, parts = Layout(), []
        fillers = [make_filler(self.sources, name, ops, 1, self.spec.native, 1) for name, ops in self.ops.items()]
        for filler in fillers:
            filler.declare(layout)
            parts += filler.parts
        memory = bytearray(layout.bytes)
        arrays = {part.name: part.place.of(memory) for part in parts}
        rows = Rows(self.sources, work.samples, self.spec.seed)
        for row in range(len(rows)):
            if identity(work.samples, row) not in job.crashed:
                tell[ROW], tell[PHASE] = row, TRYING
                fill_all(fillers, rows.take([row]), arrays, 1)

    def _event(
        self,
        job: Job,
        rows: Rows,
        row: int,
        found: tuple[str, Exception],
        policy: str,
        bins: Sequence[Row] | None = None,
    ) -> Event:
        shard, index, key, path = rows.where(row)
        field, error = found
        reason = error.reason if isinstance(error, SampleError | FormatError) else str(error)
        if bins is not None:
            row = int(np.searchsorted(np.cumsum([len(one.samples) for one in bins]), row, side="right"))
        action = {"stop": "stopped", "replace": "replaced", "mask": "masked"}[policy]
        step = self.plan.step(job.first + row // self.share)
        return Event(job.epoch, step, row % self.share, path, shard, index, key, field, reason, action)

    def _mix(self, job: Job, work: Work, arrays: dict[str, NDArray[Any]], threads: int) -> None:
        """MixUp, CutMix, Mosaic: partners by global position; those of other ranks are decoded here too."""
        first, stop = self.plan.batches(job.epoch).rows(self.spec.rank, self.spec.world)
        for number, op in enumerate(self.batch_ops):
            for step in range(job.steps):
                here = slice(step * self.share, (step + 1) * self.share)
                at = self.plan.step(job.first + step)
                partners = T.partners(op, self.spec.seed, job.epoch, at, np.arange(first, stop), self.spec.batch)
                own = {name: arrays[name][here] for name in (op.field, *op.labels)}
                kept = self._partners(job, job.first + step, partners, own, threads)
                found = work.samples.take(here)
                name = f"batch/{number}/{type(op).__name__}"
                draws = uniform(self.spec.seed, found.epoch, found.index, found.occurrence, name, op.draws)
                for extra, values in op.apply(own[op.field], kept[op.field], draws).items():
                    arrays[f"{op.field}.{extra}"][here] = values
                for label in op.labels:
                    arrays[f"{label}.partner"][here] = kept[label]

    def _partners(
        self, job: Job, step: int, partners: NDArray[np.int64], own: dict[str, NDArray[Any]], threads: int
    ) -> dict[str, NDArray[Any]]:
        """Partners' arrays, (rows, partners, ...): this rank's rows are there, those of other ranks are decoded as they are there."""
        first, stop = self.plan.batches(job.epoch).rows(self.spec.rank, self.spec.world)
        outside = (partners < first) | (partners >= stop)
        kept = {name: mine[np.clip(partners - first, 0, len(mine) - 1)] for name, mine in own.items()}
        others = np.unique(partners[outside])
        if len(others):
            foreign = self._foreign(job, step, others, threads)
            for name in own:
                kept[name][outside] = foreign[name][np.searchsorted(others, partners[outside])]
        return kept

    def _foreign(self, job: Job, step: int, rows: NDArray[np.int64], threads: int) -> dict[str, NDArray[Any]]:
        """Rows of other ranks, in memory of their own. All fields: a bad one is replaced as its rank does it."""
        layout, parts = Layout(), []
        repeats = self.plan.repeats
        fillers = [make_filler(self.sources, name, ops, len(rows), self.spec.native, repeats) for name, ops in self.ops.items()]
        for filler in fillers:
            filler.declare(layout)
            parts += filler.parts
        memory = bytearray(layout.bytes)
        arrays = {part.name: part.place.of(memory) for part in parts}
        work = self.plan.rows_of(job.epoch, step, rows)
        try:
            self._decode(job, work, fillers, arrays, np.empty(len(rows), np.uint8), threads)
        except BadRow as bad:
            raise BadRow((step - job.first) * self.share, bad.error) from None
        return arrays


def identity(samples: Samples, row: int) -> tuple[int, int]:
    """Which sample a row is."""
    return int(samples.source[row]), int(samples.index[row])


def fill_all(
    fillers: Sequence[Filler], rows: Rows, arrays: dict[str, NDArray[Any]], threads: int, crashed: Sequence[int] = ()
) -> Bad:
    """All fields of all rows; a row that fails in one is cleared in all, and so are those that must not be decoded (``crashed``)."""
    bad: Bad = {}
    for filler in fillers:
        for row, error in filler.fill(rows, arrays, threads).items():
            bad.setdefault(row, (filler.name, error))
    for row in crashed:
        bad[row] = ("", SampleError("crash", "a decoder process crashed over this sample"))
    if not bad:
        return bad
    for part in (part for filler in fillers for part in filler.parts):
        if part.by:
            take_out(arrays[part.name], arrays[part.by], bad)
        elif not part.offsets:
            arrays[part.name][list(bad)] = 0
    for part in (part for filler in fillers for part in filler.parts if part.offsets):
        lengths = np.diff(arrays[part.name])
        lengths[list(bad)] = 0
        np.cumsum(lengths, out=arrays[part.name][1:])
    return bad


def take_out(values: NDArray[Any], offsets: NDArray[np.int64], bad: Iterable[int]) -> None:
    """Close the gaps that ragged values of bad rows leave."""
    for row in sorted(bad, reverse=True):
        first, stop, end = int(offsets[row]), int(offsets[row + 1]), int(offsets[-1])
        if first < stop:
            # Rows after this one that are bad too have been taken out; what moves along behind the end is not used.
            values[first : end - (stop - first)] = values[stop:end].copy()
