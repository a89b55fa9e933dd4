"""Decompression of what a source holds, never to more than a limit."""

from __future__ import annotations

import bz2
import zlib
from typing import Any

import zstandard

from lfdata.errors import SampleError
from shard_builder.sources.common import import_extra

_WINDOW = 1 << 31
_STEP = 1 << 20
ALGORITHMS = ("zstd", "gz", "bz2", "br", "snappy")


def gunzip(data: bytes, limit: int, option: str = "max_member_bytes") -> bytes:
    """Decompress gzip data, all its members, to at most ``limit`` bytes. Raises :class:`SampleError`."""
    parts: list[bytes] = []
    left = limit
    while data:
        inflater = zlib.decompressobj(wbits=31)
        try:
            part = inflater.decompress(data, left + 1)
        except zlib.error as error:
            raise SampleError("gzip", f"the gzip member is broken: {error}") from None
        left -= len(part)
        if left < 0:
            raise SampleError("too-large", f"a gzip member of more than {limit} bytes when decompressed (option {option})")
        if not inflater.eof:
            raise SampleError("truncated", "the gzip member ends too early")
        parts.append(part)
        data = inflater.unused_data.lstrip(b"\0")
    return b"".join(parts)


def inflate(algorithm: str, data: bytes, size: int) -> bytes:
    """Decompress data that must become exactly ``size`` bytes.

    Raises:
        SampleError: ``compression`` (broken, or of another size), ``truncated``, ``too-large``, ``unsupported``.
        MissingExtraError: Brotli and Snappy need pyarrow.
    """
    if algorithm == "gz":
        found = gunzip(data, size, "max_shard_bytes")
    elif algorithm == "zstd":
        found = _zstd(data, size)
    elif algorithm == "bz2":
        found = _bz2(data, size)
    elif algorithm in ("br", "snappy"):
        found = _by_arrow({"br": "brotli"}.get(algorithm, algorithm), data, size)
    else:
        raise SampleError("unsupported", f"compression {algorithm!r} is not known; {', '.join(ALGORITHMS)} are")
    if len(found) != size:
        raise SampleError("compression", f"decompressed to {len(found)} bytes, where {size} are stated")
    return found


def _more(size: int) -> SampleError:
    return SampleError("compression", f"decompressed to more than the {size} bytes that are stated")


def _zstd(data: bytes, size: int) -> bytes:
    found = bytearray()
    try:
        with zstandard.ZstdDecompressor(max_window_size=_WINDOW).stream_reader(data, read_across_frames=True) as reader:
            while part := reader.read(_STEP):
                found += part
                if len(found) > size:
                    raise _more(size)
    except zstandard.ZstdError as error:
        raise SampleError("compression", f"zstandard: {error}") from None
    return bytes(found)


def _bz2(data: bytes, size: int) -> bytes:
    found = bytearray()
    while data:
        inflater = bz2.BZ2Decompressor()
        try:
            while not inflater.eof:
                part = inflater.decompress(data, _STEP)
                found += part
                data = b""
                if len(found) > size:
                    raise _more(size)
                if not part and inflater.needs_input:
                    raise SampleError("truncated", "the bzip2 data ends too early")
        except OSError as error:
            raise SampleError("compression", f"bzip2: {error}") from None
        data = inflater.unused_data
    return bytes(found)


def _by_arrow(codec: str, data: bytes, size: int) -> bytes:
    arrow: Any = import_extra("pyarrow", "arrow", f"{codec} data")
    if not size:
        return b""
    try:
        return bytes(arrow.decompress(data, decompressed_size=size, codec=codec))
    except (arrow.ArrowException, OSError, ValueError) as error:
        raise SampleError("compression", f"{codec}: {' '.join(str(error).split())[:200]}") from None
