"""Source: Arrow data as Hugging Face's ``save_to_disk`` writes it, or single ``.arrow`` files: record batches read one at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from lfdata.errors import OptionError, SampleError, SourceError
from shard_builder.sources.arrow_stream import ArrowFile, Piece
from shard_builder.sources.base import BadRecord, FieldSpec, RawSample, Record
from shard_builder.sources.columnar import OPTIONS, ColumnarSource, decode_locator
from shard_builder.sources.common import read_small
from shard_builder.sources.files import check_relative, show

SUFFIXES = (".arrow",)
STATE, INFO, SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"

_VALID = {
    **OPTIONS,
    "max_group_bytes": "<largest record batch, as stored; default 4G>",
}
_MAX_INFO = 256 << 20


class _DataFile(msgspec.Struct):
    filename: str


class _State(msgspec.Struct):
    data_files: list[_DataFile] = msgspec.field(name="_data_files")
    indices: list[_DataFile] | None = msgspec.field(name="_indices_data_files", default=None)
    old_indices: list[_DataFile] | None = msgspec.field(name="_indices_files", default=None)


class _Splits(msgspec.Struct):
    splits: list[str]


class Arrow(ColumnarSource):
    """The source of kind ``arrow``: one sample a row, splits and files in the order of their descriptions.

    Args:
        location: a directory that ``save_to_disk`` wrote (a data set, or several splits), or ``.arrow`` files, joined by ``::``.
        fields: the declared fields; without them Hugging Face's features decide, where the files carry them.

    Raises:
        SourceError: a description or file that is missing, empty or damaged; a declared column that is not there; from
            :meth:`scan`, a file whose columns differ. OptionError: fields or options that make no sense.
    """

    kind = "arrow"

    def __init__(
        self, location: str, fields: Sequence[FieldSpec] | None = None, stage_dir: Path | None = None, **options: str
    ) -> None:
        del stage_dir
        super().__init__(location, options, _VALID)
        self._max_bytes = self._options.size("max_group_bytes", 4 << 30)
        self._base, self.names = self._find(location, self._options.text("split"))
        self.root = self.directory_option("root", self._base)
        self.single = len(self.names) == 1
        self._open: ArrowFile | None = None
        self._batch: tuple[int, Any] = (-1, None)
        with ArrowFile(self._base, self.names[0]) as first:
            self.set_up(first.schema, first.name, fields)

    def _find(self, location: str, split: str | None) -> tuple[Path, list[str]]:
        path = Path(os.path.abspath(location))
        if not path.is_dir():
            if split is not None:
                raise OptionError(f"{location}: only a directory that save_to_disk wrote has splits")
            paths = [os.path.abspath(part) for part in location.split("::")]
            base = os.path.commonpath([os.path.dirname(one) for one in paths])
            return Path(base), [os.path.relpath(one, base) for one in paths]
        if (path / SPLITS).exists():
            splits = _described(path / SPLITS, _Splits).splits
            if split is not None and split not in splits:
                raise SourceError(f"{location}: has no split {split!r}; there are {', '.join(splits)}")
            names = [name for one in splits if split in (None, one) for name in _files_of(path, one)]
        else:
            if split is not None:
                raise SourceError(f"{location}: has no splits: there is no {SPLITS}")
            names = _files_of(path, "")
        if not names:
            raise SourceError(f"{location}: its descriptions name no file")
        return path, names

    def describe(self) -> dict[str, Any]:
        """See :class:`shard_builder.sources.base.Source`."""
        return super().describe() | {"key": self.key, "files": [show(name) for name in self.names]}

    def scan(self) -> Iterator[Record | BadRecord]:
        """Every row, file by file. Heads of record batches are read, and, where columns hold keys or paths, the batches."""
        for name in self.names:
            with ArrowFile(self._base, name) as file:
                self.check_schema(file.schema, name)
                start = 0
                try:
                    for piece in file.pieces(self._max_bytes):
                        yield from self._piece(file, piece, start)
                        start += piece.rows
                except SampleError as error:
                    yield BadRecord(b"", f"{show(name)}: rows {start} and on", error.code, error.reason)

    def _piece(self, file: ArrowFile, piece: Piece, start: int) -> Iterator[Record | BadRecord]:
        columns = self.scanned_columns()
        try:
            if columns:
                batch = file.read(piece.offset, columns, self._max_bytes)
            else:
                batch = pa.RecordBatch.from_struct_array(pa.nulls(piece.rows, pa.struct([])))
        except SampleError as error:
            yield BadRecord(b"", f"{show(file.name)}: rows {start} to {start + piece.rows - 1}", error.code, error.reason)
            return
        size = -(-piece.size // piece.rows) if piece.rows else 0
        yield from self.records(batch, file.name, file.digest, piece.offset, 0, start, size)

    def load(self, locator: bytes) -> RawSample:
        """One row. Raises :class:`SampleError`."""
        encoded, digest, offset, row, _ = decode_locator(locator)
        path = self.place(locator)
        try:
            batch = self._batch_at(os.fsdecode(encoded), digest, offset)
            if row >= batch.num_rows:
                raise SampleError("changed", "the file changed after it was scanned")
            return self.sample(batch, row, path)
        except SampleError as error:
            error.path = error.path if error.path.startswith(path) else f"{path}: {error.path}" if error.path else path
            raise
        except SourceError as error:
            raise SampleError("unreadable", str(error), path=path) from error

    def _batch_at(self, name: str, digest: int, offset: int) -> Any:
        if self._open is None or self._open.name != name:
            if self._open is not None:
                self._open.close()
            self._open, self._batch = None, (-1, None)
            self._open = ArrowFile(self._base, name)
        if self._open.digest != digest:
            raise SampleError("changed", "the file changed after it was scanned")
        if self._batch[0] != offset:
            self._batch = (-1, None)
            try:
                self._batch = (offset, self._open.read(offset, self.needed, self._max_bytes))
            except SampleError as error:
                self._batch = (offset, error)
        if isinstance(self._batch[1], SampleError):
            raise SampleError(self._batch[1].code, self._batch[1].reason)
        return self._batch[1]


def _described(path: Path, kind: Any) -> Any:
    """A JSON file of the data set. Raises :class:`SourceError`."""
    data = read_small(path, _MAX_INFO)
    if not data.strip():
        raise SourceError(f"{path.name}: an empty file; the copy of the data set is incomplete")
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise SourceError(f"{path.name}: not what save_to_disk writes: {error}") from None


def _files_of(root: Path, split: str) -> list[str]:
    """The files of one data set, relative to ``root``."""
    try:
        if split:
            check_relative(split)
        folder = root / split
        if not (folder / STATE).exists():
            raise SourceError(f"{folder.name}: no {STATE}: not a directory that save_to_disk wrote, or an incomplete copy")
        state = _described(folder / STATE, _State)
        _described(folder / INFO, dict[str, Any])
        if state.indices or state.old_indices:
            raise SourceError(f"{folder.name}: rows are chosen by an indices file; write it with flatten_indices() first")
        for file in state.data_files:
            check_relative(file.filename)
    except SampleError as error:
        raise SourceError(f"{show(root.name)}: a name that is no path inside: {error.reason}") from None
    return [os.path.join(split, file.filename) for file in state.data_files]
