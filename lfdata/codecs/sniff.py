"""What a file is, told from its first bytes; a name's extension is never looked at."""

from __future__ import annotations

from lfdata.codecs.base import Buffer

IMAGE_FORMATS = ("jpeg", "png", "webp", "gif", "tiff", "bmp", "avif", "ico")
"""Image formats this package decodes (``avif`` only where PIL was built with it; ``ico`` is read but never kept)."""

LFS_PREFIX = b"version https://git-lfs.github.com/spec/v"
LFS_ADVICE = "a Git LFS pointer in place of the file: run git lfs pull"

_MAGICS = (
    (b"\xff\xd8\xff", "jpeg"),
    (b"\x89PNG\r\n\x1a\n", "png"),
    (b"GIF87a", "gif"),
    (b"GIF89a", "gif"),
    (b"II*\0", "tiff"),
    (b"MM\0*", "tiff"),
    (b"II+\0", "tiff"),
    (b"MM\0+", "tiff"),
    (b"\0\0\1\0", "ico"),
    (b"\0\0\0\x0cjP  \r\n\x87\n", "jp2"),
    (b"\xff\x0a", "jxl"),
    (b"\0\0\0\x0cJXL \r\n\x87\n", "jxl"),
    (b"8BPS", "psd"),
    (b"fLaC", "flac"),
    (b"OggS", "ogg"),
    (b"ID3", "mp3"),
    (b"FORM", "aiff"),
    (b".snd", "au"),
    (b"caff", "caf"),
    (b"%PDF-", "pdf"),
    (b"\x1f\x8b", "gzip"),
    (b"PK\3\4", "zip"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"\x1aE\xdf\xa3", "matroska"),
    (LFS_PREFIX, "lfs-pointer"),
)
_RIFF = {b"WEBP": "webp", b"WAVE": "wav", b"AVI ": "avi"}
_BRANDS = {b"avif": "avif", b"avis": "avif", b"heic": "heif", b"heix": "heif", b"mif1": "heif", b"M4A ": "m4a"}


def sniff(data: Buffer) -> str:
    """Name the format of ``data`` by content: a short lower-case name, or ``""`` when nothing is recognised.

    Beside :data:`IMAGE_FORMATS`: ``heif jp2 jxl psd svg wav flac ogg mp3 aiff au caf m4a mp4 avi matroska pdf gzip zip zstd
    html lfs-pointer``. Only the first 512 bytes are read. Never raises.
    """
    head = bytes(memoryview(data)[:512])
    for magic, name in _MAGICS:
        if head.startswith(magic):
            return name
    if head[:4] in (b"RIFF", b"RIFX", b"RF64") and len(head) >= 12:
        return _RIFF.get(head[8:12], "")
    if head[4:8] == b"ftyp" and len(head) >= 12:
        return _sniff_ftyp(head)
    if head[:2] == b"BM" and _plausible_bmp(head):
        return "bmp"
    if len(head) >= 2 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0 and head[1] & 0x06:
        return "mp3"
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<svg", b"<?xml")) and b"<svg" in text:
        return "svg"
    return "html" if text.startswith((b"<!doctype html", b"<html")) else ""


def is_lfs_pointer(data: Buffer) -> bool:
    """Whether ``data`` is a Git LFS pointer (a text of at most 1,024 bytes that stands in for a file that was not fetched)."""
    return len(data) <= 1024 and bytes(memoryview(data)[: len(LFS_PREFIX)]) == LFS_PREFIX


def _sniff_ftyp(head: bytes) -> str:
    """ISO base media: the major brand first, then the compatible ones (an AVIF may call itself ``mif1`` first)."""
    size = min(int.from_bytes(head[:4], "big"), len(head))
    brands = [head[8:12], *(head[i : i + 4] for i in range(16, size - 3, 4))]
    if b"avif" in brands or b"avis" in brands:
        return "avif"
    return _BRANDS.get(brands[0], "mp4")


def _plausible_bmp(head: bytes) -> bool:
    """``BM`` alone is two letters of text: a known header length makes it a bitmap."""
    return len(head) >= 26 and int.from_bytes(head[14:18], "little") in (12, 16, 40, 52, 56, 64, 108, 124)
