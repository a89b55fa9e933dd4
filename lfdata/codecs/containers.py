"""Structure of image containers, walked before PIL sees them: size, completeness, checksums. Allocates nothing by a claim.

PIL tolerates what a data set must not: it skips the CRC of PNG pixel data, accepts files without their end marker, allocates
a WebP canvas and an ICO bitmap while *opening* them. Every walk here is bounded by the length of the data.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable

from lfdata.errors import SampleError

DEFLATE_MAX_RATIO = 1032
"""The most that one byte of deflate can expand to (zlib's technical notes)."""

Size = tuple[int, int]

_ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))


def truncated(reason: str) -> SampleError:
    """The one error every kind of missing data ends in."""
    return SampleError("truncated", f"truncated: {reason}")


def corrupt(reason: str) -> SampleError:
    """A file whose bytes break its format's rules."""
    return SampleError("corrupt", reason)


def check_pixels(width: int, height: int, limit: int) -> Size:
    """Refuse, as :class:`SampleError` ``pixel-limit``, a picture of more than ``limit`` pixels; else return its size."""
    if width * height > limit:
        raise SampleError("pixel-limit", f"{width}x{height} = {width * height} pixels are over the limit of {limit}")
    return width, height


def walk(data: bytes, fmt: str, limit: int) -> Size | None:
    """Check the structure of ``data`` (of format ``fmt``, see :mod:`lfdata.codecs.sniff`).

    Returns (width, height) in pixels as the header claims, or ``None`` for formats whose header PIL reads without allocating
    (``tiff``, ``avif``) and for ``jpeg``, which has :mod:`lfdata.codecs.jpeg`. Raises :class:`SampleError`: ``pixel-limit``
    (over ``limit`` pixels), ``truncated``, ``crc``, ``corrupt``.
    """
    walker = _WALKERS.get(fmt)
    return walker(data, limit) if walker else None


def _walk_png(data: bytes, limit: int, start: int = 8) -> Size:
    pos, size, idat, need = start, None, 0, 0
    while True:
        if pos + 12 > len(data):
            raise truncated(f"PNG ends at byte {len(data)} without its IEND chunk")
        length, name = struct.unpack_from(">I4s", data, pos)
        end = pos + 12 + length
        if end > len(data):
            raise truncated(f"PNG chunk {_name(name)} at byte {pos} needs {length} bytes, {len(data) - pos - 12} are there")
        if zlib.crc32(memoryview(data)[pos + 4 : end - 4]) != int.from_bytes(data[end - 4 : end], "big"):
            raise SampleError("crc", f"PNG chunk {_name(name)} at byte {pos} has a bad CRC")
        if size is None:
            if name != b"IHDR" or length != 13:
                raise corrupt(f"PNG begins with chunk {_name(name)} of {length} bytes, not with IHDR")
            size, need = _png_header(data[pos + 8 : pos + 21], limit)
        elif name == b"IDAT":
            idat += length
        elif name == b"IEND":
            break
        pos = end
    if idat * DEFLATE_MAX_RATIO < need:
        raise truncated(f"PNG of {size[0]}x{size[1]} pixels has only {idat} bytes of pixel data")
    return size


def damaged_png(data: bytes, limit: int) -> SampleError | None:
    """The error for a PNG whose signature is damaged, as a transfer as text does; ``None`` when ``data`` is no such thing."""
    start = data[:24].find(b"\0\0\0\x0dIHDR")
    if start < 0 or b"PNG" not in data[:start]:
        return None
    signature = f"PNG signature is damaged: {data[:start].hex(' ')}, a transfer as text does that"
    try:
        _walk_png(data, limit, start)
    except SampleError as error:
        return SampleError(error.code, f"{signature}; {error.reason}")
    return corrupt(signature)


