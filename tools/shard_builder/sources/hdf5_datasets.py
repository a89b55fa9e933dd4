"""HDF5 files opened with care: no value comes from another file, filters must be there, and shapes are believed within limits."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import h5py
import numpy as np
import xxhash

from lfdata.errors import OptionError, SampleError, SourceError
from shard_builder.sources.common import open_regular
from shard_builder.sources.files import show

_HEAD = 1 << 16
_MAX_LINKS = 16
_SLOTS = 1009
_MAX_ATTRIBUTE = 1 << 16
Fault = Callable[[str], Exception]


class Hdf5File:
    """One file. Raises :class:`SourceError` where it is missing, no HDF5 or cannot be opened."""

    def __init__(self, path: str, name: str) -> None:
        self.name = show(name)
        descriptor = open_regular(path)
        try:
            size = os.fstat(descriptor).st_size
            if not size:
                raise SourceError(f"{self.name}: an empty file")
            head, foot = os.pread(descriptor, _HEAD, 0), os.pread(descriptor, _HEAD, max(0, size - _HEAD))
        finally:
            os.close(descriptor)
        self.digest = xxhash.xxh64_intdigest(head + foot, size & (2**64 - 1))
        try:
            self.file = h5py.File(path, "r", locking=False)
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            raise SourceError(f"{self.name}: cannot be opened as HDF5: {said(error)}") from None

    def close(self) -> None:
        """Close the file."""
        self.file.close()

    def __enter__(self) -> Hdf5File:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def find(group: Any, path: str, depth: int = 0) -> Any:
    """What lies at a path. Links inside the file are followed, those into other files are not.

    Raises:
        KeyError: nothing does. SampleError: ``outside-root`` (a link to another file), ``hdf5``.
    """
    if depth > _MAX_LINKS:
        raise SampleError("hdf5", f"more than {_MAX_LINKS} links on the way to {path!r}")
    here = group.file if path.startswith("/") else group
    for part in path.split("/"):
        if part in ("", "."):
            continue
        if not isinstance(here, h5py.Group):
            raise KeyError(path)
        try:
            link = here.get(part, getlink=True)
        except (OSError, RuntimeError, ValueError) as error:
            raise SampleError("hdf5", f"{path!r} cannot be reached: {said(error)}") from None
        if link is None:
            raise KeyError(path)
        if isinstance(link, h5py.ExternalLink):
            raise SampleError("outside-root", f"{path!r} is a link to another file, {str(link.filename)!r}; it is not followed")
        if isinstance(link, h5py.SoftLink):
            here = find(here, link.path, depth + 1)
            continue
        try:
            here = here[part]
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            raise SampleError("hdf5", f"{path!r} cannot be opened: {said(error)}") from None
    return here


def check_dataset(data: Any, path: str, max_chunk: int) -> None:
    """Refuse a data set whose values cannot be read, or are not in this file.

    Raises:
        SampleError: ``outside-root`` (external or virtual storage), ``filter``, ``too-large``, ``unsupported``.
    """
    if not isinstance(data, h5py.Dataset):
        raise SampleError("hdf5", f"{path!r} is no data set but a {type(data).__name__.lower()}")
    if data.is_virtual or data.external:
        kind = "a virtual data set" if data.is_virtual else "stored outside its file"
        raise SampleError("outside-root", f"{path!r} is {kind}: its values are in other files; copy them into one (h5repack)")
    creation = data.id.get_create_plist()
    for number in range(creation.get_nfilters()):
        code, _, _, name = creation.get_filter(number)
        if not h5py.h5z.filter_avail(code):
            shown = f"{name.decode('ascii', 'replace')!r} (number {code})" if name else f"number {code}"
            raise SampleError(
                "filter",
                f"{path!r} is compressed with the filter {shown}, which is not installed; "
                "install it (the package hdf5plugin brings many) and set HDF5_PLUGIN_PATH, or rewrite the file with h5repack",
            )
    if data.chunks is not None and math.prod(data.chunks) * data.dtype.itemsize > max_chunk:
        size = math.prod(data.chunks) * data.dtype.itemsize
        raise SampleError(
            "too-large", f"{path!r} has chunks of {size} bytes; the limit is {max_chunk} (option max_chunk_bytes)"
        )
    if not _is_storable(data.dtype):
        raise SampleError("unsupported", f"{path!r} holds {data.dtype}: references and objects are no values")


def _is_storable(dtype: Any) -> bool:
    if dtype.names:
        return all(_is_storable(dtype[name]) for name in dtype.names)
    if h5py.check_string_dtype(dtype) is not None or h5py.check_enum_dtype(dtype) is not None:
        return True
    inner = h5py.check_vlen_dtype(dtype)
    if inner is not None:
        return _is_storable(np.dtype(inner))
    return dtype.base.kind in "biufcSV"


def cache_size(data: Any, cache: int, most: int) -> int:
    """Bytes of a chunk cache that holds all chunks of one row, so that rows in order decode each chunk once."""
    if data.chunks is None:
        return cache
    across = [-(-size // chunk) for size, chunk in zip(data.shape[1:], data.chunks[1:], strict=True)]
    band = math.prod(across) * math.prod(data.chunks) * data.dtype.itemsize
    return int(min(max(cache, band), most))


def open_cached(file: Any, name: str, size: int) -> Any:
    """A data set with a chunk cache of ``size`` bytes. It must not be open already: the library would share that one's cache."""
    access = h5py.h5p.create(h5py.h5p.DATASET_ACCESS)
    access.set_chunk_cache(_SLOTS, size, 1.0)
    return h5py.Dataset(h5py.h5d.open(file.id, name.encode(), access))


