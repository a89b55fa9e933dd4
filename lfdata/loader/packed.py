"""Token sequences packed into rows: docs/order.md says which go where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfdata.dataset import ShardDataset
from lfdata.errors import SampleError
from lfdata.loader.filler import OFFSETS, Errors, Filler, Part
from lfdata.loader.rows import Rows, as_sample_error
from lfdata.loader.slots import Layout
from lfdata.order.packing import Packing, Row

INDEX, SOURCE = "__index__", "__source__"
BOUNDARIES, SAMPLES, POSITION, SEGMENT = ".boundaries", ".samples", ".position", ".segment"


class PackedFiller(Filler):
    """Ids (rows, capacity); for each, int32 of the same shape: its place in its sample (``.position``) and which sample of the row it belongs
    to (``.segment``, from 1 on; 0 is padding, or a bad sample); samples a row (``.samples``, int64) and their boundaries in it
    (``.boundaries``, int64, one more than samples a row, with offsets). ``__index__`` with offsets: the samples' indices; of several
    sources ``__source__``, with the same offsets, says whose.
    """

    def __init__(self, sources: Sequence[ShardDataset], name: str, rows: int, packing: Packing) -> None:
        super().__init__(sources, name, rows)
        self._packing, self._dtype = packing, np.dtype(self._params("dtype"))

    def declare(self, layout: Layout) -> None:
        rows, most = self.rows, self._packing.max_samples_per_row or self._packing.window
        for suffix, dtype in (("", self._dtype), (POSITION, np.int32), (SEGMENT, np.int32)):
            self._add(layout, suffix, dtype, (rows, self._packing.capacity))
        self._add(layout, SAMPLES, np.int64, (rows,))
        self._add(layout, BOUNDARIES, np.int64, (rows * (most + 1),), self.name + BOUNDARIES + OFFSETS)
        self.parts.append(Part(self.name + BOUNDARIES + OFFSETS, layout.add(np.int64, (rows + 1,)), offsets=True))
        self.parts.append(Part(INDEX, layout.add(np.int64, (rows * most,)), INDEX + OFFSETS))
        if len(self.sources) > 1:
            self.parts.append(Part(SOURCE, layout.add(np.int64, (rows * most,)), INDEX + OFFSETS))
        self.parts.append(Part(INDEX + OFFSETS, layout.add(np.int64, (rows + 1,)), offsets=True))

    def bin_bytes(self, samples: NDArray[np.int64]) -> dict[str, NDArray[np.int64]]:
        """Bytes of each packed row in the arrays that differ in length, from the number of its samples."""
        each = {self.name + BOUNDARIES: 8 * (samples + 1), INDEX: 8 * samples, SOURCE: 8 * samples}
        return {part.name: each[part.name] for part in self.parts if part.by}

    def fill_bins(self, rows: Rows, bins: Sequence[Row], arrays: dict[str, NDArray[Any]]) -> Errors:
        """``rows``: the samples of all bins, one after the other."""
        found = rows.read(self.name, self._memory)
        bad: Errors = dict(found.bad)
        ids, position, segment = (arrays[self.name + suffix] for suffix in ("", POSITION, SEGMENT))
        ids[:], position[:], segment[:] = 0, 0, 0
        bounds, at_bounds = arrays[self.name + BOUNDARIES], arrays[self.name + BOUNDARIES + OFFSETS]
        index, at_index = arrays[INDEX], arrays[INDEX + OFFSETS]
        at_bounds[0] = at_index[0] = 0
        first = 0
        for number, row in enumerate(bins):
            count, starts = len(row.samples), row.starts
            arrays[self.name + SAMPLES][number] = count
            at_bounds[number + 1], at_index[number + 1] = at_bounds[number] + count + 1, at_index[number] + count
            bounds[at_bounds[number] : at_bounds[number + 1]] = starts
            index[at_index[number] : at_index[number + 1]] = row.samples.index
            if SOURCE in arrays:
                arrays[SOURCE][at_index[number] : at_index[number + 1]] = row.samples.source
            position[number, : starts[-1]] = row.position_ids()
            for place in range(count):
                begin, end, skip = int(starts[place]), int(starts[place + 1]), int(row.begin[place])
                stored = found.data[first + place]
                need = (skip + end - begin) * self._dtype.itemsize
                if first + place not in bad and len(stored) < need:
                    error = SampleError("corrupt", "the payload is not as long as the index says")
                    bad[first + place] = as_sample_error(error, self.name, rows, first + place)
                if first + place in bad:
                    continue
                ids[number, begin:end] = stored[skip * self._dtype.itemsize : need].view(self._dtype)
                segment[number, begin:end] = place + 1
            first += count
        return bad
