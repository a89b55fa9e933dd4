"""Which JPEGs every decoder shows alike, so that one on a device may have them: whole, upright, of usual colours and sampling."""

from __future__ import annotations

import struct

from lfdata.codecs import jpeg
from lfdata.errors import SampleError

BASELINE, PROGRESSIVE = 0xC0, 0xC2
_APP0, _APP1, _APP2, _APP14 = 0xE0, 0xE1, 0xE2, 0xEE
_EOI = b"\xff\xd9"
_ORIENTATION, _SHORT = 0x0112, 3


def is_plain(data: bytes, width: int, height: int, channels: int, refuse_icc: bool) -> bool:
    """Whether a JPEG of the index's size is one of these. What is not goes to our own decoder, which finds what is wrong with it.

    Its scans are followed to its end, so a truncated one is none; ``refuse_icc``: nor is one with a colour profile. Data within a scan
    are not looked at.
    """
    try:
        info = jpeg.parse(data)
        if info.sof not in (BASELINE, PROGRESSIVE) or info.bits != 8 or (info.width, info.height) != (width, height):
            return False
        if not _usual(info, channels) or not _markers(data, info, refuse_icc):
            return False
        if info.sof == BASELINE and len(info.scan) == len(info.components):
            # One scan up to the end: many times faster than looking at every marker.
            end = data.rfind(_EOI, info.scan_offset)
            return end > 0 and (end - info.scan_offset) * 8 >= _fewest_bits(info)
        jpeg.check_complete(data, info)
    except SampleError:
        return False
    return True


def _fewest_bits(info: jpeg.JpegInfo) -> int:
    """Two a block: no picture takes less."""
    blocks = sum(c.horizontal * c.vertical for c in info.components) if len(info.components) > 1 else 1
    return 2 * blocks * info.mcu_columns * info.mcu_rows


def _usual(info: jpeg.JpegInfo, channels: int) -> bool:
    """Grey, or three components with chroma at most halved."""
    if len(info.components) == 1:
        return True
    if len(info.components) != 3 or channels != 3:
        return False
    first, *chroma = info.components
    across, down = first.horizontal, first.vertical
    return all((c.horizontal, c.vertical) == (1, 1) for c in chroma) and across <= 2 and down <= 2


def _markers(data: bytes, info: jpeg.JpegInfo, refuse_icc: bool) -> bool:
    """YCbCr (or grey), upright, and no profile that must be applied."""
    jfif, adobe = False, None
    for code, body in jpeg.segments(data):
        if code == _APP0 and body[:5] == b"JFIF\0":
            jfif = True
        elif code == _APP14 and body[:5] == b"Adobe":
            adobe = body[11] if len(body) > 11 else 0
        profile = code == _APP2 and body[:12] == b"ICC_PROFILE\0"
        turned = code == _APP1 and body[:6] == b"Exif\0\0" and not _upright(body[6:])
        if turned or (profile and refuse_icc):
            return False
    if len(info.components) == 1:
        return True
    return adobe == 1 or (adobe is None and (jfif or [c.ident for c in info.components] == [1, 2, 3]))


def _upright(tiff: bytes) -> bool:
    """Whether EXIF says that the picture lies as it is stored; odd EXIF counts as no."""
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(tiff[:4])
    if order is None or len(tiff) < 14:
        return False
    (start,) = struct.unpack_from(order + "I", tiff, 4)
    if start + 2 > len(tiff):
        return False
    (count,) = struct.unpack_from(order + "H", tiff, start)
    for at in range(start + 2, start + 2 + 12 * count, 12):
        if at + 12 > len(tiff):
            return False
        tag, kind, values, value = struct.unpack_from(order + "HHIH", tiff, at)
        if tag == _ORIENTATION:
            return bool((kind, values, value) == (_SHORT, 1, 1))
    return True
