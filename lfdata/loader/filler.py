"""What every filler is: a field's part of a batch, how much memory that takes, and how it gets there."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfdata.dataset import Readings, ShardDataset
from lfdata.dataset.presence import has_absent
from lfdata.dataset.rows import Memory
from lfdata.errors import OptionError, SampleError
from lfdata.loader.rows import Payloads, Rows, as_sample_error
from lfdata.loader.slots import Layout, Place
from lfdata.loader.spans import DECODE

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
        self.calls_user = False
        # For stored bytes that nobody sees after fill().
        self._memory = Memory()
        # Whether a row has room for any sample, though some of the field's arrays are ragged.
        self.takes_any = False
        # Whether augment() does anything.
        self.augments = False
        # A field that every sample must have needs no column that says so.
        self._optional = any(has_absent(source, name) for source in sources)

    def declare(self, layout: Layout) -> None:
        """Reserve room."""
        raise NotImplementedError

    def start(self, rows: Rows, arrays: dict[str, NDArray[Any]]) -> Readings | None:
        """Begin to read what :meth:`fill` will ask for, into its place, while the caller does something else; ``None`` where that is no use."""
        del rows, arrays
        return None

    def fill(self, rows: Rows, arrays: dict[str, NDArray[Any]], threads: int) -> Errors:
        """Fill the arrays (by name, as many rows as ``rows`` has; ragged ones with all the room there is); gives rows that failed."""
        raise NotImplementedError

    def augment(self, rows: Rows, arrays: dict[str, NDArray[Any]], bad: Container[int]) -> Errors:
        """Random augmentation of what :meth:`fill` made of the same ``rows``, but of ``bad`` ones; gives rows that failed."""
        del rows, arrays, bad
        return {}

    def ragged_bytes(self, rows: Rows) -> dict[str, NDArray[np.int64]]:
        """Bytes that each row's values take in the arrays where they differ in length, from index columns: int64 (rows,) by name."""
        return {part.name: self._ragged_bytes(rows) for part in self.parts if part.by}

    def _ragged_bytes(self, rows: Rows) -> NDArray[np.int64]:
        raise NotImplementedError

    def _column(self, rows: Rows, role: str) -> NDArray[np.int64]:
        """A size column at some rows: 0 where the field is absent."""
        found = np.zeros(len(rows), np.int64)
        for number, where in rows.by_source():
            source, indices = self.sources[number], rows.samples.index[where]
            sizes = source.sizes(self.name, indices)[role].astype(np.int64)
            found[where] = sizes * source.present_at(self.name, indices) if self._optional else sizes
        return found

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

    def _most(self, column: str) -> int:
        """The largest sum of a size column over as many samples as a slot has rows."""
        sizes = np.concatenate([source.column(f"{self.name}.{column}") for source in self.sources]).astype(np.int64)
        return largest_sum(sizes, self.rows, self.repeats)

    def _decoder_calls(self, rows: Rows, found: Payloads, one: Callable[[int, Any], None], stage: int = DECODE) -> Errors:
        """``one(row, decoded value)`` for every row that has the field."""
        with rows.spans.stage(stage):
            return self._call_decoders(rows, found, one)

    def _call_decoders(self, rows: Rows, found: Payloads, one: Callable[[int, Any], None]) -> Errors:
        bad = dict(found.bad)
        for row in np.flatnonzero(found.present).tolist():
            if row in bad:
                continue
            rows.spans.check()
            sizes = {role: data[row] for role, data in found.sizes.items()}
            if "dims" in sizes:
                sizes["dims"] = tuple(sizes["dims"].tolist())
            source = self.sources[int(rows.samples.source[row])]
            try:
                one(row, source.decoder(self.name, int(rows.samples.index[row])).decode(found.data[row].data, sizes))
            except SampleError as error:
                bad[row] = as_sample_error(error, self.name, rows, row)
        return bad


def largest_sum(sizes: NDArray[np.int64], rows: int, repeats: int) -> int:
    """The largest sum of the sizes of as many samples as there are rows, none of them more than ``repeats`` times."""
    times = max(1, min(rows, repeats))
    whole, rest = divmod(rows, times)
    top = sizes if len(sizes) <= whole + 1 else np.partition(sizes, len(sizes) - whole - 1)[-whole - 1 :]
    top = np.sort(top)[::-1]
    return int(top[:whole].sum()) * times + int(top[whole : whole + 1].sum()) * rest


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
