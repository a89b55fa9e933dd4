"""Source: HDF5 files. Data sets whose first axis counts samples, or one group a sample."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import h5py
import msgspec
import numpy as np

from lfdata.errors import OptionError, SampleError, SourceError
from shard_builder.fields import GRAMMAR, check_unique
from shard_builder.sources.base import BadRecord, FieldSpec, RawSample, Record
from shard_builder.sources.common import ROW_NUMBER, PlainSource, as_key
from shard_builder.sources.filelist import FileList
from shard_builder.sources.files import show
from shard_builder.sources.hdf5_datasets import (
    Hdf5File,
    attribute,
    attributes,
    cache_size,
    check_dataset,
    find,
    open_cached,
    refuse,
    said,
    sample_groups,
    to_value,
)

SUFFIXES = (".h5", ".hdf5", ".hdf", ".he5")

_VALID = {
    "layout": "rows|groups",
    "group": "<group whose members are meant; default: />",
    "key": f"<data set of the keys; default: {ROW_NUMBER}, row numbers; with layout=groups the group's name>",
    "audio_rate": "<samples a second of audio that is stored as numbers>",
    "root": "<directory that paths in data sets are relative to; default: the source's own>",
    "cache_bytes": "<chunk cache of a data set in each worker; default 64M>",
    "max_rows": "<most samples in a file; default 4G>",
    "max_value_bytes": "<largest value, as stored; default 1G>",
    "max_chunk_bytes": "<largest chunk, decompressed; default 1G>",
    "max_file_bytes": "<largest file that a data set names, such as 512M; default 4G>",
}
_BLOCK = 4096
_LISTED = 40
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[bytes, int, int, bytes]).decode
"""(file, digest of its ends, row, name of the group)"""


class Hdf5(PlainSource):
    """The source of kind ``hdf5``.

    Args:
        location: a file, a pattern, several joined by ``::``, or a directory.
        fields: columns are paths of data sets below ``group``, ``PATH.MEMBER`` of compound ones, and, with ``layout=groups``, ``@NAME``
            for an attribute of the sample's group. They must be declared.

    Raises:
        SourceError: a file that is missing or no HDF5; from :meth:`scan`, a data set that is not there, lies in another file, needs
            a filter that is not installed, or has another number of rows. OptionError: fields or options that make no sense.
    """

    kind = "hdf5"

    def __init__(
        self, location: str, fields: Sequence[FieldSpec] | None = None, stage_dir: Path | None = None, **options: str
    ) -> None:
        del stage_dir
        super().__init__(location, options, _VALID)
        self._groups = self._options.choice("layout", ("rows", "groups"), "rows") == "groups"
        self._group = "/" + (self._options.text("group") or "").strip("/")
        self._key = self._options.text("key") or ROW_NUMBER
        if self._groups and self._key != ROW_NUMBER:
            raise OptionError("hdf5: with layout=groups the group's name is the key; leave key= away")
        self._rate = self._options.size("audio_rate", 0) if "audio_rate" in self._options.given else None
        self._cache = self._options.size("cache_bytes", 64 << 20)
        self._max_rows = self._options.size("max_rows", 4 << 30)
        self._max_value = self._options.size("max_value_bytes", 1 << 30)
        self._max_chunk = self._options.size("max_chunk_bytes", 1 << 30, 1 << 36)
        self.files = FileList(location, SUFFIXES)
        self.root = self.directory_option("root", Path(self.files.root))
        self._single = len(self.files.names) == 1
        self._open: Hdf5File | None = None
        self._read: dict[str, tuple[Any, str | None]] = {}
        self._notes: dict[str, Any] = {}
        if not fields:
            with Hdf5File(self.files.path(self.files.names[0]), self.files.names[0]) as first:
                how = f"say which data sets become fields with --field {GRAMMAR}, or --map FILE"
                raise OptionError(f"{first.name}: {how}; {_listing(first.file)}")
        check_unique(fields)
        self.fields = tuple(fields)
        if not self._groups and any(spec.column.startswith("@") for spec in self.fields):
            raise OptionError("hdf5: attributes are columns only with layout=groups")

    def __del__(self) -> None:
        opened = getattr(self, "_open", None)
        if opened is not None and h5py is not None:
            opened.close()

    def describe(self) -> dict[str, Any]:
        """See :class:`shard_builder.sources.base.Source`."""
        return super().describe() | {"files": self.files.describe()}

    def notes(self) -> dict[str, Any]:
        """Attributes of the first file, its group and the data sets in use; names of enumerations."""
        return dict(self._notes)

    # -- plan pass ----------------------------------------------------------------------------------------------------

    def scan(self) -> Iterator[Record | BadRecord]:
        """Every row or group, file by file. Shapes and keys are read; no value is."""
        self._notes = {}
        for name in self.files.names:
            with Hdf5File(self.files.path(name), name) as file:
                try:
                    base = find(file.file, self._group)
                except KeyError:
                    raise SourceError(f"{file.name}: there is no group {self._group!r}; {_listing(file.file)}") from None
                except SampleError as error:
                    raise refuse(error, file.name) from None
                if not isinstance(base, h5py.Group):
                    raise SourceError(f"{file.name}: {self._group!r} is no group")
                yield from self._scan_groups(file, base, name) if self._groups else self._scan_rows(file, base, name)

    def _scan_rows(self, file: Hdf5File, base: Any, name: str) -> Iterator[Record | BadRecord]:
        columns = list(dict.fromkeys([spec.column for spec in self.fields] + ([self._key] if self._key != ROW_NUMBER else [])))
        found = {column: self._dataset(file, base, column) for column in columns}
        rows = {column: int(data.shape[0]) for column, (data, _) in found.items()}
        if len(set(rows.values())) > 1:
            counts = ", ".join(f"{column!r} has {count}" for column, count in rows.items())
            raise SourceError(f"{file.name}: the data sets have unequal numbers of rows: {counts}")
        count = next(iter(rows.values()))
        if count > self._max_rows:
            raise SourceError(f"{file.name}: claims {count} rows; the limit is {self._max_rows} (option max_rows)")
        if name == self.files.names[0]:
            self._take_notes(file, base, found)
        size = sum(_row_bytes(data) for data, _ in found.values())
        encoded = os.fsencode(name)
        keys = found.get(self._key) if self._key != ROW_NUMBER else None
        for start in range(0, count, _BLOCK):
            stop = min(count, start + _BLOCK)
            try:
                block = None if keys is None else keys[0][start:stop]
            except (OSError, RuntimeError, ValueError) as error:
                yield BadRecord(
                    b"", f"{file.name}: rows {start} to {stop - 1}", _code(error), f"keys cannot be read: {said(error)}"
                )
                continue
            for row in range(start, stop):
                try:
                    key = self._row_key(name, row) if block is None else self._key_of(block[row - start], keys)
                    yield Record(key, _encode((encoded, file.digest, row, b"")), size)
                except SampleError as error:
                    yield BadRecord(b"", f"{file.name}: row {row}", error.code, error.reason)

    def _key_of(self, value: Any, keys: Any) -> bytes:
        data, member = keys
        dtype = data.dtype[member] if member else data.dtype
        return as_key(to_value(value[member] if member else value, dtype, "text"), self._key)

    def _row_key(self, name: str, row: int) -> bytes:
        number = b"%012d" % row
        return number if self._single else os.fsencode(name) + b"#" + number

    def _scan_groups(self, file: Hdf5File, base: Any, name: str) -> Iterator[Record | BadRecord]:
        encoded = os.fsencode(name)
        if name == self.files.names[0]:
            self._take_notes(file, base, {})
        for member in sample_groups(base):
            raw = os.fsencode(member)
            key = raw if self._single else encoded + b"#" + raw
            try:
                group = find(base, "./" + member)
                if not isinstance(group, h5py.Group):
                    raise SampleError("hdf5", "a data set, where a group is one sample")
                size, there = 0, 0
                for spec in self.fields:
                    data = self._member(group, spec.column)
                    there += data is not None
                    size += int(data.nbytes) if isinstance(data, h5py.Dataset) else 0
                if not there:
                    raise SampleError(
                        "hdf5", f"holds none of the declared data sets; it has {', '.join(list(group)[:10]) or 'nothing'}"
                    )
                yield Record(key, _encode((encoded, file.digest, -1, raw)), size)
            except SampleError as error:
                yield BadRecord(key, f"{file.name}: {base.name.rstrip('/')}/{show(member)}", error.code, error.reason)

    def _member(self, group: Any, column: str) -> Any:
        """A data set of a sample's group, or the value of an attribute; ``None`` where it is absent."""
        if column.startswith("@"):
            return attribute(group, column[1:]) if column[1:] in group.attrs else None
        try:
            data = find(group, "./" + column)
        except KeyError:
            return None
        check_dataset(data, column, self._max_chunk)
        if data.shape is None:
            return None
        if math.prod(data.shape) * data.dtype.itemsize > self._max_value:
            raise SampleError("too-large", f"{column!r} holds more than {self._max_value} bytes (option max_value_bytes)")
        return data

    def _dataset(self, file: Hdf5File, base: Any, column: str) -> tuple[Any, str | None]:
        """A data set of rows and the member of it that is meant. Raises :class:`SourceError`."""
        try:
            data, member = _resolve(base, column)
            check_dataset(data, column, self._max_chunk)
        except KeyError:
            raise SourceError(f"{file.name}: there is no data set {column!r}; {_listing(base)}") from None
        except SampleError as error:
            raise refuse(error, file.name) from None
        if not data.shape:
            raise SourceError(f"{file.name}: {column!r} is a single value; samples are counted by the first axis")
        if _row_bytes(data) > self._max_value:
            raise SourceError(
                f"{file.name}: a row of {column!r} has {_row_bytes(data)} bytes; the limit is {self._max_value} (option max_value_bytes)"
            )
        return data, member

    def _take_notes(self, file: Hdf5File, base: Any, found: dict[str, tuple[Any, str | None]]) -> None:
        about = {"/": attributes(file.file), base.name: attributes(base)}
        about |= {column: attributes(data) for column, (data, _) in found.items()}
        kept = {name: values for name, values in about.items() if values}
        enums = {spec.name: h5py.check_enum_dtype(found[spec.column][0].dtype) for spec in self.fields if spec.column in found}
        names = {
            name: {str(v): k for k, v in sorted(enum.items(), key=lambda item: item[1])} for name, enum in enums.items() if enum
        }
        self._notes = ({"attributes": kept} if kept else {}) | ({"class_names": names} if names else {})

    # -- workers ------------------------------------------------------------------------------------------------------

    def place(self, locator: bytes) -> str:
        """File, and row or group."""
        file, _, row, group = _decode(locator)
        return f"{show(file)}: row {row}" if row >= 0 else f"{show(file)}: {show(group)}"

    def load(self, locator: bytes) -> RawSample:
        """One row or group. Raises :class:`SampleError`."""
        encoded, digest, row, group = _decode(locator)
        path, field = self.place(locator), ""
        values: dict[str, Any] = {}
        files: dict[str, str] = {}
        try:
            file = self._opened(os.fsdecode(encoded), digest)
            for spec in self.fields:
                field = spec.name
                value = self._row(file, spec, row) if row >= 0 else self._of_group(file, spec, os.fsdecode(group))
                if value is not None:
                    values[spec.name] = (
                        self.taken(spec, value, files) if isinstance(value, str) else self._as_audio(spec, value)
                    )
        except SourceError as error:
            raise SampleError("unreadable", str(error), path=path) from error
        except SampleError as error:
            error.field = error.field or field
            error.path = f"{path}: {error.path}" if error.path and not error.path.startswith(path) else path
            raise
        except (OSError, RuntimeError, ValueError, KeyError, IndexError, TypeError) as error:
            raise SampleError(_code(error), f"cannot be read: {said(error)}", field=field, path=path) from None
        return RawSample(values, path, files)

    def _opened(self, name: str, digest: int) -> Hdf5File:
        if self._open is None or self._open.name != show(name):
            if self._open is not None:
                self._open.close()
            self._open, self._read = None, {}
            self._open = Hdf5File(self.files.path(name), name)
        if self._open.digest != digest:
            raise SampleError("changed", "the file changed after it was scanned")
        return self._open

    def _row(self, file: Hdf5File, spec: FieldSpec, row: int) -> Any:
        if spec.column not in self._read:
            data, member = self._dataset(file, find(file.file, self._group), spec.column)
            name, size = data.name, cache_size(data, self._cache, self._max_chunk)
            del data  # closes it
            self._read[spec.column] = open_cached(file.file, name, size), member
        data, member = self._read[spec.column]
        value = data[row]
        return to_value(value[member] if member else value, data.dtype[member] if member else data.dtype, spec.kind)

    def _of_group(self, file: Hdf5File, spec: FieldSpec, name: str) -> Any:
        data = self._member(find(find(file.file, self._group), "./" + name), spec.column)
        return to_value(data[()], data.dtype, spec.kind) if isinstance(data, h5py.Dataset) else data

    def _as_audio(self, spec: FieldSpec, value: Any) -> Any:
        if spec.kind != "audio" or not isinstance(value, np.ndarray):
            return value
        if self._rate is None:
            raise SampleError("unsupported", "audio as numbers needs the option audio_rate")
        return value, self._rate