def _png_header(ihdr: bytes, limit: int) -> tuple[Size, int]:
    """Size, and a lower bound of the bytes of filtered pixel data."""
    width, height, bits, colour = struct.unpack_from(">IIBB", ihdr)
    if not 0 < width < 2**31 or not 0 < height < 2**31:
        raise corrupt(f"PNG claims {width}x{height} pixels")
    channels = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}.get(colour)
    if channels is None or bits not in (1, 2, 4, 8, 16):
        raise corrupt(f"PNG has colour type {colour} at {bits} bits, which do not exist")
    return check_pixels(width, height, limit), height * (width * channels * bits // 8)


def check_png_pixels(data: bytes) -> None:
    """Inflate the pixel data of a PNG whose structure was checked, and raise ``truncated`` when it ends before the last row.

    A deflate stream may end well and hold too few rows; PIL leaves the rest black. Memory is bounded by 64 KiB.
    """
    width, height, bits, colour, _, _, interlace = struct.unpack_from(">IIBBBBB", data, 16)
    depth = bits * {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[colour]
    passes = _ADAM7 if interlace else ((0, 0, 1, 1),)
    need = 0
    for x0, y0, dx, dy in passes:
        columns, rows = -(-(width - x0) // dx), -(-(height - y0) // dy)
        if columns > 0 and rows > 0:
            need += rows * (1 + (columns * depth + 7) // 8)
    inflater, have, pos = zlib.decompressobj(), 0, 8
    while pos < len(data) and have < need and not inflater.eof:
        length = int.from_bytes(data[pos : pos + 4], "big")
        if data[pos + 4 : pos + 8] == b"IDAT":
            piece = data[pos + 8 : pos + 8 + length]
            while piece and have < need and not inflater.eof:
                have += len(inflater.decompress(piece, 65536))
                piece = inflater.unconsumed_tail
        pos += 12 + length
    while have < need and not inflater.eof and (rest := inflater.decompress(b"", 65536)):
        have += len(rest)
    if have < need:
        raise truncated(f"PNG holds {have} bytes of pixels, {width}x{height} take {need}")


def _name(name: bytes) -> str:
    return repr(name.decode("latin-1"))


def _walk_gif(data: bytes, limit: int) -> Size:
    if len(data) < 13:
        raise truncated("GIF ends inside its header")
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    check_pixels(width, height, limit)
    pos = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    first: Size | None = None
    while pos < len(data):
        kind = data[pos]
        if kind == 0x3B:
            if first is None:
                raise corrupt("GIF holds no picture")
            return first
        if kind == 0x21:
            pos = _gif_blocks(data, pos + 2)
        elif kind == 0x2C and pos + 10 <= len(data):
            left, top, w, h, local = struct.unpack_from("<HHHHB", data, pos + 1)
            # PIL grows the picture to the frame's extent, so a frame can be the bomb; the size is that of the first frame.
            width, height = check_pixels(max(width, left + w), max(height, top + h), limit)
            first = first or (width, height)
            pos = _gif_blocks(data, pos + 11 + (3 << (local & 7) + 1 if local & 0x80 else 0))
        elif kind == 0:
            pos += 1
        else:
            raise corrupt(f"GIF has unknown block 0x{kind:02x} at byte {pos}")
    raise truncated(f"GIF ends at byte {len(data)} without its trailer")


def _gif_blocks(data: bytes, pos: int) -> int:
    while pos < len(data) and data[pos]:
        pos += data[pos] + 1
    return pos + 1


def _walk_webp(data: bytes, limit: int) -> Size:
    if len(data) < 30:
        raise truncated("WebP ends inside its header")
    end = int.from_bytes(data[4:8], "little") + 8
    if end > len(data):
        raise truncated(f"WebP says {end} bytes, {len(data)} are there")
    kind = data[12:16]
    if kind == b"VP8X":
        return check_pixels(int.from_bytes(data[24:27], "little") + 1, int.from_bytes(data[27:30], "little") + 1, limit)
    if kind == b"VP8 ":
        if data[23:26] != b"\x9d\x01\x2a":
            raise corrupt("WebP key frame lacks its start code")
        width, height = struct.unpack_from("<HH", data, 26)
        return check_pixels(width & 0x3FFF, height & 0x3FFF, limit)
    if kind == b"VP8L":
        if data[20] != 0x2F:
            raise corrupt("lossless WebP lacks its signature")
        word = int.from_bytes(data[21:25], "little")
        return check_pixels((word & 0x3FFF) + 1, (word >> 14 & 0x3FFF) + 1, limit)
    raise corrupt(f"WebP begins with unknown chunk {_name(kind)}")


def _walk_bmp(data: bytes, limit: int) -> Size:
    return check_pixels(*_dib_size(data, 14), limit)


def _dib_size(data: bytes, pos: int) -> Size:
    length = int.from_bytes(data[pos : pos + 4], "little")
    if len(data) < pos + 12:
        raise truncated("BMP ends inside its header")
    if length == 12:
        width, height = struct.unpack_from("<HH", data, pos + 4)
    else:
        width, height = struct.unpack_from("<ii", data, pos + 4)
        width &= 0xFFFFFFFF  # PIL reads it unsigned
    if not width or not height:
        raise corrupt(f"BMP claims {width}x{height} pixels")
    return width, abs(height)


def _walk_ico(data: bytes, limit: int) -> Size:
    count = int.from_bytes(data[4:6], "little")
    if not count or 6 + 16 * count > len(data):
        raise truncated(f"ICO lists {count} pictures in {len(data)} bytes")
    largest: Size = (0, 0)
    for i in range(count):
        length, offset = struct.unpack_from("<II", data, 6 + 16 * i + 8)
        if offset + 4 > len(data) or offset + length > len(data):
            raise truncated(f"ICO picture {i} lies outside the file")
        if data[offset : offset + 8] == b"\x89PNG\r\n\x1a\n":
            if offset + 24 > len(data):
                raise truncated(f"ICO picture {i} ends inside its header")
            size = struct.unpack_from(">II", data, offset + 16)
        else:
            size = _dib_size(data, offset)
        largest = max(largest, (size[0], size[1]), key=lambda s: s[0] * s[1])
    return check_pixels(*largest, limit)


_WALKERS: dict[str, Callable[[bytes, int], Size]] = {
    "png": _walk_png,
    "gif": _walk_gif,
    "webp": _walk_webp,
    "bmp": _walk_bmp,
    "ico": _walk_ico,
}
