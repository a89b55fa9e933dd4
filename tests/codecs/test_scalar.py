"""Scalars keep their value or are refused; nothing wraps, nothing is rounded to an integer."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lfdata.codecs.scalar import FLOAT_NAMES, INTEGER_NAMES, SCALAR_NAMES, ScalarDecoder, ScalarEncoder
from lfdata.errors import OptionError, SampleError


def roundtrip(raw: object, dtype: str) -> np.generic:
    encoder = ScalarEncoder({"dtype": dtype})
    encoded = encoder.encode(raw)
    value = ScalarDecoder(encoder.params).decode(encoded.payload, encoded.sizes)
    assert value.dtype == np.dtype(dtype)
    return value


def code(raw: object, dtype: str) -> str:
    with pytest.raises(SampleError) as caught:
        ScalarEncoder({"dtype": dtype}).encode(raw)
    return caught.value.code


@pytest.mark.parametrize("dtype", INTEGER_NAMES)
def test_integers_fit_exactly_or_are_refused(dtype: str) -> None:
    info = np.iinfo(dtype)
    for value in (info.min, info.max, 0):
        assert int(roundtrip(value, dtype)) == value
        assert int(roundtrip(str(value), dtype)) == value
        assert int(roundtrip(f" {value}\n".encode(), dtype)) == value
    for value in (int(info.min) - 1, int(info.max) + 1, 10**30, -(10**400)):
        assert code(value, dtype) == "range"
    assert code(str(int(info.max) + 1), dtype) == "range"
    assert code("1e99999999999999999999999", dtype) == "range"


@given(st.sampled_from(INTEGER_NAMES), st.integers(-(2**70), 2**70))
def test_no_integer_ever_wraps(dtype: str, value: int) -> None:
    try:
        stored = int(roundtrip(value, dtype))
    except SampleError:
        assert not np.iinfo(dtype).min <= value <= np.iinfo(dtype).max
    else:
        assert stored == value


@pytest.mark.parametrize(
    "raw", [1.5, "1.5", float("nan"), "nan", float("inf"), "0.99999999999999999999999", "1e-400", np.float32(0.5)]
)
def test_fractions_do_not_become_integers(raw: object) -> None:
    assert code(raw, "int64") == "lossy"


def test_exact_floats_become_integers_without_a_detour_through_doubles() -> None:
    assert int(roundtrip(3.0, "int8")) == 3
    assert int(roundtrip("3.0", "int8")) == 3
    assert int(roundtrip("1.2e3", "int16")) == 1200
    assert int(roundtrip("9007199254740993.0", "int64")) == 9007199254740993


@given(st.floats())
def test_doubles_are_bit_exact(value: float) -> None:
    stored = float(roundtrip(value, "float64"))
    assert stored == value or (math.isnan(stored) and math.isnan(value))
    assert math.copysign(1, stored) == math.copysign(1, value) or math.isnan(value)


def test_floats_round_to_nearest_and_never_overflow() -> None:
    assert roundtrip(0.1, "float32") == np.float32(0.1)
    assert roundtrip("0.1", "float16") == np.float16(0.1)
    assert code(1e39, "float32") == "range"
    assert code(70000, "float16") == "range"
    assert code("1e999", "float64") == "range"
    assert code(10**400, "float64") == "range"
    assert math.isinf(float(roundtrip("-inf", "float16")))
    assert math.isnan(float(roundtrip("NaN", "float32")))


@pytest.mark.parametrize("raw", [True, 1, 1.0, "true", "TRUE", "1", b"1\n", np.bool_(True)])
def test_true_in_its_forms(raw: object) -> None:
    assert bool(roundtrip(raw, "bool")) is True


@pytest.mark.parametrize("raw", [2, -1, float("nan"), "yes", ""])
def test_other_values_are_no_booleans(raw: object) -> None:
    assert code(raw, "bool") in ("range", "parse")


@pytest.mark.parametrize("text", ["", " ", "1_000", "0x10", "1,5", "one", "1 2", "\u0661", "--1", "1e", "9" * 500])
@pytest.mark.parametrize("dtype", ["int32", "float64"])
def test_text_that_is_no_plain_number_is_refused(text: str, dtype: str) -> None:
    assert code(text, dtype) in ("parse", "range")


@pytest.mark.parametrize("raw", [None, [1], {"a": 1}, np.zeros(1), 1j, b"\xff"])
def test_other_types_are_refused(raw: object) -> None:
    assert code(raw, "int64") in ("type", "parse")


@pytest.mark.parametrize("raw", [np.int8(-3), np.uint64(2**63), np.float16(0.5), np.array(7)])
def test_numpy_scalars_keep_their_value(raw: object) -> None:
    dtype = raw.dtype.name  # type: ignore[attr-defined]
    assert roundtrip(raw, dtype) == raw


def test_payload_is_little_endian() -> None:
    assert ScalarEncoder({"dtype": "int32"}).encode(1).payload == struct.pack("<i", 1)
    assert ScalarEncoder({"dtype": "float64"}).encode(0.1).payload == struct.pack("<d", 0.1)


def test_dtype_is_required_and_must_be_known() -> None:
    with pytest.raises(OptionError, match="dtype is required"):
        ScalarEncoder({})
    for bad in ("int128", "object", "<i4", "str"):
        with pytest.raises(OptionError, match="float64"):
            ScalarEncoder({"dtype": bad})
    assert set(FLOAT_NAMES) < set(SCALAR_NAMES)


def test_damaged_payloads_are_errors() -> None:
    for payload in (b"", b"123", b"12345"):
        with pytest.raises(SampleError):
            ScalarDecoder({"dtype": "int32"}).decode(payload, {})
    with pytest.raises(SampleError):
        ScalarDecoder({"dtype": "bool"}).decode(b"\x02", {})
    with pytest.raises(OptionError):
        ScalarDecoder({"dtype": "object"})