def to_value(value: Any, dtype: Any, kind: str) -> Any:
    """A row as a field of a kind takes it.

    Texts are ``str``. Opaque values, and one-dimensional bytes (uint8) for images, audio, bytes and text, are ``bytes``. Other
    numbers are arrays, or plain numbers where the row is one; for ``json`` lists. Compounds are objects.

    Raises:
        SampleError: ``utf8``, ``unsupported``.
    """
    if dtype.names:
        return {name: to_value(value[name], dtype[name], "json") for name in dtype.names}
    if h5py.check_string_dtype(dtype) is not None:
        if isinstance(value, np.ndarray):
            return [_text(one) for one in value.ravel().tolist()] if value.ndim == 1 else _nested(value)
        return _text(value)
    inner = h5py.check_vlen_dtype(dtype)
    if inner is not None and isinstance(value, np.ndarray) and value.dtype == object:
        return [to_value(one, dtype, kind) for one in value.ravel()]
    if inner is not None:
        dtype = np.dtype(inner)
        if h5py.check_string_dtype(dtype) is not None:
            return [_text(one) for one in value]
    if dtype.base.kind == "V":
        return bytes(value.tobytes())
    found = np.asarray(value)
    if found.ndim == 1 and found.dtype == np.uint8 and kind in ("image", "audio", "bytes", "text"):
        return found.tobytes()
    if found.ndim == 0:
        return found.item()
    if kind == "json":
        return found.tolist()
    return np.ascontiguousarray(found, found.dtype.newbyteorder("="))


def _nested(value: Any) -> Any:
    return [_nested(one) if one.ndim > 1 else [_text(text) for text in one.tolist()] for one in value]


def _text(value: Any) -> str:
    data = value.encode("utf-8", "surrogateescape") if isinstance(value, str) else bytes(value)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise SampleError("utf8", f"not UTF-8: byte 0x{data[error.start]:02x} at byte {error.start}") from None


def attributes(item: Any) -> dict[str, Any]:
    """Attributes as plain values; those that are large or have no plain value are left out."""
    found: dict[str, Any] = {}
    try:
        names = sorted(item.attrs.keys())
    except (OSError, RuntimeError):
        return found
    for name in names:
        value = attribute(item, name)
        if value is not None:
            found[name] = value
    return found


def attribute(item: Any, name: str) -> Any:
    """One attribute as a plain value, or ``None``."""
    try:
        about = item.attrs.get_id(name)
        if about.get_storage_size() > _MAX_ATTRIBUTE or not _is_storable(about.dtype):
            return None
        value = item.attrs[name]
    except (OSError, RuntimeError, KeyError, ValueError, TypeError):
        return None
    if isinstance(value, h5py.Empty):
        return None
    return plain(value)


def plain(value: Any) -> Any:
    """A value as JSON holds it, or ``None``."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, np.ndarray):
        return [plain(one) for one in value.tolist()] if value.dtype.kind in "biufSUO" else None
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, list):
        return [plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | bool) else None


def sample_groups(group: Any) -> Iterator[str]:
    """Names of what lies in a group, in byte order."""
    try:
        names = list(group)
    except (OSError, RuntimeError, UnicodeError) as error:
        raise SourceError(f"{group.name}: its members cannot be listed: {said(error)}") from None
    yield from sorted(names, key=os.fsencode)


def said(error: BaseException) -> str:
    """What the library said, short."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def refuse(error: SampleError, name: str) -> SourceError | OptionError:
    """The same for the source as a whole."""
    return SourceError(f"{name}: {error.reason}")
