"""One filler a field: what its part of a batch looks like, how much memory that takes, and how it gets there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

import lfdata.transforms as T
from lfdata.codecs.pixels import CropDecoder
from lfdata.dataset import ShardDataset
from lfdata.errors import FormatError, OptionError, SampleError, StorageError
from lfdata.format.columns import scalar_dtype
from lfdata.loader.rows import Payloads, Rows, as_sample_error, retried
from lfdata.loader.slots import Layout, Place

Errors = dict[int, Exception]
SHAPES, OFFSETS, COUNT, PRESENT = ".shapes", ".offsets", ".count", ".present"


@dataclass(frozen=True, slots=True)
class Part:
    """One array of a slot.

    Attributes:
        name: its name in the batch.
        place: where it lies, for all rows a slot can have.
        by: ``""``: row by row; else the name of the array of offsets that cuts it.
        offsets: whether it is such an array, with one element more than there are rows.
    """

    name: str
    place: Place
    by: str = ""
    offsets: bool = False


class Filler:
    """Fills the arrays of one field.

    Args:
        sources: the data sets; each has the field, of one kind.
        name: the field.
        rows: rows of a slot.
    """

    def __init__(self, sources: Sequence[ShardDataset], name: str, rows: int) -> None:
        self.sources, self.name, self.rows = sources, name, rows
        # How many of the rows may be one and the same sample (padding, mixtures that repeat).
        self.repeats = 1
        self.parts: list[Part] = []
        # A field that every sample must have needs no column that says so.
        self.calls_user = False
        self._optional = any(has_absent(source, name) for source in sources)

    def declare(self, layout: Layout) -> None:
        """Reserve room."""
        raise NotImplementedError

    def fill(self, rows: Rows, arrays: dict[str, NDArray[Any]], threads: int) -> Errors:
        """Fill the arrays (by name, as many rows as ``rows`` has; ragged ones with all the room there is); gives rows that failed."""
        raise NotImplementedError

    def _add(self, layout: Layout, suffix: str, dtype: Any, shape: tuple[int, ...], by: str = "") -> None:
        self.parts.append(Part(self.name + suffix, layout.add(dtype, shape), by, suffix == OFFSETS))

    def _add_present(self, layout: Layout) -> None:
        if self._optional:
            self._add(layout, PRESENT, bool, (self.rows,))

    def _set_present(self, arrays: dict[str, NDArray[Any]], present: NDArray[np.bool_]) -> None:
        if self._optional:
            arrays[self.name + PRESENT][:] = present

    def _params(self, key: str) -> Any:
        """A parameter of the field that must be the same in all sources."""
        found = [source.schema[self.name].params.get(key) for source in self.sources]
        if any(one != found[0] for one in found):
            raise OptionError(
                f"field {self.name!r}: {key} is {found[0]!r} in one source and {found[1:]!r} in others; it must be the same"
            )
        return found[0]

    def _most(self, column: str, scale: int = 1) -> int:
        """The largest sum of a size column over as many samples as a slot has rows."""
        sizes = np.concatenate([source.column(f"{self.name}.{column}") for source in self.sources]).astype(np.int64)
        return largest_sum(sizes, self.rows, self.repeats) * scale

    def _decoder_calls(self, rows: Rows, found: Payloads, one: Callable[[int, Any], None]) -> Errors:
        """``one(row, decoded value)`` for every row that has the field."""
        bad = dict(found.bad)
        for row in np.flatnonzero(found.present).tolist():
            if row in bad:
                continue
            sizes = {role: data[row] for role, data in found.sizes.items()}
            if "dims" in sizes:
                sizes["dims"] = tuple(sizes["dims"].tolist())
            source = self.sources[int(rows.samples.source[row])]
            try:
                one(row, source.decoder(self.name, int(rows.samples.index[row])).decode(found.data[row].data, sizes))
            except SampleError as error:
                bad[row] = as_sample_error(error, self.name, rows, row)
        return bad


def has_absent(source: ShardDataset, name: str) -> bool:
    """Whether some sample lacks the field."""
    stored = source.manifest.statistics.get(name, {})
    present = stored.get("present") if isinstance(stored, dict) else None
    if isinstance(present, int):
        return present < len(source)
    return not bool(source.present(name).all())


class ScalarFiller(Filler):
    """(rows,), the field's dtype."""

    def declare(self, layout: Layout) -> None:
        self._dtype = scalar_dtype(self.sources[0].schema[self.name])
        self._params("dtype")
        self._add(layout, "", self._dtype.newbyteorder("="), (self.rows,))
        self._add_present(layout)

    def fill(self, rows: Rows, arrays: dict[str, NDArray[Any]], threads: int) -> Errors:
        del threads
        for number, where in rows.by_source():
            source, indices = self.sources[number], rows.samples.index[where]
            arrays[self.name][where] = retried(partial(source.read_many, indices, [self.name], decode=False))[self.name]
            if self._optional:
                arrays[self.name + PRESENT][where] = retried(partial(source.present_at, self.name, indices))
        return {}


