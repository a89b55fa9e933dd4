"""Distributions of one field over a data set, from index columns alone: no payload is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfdata.codecs.image import IMAGE_CODECS
from lfdata.errors import LfdataError
from lfdata.format.columns import scalar_dtype
from lfdata.format.layout import SIZE_ROLES
from lfdata.format.schema import field_ndim
from shard_builder.examine.opened import DataSet
from shard_builder.examine.quantiles import Chunks, summarise
from shard_builder.examine.text import visible
from shard_builder.examine.worker import Progress

STEP = 1 << 20
MAX_DISTINCT = 65_536
LISTED_VALUES = 50
# Columns whose every value is worth counting.
_COUNTED = ("codec", "channels", "bits", "rate")
_CODEC_NAMES = {number: name for name, number in IMAGE_CODECS.items()}


def columns(data: DataSet, task: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Operation ``columns``: ``field`` (name) -> present and absent counts, ``columns`` by name, ``errors`` of shards left
    out."""
    return FieldColumns(data, task["field"], progress).describe()


class FieldColumns:
    """Walks over a field's columns shard by shard, present rows only."""

    def __init__(self, data: DataSet, name: str, progress: Progress) -> None:
        self.data = data
        self.name = name
        self.field = data.schema[name]
        self.progress = progress
        self.errors: list[str] = []
        self.ndim = field_ndim(data.path, self.field) if self.field.kind == "array" else 0
        self._numbers: list[int] = []
        self.present = self._survey()

    def _survey(self) -> int:
        """Count present values; shards that cannot be read are named and left out."""
        present = 0
        for number in range(len(self.data.manifest.shards)):
            self.progress.beat()
            try:
                file = self.data.shard(number).file_of(self.name)
                column = file.column(self.name, "present")
                for role in SIZE_ROLES[self.field.kind]:
                    file.column(self.name, role)
            except LfdataError as error:
                self.errors.append(visible(f"shard {number}: {error}"))
                continue
            self._numbers.append(number)
            present += self.data.manifest.shards[number].rows if column is None else int(np.count_nonzero(column))
        return present

    @property
    def rows(self) -> int:
        """Rows of the shards that could be read."""
        return sum(self.data.manifest.shards[number].rows for number in self._numbers)

    def walk(self, roles: tuple[str, ...]) -> Iterator[tuple[NDArray[Any], ...]]:
        """Pieces of some columns, side by side; ``dims`` has shape (rows, ndim)."""
        for number in self._numbers:
            file = self.data.shard(number).file_of(self.name)
            there = file.column(self.name, "present")
            rows = self.data.manifest.shards[number].rows
            parts = [
                column.reshape(rows, self.ndim) if role == "dims" else column
                for role in roles
                if (column := file.column(self.name, role)) is not None
            ]
            for at in range(0, rows, STEP):
                self.progress.beat()
                pieces = [part[at : at + STEP] for part in parts]
                yield tuple(pieces) if there is None else tuple(piece[there[at : at + STEP] != 0] for piece in pieces)

    def chunks(self, roles: tuple[str, ...], combine: Callable[..., NDArray[Any]]) -> Chunks:
        """One derived column."""
        return lambda: (combine(*pieces) for pieces in self.walk(roles))

    def describe(self) -> dict[str, Any]:
        """Everything about the field."""
        found: dict[str, Any] = {"kind": self.field.kind, "present": self.present, "absent": self.rows - self.present}
        summaries: dict[str, Any] = {}
        for role in SIZE_ROLES[self.field.kind]:
            if role in _COUNTED:
                found.setdefault("counts", {})[role] = self.counts(role)
            elif role == "dims":
                for axis in range(self.ndim):
                    summaries[f"dims[{axis}]"] = summarise(self.chunks((role,), lambda dims, axis=axis: dims[:, axis]))
            else:
                summaries[role] = summarise(self.chunks((role,), lambda values: values))
        for name, (roles, combine) in _DERIVED.get(self.field.kind, {}).items():
            summaries[name] = summarise(self.chunks(roles, combine))
        if self.field.kind == "scalar" and scalar_dtype(self.field).kind in "iub":
            found.setdefault("counts", {})["value"] = self.counts("value")
        return found | {"columns": summaries, "errors": self.errors}

    def counts(self, role: str) -> dict[str, Any]:
        """How often each value occurs: the :data:`LISTED_VALUES` most frequent; none if there are too many different ones."""
        table: dict[int, int] = {}
        for (values,) in self.walk((role,)):
            different, numbers = np.unique(values, return_counts=True)
            for value, number in zip(different.tolist(), numbers.tolist(), strict=True):
                table[int(value)] = table.get(int(value), 0) + number
            if len(table) > MAX_DISTINCT:
                return {"distinct": f"more than {MAX_DISTINCT}", "top": []}
        top = sorted(table.items(), key=lambda pair: (-pair[1], pair[0]))[:LISTED_VALUES]
        name = (lambda value: _CODEC_NAMES.get(value, value)) if role == "codec" else (lambda value: value)
        return {"distinct": len(table), "top": [[name(value), number] for value, number in top]}


def _seconds(frames: NDArray[Any], rate: NDArray[Any]) -> NDArray[Any]:
    seconds: NDArray[np.float64] = frames / np.maximum(rate, 1).astype(np.float64)
    return seconds


_DERIVED: dict[str, dict[str, tuple[tuple[str, ...], Callable[..., NDArray[Any]]]]] = {
    "image": {
        "aspect": (("width", "height"), lambda width, height: width / np.maximum(height, 1).astype(np.float64)),
        "megapixels": (("width", "height"), lambda width, height: width.astype(np.float64) * height / 1e6),
    },
    "audio": {"seconds": (("frames", "rate"), _seconds)},
    "json": {"ratio": (("raw_bytes", "bytes"), lambda raw, stored: raw / np.maximum(stored, 1).astype(np.float64))},
}
