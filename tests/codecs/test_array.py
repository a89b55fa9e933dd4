"""Arrays keep every value or are refused; .npy headers are never trusted."""

from __future__ import annotations

import contextlib
import io
import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lfdata.codecs.array import ArrayDecoder, ArrayEncoder
from lfdata.codecs.scalar import SCALAR_NAMES
from lfdata.errors import OptionError, SampleError


def npy(array: np.ndarray, **kwargs: object) -> bytes:
    out = io.BytesIO()
    np.save(out, array, **kwargs)  # type: ignore[arg-type]
    return out.getvalue()


def header(text: str, body: bytes = b"", version: int = 1) -> bytes:
    data = text.encode("latin-1")
    return b"\x93NUMPY" + bytes((version, 0)) + struct.pack("<H" if version == 1 else "<I", len(data)) + data + body


def encode(raw: object, dtype: str, **options: str) -> np.ndarray:
    options = options if "shape" in options else {"ndim": "1", **options}
    encoder = ArrayEncoder({"dtype": dtype, **options})
    encoded = encoder.encode(raw)
    result = ArrayDecoder(encoder.params).decode(encoded.payload, encoded.sizes)
    assert result.dtype == np.dtype(dtype)
    assert result.flags.owndata or result.base is None or result.base.flags.owndata
    assert result.flags.writeable and result.flags.c_contiguous
    return result


def code(raw: object, dtype: str, **options: str) -> str:
    with pytest.raises(SampleError) as caught:
        encode(raw, dtype, **options)
    return caught.value.code


@given(
    st.sampled_from(SCALAR_NAMES).flatmap(lambda name: hnp.arrays(name, hnp.array_shapes(max_dims=4, min_side=0, max_side=4)))
)
def test_arrays_and_npy_files_come_back_exactly(array: np.ndarray) -> None:
    for raw in (array, npy(array), npy(np.asfortranarray(array)), array.astype(array.dtype.newbyteorder(">"))):
        result = encode(raw, array.dtype.name, ndim=str(array.ndim))
        assert result.shape == array.shape
        assert result.tobytes() == array.tobytes()


def test_big_endian_fortran_npy_is_stored_little_endian_in_c_order() -> None:
    array = np.arange(6, dtype=">i4").reshape(2, 3)
    encoded = ArrayEncoder({"dtype": "int32", "ndim": "2"}).encode(npy(np.asfortranarray(array)))
    assert encoded.payload == struct.pack("<6i", *range(6))
    assert encoded.sizes == {"dims": (2, 3)}


@pytest.mark.parametrize(
    ("raw", "dtype", "want"),
    [
        (np.array([300]), "uint8", "range"),
        (np.array([-1]), "uint64", "range"),
        (np.array([2**64 - 1], np.uint64), "int64", "range"),
        (np.array([1.5]), "int32", "lossy"),
        (np.array([np.nan]), "int32", "range"),
        (np.array([2.0**63]), "int64", "range"),
        (np.array([0.1]), "float32", "lossy"),
        (np.array([2**24 + 1]), "float32", "lossy"),
        (np.array([2**63 - 1]), "float64", "lossy"),
        (np.array([2**64 - 1], np.uint64), "float32", "lossy"),
        (np.array([1e39]), "float32", "range"),
        (np.array([70000]), "float16", "range"),
        (np.array([1j]), "float64", "dtype"),
        (np.array([2]), "bool", "range"),
        (np.array(["a"]), "int32", "dtype"),
        (np.array([object()]), "int32", "dtype"),
        (np.array(["2020-01-01"], "M8[D]"), "int64", "dtype"),
    ],
)
def test_lossy_casts_are_refused(raw: np.ndarray, dtype: str, want: str) -> None:
    assert code(raw, dtype) == want


@given(hnp.arrays(st.sampled_from(["int64", "uint64", "float64", "float32", "int16"]), 3), st.sampled_from(SCALAR_NAMES[:12]))
def test_an_accepted_cast_changes_no_value(array: np.ndarray, dtype: str) -> None:
    try:
        result = encode(array, dtype)
    except SampleError:
        return
    for before, after in zip(array.tolist(), result.tolist(), strict=True):
        assert before == after or (before != before and after != after)


def test_same_kind_rounds_floats_but_never_wraps_or_overflows() -> None:
    assert encode(np.array([0.1]), "float32", cast="same_kind")[0] == np.float32(0.1)
    assert encode(np.array([2**24 + 1]), "float32", cast="same_kind")[0] == np.float32(2**24)
    assert code(np.array([300]), "uint8", cast="same_kind") == "range"
    assert code(np.array([1.5]), "int32", cast="same_kind") == "lossy"
    assert code(np.array([1e39]), "float32", cast="same_kind") == "range"


def test_nan_and_infinity_are_kept() -> None:
    assert np.array_equal(
        encode([1.0, float("nan"), float("-inf")], "float32"), np.array([1, np.nan, -np.inf], "f4"), equal_nan=True
    )


def test_nested_lists() -> None:
    assert encode([[1, 2], [3, 4]], "int8", ndim="2").tolist() == [[1, 2], [3, 4]]
    assert encode([0.1, 1], "float32").tolist() == [np.float32(0.1), 1.0]
    assert encode([], "int32").shape == (0,)
    assert encode([True, False], "bool").tolist() == [True, False]
    assert code([[1], [2, 3]], "int32", ndim="2") == "ragged"
    assert code([1, None], "int32") == "type"
    assert code(["1"], "int32") == "type"
    assert code([2**64], "uint64") == "type"
    assert code([2**53 + 1, 0.5], "float64") == "lossy"
    assert code([256], "uint8") == "range"
    deep: list[object] = []
    for _ in range(5000):
        deep = [deep]
    assert code(deep, "int32") in ("ragged", "type", "shape")