class TokensFiller(Filler):
    """Fixed length: (rows, length) and counts. Otherwise ids one after the other, and offsets."""

    def __init__(self, sources: Sequence[ShardDataset], name: str, rows: int, ops: Sequence[Any]) -> None:
        super().__init__(sources, name, rows)
        self._op = single(ops, T.Tokens, name)
        self._dtype = np.dtype(self._params("dtype"))

    def declare(self, layout: Layout) -> None:
        if self._op is None:
            self._add(layout, "", self._dtype, (self._most("tokens"),), self.name + OFFSETS)
            self._add(layout, OFFSETS, np.int64, (self.rows + 1,))
        else:
            self._add(layout, "", self._dtype, (self.rows, self._op.length))
            self._add(layout, COUNT, np.int64, (self.rows,))
        self._add_present(layout)

    def fill(self, rows: Rows, arrays: dict[str, NDArray[Any]], threads: int) -> Errors:
        del threads
        if self._op is not None and self._fixed(rows, arrays):
            return {}
        found = rows.read(self.name)
        self._set_present(arrays, found.present)
        bad = dict(found.bad)
        ids = [
            data.view(self._dtype) if not len(data) % self._dtype.itemsize else data[:0].view(self._dtype)
            for data in found.data
        ]
        lengths = np.array([len(one) for one in ids], np.int64)
        for row in np.flatnonzero(lengths != found.sizes.get("tokens", lengths)).tolist():
            if row not in bad:
                bad[row] = as_sample_error(
                    SampleError("corrupt", "the payload is not as long as the index says"), self.name, rows, row
                )
        if self._op is None:
            flatten(ids, bad, arrays[self.name], arrays[self.name + OFFSETS])
            return bad
        out, counts = arrays[self.name], arrays[self.name + COUNT]
        starts, taken = self._op.place(lengths, lambda operation, count: rows.uniform(f"{self.name}/{operation}", count))
        counts[:] = taken
        out[:] = self._op.pad
        for row, (start, count) in enumerate(zip(starts.tolist(), taken.tolist(), strict=True)):
            if row not in bad:
                at = self._op.length - count if self._op.side == "left" else 0
                out[row, at : at + count] = ids[row][start : start + count]
        return bad

    def _fixed(self, rows: Rows, arrays: dict[str, NDArray[Any]]) -> bool:
        """The usual case, read in place: every sequence of the one source is as long as asked for."""
        out = arrays[self.name]
        if len(self.sources) > 1 or self._optional:
            return False
        source, indices = self.sources[0], rows.samples.index
        try:
            if (source.sizes(self.name, indices)["tokens"] != self._op.length).any():
                return False
            if not source.read_into(indices, self.name, out.reshape(-1).view(np.uint8)):
                return False
        except (FormatError, StorageError):
            # Once more, row by row and with another try.
            return False
        arrays[self.name + COUNT][:] = self._op.length
        return True


