"""Windows: values of several frames around a row, many rows at a time (docs/windows.md)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lfdata.dataset.presence import has_absent
from lfdata.dataset.rows import checked_rows
from lfdata.errors import KeyMissingError, LimitError, OptionError
from lfdata.format.columns import scalar_dtype
from lfdata.order.episodes import EPISODE, FRAME, Episodes, Indices, checked_deltas

if TYPE_CHECKING:
    from lfdata.dataset.dataset import ShardDataset

PAD, PRESENT = "_is_pad", ".present"


def open_episodes(data: ShardDataset, episode: str, frame: str | None) -> Episodes:
    """The episodes of a data set by its columns. Raises :class:`OptionError`, :class:`KeyMissingError`."""
    columns: list[NDArray[Any] | None] = []
    for name in (episode, frame):
        if name is None:
            columns.append(None)
            continue
        field = data.schema.get(name)
        if field is None or field.kind != "scalar" or np.dtype(field.params.get("dtype", "f4")).kind not in "iu":
            what = "there is no such field" if field is None else f"it is of kind {field.kind}, {field.params.get('dtype')}"
            raise OptionError(f"{data.path}: windows need {name!r} as a scalar field of integers: {what}")
        if not data.present(name).all():
            raise OptionError(f"{data.path}: windows need {name!r} in every row; {int((~data.present(name)).sum())} lack it")
        columns.append(data.column(name))
    assert columns[0] is not None
    return Episodes(columns[0], columns[1], str(data.path))


class Windows:
    """Windows over some fields of a data set.

    Args:
        data: the data set; every row has ``episode`` and ``frame``, see :class:`lfdata.order.episodes.Episodes`.
        deltas: by field, frames before (negative) or after the row.
        episode, frame: the scalar fields that say what belongs together; ``frame=None``: rows are frames, without gaps.

    Raises:
        OptionError, KeyMissingError: deltas or fields that make no sense.
    """

    def __init__(
        self, data: ShardDataset, deltas: Mapping[str, Iterable[int]], episode: str = EPISODE, frame: str | None = FRAME
    ) -> None:
        self._data = data
        self.episodes = data.episodes(episode, frame)
        self.deltas = {name: checked_deltas(given, name) for name, given in deltas.items()}
        if missing := [name for name in self.deltas if name not in data.schema]:
            raise KeyMissingError(f"{data.path}: no field {missing[0]!r}; there are {list(data.schema)}")
        made = [name + suffix for name in self.deltas for suffix in (PAD, PRESENT)]
        if clash := [name for name in made if name in self.deltas]:
            raise OptionError(f"{data.path}: the field {clash[0]!r} has the name of a mask of windows")
        self._optional = {name for name in self.deltas if has_absent(data, name)}

    def read(self, indices: Any) -> dict[str, Any]:
        """Windows of some rows, repeats allowed, negative indices from the end.

        Returns:
            By field: scalars (n, T), arrays of a declared shape (n, T, ...), pictures of one size uint8 or uint16
            (n, T, height, width, channels), owned; anything else as a list of n lists of T values. Bool (n, T) as ``NAME_is_pad``; as
            ``NAME.present`` for fields that samples may lack: zeros (or ``None``) stand for what is absent.

        Raises:
            IndexError; FormatError: a damaged shard. SampleError: a payload that cannot be decoded. OptionError: pictures of several sizes.
        """
        rows = checked_rows(self._data.path, len(self._data), indices)
        found: dict[str, Any] = {}
        for name, deltas in self.deltas.items():
            places, padding = self.episodes.window(rows, deltas)
            found[name] = self._values(name, places)
            found[name + PAD] = padding
            if name in self._optional:
                found[name + PRESENT] = self._data.present_at(name, places.reshape(-1)).reshape(places.shape)
        return found

    def _values(self, name: str, places: Indices) -> Any:
        field, flat = self._data.schema[name], places.reshape(-1)
        if field.kind == "scalar":
            return self._data.read_many(flat, [name], decode=False)[name].reshape(places.shape)
        if field.kind == "image":
            return self._stacked(name, places, None)
        if field.kind == "array" and (shape := fixed_shape(field.params)) is not None:
            whole = read_arrays(self._data, name, flat, shape)
            return self._stacked(name, places, shape) if whole is None else whole.reshape(*places.shape, *shape)
        different, where = _distinct(flat)
        values = self._data.read_many(different, [name])[name]
        by_row: Any = where.reshape(places.shape).tolist()
        return [[values[at] for at in row] for row in by_row]

    def _stacked(self, name: str, places: Indices, shape: tuple[int, ...] | None) -> NDArray[Any]:
        """Decoded once each, then put where they are wanted; zeros where absent."""
        different, where = _distinct(places.reshape(-1))
        values = self._data.read_many(different, [name])[name]
        like = {(value.shape, value.dtype) for value in values if value is not None}
        if len(like) > 1:
            sizes = sorted(found[0] for found in like)
            raise OptionError(
                f"{self._data.path}: field {name!r} has values of shapes {sizes[0]} and {sizes[-1]} in one call: read them with "
                "read_many, or through a Loader with a crop"
            )
        default = (shape or (0, 0, 0), np.dtype(scalar_dtype(self._data.schema[name]) if shape else np.uint8).newbyteorder("="))
        size, dtype = next(iter(like)) if like else default
        distinct = np.zeros((len(different), *size), dtype)
        for at, value in enumerate(values):
            if value is not None:
                distinct[at] = value
        try:
            return distinct[where].reshape(*places.shape, *size)
        except MemoryError as error:
            raise LimitError(
                self._data.path, None, f"field {name!r}: no memory for {places.size} values. Read fewer"
            ) from error


def _distinct(rows: Indices) -> tuple[Indices, Indices]:
    """Rows without repeats, and where each row is among them."""
    found = np.unique(rows, return_inverse=True)
    return found[0], found[1]


def fixed_shape(params: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The declared shape of an array field, if no side of it is free."""
    shape = params.get("shape") or []
    return tuple(shape) if shape and all(isinstance(side, int) for side in shape) else None


def read_arrays(data: ShardDataset, name: str, rows: Indices, shape: tuple[int, ...]) -> NDArray[Any] | None:
    """Arrays of a declared shape at some rows, (rows, *shape), read straight into their place; ``None`` if some are absent or not what the
    schema says (decoding them one by one says which)."""
    dtype = np.dtype(scalar_dtype(data.schema[name])).newbyteorder("=")
    try:
        out = np.empty((len(rows), *shape), dtype)
    except MemoryError as error:
        raise LimitError(data.path, None, f"field {name!r}: no memory for {len(rows)} values. Read fewer at a time") from error
    return out if read_arrays_into(data, name, rows, out) else None


def read_arrays_into(data: ShardDataset, name: str, rows: Indices, out: NDArray[Any]) -> bool:
    """:func:`read_arrays` into ``out``, C-contiguous; False where it is not possible."""
    raw = out.reshape(-1).view(np.uint8)
    if not len(rows) or not raw.size or not (data.sizes(name, rows)["dims"] == out.shape[1:]).all():
        return not len(rows)
    return data.read_into(rows, name, raw) and (out.dtype.kind != "b" or int(raw.max()) <= 1)
