"""A data set of many shards: samples by index or key, many at a time, and whole columns.

Opening reads the manifest only; shards open when they are first touched. A data set is pickled as its path and options, whatever
its size, and may be used after ``fork`` and from threads.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfdata.dataset.ragged import Ragged
from lfdata.dataset.reading import Readings
from lfdata.dataset.rows import Memory, by_shard, checked_rows, scatter
from lfdata.dataset.shard import Shard
from lfdata.dataset.shards import Shards
from lfdata.dataset.values import keys_of, payloads_of, values_of
from lfdata.dataset.windows import Windows, open_episodes
from lfdata.errors import CorruptError, KeyMissingError, OptionError, SampleError
from lfdata.format.cache import DEFAULT_BUDGET
from lfdata.format.files import RangeFile
from lfdata.format.gather import default_threads
from lfdata.format.layout import SIZE_ROLES
from lfdata.format.meta import MANIFEST, FieldMeta, Manifest, read_manifest
from lfdata.format.reader import ShardFile
from lfdata.format.schema import field_ndim
from lfdata.order.episodes import EPISODE, FRAME, Episodes
from lfdata.storage import Cache, is_url, open_store
from lfdata.storage.urls import local_path

KEY = "__key__"
MAX_DESCRIPTORS = 64


class ShardDataset:
    """Map-style access to a data set written by ``shard-builder``.

    Args:
        path: directory with ``manifest.json`` (or the manifest itself), or its URL (``s3://``, ``gs://``, ``https://``, ...; docs/remote.md).
        fields: names of the fields that samples carry; all by default.
        index_cache_bytes: memory for index columns, shared by all shards.
        max_descriptors: open files at a time.
        read_threads: threads a call may use to read and check payloads (with the native module); up to 4 by default.
        cache: where files that are not local are kept: options, or a directory; the default one for URLs. With one, a path is read through
            it too.

    Raises:
        FormatError: no manifest, or a damaged or newer one. StorageError: it cannot be reached. MissingExtraError: a URL without the extra.
        KeyMissingError: a field the data set does not have. OptionError: an option out of range.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        fields: Sequence[str] | None = None,
        *,
        index_cache_bytes: int = DEFAULT_BUDGET,
        max_descriptors: int = MAX_DESCRIPTORS,
        read_threads: int | None = None,
        cache: Cache | str | os.PathLike[str] | None = None,
    ) -> None:
        if max_descriptors < 1 or (read_threads is not None and read_threads < 1):
            raise OptionError(f"max_descriptors ({max_descriptors}) and read_threads ({read_threads}) must be at least 1")
        location = directory_of(path)
        self.store = open_store(location, cache)
        if isinstance(location, str) and self.store is None:
            location = local_path(location) or location
        self.path: Path | str = location if self.store is None else self.store.name
        self._location = location
        self._options = (index_cache_bytes, max_descriptors, read_threads, cache)
        self.read_threads = default_threads() if read_threads is None else read_threads
        self._asked = None if fields is None else tuple(fields)
        self.manifest = self._read_manifest()
        self.schema: dict[str, FieldMeta] = {field.name: field for field in self.manifest.fields}
        self.fields = self._names(fields)
        self._shards = Shards(self.path, self.store, self.manifest, self.schema, index_cache_bytes, max_descriptors)
        self._starts = self._shards.starts
        self._episodes: dict[tuple[str, str | None], Episodes] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (str(self._location), self._asked, *self._options)

    def __repr__(self) -> str:
        return f"ShardDataset({str(self.path)!r}, {len(self)} samples in {len(self.manifest.shards)} shards, fields {list(self.schema)})"

    def __len__(self) -> int:
        return self.manifest.rows

    @property
    def absolute(self) -> str:
        """Where it lies, as another process finds it."""
        return self._location if isinstance(self._location, str) else os.path.realpath(self._location)

    # -- samples ------------------------------------------------------------------------------------------------------

    def __getitem__(self, index: int) -> dict[str, Any]:
        """One decoded sample: a dict by field name, plus its key (bytes) as ``"__key__"``; an absent field is ``None``.

        Values by kind (all owned and writable): image uint8 or uint16 (height, width, channels); tokens (n,) unsigned;
        audio ``Audio(samples int16 (frames, channels), rate)``; array as declared; json a Python value; text ``str``;
        bytes ``bytes``; scalar a numpy scalar.

        Raises:
            IndexError: out of range. FormatError: a damaged shard. SampleError: a payload that cannot be decoded.
        """
        return self.__getitems__([operator.index(index)])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Several samples at once (torch's DataLoader calls this with the indices of a batch)."""
        columns = self.read_many(indices)
        names = [KEY, *self.fields]
        return [dict(zip(names, row, strict=True)) for row in zip(*(columns[name] for name in names), strict=True)]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """All samples in order."""
        for start in range(0, len(self), 32):
            yield from self.__getitems__(range(start, min(start + 32, len(self))))

    def read_many(self, indices: Any, fields: Sequence[str] | None = None, *, decode: bool = True) -> dict[str, Any]:
        """Values of many samples, field by field, in the order of ``indices`` (repeats allowed).

        Args:
            indices: integers, negative ones from the end.
            fields: names; the data set's own by default. Only their bytes are read.
            decode: ``True``: a list of decoded values a field (see ``__getitem__``). ``False``: a :class:`Ragged` of stored
                bytes a field (scalars: their array), verified against their checks.

        Returns:
            By field name; with ``decode`` also ``"__key__"``.
        """
        rows = checked_rows(self.path, len(self), indices)
        names = self.fields if fields is None else self._names(fields)
        parts = by_shard(self._starts, rows)
        if self.store is not None:
            for name in names:
                self._shards.warm([number for number, _ in parts], name)
        result: dict[str, Any] = {name: values_of(self._shards, name, rows, parts, self.read_threads, decode) for name in names}
        if decode:
            result[KEY] = keys_of(self._shards, rows, parts)
        return result

    def read_stored(self, indices: Any, field: str, memory: Memory) -> Ragged:
        """Stored bytes of many samples, verified, in memory that is used again: gone when ``memory`` is asked the next time in this thread."""
        self._names([field])
        rows = checked_rows(self.path, len(self), indices)
        found = payloads_of(self._shards, field, rows, self._shards.parts(rows, field), self.read_threads, memory=memory)
        assert found is not None
        return found

    def read_into(self, indices: Any, field: str, out: NDArray[np.uint8]) -> bool:
        """Stored bytes of many samples one after the other into ``out`` (uint8, one-dimensional), verified. False, and nothing read, if they
        are not of one length that fills it exactly."""
        self._names([field])
        rows = checked_rows(self.path, len(self), indices)
        return payloads_of(self._shards, field, rows, by_shard(self._starts, rows), self.read_threads, out) is not None

    def start_read(self, indices: Any, field: str, out: NDArray[np.uint8]) -> Readings | None:
        """What :meth:`read_into` does, in the background: for files in the page cache, with the native module and more than one thread to read
        with; otherwise, and where the samples do not fill ``out``, ``None``."""
        self._names([field])
        if self.read_threads < 2:
            return None
        rows = checked_rows(self.path, len(self), indices)
        places = np.arange(len(rows)) * (len(out) // max(1, len(rows)))
        readings = []
        for number, where in by_shard(self._starts, rows):
            shard = self._shards.shard(number)
            located = shard.lengths(field, rows[where] - self._starts[number])
            if not (located[1] * len(rows) == len(out)).all():
                return None
            reading = shard.start_read(field, located, out, places[where])
            if reading is None:
                return None
            readings.append(reading)
        return Readings(readings)

    def keys(self, indices: Any) -> list[bytes]:
        """Keys of some samples."""
        rows = checked_rows(self.path, len(self), indices)
        return keys_of(self._shards, rows, by_shard(self._starts, rows))

    def index_of(self, key: bytes | str) -> int:
        """Index of the sample with this key (``str`` is taken as UTF-8). Raises :class:`KeyMissingError`."""
        wanted = key.encode("utf-8", "surrogateescape") if isinstance(key, str) else key
        if not isinstance(wanted, bytes):
            raise OptionError(f"a key is bytes or str, not {type(key).__name__}")
        index = self.index()
        if index is not None:
            for row in index.find_hash(wanted):
                if 0 <= row < len(self) and self.keys([row])[0] == wanted:
                    return row
        else:
            for number in range(len(self.manifest.shards)):
                row_in_shard = self._shards.shard(number).base.find(wanted)
                if row_in_shard is not None:
                    return int(self._starts[number]) + row_in_shard
        raise KeyMissingError(f"{self.path}: no sample with key {wanted!r}")

    def read_audio(self, index: int, field: str, start: int, stop: int) -> NDArray[np.int16]:
        """Frames ``start`` to ``stop`` (clipped to the recording) of an audio field: int16, (frames, channels), owned.

        Reads and verifies the covering chunks only. Raises :class:`SampleError` if the sample has no such field.
        """
        shard, local = self._one(index, field, "audio")
        return shard.read_frames(field, local, start, stop)

    def read_image_rows(self, index: int, field: str, start: int, stop: int) -> NDArray[np.uint8]:
        """Pixel rows ``start`` to ``stop`` of a JPEG stored with ``restart=rows``: uint8, (stop - start, width, channels), owned.

        Equal to the same rows of the whole picture, but only the rows asked for (and one restart interval around them) are decoded.
        The stored bytes are read and verified whole. Raises :class:`SampleError` if the sample has no such field or cannot be
        decoded, :class:`OptionError` for pictures without restart markers and rows outside the picture.
        """
        shard, local = self._one(index, field, "image")
        try:
            return shard.read_pixel_rows(field, local, start, stop)
        except SampleError as error:
            error.field, error.key = field, self.keys([index])[0]
            error.path = f"{shard.name}, row {int(local[0])}, index {index}"
            raise

    def sizes(self, field: str, indices: Any) -> dict[str, NDArray[Any]]:
        """Index columns of a field by role (``"width"``, ``"tokens"``, ...; not ``value``) at some samples, one element a sample."""
        self._names([field])
        rows = checked_rows(self.path, len(self), indices)
        parts = self._shards.parts(rows, field)
        if len(parts) == 1:
            return self._shards.shard(parts[0][0]).sizes(field, rows - self._starts[parts[0][0]])
        found: dict[str, NDArray[Any]] = {}
        for number, where in parts:
            scatter(self._shards.shard(number).sizes(field, rows[where] - self._starts[number]), where, len(rows), found)
        return found

    def locate(
        self, field: str, indices: Any
    ) -> Iterator[tuple[RangeFile, NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]]:
        """Where the stored bytes of some samples lie, file by file: positions in ``indices``, offsets and lengths in bytes."""
        rows = checked_rows(self.path, len(self), indices)
        for number, where in self._shards.parts(rows, field):
            shard = self._shards.shard(number)
            offsets, lengths, _ = shard.lengths(field, rows[where] - self._starts[number])
            yield shard.file_of(field).file, where, offsets, lengths

    def decoder(self, field: str, index: int) -> Any:
        """The decoder of a field in the shard that holds a sample."""
        return self._shards.shard(self._shards.number(index)).decoder(field)

    def shard_name(self, index: int) -> str:
        """File name of the shard that holds a sample."""
        return self.manifest.shards[self._shards.number(index)].file

    def _one(self, index: int, field: str, kind: str) -> tuple[Shard, NDArray[np.int64]]:
        """The shard and row of one sample that has a field of this kind."""
        self._names([field])
        if self.schema[field].kind != kind:
            raise OptionError(f"{self.path}: field {field!r} is of kind {self.schema[field].kind}, not {kind}")
        rows = checked_rows(self.path, len(self), [index])
        number, _ = by_shard(self._starts, rows)[0]
        shard, local = self._shards.shard(number), rows - self._starts[number]
        if not shard.present(field, local)[0]:
            key = self.keys([index])[0]
            raise SampleError("absent", f"the sample has no {kind} there", field=field, key=key, path=shard.name)
        return shard, local

    # -- windows ------------------------------------------------------------------------------------------------------

    def episodes(self, episode: str = EPISODE, frame: str | None = FRAME) -> Episodes:
        """Which rows belong together, by two scalar fields (docs/windows.md). Read once and kept. Raises :class:`OptionError`."""
        with self._shards.lock:
            found = self._episodes.get((episode, frame))
            if found is None:
                found = self._episodes[episode, frame] = open_episodes(self, episode, frame)
            return found

    def windows(self, deltas: Mapping[str, Iterable[int]], *, episode: str = EPISODE, frame: str | None = FRAME) -> Windows:
        """Windows over fields: ``data.windows({"action": range(16)}).read(rows)``. See :class:`lfdata.dataset.windows.Windows`."""
        return Windows(self, deltas, episode, frame)

    # -- columns ------------------------------------------------------------------------------------------------------

    def column(self, name: str) -> NDArray[Any]:
        """A whole index column, verified: ``"label"`` for a scalar field, ``"image.width"`` for a size.

        Returns:
            Read-only, shape (n,) ((n, ndim) for dims), in sample order. A view of one mapping, kept alive by it, if the data set has a
            consolidated index or one shard; a copy otherwise. Absent values are 0: see :meth:`present`.
        """
        field, _, role = name.rpartition(".") if name not in self.schema else (name, "", "value")
        if field not in self.schema or role not in SIZE_ROLES[self.schema[field].kind]:
            raise KeyMissingError(f"{self.path}: no column {name!r}; there are {self.columns}")
        data = self._shards.column(field, role)
        if data is None:
            raise CorruptError(self.path, None, f"no shard has the column {name!r}")
        if role == "dims":
            data = data.reshape(len(self), field_ndim(self.path, self.schema[field]))
        return data

    @property
    def columns(self) -> list[str]:
        """Names of all columns."""
        return [
            field.name if role == "value" else f"{field.name}.{role}"
            for field in self.manifest.fields
            for role in SIZE_ROLES[field.kind]
        ]

    def index(self) -> ShardFile | None:
        """The consolidated index, if there is one that belongs to this manifest."""
        return self._shards.index()

    def shard_column(self, number: int, field: str, role: str) -> NDArray[Any] | None:
        """One shard's column as a view of its mapping."""
        return self._shards.shard(number).file_of(field).column(field, role)

    def present(self, field: str) -> NDArray[np.bool_]:
        """Which samples have a field: bool, shape (n,)."""
        data = self._shards.column(self._names([field])[0], "present")
        return np.ones(len(self), bool) if data is None else data.astype(bool)

    def present_at(self, field: str, indices: Any) -> NDArray[np.bool_]:
        """Which of some samples have a field: bool, one element a sample."""
        self._names([field])
        rows = checked_rows(self.path, len(self), indices)
        found = np.ones(len(rows), bool)
        for number, where in self._shards.parts(rows, field):
            found[where] = self._shards.shard(number).present(field, rows[where] - self._starts[number])
        return found

    def tokens(self, field: str, shard: int) -> NDArray[Any]:
        """All token ids of one shard as one zero-copy, read-only view."""
        self._names([field])
        return self._shards.shard(shard).file_of(field).tokens(field)

    # -- lifetime -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close descriptors and forget open shards; views handed out stay valid. The data set reopens on use."""
        self._shards.close()

    def shard(self, number: int) -> Shard:
        """An open shard, for tools."""
        return self._shards.shard(number)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _read_manifest(self) -> Manifest:
        if self.store is None:
            return read_manifest(Path(self.path))
        # Before there are threads: a fork while one of them imports would leave a lock held in the child.
        from lfdata.dataset.remote import remote_manifest

        return remote_manifest(self.store)

    def _names(self, fields: Sequence[str] | None) -> tuple[str, ...]:
        if fields is None:
            return tuple(self.schema)
        if isinstance(fields, str):
            raise OptionError(f"fields must be a sequence of names, not the text {fields!r}")
        unknown = [name for name in fields if name not in self.schema]
        if unknown:
            raise KeyMissingError(f"{self.path}: no field {unknown[0]!r}; there are {list(self.schema)}")
        return tuple(dict.fromkeys(fields))


def directory_of(location: str | os.PathLike[str]) -> Path | str:
    """The directory of a data set: a path, or a URL as text. The manifest itself stands for it."""
    if not is_url(location):
        path = Path(location)
        return path.parent if path.name == MANIFEST else path
    return str(location).rstrip("/").removesuffix("/" + MANIFEST)


def _reopen(
    path: str,
    fields: Sequence[str] | None,
    index_cache_bytes: int,
    max_descriptors: int,
    read_threads: int | None,
    cache: Any = None,
) -> ShardDataset:
    return ShardDataset(
        path,
        fields,
        index_cache_bytes=index_cache_bytes,
        max_descriptors=max_descriptors,
        read_threads=read_threads,
        cache=cache,
    )
