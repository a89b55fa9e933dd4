"""Parquet files of LeRobot data sets: columns checked against declared features, rows read forward in bounded batches."""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfdata.errors import MissingExtraError, SampleError, SourceError
from shard_builder.sources.files import refuse_pointer, resolve_inside, show, size_inside

# Rows decoded at a time: few where pictures are among them.
BATCH_ROWS, BATCH_PICTURES = 256, 16
_FAMILIES = {"f": "float", "i": "integer", "u": "integer", "b": "bool"}


def arrow_library() -> Any:
    """pyarrow. Raises :class:`MissingExtraError`."""
    try:
        importlib.import_module("pyarrow.parquet")
        importlib.import_module("pyarrow.compute")
        return importlib.import_module("pyarrow")
    except ImportError as error:
        raise MissingExtraError(f"Parquet files need pyarrow: pip install 'lfdata[arrow]' ({error})") from error


class ParquetFile:
    """One opened file below ``root``.

    Raises:
        SampleError: ``missing-file``, ``lfs-pointer``, ..., ``parquet``: not Parquet, or damaged.
    """

    def __init__(self, root: Path, path: str) -> None:
        self._arrow, self.path = arrow_library(), path
        self.size = size_inside(root, path)
        real = resolve_inside(root, path)
        try:
            with open(real, "rb") as file:
                refuse_pointer(file.read(1024), path)
            self._file = self._arrow.parquet.ParquetFile(os.fspath(real))
            self.schema: dict[str, Any] = {field.name: field.type for field in self._file.schema_arrow}
            self.rows = int(self._file.metadata.num_rows)
        except (self._arrow.ArrowException, OSError, ValueError) as error:
            raise self._bad(error) from error
        counts = [self._file.metadata.row_group(n).num_rows for n in range(self._file.num_row_groups)]
        self.group_starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)

    def _bad(self, error: Exception) -> SampleError:
        text = " ".join(str(error).split())[:300]
        return SampleError("parquet", f"not a Parquet file, or a damaged one: {text}", path=show(self.path))

    def read(self, names: Sequence[str]) -> Any:
        """Whole columns, as a table. Raises :class:`SampleError`."""
        try:
            return self._file.read(list(names), use_threads=False)
        except (self._arrow.ArrowException, OSError, ValueError) as error:
            raise self._bad(error) from error

    def batches(self, group: int, names: Sequence[str], rows: int) -> Iterator[Any]:
        """Record batches of a row group. Raises :class:`SampleError`."""
        try:
            yield from self._file.iter_batches(rows, row_groups=[group], columns=list(names), use_threads=False)
        except (self._arrow.ArrowException, OSError, ValueError) as error:
            raise self._bad(error) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class MetaTable:
    """A Parquet file of the ``meta`` folder, whole. Raises :class:`SourceError` naming it."""

    def __init__(self, root: Path, path: str, location: str) -> None:
        self._where = f"{location}/{path}"
        try:
            self._file = ParquetFile(root, path)
        except SampleError as error:
            raise SourceError(f"{self._where}: {error.reason}") from None

    def columns(self, types: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        """Columns of numbers without nulls, as these dtypes."""
        missing = [name for name in types if name not in self._file.schema]
        if missing:
            raise SourceError(f"{self._where}: no column {missing[0]!r}")
        try:
            table = self._file.read(list(types))
        except SampleError as error:
            raise SourceError(f"{self._where}: {error.reason}") from None
        found = {}
        for name, dtype in types.items():
            column = table.column(name)
            values = None if column.null_count else column.to_numpy()
            if values is None or values.dtype.kind not in ("iu" if dtype is np.int64 else "iuf"):
                raise SourceError(f"{self._where}: column {name!r} holds {column.type}, or nulls, where numbers are expected")
            found[name] = values.astype(dtype)
        return found

    def texts(self, number: str) -> dict[int, str]:
        """A column of texts by a column of integers: pandas writes the texts as its index, under a name of its own."""
        arrow = arrow_library()
        is_text = [
            name for name, kind in self._file.schema.items() if arrow.types.is_string(kind) or arrow.types.is_large_string(kind)
        ]
        if number not in self._file.schema or not is_text:
            raise SourceError(f"{self._where}: needs a column {number!r} and one of texts; it has {list(self._file.schema)}")
        numbers = self.columns({number: np.int64})[number]
        try:
            texts = self._file.read([is_text[0]]).column(is_text[0]).to_pylist()
        except SampleError as error:
            raise SourceError(f"{self._where}: {error.reason}") from None
        return {int(key): text for key, text in zip(numbers.tolist(), texts, strict=True) if text is not None}


def check_column(kind: Any, dtype: str, shape: Sequence[int]) -> str:
    """What is wrong with a column of Arrow type ``kind`` for a feature; empty if nothing is."""
    types = arrow_library().types
    kind = _storage(kind)
    if dtype == "image":
        members = [kind.field(n).name for n in range(kind.num_fields)] if types.is_struct(kind) else []
        fits = "bytes" in members or types.is_binary(kind) or types.is_large_binary(kind)
        return "" if fits else f"it holds {kind}, not pictures (a struct with bytes)"
    if dtype == "string":
        return "" if types.is_string(kind) or types.is_large_string(kind) else f"it holds {kind}, not text"
    depth = 0
    while _is_list(kind):
        kind, depth = _storage(kind.value_type), depth + 1
    try:
        leaf = np.dtype(kind.to_pandas_dtype())
    except (NotImplementedError, TypeError):
        leaf = np.dtype("O")
    wanted = np.dtype(dtype)
    if _FAMILIES.get(leaf.kind, leaf.name) != _FAMILIES.get(wanted.kind):
        return f"it holds {kind}, not {dtype}"
    levels = {0, 1} if math.prod(shape) == 1 and len(shape) <= 1 else {len(shape)}
    return "" if depth in levels else f"it holds lists {depth} deep for the shape {tuple(shape)}"


def _storage(kind: Any) -> Any:
    """An extension type's own type: the extensions of ``datasets`` are known only where that library is loaded."""
    return getattr(kind, "storage_type", kind)


def _is_list(kind: Any) -> bool:
    types = arrow_library().types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def dense(column: Any, shape: Sequence[int]) -> NDArray[Any] | None:
    """A column of nested lists as one array (rows, *shape); ``None`` where a value is null or of another shape."""
    compute = importlib.import_module("pyarrow.compute")
    values, sides = getattr(column, "storage", column), list(shape)
    if not _is_list(values.type):
        sides = []
    rows = len(values)
    for side in sides:
        if values.null_count or not _is_list(values.type):
            return None
        lengths = compute.list_value_length(values).to_numpy(zero_copy_only=False)
        if len(lengths) and not (lengths == side).all():
            return None
        values = values.flatten()
        values = getattr(values, "storage", values)
    if values.null_count or _is_list(values.type):
        return None
    return np.asarray(values.to_numpy(zero_copy_only=False)).reshape(rows, *sides)


class Rows:
    """Rows of one file, by number; cheap for numbers that go up. ``shapes``: by column of numbers, its shape."""

    def __init__(self, file: ParquetFile, shapes: Mapping[str, Sequence[int]], others: Sequence[str], pictures: bool) -> None:
        self.file, self._shapes, self._others = file, shapes, others
        self._batch_rows = BATCH_PICTURES if pictures else BATCH_ROWS
        self._group, self._low, self._high = -1, 0, 0
        self._batches: Iterator[Any] = iter(())
        self._batch: Any = None
        self._dense: dict[str, NDArray[Any] | None] = {}

    def row(self, number: int) -> dict[str, Any]:
        """Values of a row: arrays, scalars of NumPy, texts, dicts; ``None`` for nulls. Raises :class:`SampleError`."""
        self._go(number)
        at = number - self._low
        found: dict[str, Any] = {}
        for name, shape in self._shapes.items():
            whole = self._dense[name]
            found[name] = whole[at] if whole is not None else self._single(name, at, shape)
        for name in self._others:
            found[name] = self._batch.column(name)[at].as_py()
        return found

    def _go(self, number: int) -> None:
        group = int(np.searchsorted(self.file.group_starts, number, side="right")) - 1
        if not 0 <= number < self.file.rows:
            raise SampleError("changed", "the file has fewer rows than when it was scanned", path=show(self.file.path))
        if group != self._group or number < self._low:
            self._group, self._high = group, int(self.file.group_starts[group])
            self._batches = self.file.batches(group, [*self._shapes, *self._others], self._batch_rows)
        while number >= self._high:
            try:
                batch = next(self._batches, None)
            except SampleError:
                self._group = -1
                raise
            if batch is None:
                self._group = -1
                raise SampleError("parquet", "a row group with fewer rows than its header says", path=show(self.file.path))
            self._batch, self._low = batch, self._high
            self._high += len(batch)
            self._dense = {}
        if not self._dense:
            self._dense = {name: dense(self._batch.column(name), shape) for name, shape in self._shapes.items()}

    def _single(self, name: str, at: int, shape: Sequence[int]) -> Any:
        """A value of a batch in which some value is null or of another shape."""
        value = self._batch.column(name)[at].as_py()
        if value is None:
            return None
        try:
            array = np.array(value)
        except ValueError:
            array = np.array(None)
        if array.dtype.kind not in "biuf" or (array.shape != tuple(shape) and not (array.ndim == 0 and math.prod(shape) == 1)):
            found = "nulls or lists of different lengths" if array.dtype.kind not in "biuf" else f"the shape {array.shape}"
            raise SampleError("shape", f"column {name!r} has {found}; info.json declares {tuple(shape)}")
        return array
