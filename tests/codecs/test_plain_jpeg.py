"""JPEGs that another decoder may have: ordinary ones, whatever tables and sizes; never one that needs more than decoding."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from lfdata.codecs.plain_jpeg import is_plain

WIDTH, HEIGHT = 53, 37


def jpeg(mode: str = "RGB", orientation: int = 0, **options: Any) -> bytes:
    rng = np.random.default_rng(1)
    image = Image.fromarray(rng.integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8)).convert(mode)
    if orientation:
        found = Image.Exif()
        found[0x0112] = orientation
        options["exif"] = found.tobytes()
    file = io.BytesIO()
    image.save(file, "JPEG", **options)
    return file.getvalue()


def plain(data: bytes, channels: int = 3, refuse_icc: bool = True) -> bool:
    return is_plain(data, WIDTH, HEIGHT, channels, refuse_icc)


@pytest.mark.parametrize(
    "options",
    [{}, {"subsampling": 0}, {"subsampling": 1}, {"subsampling": 2}, {"progressive": True}, {"mode": "L"}, {"orientation": 1}],
)
def test_ordinary_ones(options: dict[str, Any]) -> None:
    assert plain(jpeg(**options))


@pytest.mark.parametrize("orientation", range(2, 9))
def test_turned_ones_are_not(orientation: int) -> None:
    assert not plain(jpeg(orientation=orientation))


def test_others_are_not() -> None:
    assert not plain(jpeg("CMYK")) and not plain(b"") and not plain(b"\xff\xd8\xff" + bytes(40))
    assert not plain(jpeg(), channels=1) and plain(jpeg("L"), channels=1)
    profile = jpeg(icc_profile=bytes(200))
    assert not plain(profile) and plain(profile, refuse_icc=False)
    assert not is_plain(jpeg(), WIDTH + 1, HEIGHT, 3, True) and not is_plain(jpeg(), WIDTH, HEIGHT - 1, 3, True)


def test_colours_that_are_not_ycbcr_are_not() -> None:
    data = jpeg()
    frame = data.index(b"\xff\xc0")
    named = bytearray(data)
    for number, letter in enumerate(b"RGB"):
        named[frame + 10 + 3 * number] = letter
    scan = data.index(b"\xff\xda")
    for number, letter in enumerate(b"RGB"):
        named[scan + 5 + 2 * number] = letter
    bare = bytes(named).replace(b"JFIF\0", b"JUNK\0", 1)
    assert plain(bytes(named)) and not plain(bare), "without a JFIF marker the names say that it is RGB"
    adobe = data[:2] + b"\xff\xee\x00\x0eAdobe\0\x64\0\0\0\0" + b"\0" + data[2:]
    assert not plain(adobe)


@pytest.mark.parametrize("options", [{}, {"progressive": True}])
def test_a_truncated_one_is_not(options: dict[str, Any]) -> None:
    data = jpeg(**options)
    assert not any(plain(data[:end]) for end in range(0, len(data), 7))


@given(st.integers(0, 600), st.binary(min_size=1, max_size=8))
def test_odd_bytes_raise_nothing(at: int, odd: bytes) -> None:
    data = jpeg(orientation=1)
    assert plain(data[:at] + odd + data[at + len(odd) :]) in (True, False)
