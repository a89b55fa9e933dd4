"""Kind ``scalar``: one number or truth value a sample, stored as its little-endian bytes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

import numpy as np

from lfdata.codecs._common import OptionReader
from lfdata.codecs.base import Buffer, Encoded
from lfdata.errors import OptionError, SampleError

INTEGER_NAMES = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
FLOAT_NAMES = ("float16", "float32", "float64")
SCALAR_NAMES = (*INTEGER_NAMES, *FLOAT_NAMES, "bool")

_INTEGER = re.compile(r"[+-]?[0-9]{1,64}\Z", re.ASCII)
_FLOAT = re.compile(r"[+-]?(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?|inf|infinity|nan)\Z", re.ASCII | re.IGNORECASE)
_BOOLS = {"true": True, "false": False, "1": True, "0": False}
_MAX_TEXT = 400  # longest number worth reading: the exact decimal form of the smallest double needs fewer useful digits


def little_endian(name: str) -> np.dtype[Any]:
    """The little-endian NumPy dtype called ``name``."""
    return np.dtype(name).newbyteorder("<")


class ScalarEncoder:
    """Stores one value of a fixed dtype.

    Option ``dtype`` (required): ``int8`` to ``int64``, ``uint8`` to ``uint64``, ``float16`` to ``float64``, ``bool``.

    Accepted: Python and NumPy numbers and booleans, and text (``str`` or ASCII bytes, surrounding white space ignored) in plain
    decimal form. Rules:
        integers: out of range is an error, never a wrap; a float is accepted only when it is exactly an integer;
        floats: rounded to the nearest value of the dtype (which is what float means); a finite value that would become infinite
            is an error; NaN and infinities are kept;
        bool: booleans, 0 and 1, and the texts true, false, 1, 0 in any case.
    """

    kind = "scalar"

    def __init__(self, options: Mapping[str, str]) -> None:
        reader = OptionReader(self.kind, options, {"dtype": "|".join(SCALAR_NAMES)})
        name = reader.text("dtype")
        if name is None:
            raise OptionError(f"scalar: dtype is required; expected dtype={'|'.join(SCALAR_NAMES)}")
        if name not in SCALAR_NAMES:
            raise reader.bad("dtype")
        self._name = name
        self._dtype = little_endian(name)
        self.params: dict[str, Any] = {"dtype": name}

    def encode(self, raw: Any) -> Encoded:
        """Encode one value. Raises ``SampleError``: ``type``, ``parse``, ``range``, ``lossy``."""
        value = _plain(raw)
        if isinstance(value, str):
            value = _parse(value, self._name)
        if self._name == "bool":
            return Encoded(b"\x01" if _to_bool(value) else b"\x00")
        number = self._to_integer(value) if self._name in INTEGER_NAMES else self._to_float(value)
        return Encoded(np.array(number, dtype=self._dtype).tobytes())

    def _to_integer(self, value: bool | int | float) -> int:
        if isinstance(value, float):
            if not (math.isfinite(value) and value.is_integer()):
                raise SampleError("lossy", f"{value!r} is not an integer, and the field is {self._name}")
            value = int(value)
        info = np.iinfo(self._dtype)
        if not info.min <= value <= info.max:
            raise SampleError("range", f"{_short(value)} does not fit {self._name} ({info.min} to {info.max})")
        return int(value)

    def _to_float(self, value: bool | int | float) -> float:
        try:
            number = float(value)
        except OverflowError:
            raise SampleError("range", f"{_short(value)} is beyond {self._name}") from None
        if math.isfinite(number):
            with np.errstate(over="ignore"):
                fits = bool(np.isfinite(np.float64(number).astype(self._dtype)))
            if not fits:
                raise SampleError("range", f"{number!r} is beyond {self._name}")
        return number


def _short(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    return repr(value)


def _plain(raw: Any) -> bool | int | float | str:
    """A Python scalar or text from what a source may hold."""
    if isinstance(raw, np.generic) or (isinstance(raw, np.ndarray) and raw.ndim == 0):
        raw = raw.item()
    if isinstance(raw, bytes | bytearray | memoryview):
        data = bytes(raw[:_MAX_TEXT])
        try:
            raw = data.decode("ascii") if len(raw) <= _MAX_TEXT else "?" * (_MAX_TEXT + 1)
        except UnicodeDecodeError as error:
            raise SampleError("parse", f"not a number: byte 0x{data[error.start]:02x} at byte offset {error.start}") from None
    if isinstance(raw, bool | int | float | str):
        return raw
    raise SampleError("type", f"a single number or boolean expected, got {type(raw).__name__}")


def _parse(text: str, name: str) -> bool | int | float:
    if len(text) > _MAX_TEXT:
        raise SampleError("parse", f"not a number: more than {_MAX_TEXT} characters")
    text = text.strip(" \t\r\n")
    if name == "bool":
        if text.lower() not in _BOOLS:
            raise SampleError("parse", f"{text!r} is not true, false, 1 or 0")
        return _BOOLS[text.lower()]
    if _INTEGER.match(text):
        return int(text)
    if not _FLOAT.match(text):
        raise SampleError("parse", f"{text!r} is not a decimal number")
    if name in INTEGER_NAMES:
        return _exact_integer(text, name)
    number = float(text)
    if math.isinf(number) and "inf" not in text.lower():
        raise SampleError("range", f"{text!r} is beyond {name}")
    return number


def _exact_integer(text: str, name: str) -> int:
    """The integer that text with a point or exponent (``3.0``, ``1e3``) stands for, without a detour through a double."""
    try:
        value = Decimal(text)
    except InvalidOperation:  # the exponent alone is beyond every dtype
        raise SampleError("range", f"{text!r} is beyond {name}") from None
    if not value.is_finite() or value != value.to_integral_value():
        raise SampleError("lossy", f"{text!r} is not an integer, and the field is {name}")
    if value.adjusted() > 64:
        raise SampleError("range", f"{text!r} is beyond {name}")
    return int(value)


def _to_bool(value: bool | int | float) -> bool:
    if value not in (0, 1):
        raise SampleError("range", f"{_short(value)} is not a boolean (0 or 1)")
    return bool(value)


class ScalarDecoder:
    """Payload -> NumPy scalar of the field's dtype."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        name = params.get("dtype")
        if name not in SCALAR_NAMES:
            raise OptionError(f"scalar: the schema's dtype {name!r} is none of {', '.join(SCALAR_NAMES)}")
        self._dtype = little_endian(str(name))

    def decode(self, payload: Buffer, sizes: Mapping[str, Any]) -> np.generic:
        """One value. Raises ``SampleError`` (``corrupt``) when the payload has another length or is no boolean."""
        del sizes
        if len(payload) != self._dtype.itemsize:
            raise SampleError("corrupt", f"{len(payload)} bytes stored for one {self._dtype.name}")
        if self._dtype.kind == "b" and payload[0] > 1:
            raise SampleError("corrupt", f"byte {payload[0]} stored for a boolean")
        value: np.generic = np.frombuffer(payload, dtype=self._dtype)[0]
        return value
