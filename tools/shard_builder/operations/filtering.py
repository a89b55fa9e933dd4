"""``filter``: the samples for which an expression is true."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfdata.dataset import ShardDataset
from lfdata.dataset.shard import Shard
from lfdata.errors import CorruptError, KeyMissingError, OptionError
from lfdata.format.durable import Files
from shard_builder.operations.build import Build, BuildOptions, Built, Progress
from shard_builder.operations.expression import Expression
from shard_builder.operations.inputs import open_input
from shard_builder.operations.selecting import Mask

_KEY_ROWS = 65_536


def filter_samples(
    source: str | Path,
    target: str | Path,
    where: str,
    *,
    build: BuildOptions | None = None,
    progress: Progress | None = None,
    files: Files | None = None,
) -> Built:
    """Make a data set of the samples for which ``where`` (:mod:`shard_builder.operations.expression`) is true, in their order.

    Raises:
        OptionError: a mistake in the expression, or a column that is not there. LfdataError: nothing is kept.
    """
    expression = Expression(where)
    data = open_input(source)
    job = Build("filter", {"where": where}, [data], data.manifest.fields, build or BuildOptions(), files or Files())
    return job.run(Path(target), lambda _scratch: [kept_rows(data, expression)], progress)


def kept_rows(data: ShardDataset, expression: Expression) -> Mask:
    """Which samples are kept; shard by shard."""
    parts = [expression.keep(ShardColumns(data, data.shard(ordinal))) for ordinal in range(len(data.manifest.shards))]
    return np.concatenate(parts) if parts else np.empty(0, bool)


class ShardColumns:
    """See :class:`shard_builder.operations.expression.Columns`."""

    def __init__(self, data: ShardDataset, shard: Shard) -> None:
        self._data, self._shard = data, shard
        self.rows = shard.rows
        self._keys: list[bytes] | None = None

    def column(self, name: str) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Values and presence of ``FIELD`` (a scalar) or ``FIELD.ROLE``."""
        if name not in self._data.columns:
            raise OptionError(f"--where: no column {name!r}; there are {', '.join(self._data.columns)}, key and has(FIELD)")
        field, role = (name, "value") if name in self._data.schema else tuple(name.rsplit(".", 1))
        if role == "dims":
            raise OptionError("--where: the dimensions of an array are several numbers; compare its bytes")
        found = self._shard.file_of(field).read_column(field, role)
        if found is None:
            raise CorruptError(self._shard.name, None, f"field {field!r} has no column {role!r}")
        return found, self.present(field)

    def present(self, field: str) -> NDArray[np.bool_]:
        """Where a field is there."""
        try:
            found = self._shard.file_of(field).read_column(field, "present")
        except KeyMissingError:
            raise OptionError(f"--where: no field {field!r}; there are {', '.join(self._data.schema)}") from None
        return np.ones(self.rows, bool) if found is None else found.astype(bool)

    def keys(self) -> list[bytes]:
        """All keys of the shard."""
        if self._keys is None:
            self._keys = []
            for start in range(0, self.rows, _KEY_ROWS):
                self._keys += self._shard.base.keys(np.arange(start, min(start + _KEY_ROWS, self.rows)))
        return self._keys