class AudioFiller(Filler):
    """A window: (rows, frames, channels) int16 and counts. Otherwise samples one after the other, offsets, and shapes (frames, channels)."""

    def __init__(self, sources: Sequence[ShardDataset], name: str, rows: int, ops: Sequence[Any]) -> None:
        super().__init__(sources, name, rows)
        self._window = next((op for op in ops if isinstance(op, T.AudioWindow)), None)
        self._gains = [(place, op) for place, op in enumerate(ops) if isinstance(op, T.Gain)]
        if len(self._gains) + (self._window is not None) != len(ops):
            raise OptionError(f"field {name!r}: audio takes one AudioWindow and Gain, not {[type(op).__name__ for op in ops]}")
        self._channels = 0
        if self._window is not None:
            channels = np.unique(
                np.concatenate([source.column(f"{name}.channels")[source.present(name)] for source in sources])
            )
            if len(channels) > 1:
                raise OptionError(
                    f"field {name!r}: recordings of {channels.tolist()} channels; convert with channels=mono for windows"
                )
            self._channels = int(channels[0]) if len(channels) else 1

    def declare(self, layout: Layout) -> None:
        if self._window is None:
            self._add(layout, "", np.int16, (self._most("bytes") // 2,), self.name + OFFSETS)
            self._add(layout, OFFSETS, np.int64, (self.rows + 1,))
            self._add(layout, SHAPES, np.int64, (self.rows, 2))
        else:
            self._add(layout, "", np.int16, (self.rows, self._window.frames, self._channels))
            self._add(layout, COUNT, np.int64, (self.rows,))
        self._add_present(layout)

    def fill(self, rows: Rows, arrays: dict[str, NDArray[Any]], threads: int) -> Errors:
        del threads
        if self._window is not None:
            return self._windows(rows, arrays, self._window)
        found = rows.read(self.name)
        self._set_present(arrays, found.present)
        shapes, values = arrays[self.name + SHAPES], [np.empty(0, np.int16)] * len(rows)
        shapes[:] = 0

        def one(row: int, audio: Any) -> None:
            values[row] = audio.samples.reshape(-1)
            shapes[row] = audio.samples.shape

        bad = self._decoder_calls(rows, found, one)
        flatten(values, bad, arrays[self.name], arrays[self.name + OFFSETS])
        offsets = arrays[self.name + OFFSETS]
        for place, gain in self._gains:
            u = rows.uniform(f"{self.name}/{place}/Gain", gain.draws)
            for row in range(len(rows)):
                gain.apply(arrays[self.name][offsets[row] : offsets[row + 1]], u[row])
        return bad

    def _windows(self, rows: Rows, arrays: dict[str, NDArray[Any]], window: Any) -> Errors:
        """Only the chunks that cover each window are read and checked."""
        out, counts = arrays[self.name], arrays[self.name + COUNT]
        bad: Errors = {}
        lengths = np.zeros(len(rows), np.int64)
        present = np.zeros(len(rows), bool)
        for number, where in rows.by_source():
            source, indices = self.sources[number], rows.samples.index[where]
            lengths[where] = retried(partial(source.sizes, self.name, indices))["frames"]
            present[where] = retried(partial(source.present_at, self.name, indices))
        self._set_present(arrays, present)
        starts, taken = window.window(lengths, lambda operation, count: rows.uniform(f"{self.name}/{operation}", count))
        counts[:] = taken
        for row, (start, count) in enumerate(zip(starts.tolist(), taken.tolist(), strict=True)):
            source = self.sources[int(rows.samples.source[row])]
            try:
                if count:
                    read = partial(source.read_audio, int(rows.samples.index[row]), self.name, start, start + count)
                    out[row, :count] = retried(read)
                out[row, count:] = window.pad
            except (FormatError, SampleError, ValueError) as error:
                bad[row] = as_sample_error(error, self.name, rows, row)
        for place, gain in self._gains:
            u = rows.uniform(f"{self.name}/{place}/Gain", gain.draws)
            for row in range(len(rows)):
                gain.apply(out[row], u[row])
        return bad


class ArrayFiller(Filler):
    """A declared shape without ``*``: (rows, *shape). Otherwise values one after the other, offsets, and shapes."""

    def __init__(self, sources: Sequence[ShardDataset], name: str, rows: int, ops: Sequence[Any]) -> None:
        super().__init__(sources, name, rows)
        refuse(ops, name)
        self._dtype = scalar_dtype(sources[0].schema[name])
        self._params("dtype")
        self._ndim = int(self._params("ndim"))
        shape = self._params("shape") or []
        self._shape = tuple(shape) if shape and all(isinstance(side, int) for side in shape) else None

    def declare(self, layout: Layout) -> None:
        dtype = self._dtype.newbyteorder("=")
        if self._shape is not None:
            self._add(layout, "", dtype, (self.rows, *self._shape))
        else:
            self._add(layout, "", dtype, (self._most("bytes") // dtype.itemsize,), self.name + OFFSETS)
            self._add(layout, OFFSETS, np.int64, (self.rows + 1,))
            self._add(layout, SHAPES, np.int64, (self.rows, self._ndim))
        self._add_present(layout)

    def fill(self, rows: Rows, arrays: dict[str, NDArray[Any]], threads: int) -> Errors:
        del threads
        found = rows.read(self.name)
        self._set_present(arrays, found.present)
        if self._shape is not None:
            arrays[self.name][~found.present] = 0

            def put(row: int, value: Any) -> None:
                arrays[self.name][row] = value

            return self._decoder_calls(rows, found, put)
        shapes, values = arrays[self.name + SHAPES], [np.empty(0, self._dtype)] * len(rows)
        shapes[:] = 0

        def one(row: int, value: Any) -> None:
            values[row] = value.reshape(-1)
            shapes[row] = value.shape

        bad = self._decoder_calls(rows, found, one)
        flatten(values, bad, arrays[self.name], arrays[self.name + OFFSETS])
        return bad


class BytesFiller(Filler):
    """Text as UTF-8, bytes, and structured values as MessagePack: uint8 values one after the other, and offsets."""

    def __init__(self, sources: Sequence[ShardDataset], name: str, rows: int, ops: Sequence[Any]) -> None:
        super().__init__(sources, name, rows)
        refuse(ops, name)
        self._packed = sources[0].schema[name].kind == "json"

    def declare(self, layout: Layout) -> None:
        self._add(layout, "", np.uint8, (self._most("raw_bytes" if self._packed else "bytes"),), self.name + OFFSETS)
        self._add(layout, OFFSETS, np.int64, (self.rows + 1,))
        self._add_present(layout)

    def fill(self, rows: Rows, arrays: dict[str, NDArray[Any]], threads: int) -> Errors:
        del threads
        found = rows.read(self.name)
        self._set_present(arrays, found.present)
        bad, values = dict(found.bad), list(found.data)
        if self._packed:
            values = [np.empty(0, np.uint8)] * len(rows)
            for row in np.flatnonzero(found.present).tolist():
                source = self.sources[int(rows.samples.source[row])]
                decoder = source.decoder(self.name, int(rows.samples.index[row]))
                try:
                    raw = decoder.messagepack(found.data[row].data, {"raw_bytes": found.sizes["raw_bytes"][row]})
                    values[row] = np.frombuffer(raw, np.uint8)
                except SampleError as error:
                    bad[row] = as_sample_error(error, self.name, rows, row)
        flatten(values, bad, arrays[self.name], arrays[self.name + OFFSETS])
        return bad


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
        found = {int(c) for source in sources for c in np.unique(source.column(f"{name}.channels")[source.present(name)])}
        self.channels = 1 if found == {1} else 3
        self._restart = [bool(source.schema[name].params.get("restart")) for source in sources]
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

    def fill(self, rows: Rows, arrays: dict[str, NDArray[Any]], threads: int) -> Errors:
        found = rows.read(self.name)
        self._set_present(arrays, found.present)
        out = arrays[self.name]
        if self._map is not None and self.size is not None:
            out[:] = 0
            out = np.zeros((len(rows), *self.size, self.channels), np.uint8)
        bad = dict(found.bad)
        good = np.array([row for row in np.flatnonzero(found.present).tolist() if row not in bad], np.int64)
        if self.size is None:
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
        for number, where in kept.by_source():
            usable = np.array([p for p in where.tolist() if p not in placed.bad], np.int64) if placed.bad else where
            places = good[usable]
            aux = None
            if self._restart[number]:
                aux = self.sources[number].mcu_rows(self.name, rows.samples.index[places])
            failed = self._decoders[number].crop_resize(
                [found.data[row] for row in places.tolist()],
                {role: data[usable] for role, data in sizes.items()},
                placed.boxes[usable],
                placed.flips[usable],
                out,
                threads=threads,
                places=places,
                aux=aux,
            )
            for position, error in failed.items():
                row = int(places[position])
                bad[row] = as_sample_error(error, self.name, rows, row)
        for place, op in self._pixels:
            u = rows.uniform(f"{self.name}/{place}/{type(op).__name__}", op.draws)
            for row in good.tolist():
                if row not in bad:
                    op.apply(out[row], u[row])
        if self._map is not None:
            self._mapped(rows, out, arrays[self.name], good, bad)
        return bad

    def _mapped(self, rows: Rows, pixels: NDArray[np.uint8], out: NDArray[Any], good: NDArray[np.int64], bad: Errors) -> None:
        """The user's function of every picture."""
        assert self._map is not None
        draws = rows.uniform(f"{self.name}/{self._map_place}/Map", self._map.draws)
        for row in good.tolist():
            if row in bad:
                continue
            try:
                out[row] = self._map.apply(pixels[row], draws[row])
            except SampleError as error:
                bad[row] = as_sample_error(error, self.name, rows, row)

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


class MapFiller(Filler):
    """A user's function of the decoded value: (rows, *shape)."""

    def __init__(self, sources: Sequence[ShardDataset], name: str, rows: int, op: Any) -> None:
        super().__init__(sources, name, rows)
        self.calls_user = True
        self._op = op
        op.resolve()

    def declare(self, layout: Layout) -> None:
        self._add(layout, "", np.dtype(self._op.dtype), (self.rows, *self._op.shape))
        self._add_present(layout)

    def fill(self, rows: Rows, arrays: dict[str, NDArray[Any]], threads: int) -> Errors:
        del threads
        out, draws = arrays[self.name], rows.uniform(f"{self.name}/0/Map", self._op.draws)

        def one(row: int, value: Any) -> None:
            out[row] = self._op.apply(value, draws[row])

        if self.sources[0].schema[self.name].kind == "scalar":
            return self._scalars(rows, arrays, one)
        found = rows.read(self.name)
        self._set_present(arrays, found.present)
        out[~found.present] = 0
        return self._decoder_calls(rows, found, one)

    def _scalars(self, rows: Rows, arrays: dict[str, NDArray[Any]], one: Callable[[int, Any], None]) -> Errors:
        """Scalars lie in the index: they have no payload and no decoder."""
        bad: Errors = {}
        present = np.ones(len(rows), bool)
        for number, where in rows.by_source():
            source, indices = self.sources[number], rows.samples.index[where]
            present[where] = retried(partial(source.present_at, self.name, indices))
            values = retried(partial(source.read_many, indices, [self.name], decode=False))[self.name]
            for row, value in zip(where.tolist(), values, strict=True):
                if not present[row]:
                    arrays[self.name][row] = 0
                    continue
                try:
                    one(row, value)
                except SampleError as error:
                    bad[row] = as_sample_error(error, self.name, rows, row)
        self._set_present(arrays, present)
        return bad


def largest_sum(sizes: NDArray[np.int64], rows: int, repeats: int) -> int:
    """The largest sum of the sizes of as many samples as there are rows, none of them more than ``repeats`` times."""
    times = max(1, min(rows, repeats))
    whole, rest = divmod(rows, times)
    top = sizes if len(sizes) <= whole + 1 else np.partition(sizes, len(sizes) - whole - 1)[-whole - 1 :]
    top = np.sort(top)[::-1]
    return int(top[:whole].sum()) * times + int(top[whole : whole + 1].sum()) * rest


def plain(filler: Filler) -> bool:
    """Whether a field's values are copied rather than decoded."""
    return isinstance(filler, ScalarFiller | TokensFiller)


def single(ops: Sequence[Any], kind: type, name: str) -> Any:
    """The only operation, of a kind; ``None`` if there is none."""
    if not ops:
        return None
    if len(ops) > 1 or not isinstance(ops[0], kind):
        raise OptionError(f"field {name!r}: takes one {kind.__name__} at most, not {[type(op).__name__ for op in ops]}")
    return ops[0]


def refuse(ops: Sequence[Any], name: str) -> None:
    """No operation fits."""
    if ops:
        raise OptionError(f"field {name!r}: {type(ops[0]).__name__} does not go with it; a Map takes any value")


def flatten(values: Sequence[NDArray[Any]], bad: Errors, out: NDArray[Any], offsets: NDArray[np.int64]) -> None:
    """Values one after the other; bad rows have none."""
    at = 0
    for row, value in enumerate(values):
        offsets[row] = at
        if row not in bad:
            out[at : at + len(value)] = value
            at += len(value)
    offsets[len(values)] = at


def make_filler(
    sources: Sequence[ShardDataset], name: str, ops: Sequence[Any], rows: int, native: bool | None, repeats: int = 1
) -> Filler:
    """The filler of a field with its transforms, for rows of which up to ``repeats`` may be one sample.

    Raises:
        OptionError: kinds that differ, transforms that do not fit.
    """
    filler = _filler(sources, name, ops, rows, native)
    filler.repeats = repeats
    return filler


def _filler(sources: Sequence[ShardDataset], name: str, ops: Sequence[Any], rows: int, native: bool | None) -> Filler:
    kinds = {source.schema[name].kind for source in sources}
    if len(kinds) > 1:
        raise OptionError(f"field {name!r} is of kinds {sorted(kinds)} in different sources")
    kind = kinds.pop()
    if len(ops) == 1 and isinstance(ops[0], T.Map):
        return MapFiller(sources, name, rows, ops[0])
    match kind:
        case "image":
            return ImageFiller(sources, name, rows, ops, native)
        case "tokens":
            return TokensFiller(sources, name, rows, ops)
        case "audio":
            return AudioFiller(sources, name, rows, ops)
        case "array":
            return ArrayFiller(sources, name, rows, ops)
        case "scalar":
            refuse(ops, name)
            return ScalarFiller(sources, name, rows)
    return BytesFiller(sources, name, rows, ops)
