"""What libsndfile does not check in FLAC files: STREAMINFO that lies, formats that change between frames."""

from __future__ import annotations

import re
from dataclasses import dataclass

from lfdata.errors import SampleError

_RATES = (0, 88200, 176400, 192000, 8000, 16000, 22050, 24000, 32000, 44100, 48000, 96000)
_BITS = {0: 0, 1: 8, 2: 12, 4: 16, 5: 20, 6: 24, 7: 32}
_OPENABLE = (8, 16, 24)  # depths that libsndfile accepts in STREAMINFO; it decodes each frame at the frame's own depth
_PREVIOUS = 4
_SYNC = re.compile(rb"\xff[\xf8\xf9]")
_CRC_BUDGET = 8 * 1024 * 1024  # bytes of frames checked in one file; honest files need one frame, some kilobytes


@dataclass(frozen=True, slots=True)
class FlacFacts:
    """``data``: the file to hand to libsndfile; ``declared``: frames that STREAMINFO claims (0: not said); ``warnings``."""

    data: bytes
    declared: int
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Frame:
    start: int
    rate: int  # 0: as STREAMINFO says
    channels: int
    bits: int  # 0: as STREAMINFO says


def inspect_flac(raw: bytes) -> FlacFacts:
    """Check a native FLAC file and free it of claims that libsndfile would believe.

    libsndfile stops at the length STREAMINFO claims and refuses depths such as 12 bits; in the returned copy the length is
    "unknown" and the depth one that opens, while each frame still says its own.

    Raises:
        SampleError: ``flac-header``, ``truncated``, ``rate-change`` (rate, channels or depth change inside the stream),
            ``bit-depth``.
    """
    if len(raw) < 42 or raw[4] & 0x7F != 0 or int.from_bytes(raw[5:8], "big") < 34:
        raise SampleError("flac-header", "FLAC does not start with a whole STREAMINFO block")
    info = int.from_bytes(raw[18:26], "big")
    rate, channels, bits = info >> 44, (info >> 41 & 7) + 1, (info >> 36 & 31) + 1
    frames = _scan(raw, _audio_start(raw), rate, channels)
    warnings: tuple[str, ...] = ()
    depths = {frame.bits for frame in frames}
    if bits not in _OPENABLE or depths - {0, bits}:
        if 0 in depths or len(depths) > 1:
            raise SampleError("bit-depth", f"FLAC of {bits} bits whose frames say {sorted(depths)} cannot be decoded reliably")
        if depths and depths != {bits}:
            warnings = (f"STREAMINFO says {bits} bits, the frames {min(depths)}: decoded as the frames say",)
        bits = 24
    mended = (info >> 41 << 41) | ((bits - 1) << 36)
    return FlacFacts(raw[:18] + mended.to_bytes(8, "big") + raw[26:], info & (1 << 36) - 1, warnings)


def _audio_start(raw: bytes) -> int:
    position, last = 4, False
    while not last:
        if position + 4 > len(raw):
            raise SampleError("truncated", "FLAC ends inside its metadata")
        last = bool(raw[position] & 0x80)
        position += 4 + int.from_bytes(raw[position + 1 : position + 4], "big")
    return position


def _scan(raw: bytes, position: int, rate: int, channels: int) -> list[_Frame]:
    """One frame for each distinct depth; refuses a change of rate or channels."""
    depths: dict[int, _Frame] = {}
    budget = _CRC_BUDGET
    recent: list[_Frame] = []
    for match in _SYNC.finditer(raw, position):
        frame = _parse_header(raw, match.start())
        if frame is None:
            continue
        fits = frame.rate in (0, rate) and frame.channels == channels
        if not (fits and (frame.bits in depths or not recent)):
            # A header can appear inside compressed audio by chance. It is real when a frame ends just before it: the CRC-16 of
            # a whole frame, its own trailing CRC included, is zero.
            budget -= sum(frame.start - before.start for before in recent)
            if budget < 0:
                raise SampleError("flac-header", "FLAC frame headers contradict STREAMINFO or each other")
            if recent and not any(_crc16(raw[before.start : frame.start]) == 0 for before in recent):
                continue
            if not fits:
                raise SampleError(
                    "rate-change",
                    f"FLAC frame at byte {frame.start} has {frame.rate or rate} Hz and {frame.channels} channels, the stream "
                    f"{rate} Hz and {channels}: split the file",
                )
        depths.setdefault(frame.bits, frame)
        recent = [*recent[1 - _PREVIOUS :], frame]
    return list(depths.values())


def _parse_header(raw: bytes, at: int) -> _Frame | None:
    """The frame header at ``at``, or ``None`` when there is none."""
    head = raw[at : at + 16]
    if len(head) < 6 or head[1] & 0xFE != 0xF8 or head[3] & 1:
        return None
    block, rate_code, assignment, bits = head[2] >> 4, head[2] & 15, head[3] >> 4, _BITS.get(head[3] >> 1 & 7)
    if block == 0 or rate_code == 15 or assignment > 10 or bits is None:
        return None
    extra = 8 - (head[4] ^ 0xFF).bit_length() if head[4] & 0x80 else 0  # leading ones of the coded number
    if extra == 1 or extra == 8:
        return None
    if any(byte & 0xC0 != 0x80 for byte in head[5 : 4 + max(extra, 1)]):
        return None
    position = 4 + max(extra, 1) + (block in (6, 7)) * (block - 5)
    rate = _RATES[rate_code] if rate_code < 12 else 0
    if rate_code >= 12:
        width = 1 if rate_code == 12 else 2
        rate = int.from_bytes(head[position : position + width], "big") * {12: 1000, 13: 1, 14: 10}[rate_code]
        position += width
    if position >= len(head) or _crc8(head[:position]) != head[position]:
        return None
    return _Frame(at, rate, assignment + 1 if assignment < 8 else 2, bits)


def _table(width: int, polynomial: int) -> tuple[int, ...]:
    top, mask = 1 << (width - 1), (1 << width) - 1
    table = []
    for byte in range(256):
        value = byte << (width - 8)
        for _ in range(8):
            value = (value << 1 ^ polynomial if value & top else value << 1) & mask
        table.append(value)
    return tuple(table)


_CRC8 = _table(8, 0x07)
_CRC16 = _table(16, 0x8005)


def _crc8(data: bytes) -> int:
    value = 0
    for byte in data:
        value = _CRC8[value ^ byte]
    return value


def _crc16(data: bytes) -> int:
    value = 0
    for byte in data:
        value = (value << 8 & 0xFFFF) ^ _CRC16[value >> 8 ^ byte]
    return value