def _resolve(base: Any, column: str) -> tuple[Any, str | None]:
    try:
        return find(base, "./" + column), None
    except KeyError:
        path, _, member = column.rpartition(".")
        if not path:
            raise
        data = find(base, "./" + path)
        if not isinstance(data, h5py.Dataset) or member not in (data.dtype.names or ()):
            raise
        return data, member


def _row_bytes(data: Any) -> int:
    return int(math.prod(data.shape[1:]) * data.dtype.itemsize)


def _code(error: BaseException) -> str:
    return "checksum" if "checksum" in str(error).lower() or "fletcher" in str(error).lower() else "hdf5"


def _listing(group: Any) -> str:
    """Some data sets below a group, for messages."""
    found: list[str] = []
    stack = [(group, "")]
    while stack and len(found) < _LISTED:
        here, prefix = stack.pop()
        for name in sorted(here, reverse=True)[: 10 * _LISTED]:
            try:
                item = find(here, "./" + name)
            except (KeyError, SampleError):
                continue
            if isinstance(item, h5py.Group) and prefix.count("/") < 8:
                stack.append((item, f"{prefix}{name}/"))
            elif isinstance(item, h5py.Dataset):
                found.append(f"{prefix}{name} {item.shape} {item.dtype}")
    return f"data sets: {', '.join(sorted(found)[:_LISTED]) or 'none'}"
