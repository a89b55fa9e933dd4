"""Values of MDS columns by their encodings. Nothing is unpickled; a length or shape is believed only where the bytes bear it out."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from lfdata.errors import OptionError, SampleError

PICKLE = "pkl"
_SCALARS = {
    name: np.dtype(name)
    for name in (*(f"{s}int{b}" for s in ("", "u") for b in (8, 16, 32, 64)), "float16", "float32", "float64")
}
_FILES = ("bytes", "png", "jpeg")
_DIGITS = ("str_int", "str_float", "str_decimal")
_LISTS = {"list[png]": "png", "list[jpeg]": "jpeg", "list[pil]": "pil", "jpeg_array": "jpeg", "jpegarray": "jpeg"}
_PLAIN = ("str", "int", "pil", "json", PICKLE, *_FILES, *_DIGITS, *_SCALARS, *_LISTS)
# The number of a value's dtype, where the column does not fix it.
_DTYPES = {
    8: "uint8",
    9: "int8",
    16: "uint16",
    17: "int16",
    18: "float16",
    32: "uint32",
    33: "int32",
    34: "float32",
    64: "uint64",
    65: "int64",
    66: "float64",
}
_MODES: dict[str, tuple[str, int]] = {
    "L": ("u1", 1),
    "LA": ("u1", 2),
    "RGB": ("u1", 3),
    "RGBA": ("u1", 4),
    "I;16": ("<u2", 1),
    "I;16L": ("<u2", 1),
    "I;16B": (">u2", 1),
    "I": ("<i4", 1),
    "F": ("<f4", 1),
}
_MAX_NDIM = 63


def is_list(encoding: str) -> bool:
    """Whether values are lists of pictures."""
    return encoding in _LISTS


def check_encoding(encoding: str) -> None:
    """Raises :class:`OptionError` for an encoding that this version does not know."""
    if encoding in _PLAIN:
        return
    name, _, arguments = encoding.partition(":")
    if name == "ndarray":
        _array_type(arguments)
        return
    raise OptionError(f"the encoding {encoding!r} is not known; known are {', '.join(_PLAIN)} and ndarray[:DTYPE[:SHAPE]]")


def _array_type(arguments: str) -> tuple[str | None, tuple[int, ...] | None]:
    dtype, _, sizes = arguments.partition(":")
    if dtype and dtype not in _DTYPES.values():
        raise OptionError(f"an array of {dtype!r} is not known; known are {', '.join(_DTYPES.values())}")
    try:
        shape = tuple(int(size) for size in sizes.split(",")) if sizes else None
    except ValueError:
        raise OptionError(f"the shape {sizes!r} of an array is no list of numbers") from None
    if shape is not None and min(shape) < 1:
        raise OptionError(f"the shape {sizes!r} of an array has no positive sizes")
    return dtype or None, shape


def fixed_size(encoding: str) -> int | None:
    """Bytes of every value, where the encoding fixes them."""
    if encoding == "int":
        return 8
    if encoding in _SCALARS:
        return _SCALARS[encoding].itemsize
    if encoding.startswith("ndarray:"):
        dtype, shape = _array_type(encoding.partition(":")[2])
        if dtype and shape:
            return math.prod(shape) * np.dtype(dtype).itemsize
    return None


def guess(encoding: str, first: Any, several: bool) -> tuple[str, dict[str, str]] | None:
    """Kind and options of a column's field; ``None`` where it must be declared.

    Args:
        first: the column's first value, for arrays. several: whether there are several columns of pictures.
    """
    if encoding == "bytes":
        return "bytes", {}
    if encoding == "str" or encoding in _DIGITS:
        return "text", {}
    if encoding == "json":
        return "json", {}
    if encoding == "int" or encoding in _SCALARS:
        return "scalar", {"dtype": "int64" if encoding == "int" else encoding}
    if encoding in ("png", "jpeg"):
        return "image", {"codec": "keep"} if several else {}
    if encoding == "pil":
        return "image", {"codec": "png", "bits16": "keep"}
    if encoding.partition(":")[0] == "ndarray" and isinstance(first, np.ndarray):
        return "array", {"dtype": first.dtype.name, "ndim": str(first.ndim)}
    return None


def decode(encoding: str, data: bytes, kind: str) -> Any:
    """One value for a field of a kind.

    Raises:
        SampleError: ``mds`` (a length that is not the encoding's, a shape that the bytes do not bear out), ``utf8``, ``json``,
            ``unsupported`` (a PIL mode without pixels of its own).
    """
    if encoding in _FILES:
        return data
    if encoding == "str" or encoding in _DIGITS:
        return _text(data)
    if encoding == "json":
        return data if kind in ("json", "bytes") else _json(data)
    if encoding == "int" or encoding in _SCALARS:
        dtype = _SCALARS.get(encoding, np.dtype("int64"))
        if len(data) != dtype.itemsize:
            raise SampleError("mds", f"{len(data)} bytes for one {encoding}")
        return np.frombuffer(data, dtype.newbyteorder("<"))[0].item()
    if encoding in _LISTS:
        return data if kind == "bytes" else elements(encoding, data)
    if encoding == "pil":
        return data if kind == "bytes" else _pixels(data)
    return _array(encoding.partition(":")[2], data)


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise SampleError("utf8", f"not UTF-8: byte 0x{data[error.start]:02x} at byte {error.start}") from None


def _json(data: bytes) -> Any:
    import msgspec

    try:
        return msgspec.json.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise SampleError("json", f"not JSON: {error}") from None


def _array(arguments: str, data: bytes) -> Any:
    dtype, shape = _array_type(arguments)
    place = 0
    try:
        if dtype is None:
            dtype = _DTYPES.get(data[place])
            place += 1
        if dtype is None:
            raise SampleError("mds", f"an array of an unknown dtype {data[0]}")
        if shape is None:
            ndim, width = data[place] >> 2, 1 << (data[place] & 3)
            sizes = data[place + 1 : place + 1 + ndim * width]
            place += 1 + ndim * width
            if not 1 <= ndim <= _MAX_NDIM or len(sizes) != ndim * width:
                raise SampleError("mds", f"an array of {ndim} dimensions in {len(data)} bytes")
            shape = tuple(np.frombuffer(sizes, f"<u{width}").tolist())
    except IndexError:
        raise SampleError("mds", f"an array in {len(data)} bytes") from None
    item = np.dtype(dtype)
    if math.prod(shape) * item.itemsize != len(data) - place or 0 in shape:
        raise SampleError("mds", f"an array of {shape} {dtype} in {len(data) - place} bytes")
    return np.frombuffer(data, item.newbyteorder("<"), offset=place).reshape(shape)


def _pixels(data: bytes) -> Any:
    """Pixels of a picture that was stored as PIL holds it."""
    if len(data) < 12:
        raise SampleError("mds", f"a picture in {len(data)} bytes")
    width, height, length = struct.unpack_from("<3I", data)
    mode = data[12 : 12 + length].decode("ascii", "replace") if length <= 16 else "?"
    if mode not in _MODES:
        raise SampleError("unsupported", f"a picture of PIL mode {mode!r}; {', '.join(_MODES)} are read")
    dtype, channels = _MODES[mode]
    item = np.dtype(dtype)
    if not width or not height or width * height * channels * item.itemsize != len(data) - 12 - length:
        raise SampleError("mds", f"a picture of {width} x {height} {mode} in {len(data) - 12 - length} bytes")
    shape = (height, width) if channels == 1 else (height, width, channels)
    found = np.frombuffer(data, item, offset=12 + length).reshape(shape)
    return found.astype(item.newbyteorder("="), copy=False)


def elements(encoding: str, data: bytes) -> Sequence[Any]:
    """The pictures of a list: bytes of files, or pixels. Raises :class:`SampleError` (``mds``)."""
    start = 0 if encoding.startswith("jpeg") else 4  # list[...] begins with four bytes kept for later
    if len(data) < start + 4:
        raise SampleError("mds", f"a list of pictures in {len(data)} bytes")
    count = struct.unpack_from("<I", data, start)[0]
    place = start + 4 + 4 * count
    if place > len(data):
        raise SampleError("mds", f"a list of {count} pictures in {len(data)} bytes")
    found: list[Any] = []
    for size in struct.unpack_from(f"<{count}I", data, start + 4):
        part = data[place : place + size]
        if len(part) != size:
            raise SampleError("mds", f"picture {len(found)} of a list ends {size - len(part)} bytes too early")
        found.append(_pixels(part) if _LISTS[encoding] == "pil" else part)
        place += size
    if place != len(data):
        raise SampleError("mds", f"{len(data) - place} bytes behind the last picture of a list")
    return found
