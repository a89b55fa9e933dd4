"""Formats are told by content; every known magic is named, prefixes and noise never raise."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import features

sys.path.insert(0, str(Path(__file__).parent))
from image_samples import photo, save

from lfdata.codecs.sniff import LFS_ADVICE, is_lfs_pointer, sniff

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 12345\n"


@pytest.mark.parametrize("fmt", ["JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP", "ICO", "AVIF"])
def test_written_files_are_recognised_without_a_name(fmt: str) -> None:
    if fmt == "AVIF" and not features.check("avif"):
        pytest.skip("this PIL was built without AVIF")
    assert sniff(save(photo(32, 32), fmt)) == fmt.lower()


@pytest.mark.parametrize(
    ("head", "name"),
    [
        (b"RIFF\x24\0\0\0WAVEfmt ", "wav"),
        (b"RIFX\x24\0\0\0WAVEfmt ", "wav"),
        (b"RIFF\x24\0\0\0AVI LIST", "avi"),
        (b"fLaC\0\0\0\x22", "flac"),
        (b"OggS\0\2", "ogg"),
        (b"ID3\3\0\0", "mp3"),
        (b"\xff\xfb\x90\x64", "mp3"),
        (b"FORM\0\0\0\0AIFF", "aiff"),
        (b"\0\0\0\x20ftypisom\0\0\2\0isomiso2", "mp4"),
        (b"\0\0\0\x18ftypmif1\0\0\0\0mif1avif", "avif"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "heif"),
        (b"\0\0\0\x18ftypM4A \0\0\0\0M4A mp42", "m4a"),
        (b"\x1f\x8b\x08", "gzip"),
        (b"PK\3\4", "zip"),
        (b"%PDF-1.7", "pdf"),
        (b"\x1aE\xdf\xa3", "matroska"),
        (b"\xff\x0a", "jxl"),
        (b'<?xml version="1.0"?><svg xmlns="x">', "svg"),
        (b"\n<!DOCTYPE html><html>", "html"),
        (POINTER, "lfs-pointer"),
    ],
)
def test_magic_is_named(head: bytes, name: str) -> None:
    assert sniff(head) == name


@pytest.mark.parametrize(
    "data", [b"", b"B", b"BM is how this text begins, and it goes on", b"RIFF", b"plain text", b"\0" * 600]
)
def test_noise_has_no_name(data: bytes) -> None:
    assert sniff(data) == ""


def test_pointer_is_small_and_exact() -> None:
    assert is_lfs_pointer(POINTER)
    assert is_lfs_pointer(memoryview(POINTER))
    assert not is_lfs_pointer(POINTER + b" " * 1024)
    assert not is_lfs_pointer(b"version 1")
    assert "git lfs pull" in LFS_ADVICE


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=64))
def test_never_raises(data: bytes) -> None:
    assert isinstance(sniff(data), str)
