"""Fills a slot with some consecutive steps: what comes out depends on the spec, epoch and steps alone."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

import lfdata.transforms as T
from lfdata.dataset import Readings, ShardDataset
from lfdata.errors import ChangedError, FormatError, OptionError, SampleError, StorageError, shortened, text_of
from lfdata.loader.drawn import Drawer
from lfdata.loader.fields import make_filler, plain
from lfdata.loader.filler import Filler, Part
from lfdata.loader.filling import augment_all, clear, fill_all, identity
from lfdata.loader.jobs import Done, Event, Failure, Job
from lfdata.loader.lane import MASKED, OK, POISON, BadRow, Lane
from lfdata.loader.mix import Mixer
from lfdata.loader.packed import PackedFiller
from lfdata.loader.places import exact
from lfdata.loader.plan import Plan, Work, fingerprint
from lfdata.loader.rows import EMPTY, NOT_THE_FILE, Rows, lost, named
from lfdata.loader.slots import AUGMENTING, DECODING, MIXING, PLANNING, TRYING, Layout, Place, Slots
from lfdata.loader.slots import INDEX as INDEX_TRIED
from lfdata.loader.slots import SOURCE as SOURCE_TRIED
from lfdata.loader.spans import MIX, PLAN
from lfdata.loader.spec import COPIED_SLOT_BYTES, MOST_STEPS_A_SLOT, SLOT_BYTES, Spec
from lfdata.loader.task import Stages, Task
from lfdata.order.packing import Row
from lfdata.order.samples import Samples
from lfdata.schedule.work import Class

if TYPE_CHECKING:
    from lfdata.loader.ahead import Ahead

INDEX, SOURCE, MASK, PART = "__index__", "__source__", "__mask__", "__part__"
MOST_ATTEMPTS = 100


class Producer:
    """Opened sources, fillers and plan of a spec. Safe for several threads."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        names = [field.name for field in spec.fields]
        self.sources = [
            ShardDataset(os.fsdecode(source.path), names, read_threads=spec.threads, cache=spec.cache)
            for source in spec.sources
        ]
        for source, dataset in zip(spec.sources, self.sources, strict=True):
            if fingerprint(dataset, source.selection) != source.fingerprint:
                raise ChangedError(
                    dataset.path, None, "the data set was replaced while the loader was starting. Make the loader again"
                )
        self.plan = Plan(spec, self.sources)
        self.share = self.plan.batches(0).share(spec.rank, spec.world)
        self.batch_ops = [op for op in T.from_spec(spec.batch_ops) if isinstance(op, T.BatchTransform)]
        if len(self.batch_ops) != len(spec.batch_ops):
            raise OptionError("batch_transforms takes MixUp, CutMix and Mosaic; others belong to a field")
        self.ops = {field.name: T.from_spec(field.transforms) for field in spec.fields}
        self.drawers = [Drawer(one, self.ops[one.field]) for one in spec.drawn]
        self._alone = threading.Lock()
        self._begun: dict[int, tuple[Work, Mapping[str, Readings]]] = {}
        self.steps = self._steps_a_slot()
        self.layout, self.fillers, self.parts = self._layout(self.steps)
        self._ahead = self._look_ahead() if any(source.store for source in self.sources) else None

    @property
    def drawn(self) -> list[str]:
        """Names of the arrays that say what the device is to do to pictures."""
        return [name for drawer in self.drawers for name in drawer.names]

    def _look_ahead(self) -> Ahead:
        # Most data are local, and a decoder process that starts is waited for.
        from lfdata.loader.ahead import Ahead

        return Ahead(self.plan, self.sources, self.spec)

    def _layout(self, steps: int) -> tuple[Layout, list[Filler], list[Part]]:
        rows, layout = self.share * steps, Layout()
        fillers: list[Filler] = []
        if self.plan.packing is not None:
            return self._packed_layout(rows, layout)
        parts = [Part(INDEX, layout.add(np.int64, (rows,))), Part(MASK, layout.add(bool, (rows,)))]
        if len(self.sources) > 1:
            parts.append(Part(SOURCE, layout.add(np.int64, (rows,))))
        parts += self._says_part(layout, rows)
        self.status = layout.add(np.uint8, (rows,))
        for name, ops in self.ops.items():
            filler = make_filler(self.sources, name, ops, rows, self.spec.native, self.plan.repeats, name in self.spec.stored)
            filler.declare(layout)
            fillers.append(filler)
            parts += filler.parts
        for op in self.batch_ops:
            parts += [Part(name, layout.add(dtype, (rows, *shape))) for name, (dtype, shape) in self._extra(op, parts).items()]
        for drawer in self.drawers:
            parts += drawer.declare(layout, rows, parts)
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
        return layout, [filler], [mask, *self._says_part(layout, rows), *filler.parts]

    def _says_part(self, layout: Layout, rows: int) -> list[Part]:
        return [Part(PART, layout.add(np.int64, (rows, 2)))] if self.spec.parts else []

    def _extra(self, op: Any, parts: Sequence[Part]) -> dict[str, tuple[Any, tuple[int, ...]]]:
        """Arrays that a batch operation adds: its own, and its partners' values of the fields it names."""
        found = {part.name: part for part in parts}
        if op.field in self.spec.stored:
            raise OptionError(
                f"{type(op).__name__}: the pictures of {op.field!r} are decoded on the device, after batch transforms: mix them there "
                "(lfdata.device.Images), or take decode='cpu'"
            )
        for option, name in (("field", op.field), *(("labels", label) for label in op.labels)):
            if name not in found:
                raise OptionError(
                    f"{type(op).__name__}: {option} names {name!r}, which the loader does not give; its fields are {list(self.ops)}"
                )
        before = [other.field for other in self.batch_ops[: next(n for n, one in enumerate(self.batch_ops) if one is op)]]
        if mixed := [label for label in op.labels if label in before]:
            raise OptionError(
                f"{type(op).__name__}: the label {mixed[0]!r} is mixed by an earlier batch transform, and labels are not: put that one last"
            )
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
        self.bound = layout.bytes
        most = SLOT_BYTES if self.batch_ops or not all(map(plain, fillers)) else COPIED_SLOT_BYTES
        return max(1, min(MOST_STEPS_A_SLOT, most // max(1, layout.bytes)))

    def begin(self, job: Job, slots: Slots) -> None:
        """Begin to read for a job what can be read while the caller does something else; :meth:`run` waits for it."""
        if self.batch_ops or self.plan.packing is not None or self.spec.poison:
            return
        try:
            work = self._work(job)
            parts, _ = self._places(work)
        except Exception:
            # It is told in its turn, after the batches before it.
            return
        places = {part.name: part.place for part in parts}
        rows, slot = Rows(self.sources, work.samples, self.spec.seed), slots.slot(job.slot)
        found = {}
        for filler in self.fillers:
            arrays = {
                part.name: places[part.name].of(slot)[: len(rows)] for part in filler.parts if not part.by and not part.offsets
            }
            if (reading := filler.start(rows, arrays)) is not None:
                found[filler.name] = reading
        self._begun[job.number] = work, found

    def forget(self) -> None:
        """Give up what was begun."""
        self._begun.clear()

    def _work(self, job: Job) -> Work:
        if job.rows is None:
            return self.plan.work(job.epoch, job.first, job.steps)
        return self.plan.work(job.epoch, job.first, job.steps, job.rows)

    def _places(self, work: Work) -> tuple[list[Part], Place]:
        """Where the arrays of a slot with some rows lie, and the status of the rows."""
        return exact(self, work) if self.spec.exact else (self.parts, self.status)

    def task(self, job: Job, slots: Slots, threads: int, given_up: Callable[[], bool] | None = None) -> Task:
        """A job, to be done stage by stage."""
        task = Task(job, slots, threads, given_up)
        task.stages = self._stages(job, slots, task.lane)
        return task

    def run(self, job: Job, slots: Slots, lane: int, threads: int, given_up: Callable[[], bool] | None = None) -> Done:
        """One job, at once."""
        with self._alone if job.alone else nullcontext():
            return self.task(job, slots, threads, given_up).finish(lane)

    def _stages(self, job: Job, slots: Slots, lane: Lane) -> Stages:
        if self._ahead is None:
            return (yield from self._made(job, slots, lane))
        with self._ahead.making(job.epoch, job.first):
            done = yield from self._made(job, slots, lane)
        return msgspec.structs.replace(done, storage=self._ahead.report())

    def _made(self, job: Job, slots: Slots, lane: Lane) -> Stages:
        """One job, failures included: they go to the loader as what they are."""
        try:
            while True:
                try:
                    return (yield from self._fill(job, slots.slot(job.slot), lane))
                except BadRow as bad:
                    # The steps before it come first. What was good may have turned bad meanwhile: again, then.
                    steps = bad.row // max(1, self.share)
                    if not steps:
                        return Done(job.number, 0, failure=Failure.of(bad.error, job.first))
                    job = msgspec.structs.replace(job, steps=steps)
        except Exception as error:
            return Done(job.number, 0, failure=Failure.of(error, job.first))

    def _fill(self, job: Job, slot: Any, lane: Lane) -> Stages:
        lane.phase(PLANNING)
        begun = self._begun.pop(job.number, None)
        with lane.spans.stage(PLAN):
            work, started = begun or (self._work(job), EMPTY)
            parts, status_at = self._places(work)
        count = len(work.positions)
        arrays = {part.name: part.place.of(slot) for part in parts}
        row_arrays = {
            part.name: arrays[part.name] if part.by else arrays[part.name][: count + part.offsets] for part in self.parts
        }
        status = status_at.of(slot)[:count]
        status[:] = POISON
        if self.spec.poison:
            for part in self.parts:
                arrays[part.name].view(np.uint8)[...] = POISON
        if PART in row_arrays:
            row_arrays[PART][:] = job.part
        lane.phase(DECODING)
        offsets = tuple(part.place.offset for part in parts) if self.spec.exact else ()
        if work.bins is not None:
            return msgspec.structs.replace(self._fill_packed(job, work, row_arrays, lane), at=offsets)
        events = yield from self.decode(job, work, self.fillers, row_arrays, status, lane, started)
        if self.batch_ops:
            yield Class.MIX
            lane.phase(MIXING)
            with lane.spans.stage(MIX):
                Mixer(self).mix(job, work, row_arrays, (status == MASKED) & work.mask, lane)
        row_arrays[INDEX][:] = work.samples.index
        if SOURCE in row_arrays:
            row_arrays[SOURCE][:] = work.samples.source
        row_arrays[MASK][:] = status == OK
        for drawer in self.drawers:
            drawer.fill(self.plan, job, work.samples, row_arrays[MASK], row_arrays)
        if (status == POISON).any():
            raise AssertionError(f"rows {np.flatnonzero(status == POISON).tolist()} of step {job.first} were not filled")
        used = {part.name: int(arrays[part.by][count]) for part in self.parts if part.by}
        return Done(job.number, job.steps, used, tuple(events), at=offsets)

    def _fill_packed(self, job: Job, work: Work, arrays: dict[str, NDArray[Any]], lane: Lane) -> Done:
        """Packed rows; bad samples are masked where they are."""
        assert work.bins is not None
        (filler,) = self.fillers
        assert isinstance(filler, PackedFiller)
        if job.careful:
            self._try_each(job, work.samples, lane)
        rows = Rows(self.sources, work.samples, self.spec.seed, spans=lane.spans)
        try:
            found = filler.fill_bins(rows, work.bins, arrays)
        except (*NOT_THE_FILE, StorageError) as error:
            raise lost(error, filler.name, rows) from error
        bad = {row: (filler.name, error) for row, error in found.items()}
        if bad and self.spec.bad.policy == "stop":
            row = min(bad)
            ends = np.cumsum([len(one.samples) for one in work.bins])
            raise BadRow(int(np.searchsorted(ends, row, side="right")), named(bad[row][1], filler.name, rows, row))
        arrays[MASK][:] = work.mask
        events = tuple(self._event(job, rows, row, found, "mask", work.bins) for row, found in sorted(bad.items()))
        count = len(work.positions)
        used = {part.name: int(arrays[part.by][count]) for part in self.parts if part.by}
        return Done(job.number, job.steps, used, events)

    def decode(
        self,
        job: Job,
        work: Work,
        fillers: Sequence[Filler],
        arrays: dict[str, NDArray[Any]],
        status: NDArray[np.uint8],
        lane: Lane,
        started: Mapping[str, Readings] = EMPTY,
    ) -> Generator[Class, None, list[Event]]:
        """All fields of all rows; bad rows by policy. Gives the events."""
        samples, events = work.samples, []
        policy = self.spec.bad.policy
        if policy == "replace" and any(part.by for filler in fillers if not filler.takes_any for part in filler.parts):
            policy = "mask"  # ragged samples are masked in place: a slot has room for those it was planned for
        for attempt in range(MOST_ATTEMPTS):
            if job.careful:
                self._try_each(job, samples, lane)
            rows = Rows(self.sources, samples, self.spec.seed, started, job.number, lane.spans)
            crashed = [row for row in range(len(rows)) if identity(samples, row) in job.crashed] if job.crashed else []
            found = rows.without(crashed)
            bad = fill_all(fillers, found, arrays, lane.threads, crashed)
            if any(filler.augments for filler in fillers):
                yield Class.AUGMENT
                lane.phase(AUGMENTING)
                augment_all(fillers, found, arrays, bad)
            clear(fillers, arrays, bad)
            started = EMPTY
            events += [self._event(job, rows, row, what, policy) for row, what in sorted(bad.items())]
            if not bad or policy == "mask" or policy == "stop":
                break
            index = samples.index.copy()
            for row in bad:
                position, source = int(work.positions[row]), int(samples.source[row])
                index[row] = self.plan.substitute(job.epoch, position, source, attempt + 1)
            samples = Samples(samples.source, samples.epoch, index, samples.occurrence)
            lane.phase(DECODING)
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

    def _try_each(self, job: Job, samples: Samples, lane: Lane) -> None:
        """Decode every sample alone, saying which: if that ends this process, the next one is told."""
        layout, parts = Layout(), []
        native, stored = self.spec.native, self.spec.stored
        fillers = [make_filler(self.sources, name, ops, 1, native, 1, name in stored) for name, ops in self.ops.items()]
        for filler in fillers:
            filler.declare(layout)
            parts += filler.parts
        memory = bytearray(layout.bytes)
        arrays = {part.name: part.place.of(memory) for part in parts}
        rows, tell = Rows(self.sources, samples, self.spec.seed), lane.tell
        for row in range(len(rows)):
            if (found := identity(samples, row)) not in job.crashed:
                tell[SOURCE_TRIED], tell[INDEX_TRIED] = found
                lane.phase(TRYING)
                one = rows.take([row])
                augment_all(fillers, one, arrays, fill_all(fillers, one, arrays, 0))
        lane.phase(DECODING)

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
        reason = shortened(error.reason) if isinstance(error, SampleError | FormatError) else text_of(error)
        if bins is not None:
            row = int(np.searchsorted(np.cumsum([len(one.samples) for one in bins]), row, side="right"))
        action = {"stop": "stopped", "replace": "replaced", "mask": "masked"}[policy]
        row += job.rows[0] if job.rows is not None else 0
        step = self.plan.step(job.first + row // self.share)
        return Event(job.epoch, step, row % self.share, path, shard, index, key, field, reason, action)
