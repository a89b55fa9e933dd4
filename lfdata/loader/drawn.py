"""What the device is to do to pictures, drawn where they are decoded (docs/scheduler.md, "Pictures"): crops, mirroring, MixUp, CutMix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import lfdata.transforms as T
from lfdata.errors import OptionError
from lfdata.loader.filler import Part
from lfdata.loader.jobs import Job
from lfdata.loader.plan import Plan
from lfdata.loader.slots import Layout
from lfdata.loader.spec import DrawSpec
from lfdata.order.draws import Draws
from lfdata.order.permutation import Permutation, make_key
from lfdata.order.samples import Samples
from lfdata.transforms.beta import quantile

CROP, FLIP, PARTNER, WEIGHT, BOX = ".crop", ".flip", ".partner", ".weight", ".box"
# Third number of the keys of partners within a batch (docs/order.md).
WITHIN = 9


class Drawer:
    """Of one field.

    Args:
        ops: the field's transforms: crop and mirroring draw as if they stood at their end.

    Attributes:
        names: of its arrays, once they are declared.
    """

    def __init__(self, spec: DrawSpec, ops: Sequence[T.Transform]) -> None:
        self.spec, self._place = spec, len(ops)
        self._geometry: list[T.Geometry] = []
        if spec.crop:
            self._geometry.append(T.RandomCrop(spec.size))
        if spec.flip is not None:
            self._geometry.append(T.RandomHorizontalFlip(spec.flip))
        self._row: tuple[int, ...] = ()
        self.names: list[str] = []

    def declare(self, layout: Layout, rows: int, before: Sequence[Part]) -> list[Part]:
        """Arrays of so many rows. ``before``: the others of the batch."""
        spec, found = self.spec, {part.name: part for part in before}
        self._row = found[spec.field].place.shape[1:]
        kinds: list[tuple[bool, str, Any, tuple[int, ...]]] = [
            (spec.crop, CROP, np.int32, (2,)),
            (spec.flip is not None, FLIP, np.bool_, ()),
            (spec.mixes, PARTNER, np.int64, ()),
            (spec.mixes, WEIGHT, np.float32, ()),
            (spec.cutmix is not None, BOX, np.int32, (4,)),
        ]
        parts = [
            Part(spec.field + suffix, layout.add(dtype, (rows, *shape))) for wanted, suffix, dtype, shape in kinds if wanted
        ]
        if clash := [part.name for part in parts if part.name in found]:
            raise OptionError(f"Images says in {clash[0]!r} what it draws, and there is such a field already: rename that one")
        self.names = [part.name for part in parts]
        return parts

    def fill(self, plan: Plan, job: Job, samples: Samples, mask: NDArray[np.bool_], arrays: dict[str, NDArray[Any]]) -> None:
        """Draw for the rows of some steps. ``mask``: those that count."""
        field, draws = self.spec.field, Draws(samples.epoch, samples.index, samples.occurrence)

        def uniform(operation: str, count: int) -> NDArray[np.float64]:
            return draws.uniform(plan.spec.seed, f"{field}/{operation}", count)

        if self._geometry:
            heights, widths = (np.full(len(samples), side) for side in self._row[:2])
            placed = T.place(self._geometry, widths, heights, uniform, self._place)
            if self.spec.crop:
                arrays[field + CROP][:] = placed.boxes[:, 1::-1]
            if self.spec.flip is not None:
                arrays[field + FLIP][:] = placed.flips
        if self.spec.mixes and len(samples):
            self._partners(plan, job, mask, arrays[field + PARTNER])
            self._mix(uniform("mix", 5), arrays)

    def _mix(self, u: NDArray[np.float64], arrays: dict[str, NDArray[Any]]) -> None:
        """How rows are mixed with their partners. ``u``: whether, by which of the two, lam, and where a rectangle lies, x and y."""
        spec, field = self.spec, self.spec.field
        partner, weight = arrays[field + PARTNER], arrays[field + WEIGHT]
        own = np.tile(np.arange(spec.rows), len(partner) // spec.rows)
        mixed = (u[:, 0] < spec.mix_prob) & (partner != own)
        cut = np.zeros(len(mixed), bool)
        if spec.cutmix is not None:
            cut = mixed & (True if spec.mixup is None else u[:, 1] < spec.switch_prob)
            boxes, left = T.CutMix(alpha=spec.cutmix).boxes(spec.size, u[:, 2:])
            arrays[field + BOX][:] = np.where(cut[:, None], boxes, 0)
            weight[:] = np.where(cut, left, 1)
        else:
            weight[:] = 1
        if spec.mixup is not None:
            weight[:] = np.where(mixed & ~cut, quantile(spec.mixup, u[:, 2]), weight)
        partner[:] = np.where(mixed, partner, own)

    def _partners(self, plan: Plan, job: Job, mask: NDArray[np.bool_], partner: NDArray[np.int64]) -> None:
        """Of each batch's rows the next one in a random circle of those that count; the others have themselves."""
        spec, (first, stop) = plan.spec, plan.batches(job.epoch).rows(plan.spec.rank, plan.spec.world)
        rows = self.spec.rows
        batches = (stop - first) // rows
        for number in range(len(partner) // rows):
            here = slice(number * rows, (number + 1) * rows)
            found, good = np.arange(rows), np.flatnonzero(mask[here])
            step, row = plan.step(job.first + number // batches), first + number % batches * rows
            circle = good[Permutation(len(good), make_key(spec.seed, job.epoch, WITHIN, step, row))(np.arange(len(good)))]
            found[circle] = np.roll(circle, -1)
            partner[here] = found
