"""Kind ``array``: n-dimensional numeric arrays of one dtype, stored as little-endian bytes in C order."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfdata.codecs._common import OptionReader, check_max_bytes, refuse_lfs_pointer
from lfdata.codecs._npy import NPY_MAGIC, parse_npy
from lfdata.codecs.base import Buffer, Encoded
from lfdata.codecs.scalar import SCALAR_NAMES, little_endian
from lfdata.errors import OptionError, SampleError

MAX_NDIM = 8

_VALID = {
    "dtype": "|".join(SCALAR_NAMES),
    "ndim": f"<1 to {MAX_NDIM}>",
    "shape": "<sizes joined by x, * for any: 3x224x224, *x3>",
    "cast": "exact|same_kind",
    "max_bytes": "<largest array accepted, in bytes; no limit by default>",
}


class ArrayEncoder:
    """Stores arrays of a fixed dtype and number of dimensions.

    Options:
        dtype: required; a NumPy name without byte order (stored little-endian). Objects, strings and records are refused.
        ndim or shape: exactly one is required. ``shape=3x*`` fixes three rows and leaves the columns free.
        cast: what may be done to an array of another dtype. ``exact`` (default) keeps every value or refuses. ``same_kind``
            also rounds to a narrower floating-point type (float64 -> float32, integers -> float). Integers never wrap and a
            finite value never becomes infinite under either.
        max_bytes: refuses larger arrays (bytes as stored).

    NaN and infinities are kept. ``Encoded.sizes["dims"]`` is the shape, a tuple of ndim integers.
    """

    kind = "array"

    def __init__(self, options: Mapping[str, str]) -> None:
        reader = OptionReader(self.kind, options, _VALID)
        name = reader.text("dtype")
        if name is None:
            raise OptionError(f"array: dtype is required; expected dtype={_VALID['dtype']}")
        if name not in SCALAR_NAMES:
            raise reader.bad("dtype", "the stored order is always little-endian" if name[:1] in "<>=|" else "")
        self._dtype = little_endian(name)
        self._shape = _read_shape(reader)
        self._cast = reader.choice("cast", ("exact", "same_kind"), "exact")
        self._max_bytes = reader.integer("max_bytes", None, 0, 2**63 - 1)
        self.params: dict[str, Any] = {
            "dtype": name,
            "ndim": len(self._shape),
            "shape": list(self._shape),
            "order": "C",
            "cast": self._cast,
            "max_bytes": self._max_bytes,
        }

    def encode(self, raw: Any) -> Encoded:
        """Encode ``.npy`` bytes, an ``ndarray``, or nested lists of numbers.

        Numbers in lists have no declared width, so a float field rounds them to its dtype; integers must fit exactly.
        Raises ``SampleError``: ``type``, ``npy``, ``truncated``, ``trailing``, ``dtype``, ``shape``, ``lossy``, ``range``,
        ``ragged``, ``size-limit``, ``lfs-pointer``.
        """
        rounding = self._cast == "same_kind"
        if isinstance(raw, bytes | bytearray | memoryview):
            source = _from_bytes(bytes(raw))
        elif isinstance(raw, np.ndarray | np.generic):
            source = np.asarray(raw)
        elif isinstance(raw, list | tuple):
            source = _from_lists(raw)
            if not source.size:
                source = source.astype(self._dtype)
            rounding = True
        else:
            raise SampleError("type", f"an array, nested lists or .npy bytes expected, got {type(raw).__name__}")
        if source.dtype.kind not in "biufc" or source.dtype.itemsize > 16 or source.dtype.name not in SCALAR_NAMES:
            raise SampleError("dtype", f"arrays of {source.dtype} are not stored; numbers and booleans are")
        self._check_shape(source.shape)
        check_max_bytes(math.prod(source.shape) * self._dtype.itemsize, self._max_bytes)
        stored = np.ascontiguousarray(cast_checked(source, self._dtype, rounding))
        return Encoded(stored.tobytes(), sizes={"dims": tuple(int(n) for n in source.shape)})

    def _check_shape(self, shape: tuple[int, ...]) -> None:
        fits = len(shape) == len(self._shape) and all(want in (None, n) for want, n in zip(self._shape, shape, strict=True))
        if not fits:
            want = "x".join("*" if n is None else str(n) for n in self._shape)
            raise SampleError("shape", f"shape {'x'.join(map(str, shape)) or 'of a single number'} where {want} is declared")


def _read_shape(reader: OptionReader) -> tuple[int | None, ...]:
    ndim = reader.integer("ndim", None, 1, MAX_NDIM)
    text = reader.text("shape")
    if (ndim is None) == (text is None):
        raise OptionError(f"array: give exactly one of ndim={_VALID['ndim']} and shape={_VALID['shape']}")
    if text is None:
        return (None,) * (ndim or 0)
    parts = text.split("x")
    if not 1 <= len(parts) <= MAX_NDIM:
        raise reader.bad("shape", f"1 to {MAX_NDIM} dimensions")
    if not all(part == "*" or (part.isascii() and part.isdigit() and len(part) <= 18) for part in parts):
        raise reader.bad("shape")
    return tuple(None if part == "*" else int(part) for part in parts)


def _from_bytes(raw: bytes) -> NDArray[Any]:
    if raw.startswith(NPY_MAGIC):
        return parse_npy(raw)
    refuse_lfs_pointer(raw)
    if not raw:
        raise SampleError("empty", "zero bytes where an .npy file is expected")
    hint = "; for an .npz, extract the member you want" if raw.startswith(b"PK\x03\x04") else ""
    raise SampleError("npy", f"not an .npy file (it starts with {raw[:6]!r}){hint}")


def _from_lists(raw: list[Any] | tuple[Any, ...]) -> NDArray[Any]:
    try:
        source = np.array(raw)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise SampleError("ragged", f"nested lists do not form an array: {str(error)[:200]}") from None
    if source.dtype.kind in "OUSVmM":
        raise SampleError("type", "nested lists may hold only numbers and booleans within 64 bits")
    if source.dtype.kind == "f" and source.size and bool(np.any(np.abs(source[np.isfinite(source)]) >= 2.0**53)):
        # integers beside floats were turned into doubles by NumPy; beyond 2**53 that may have changed them
        source = _exact_mixed(raw, source)
    return source


def _exact_mixed(raw: list[Any] | tuple[Any, ...], source: NDArray[Any]) -> NDArray[Any]:
    objects = np.array(raw, dtype=object)
    for item, value in zip(objects.flat, source.flat, strict=True):
        if isinstance(item, int) and item != int(value):
            raise SampleError("lossy", f"integer {item} beside floats does not survive as float64")
    return source


def cast_checked(source: NDArray[Any], target: np.dtype[Any], rounding: bool) -> NDArray[Any]:
    """``source`` as ``target``, refusing every change of value that is not asked for.

    Args:
        source: numeric or boolean array.
        target: dtype to store.
        rounding: accept rounding into a floating-point or complex target.

    Raises:
        SampleError: ``range`` (does not fit, would overflow) or ``lossy`` (would change a value).
    """
    if source.dtype == target:
        return source
    if source.dtype.kind == "c" and target.kind != "c":
        raise SampleError("lossy", f"complex values do not fit {target.name}")
    with np.errstate(all="ignore"):
        if target.kind in "iub":
            return _cast_to_integer(source, target)
        result = source.astype(target)
        if source.dtype.kind in "fc" and bool(np.any(np.isfinite(source) & ~np.isfinite(result))):
            raise SampleError("range", f"a finite value is beyond {target.name}")
        if source.dtype.kind in "iu" and not bool(np.all(np.isfinite(result))):
            raise SampleError("range", f"an integer is beyond {target.name}")
        if not rounding and not _kept(source, result):
            raise SampleError("lossy", f"{source.dtype.name} values change as {target.name}; cast=same_kind rounds them")
    return result


def _cast_to_integer(source: NDArray[Any], target: np.dtype[Any]) -> NDArray[Any]:
    low, high = (0, 1) if target.kind == "b" else (int(np.iinfo(target).min), int(np.iinfo(target).max))
    if source.dtype.kind == "f":
        wide = source.astype(np.float64)
        # high + 1 is a power of two and so exact as a double, which high itself is not for 64 bits
        inside = (wide >= float(low)) & (wide < float(high + 1))
        if not bool(np.all(inside)):
            raise SampleError("range", f"a value is beyond {target.name} ({low} to {high}) or not finite")
        if not bool(np.all(wide == np.trunc(wide))):
            raise SampleError("lossy", f"a value is not an integer, and the field is {target.name}")
    elif source.size:
        least, most = int(source.min()), int(source.max())
        if least < low or most > high:
            raise SampleError("range", f"values from {least} to {most} do not fit {target.name} ({low} to {high})")
    return source.astype(target)


def _kept(source: NDArray[Any], result: NDArray[Any]) -> bool:
    """Whether every value of ``source`` is still the same in the floating-point ``result``."""
    if source.dtype.kind == "b":
        return True
    if source.dtype.kind in "iu":
        values = result.real
        info = np.iinfo(source.dtype)
        # a double at or beyond the integer's range cannot be equal, and casting it back would be undefined
        inside = (values >= float(info.min)) & (values < float(int(info.max) + 1))
        return bool(np.all(inside)) and bool(np.all(values.astype(source.dtype) == source))
    return bool(np.array_equal(result.astype(source.dtype), source, equal_nan=True))


class ArrayDecoder:
    """Payload -> owned, writable ``ndarray`` in C order, shape ``sizes["dims"]``, native byte order."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        name, ndim, shape = params.get("dtype"), params.get("ndim"), params.get("shape")
        if name not in SCALAR_NAMES or not isinstance(ndim, int) or not 1 <= ndim <= MAX_NDIM:
            raise OptionError(f"array: the schema's dtype {name!r} or ndim {ndim!r} is not one this version reads")
        self._dtype = little_endian(str(name))
        self._shape: list[int | None] = list(shape) if isinstance(shape, list | tuple) else [None] * ndim
        if len(self._shape) != ndim:
            raise OptionError(f"array: the schema's shape {shape!r} does not have {ndim} dimensions")

    def decode(self, payload: Buffer, sizes: Mapping[str, Any]) -> NDArray[Any]:
        """Decode one array. Raises ``SampleError`` (``corrupt``) when dims, shape and payload length disagree."""
        dims = tuple(int(n) for n in sizes["dims"])
        if len(dims) != len(self._shape) or any(want not in (None, n) for want, n in zip(self._shape, dims, strict=True)):
            raise SampleError("corrupt", f"dims {dims} do not match the declared shape {self._shape}")
        expected = math.prod(dims) * self._dtype.itemsize  # Python integers: no overflow
        if min(dims) < 0 or expected != len(payload):
            raise SampleError("corrupt", f"dims {dims} of {self._dtype.name} take {expected} bytes, {len(payload)} are stored")
        flat = np.frombuffer(payload, dtype=self._dtype)
        if self._dtype.kind == "b" and flat.size and int(flat.view(np.uint8).max()) > 1:
            raise SampleError("corrupt", "a byte other than 0 and 1 is stored for a boolean")
        try:
            return flat.reshape(dims).astype(self._dtype.newbyteorder("="), copy=True)
        except ValueError as error:  # zero elements, but the other dims overflow what NumPy can address
            raise SampleError("corrupt", f"dims {dims}: {error}") from None
