"""Text and bytes come back exactly; what is not text is refused by name."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nonimage_odd import ODD, names, needs_odd

from lfdata.codecs.raw import BytesDecoder, BytesEncoder
from lfdata.codecs.text import TextDecoder, TextEncoder
from lfdata.errors import OptionError, SampleError

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 123\n"


def roundtrip(raw: object, **options: str) -> str:
    encoder = TextEncoder(options)
    encoded = encoder.encode(raw)
    return TextDecoder(encoder.params).decode(encoded.payload, encoded.sizes)


def refusal(raw: object, **options: str) -> SampleError:
    with pytest.raises(SampleError) as caught:
        TextEncoder(options).encode(raw)
    return caught.value


@given(st.text(st.characters(codec="utf-8")))
def test_every_text_comes_back_exactly(text: str) -> None:
    assert roundtrip(text) == text
    if not text.startswith("\ufeff"):
        assert roundtrip(text.encode()) == text


def test_text_is_never_normalised() -> None:
    for text in ("e\u0301", "\u00e9", "a\0b", "\u202eabc", "line\r\nline\n", "  \t "):
        assert TextEncoder({}).encode(text).payload == text.encode()


@needs_odd
def test_naughty_strings_are_byte_exact() -> None:
    (name,) = [n for n in names(".json") if "blns" in n]
    strings = json.loads((ODD / name).read_bytes())
    assert len(strings) > 500
    assert [roundtrip(text) for text in strings] == strings


@pytest.mark.parametrize(
    ("raw", "offset"),
    [(b"abc\xff", 3), (b"\xc0\x80", 0), (b"ok \xed\xa0\x80", 3), (b"\xf4\x90\x80\x80", 0), (b"cut \xe2\x82", 4), (b"x\x80", 1)],
)
def test_invalid_utf8_names_the_byte_offset(raw: bytes, offset: int) -> None:
    error = refusal(raw)
    assert error.code == "utf8"
    assert f"byte offset {offset} " in error.reason


@needs_odd
def test_the_utf8_torture_file_is_refused_at_its_first_bad_byte() -> None:
    (name,) = names("utf8tests.bin")
    assert "byte offset 308 " in refusal((ODD / name).read_bytes()).reason
    replaced = TextEncoder({"errors": "replace"}).encode((ODD / name).read_bytes())
    assert "\ufffd" in bytes(replaced.payload).decode()
    assert "308" in replaced.warnings[0]


def test_utf16_is_refused_with_a_hint() -> None:
    assert "UTF-16" in refusal("hello".encode("utf-16")).reason


def test_a_lone_surrogate_is_refused_or_replaced_never_a_crash() -> None:
    assert refusal("ab\ud800c").code == "surrogate"
    assert roundtrip("ab\ud800c\udfff", errors="replace") == "ab\ufffdc\ufffd"


def test_the_byte_order_mark_of_bytes_is_stripped_by_default_and_kept_by_option() -> None:
    assert roundtrip(b"\xef\xbb\xbfhi") == "hi"
    assert roundtrip(b"\xef\xbb\xbfhi", bom="keep") == "\ufeffhi"
    assert roundtrip("\ufeffhi") == "\ufeffhi"


def test_an_lfs_pointer_is_refused() -> None:
    error = refusal(POINTER)
    assert error.code == "lfs-pointer"
    assert "git lfs pull" in error.reason


@pytest.mark.parametrize("raw", [1, None, ["a"], 1.5])
def test_other_types_are_refused(raw: object) -> None:
    assert refusal(raw).code == "type"


def test_length_limit_counts_bytes_of_utf8() -> None:
    assert refusal("\u20ac\u20ac", max_bytes="5").code == "size-limit"
    assert roundtrip("\u20ac\u20ac", max_bytes="6") == "\u20ac\u20ac"


def test_options_that_mean_nothing_list_the_valid_ones() -> None:
    with pytest.raises(OptionError, match=r"'encoding'.*errors=strict\|replace"):
        TextEncoder({"encoding": "latin-1"})
    with pytest.raises(OptionError, match=r"strict\|replace"):
        TextEncoder({"errors": "ignore"})
    with pytest.raises(OptionError, match="max_bytes"):
        TextEncoder({"max_bytes": "-1"})


def test_stored_bytes_that_are_not_utf8_are_an_error() -> None:
    with pytest.raises(SampleError):
        TextDecoder({}).decode(b"\xff", {})


@given(st.binary(max_size=200))
def test_bytes_come_back_exactly(raw: bytes) -> None:
    encoder = BytesEncoder({})
    for given_as in (raw, bytearray(raw), memoryview(raw)):
        assert BytesDecoder(encoder.params).decode(encoder.encode(given_as).payload, {}) == raw


@needs_odd
def test_the_lfs_pointer_in_place_of_a_video_says_git_lfs_pull() -> None:
    (name,) = [n for n in names(".mp4") if n.startswith("lfs_pointer")]
    raw = (ODD / name).read_bytes()
    with pytest.raises(SampleError, match="git lfs pull"):
        BytesEncoder({}).encode(raw)
    assert BytesEncoder({"lfs_pointer": "keep"}).encode(raw).payload == raw


def test_bytes_limits_and_types() -> None:
    with pytest.raises(SampleError, match="max_bytes=3"):
        BytesEncoder({"max_bytes": "3"}).encode(b"1234")
    with pytest.raises(SampleError) as caught:
        BytesEncoder({}).encode([1, 2])
    assert caught.value.code == "type"
    assert BytesEncoder({}).encode("\u00e9").payload == b"\xc3\xa9"