def test_declared_shapes_hold() -> None:
    assert encode(np.zeros((2, 3), "f4"), "float32", shape="2x3").shape == (2, 3)
    assert encode(np.zeros((5, 3), "f4"), "float32", shape="*x3").shape == (5, 3)
    assert code(np.zeros((3, 2), "f4"), "float32", shape="2x3") == "shape"
    assert code(np.zeros(3, "f4"), "float32", ndim="2") == "shape"
    assert code(np.float32(1), "float32", ndim="1") == "shape"


@pytest.mark.parametrize(
    ("raw", "want"),
    [
        (b"", "empty"),
        (b"hello", "npy"),
        (b"PK\x03\x04rest", "npy"),
        (b"\x93NUMPY", "truncated"),
        (npy(np.zeros(4))[:-1], "truncated"),
        (npy(np.zeros(4)) + b"x", "trailing"),
        (b"\x93NUMPY\x01\x00\xff\xff" + b" " * 100, "npy"),
        (b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + b" " * 100, "npy"),
        (b"\x93NUMPY\x09\x00\x01\x00 ", "npy"),
        (header("{'descr': '<f8', 'fortran_order': False, 'shape': (4611686018427387904, 4), }"), "truncated"),
        (header("{'descr': '<f8', 'fortran_order': False, 'shape': (99999999999999999999, 0), }"), "shape"),
        (header("{'descr': '<f8', 'fortran_order': False, 'shape': (-1,), }", bytes(8)), "npy"),
        (header("{'descr': '<f8', 'fortran_order': False, 'shape': (1,), 'x': 1}", bytes(8)), "npy"),
        (header("{'descr': '<f8', 'fortran_order': False}", bytes(8)), "npy"),
        (header("{'descr': '<f8', 'descr': '<f8', 'fortran_order': False, 'shape': (1,)}", bytes(8)), "npy"),
        (header("__import__('os').system('true')"), "npy"),
        (header("{" * 5000), "npy"),
        (header("{'descr': '|O', 'fortran_order': False, 'shape': (1,), }", bytes(8)), "dtype"),
        (header("{'descr': '<U4', 'fortran_order': False, 'shape': (1,), }", bytes(16)), "dtype"),
        (header("{'descr': [('a', '<f8')], 'fortran_order': False, 'shape': (1,), }", bytes(8)), "dtype"),
        (header("{'descr': '<f7', 'fortran_order': False, 'shape': (1,), }", bytes(7)), "dtype"),
        (header("{'descr': '|b1', 'fortran_order': False, 'shape': (1,), }", b"\x02"), "npy"),
    ],
)
def test_bad_npy_files_are_refused_by_name(raw: bytes, want: str) -> None:
    tracemalloc.start()
    try:
        assert code(raw, "float64", ndim="2") == want
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("version", [1, 2, 3])
def test_npy_header_versions_are_read(version: int) -> None:
    raw = header("{'shape': (2L,), 'fortran_order': False, 'descr': '>i2'}", b"\x00\x01\x00\x02", version)
    assert encode(raw, "int16").tolist() == [1, 2]


def test_pickled_npy_is_refused_without_unpickling() -> None:
    assert code(npy(np.array([{"a": 1}], dtype=object), allow_pickle=True), "float64") == "dtype"


@given(st.integers(0, 200), st.binary(min_size=1, max_size=1))
def test_a_damaged_npy_raises_only_our_errors(at: int, byte: bytes) -> None:
    raw = bytearray(npy(np.arange(9, dtype="<i4")))
    raw[at % len(raw)] = byte[0]
    with contextlib.suppress(SampleError):
        encode(bytes(raw), "int32")


@pytest.mark.parametrize("dims", [(2,), (3, 1), (-3,), (2**62, 4), (0,)])
def test_dims_that_do_not_match_the_payload_are_an_error(dims: tuple[int, ...]) -> None:
    with pytest.raises(SampleError):
        ArrayDecoder({"dtype": "float32", "ndim": 1}).decode(bytes(12), {"dims": dims})


def test_dims_that_overflow_with_zero_elements_are_an_error() -> None:
    with pytest.raises(SampleError):
        ArrayDecoder({"dtype": "float32", "ndim": 3}).decode(b"", {"dims": (0, 2**62, 2**62)})


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "float32"},
        {"dtype": "float32", "ndim": "1", "shape": "2"},
        {"dtype": "object", "ndim": "1"},
        {"dtype": ">f4", "ndim": "1"},
        {"dtype": "float32", "ndim": "0"},
        {"dtype": "float32", "ndim": "9"},
        {"dtype": "float32", "shape": "2x"},
        {"dtype": "float32", "shape": "-2"},
        {"dtype": "float32", "ndim": "1", "cast": "unsafe"},
        {"dtype": "float32", "ndim": "1", "order": "F"},
    ],
)
def test_bad_options_are_refused(options: dict[str, str]) -> None:
    with pytest.raises(OptionError):
        ArrayEncoder(options)


def test_size_limit() -> None:
    assert code(np.zeros(3, "f4"), "float32", max_bytes="11") == "size-limit"
