"""Pictures: cropped to one size, or whole and ragged."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import lfdata.transforms as T
from lfdata.codecs.base import PackedPayloads
from lfdata.codecs.pixels import CropDecoder
from lfdata.dataset import Ragged, ShardDataset
from lfdata.errors import OptionError, SampleError
from lfdata.loader.filler import OFFSETS, PRESENT, SHAPES, Errors, Filler, largest_sum
from lfdata.loader.rows import Payloads, Rows, as_sample_error
from lfdata.loader.slots import Layout
from lfdata.loader.spans import AUGMENT, DECODE
from lfdata.transforms.user import watching_for_ctrl_c

# Pictures that a thread decodes, of a job that may be given up, before it is asked whether it is: a tenth of a second.
PIECE = 8


class ImageFiller(Filler):
    """A fixed size: (rows, height, width, channels) uint8. Otherwise pixels one after the other, offsets, and shapes. A Map at the end
    takes the pixels of a fixed size and gives what it declares.
    """

    def __init__(
        self, sources: Sequence[ShardDataset], name: str, rows: int, ops: Sequence[Any], native: bool | None = None
    ) -> None:
        super().__init__(sources, name, rows)
        self._map = ops[-1] if ops and isinstance(ops[-1], T.Map) else None
        if self._map is not None:
            self._map.resolve()
            self._map_place, self.calls_user = len(ops) - 1, True
            ops = ops[:-1]
        self._geometry = [op for op in ops if isinstance(op, T.GEOMETRY)]
        self._pixels = [(place, op) for place, op in enumerate(ops) if isinstance(op, T.PIXELS)]
        if len(self._geometry) + len(self._pixels) != len(ops) or list(ops[: len(self._geometry)]) != self._geometry:
            raise OptionError(
                f"field {name!r}: sizes and crops first, then pixel operations, then a Map; not {[type(op).__name__ for op in ops]}"
            )
        self.size = T.output_size(self._geometry)
        self.augments = self.size is not None and bool(self._pixels or self._map)
        found = {int(c) for source in sources for c in np.unique(source.column(f"{name}.channels")[source.present(name)])}
        self.channels = 1 if found == {1} else 3
        self._decoders = [CropDecoder(source.schema[name].params, channels=self.channels, native=native) for source in sources]

    def declare(self, layout: Layout) -> None:
        if self._map is not None:
            if self.size is None:
                raise OptionError(f"field {self.name!r}: pixels for a Map must have a fixed size: end the geometry with a crop")
            self._add(layout, "", np.dtype(self._map.dtype), (self.rows, *self._map.shape))
        elif self.size is not None:
            self._add(layout, "", np.uint8, (self.rows, *self.size, self.channels))
        else:
            if self._geometry:
                raise OptionError(f"field {self.name!r}: the sizes and crops must end in a fixed size")
            areas = np.concatenate(
                [
                    s.column(f"{self.name}.width").astype(np.int64) * s.column(f"{self.name}.height").astype(np.int64)
                    for s in self.sources
                ]
            )
            most = largest_sum(areas, self.rows, self.repeats)
            self._add(layout, "", np.uint8, (most * self.channels,), self.name + OFFSETS)
            self._add(layout, OFFSETS, np.int64, (self.rows + 1,))
            self._add(layout, SHAPES, np.int64, (self.rows, 3))
        self._add_present(layout)

    def _ragged_bytes(self, rows: Rows) -> NDArray[np.int64]:
        return self._column(rows, "width") * self._column(rows, "height") * self.channels

    def fill(self, rows: Rows, arrays: dict[str, NDArray[Any]], threads: int) -> Errors:
        found = rows.read(self.name, self._memory)
        self._set_present(arrays, found.present)
        out = arrays[self.name]
        if self._map is not None and self.size is not None:
            out[:] = 0
            out = np.zeros((len(rows), *self.size, self.channels), np.uint8)
            rows.kept[self.name] = out
        bad = dict(found.bad)
        good = np.flatnonzero(found.present)
        if bad:
            good = np.array([row for row in good.tolist() if row not in bad], np.int64)
        if self.size is None:
            with rows.spans.stage(DECODE):
                self._whole(rows, found, arrays, good, bad, threads)
            return bad
        if len(good) < len(rows):
            out[~found.present] = 0
        kept = rows.take(good) if len(good) < len(rows) else rows
        sizes = {role: data[good] for role, data in found.sizes.items()} if len(good) < len(rows) else found.sizes
        placed = T.place(
            self._geometry,
            sizes["width"].astype(np.int64),
            sizes["height"].astype(np.int64),
            lambda operation, count: kept.uniform(f"{self.name}/{operation}", count),
        )
        for position, reason in placed.bad.items():
            row = int(good[position])
            bad[row] = as_sample_error(SampleError("crop", reason), self.name, rows, row)
        todo = np.ones(len(good), bool)
        todo[list(placed.bad)] = False
        self._hand_on(rows, found, sizes, placed, good, todo, arrays)
        for number, where in kept.by_source():
            for some in in_pieces(where[todo[where]], rows, threads):
                rows.spans.check()
                places = good[some]
                with rows.spans.stage(DECODE):
                    failed = self._decoders[number].crop_resize(
                        payloads(found.data, places),
                        {role: data[some] for role, data in sizes.items()},
                        placed.boxes[some],
                        placed.flips[some],
                        out,
                        threads=threads,
                        turn=rows.turn,
                        places=places,
                        spent=rows.spans.work,
                    )
                for position, error in failed.items():
                    row = int(places[position])
                    bad[row] = as_sample_error(error, self.name, rows, row)
        rows.kept[self.name + PRESENT] = found.present
        return bad

    def _hand_on(
        self,
        rows: Rows,
        found: Payloads,
        sizes: dict[str, NDArray[Any]],
        placed: T.Placed,
        good: NDArray[np.int64],
        todo: NDArray[np.bool_],
        arrays: dict[str, NDArray[Any]],
    ) -> None:
        """Take pictures out of what is to be decoded here (``todo``, by place in ``good``) that somebody else decodes."""

    def augment(self, rows: Rows, arrays: dict[str, NDArray[Any]], bad: Container[int]) -> Errors:
        if not self.augments:
            return {}
        with rows.spans.stage(AUGMENT):
            out = arrays[self.name]
            pixels = rows.kept.get(self.name, out)
            good = [row for row in np.flatnonzero(rows.kept[self.name + PRESENT]).tolist() if row not in bad]
            for place, op in self._pixels:
                u = rows.uniform(f"{self.name}/{place}/{type(op).__name__}", op.draws)
                for row in good:
                    rows.spans.check()
                    op.apply(pixels[row], u[row])
            return {} if self._map is None else self._mapped(rows, pixels, out, good)

    def _mapped(self, rows: Rows, pixels: NDArray[np.uint8], out: NDArray[Any], good: Sequence[int]) -> Errors:
        """The user's function of every picture."""
        assert self._map is not None
        draws, bad = rows.uniform(f"{self.name}/{self._map_place}/Map", self._map.draws), {}
        with watching_for_ctrl_c():
            for row in good:
                try:
                    out[row] = self._map.apply(pixels[row], draws[row])
                except SampleError as error:
                    bad[row] = as_sample_error(error, self.name, rows, row)
        return bad

    def _whole(
        self, rows: Rows, found: Payloads, arrays: dict[str, NDArray[Any]], good: NDArray[np.int64], bad: Errors, threads: int
    ) -> None:
        """Pictures as they are, one after the other."""
        del threads
        out, offsets, shapes = arrays[self.name], arrays[self.name + OFFSETS], arrays[self.name + SHAPES]
        shapes[:] = 0
        at, usable = 0, set(good.tolist())
        for row in range(len(rows)):
            offsets[row] = at
            if row not in usable:
                continue
            rows.spans.check()
            sizes = {role: data[row : row + 1] for role, data in found.sizes.items()}
            width, height = int(sizes["width"][0]), int(sizes["height"][0])
            end = at + width * height * self.channels
            view = out[at:end].reshape(1, height, width, self.channels)
            box = np.array([[0, 0, width, height]], np.float64)
            decoder = self._decoders[int(rows.samples.source[row])]
            failed = decoder.crop_resize([found.data[row]], sizes, box, np.zeros(1, bool), view)
            if failed:
                bad[row] = as_sample_error(failed[0], self.name, rows, row)
                continue
            for place, op in self._pixels:
                u = rows.take([row]).uniform(f"{self.name}/{place}/{type(op).__name__}", op.draws)
                op.apply(view[0], u[0])
            shapes[row], at = (height, width, self.channels), end
        offsets[len(rows)] = at


def in_pieces(usable: NDArray[np.int64], rows: Rows, threads: int) -> list[NDArray[np.int64]]:
    """What is decoded at a time: all at once, but for a job that may be given up between a few."""
    if rows.spans.given_up is None:
        return [usable]
    return [usable[at : at + PIECE * max(1, threads)] for at in range(0, len(usable), PIECE * max(1, threads))]


def payloads(data: Any, places: NDArray[np.int64]) -> Any:
    """Some of the values that were read, as the decoder takes them."""
    if isinstance(data, Ragged):
        return PackedPayloads(data.values, data.offsets[:-1][places], data.offsets[1:][places])
    return [data[row] for row in places.tolist()]
