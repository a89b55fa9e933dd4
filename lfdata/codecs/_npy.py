"""Reads ``.npy`` bytes without evaluating the header as Python and without allocating by what it claims."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfdata.errors import SampleError

NPY_MAGIC = b"\x93NUMPY"

_MAX_HEADER = 16 * 1024  # plain arrays need about 120 bytes; only record dtypes, which are refused, need more
_MAX_NDIM = 32
# descr of a plain dtype, fortran_order, shape: nothing else can describe a numeric array
_ITEM = re.compile(
    r"\s*'(?P<key>descr|fortran_order|shape)'\s*:\s*"
    r"(?:'(?P<descr>[^'\\]{1,16})'|(?P<bool>True|False)|\((?P<shape>[0-9L,\s]{0,800})\))\s*(?P<comma>,?)\s*"
)


def parse_npy(raw: bytes) -> NDArray[Any]:
    """The array in ``raw``, a read-only view of it.

    Raises:
        SampleError: ``npy`` (malformed header), ``dtype`` (objects, strings, records), ``truncated``, ``trailing``, ``shape``.
    """
    start, text = _header(raw)
    descr, fortran, shape = _parse_header(text)
    dtype = _plain_dtype(descr)
    if len(shape) > _MAX_NDIM:
        raise SampleError("shape", f".npy of {len(shape)} dimensions")
    expected = math.prod(shape) * dtype.itemsize  # Python integers: no overflow
    present = len(raw) - start
    if expected > present:
        raise SampleError("truncated", f".npy header asks for {expected} bytes of data, {present} are there")
    if expected < present:
        raise SampleError("trailing", f".npy header asks for {expected} bytes of data, {present} are there")
    flat = np.frombuffer(raw, dtype=dtype, offset=start)
    if dtype.kind == "b" and flat.size and int(flat.view(np.uint8).max()) > 1:
        raise SampleError("npy", "a boolean .npy holds a byte other than 0 and 1")
    try:
        return flat.reshape(shape, order="F" if fortran else "C")
    except ValueError as error:  # zero elements, but the other dims overflow what NumPy can address
        raise SampleError("shape", f".npy shape {shape}: {error}") from None


def _header(raw: bytes) -> tuple[int, str]:
    """Offset of the data and the header's text."""
    if len(raw) < 10:
        raise SampleError("truncated", f".npy of {len(raw)} bytes ends inside its header")
    major = raw[6]
    if major not in (1, 2, 3) or raw[7] != 0:
        raise SampleError("npy", f".npy version {raw[6]}.{raw[7]} is unknown")
    width = 2 if major == 1 else 4
    length = int.from_bytes(raw[8 : 8 + width], "little")
    start = 8 + width + length
    if length > _MAX_HEADER:
        raise SampleError("npy", f".npy header claims {length} bytes; at most {_MAX_HEADER} are read")
    if start > len(raw):
        raise SampleError("truncated", f".npy header claims {length} bytes, {len(raw) - 8 - width} are there")
    return start, raw[8 + width : start].decode("latin-1")


def _parse_header(text: str) -> tuple[str, bool, tuple[int, ...]]:
    body = text.strip()
    if not (body.startswith("{") and body.endswith("}")):
        raise SampleError("npy", ".npy header is not a dictionary")
    body = body[1:-1]
    items: dict[str, re.Match[str]] = {}
    position = 0
    while position < len(body):
        match = _ITEM.match(body, position)
        if match is None or match["key"] in items:
            break
        items[match["key"]] = match
        position = match.end()
        if not match["comma"]:
            break
    descr = items["descr"]["descr"] if "descr" in items else None
    order = items["fortran_order"]["bool"] if "fortran_order" in items else None
    shape = items["shape"]["shape"] if "shape" in items else None
    if descr is None and re.search(r"'descr'\s*:\s*[\[(]", body):
        raise SampleError("dtype", "an .npy of records is not stored; split it into one field a column")
    if position != len(body) or descr is None or order is None or shape is None:
        raise SampleError("npy", f".npy header is malformed: {text.strip()[:120]!r}")
    return descr, order == "True", _parse_shape(shape)


def _parse_shape(text: str) -> tuple[int, ...]:
    parts = [part.strip().removesuffix("L") for part in text.split(",")]  # Python 2 wrote 3L
    if parts and not parts[-1]:
        parts.pop()
    if not all(part.isdigit() and len(part) <= 20 for part in parts):
        raise SampleError("npy", f".npy shape ({text[:80]}) is malformed")
    return tuple(map(int, parts))


def _plain_dtype(descr: str) -> np.dtype[Any]:
    if "O" in descr:
        raise SampleError("dtype", "an .npy of Python objects needs pickle and is refused")
    if not re.fullmatch(r"[<>|=]?[biufc][0-9]{1,2}", descr):
        raise SampleError("dtype", f".npy of dtype {descr!r} is not stored; numbers and booleans are")
    try:
        return np.dtype(descr)
    except TypeError:
        raise SampleError("dtype", f".npy of dtype {descr!r} does not exist") from None
