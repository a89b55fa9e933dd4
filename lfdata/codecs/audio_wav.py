"""What libsndfile does not check or mend in WAV files: contradictory headers, data cut short, odd containers."""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace

import numpy as np

from lfdata.errors import SampleError

_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_UNKNOWN_LENGTH = 0xFFFFFFFF  # written by programs that stream into a pipe
_SCAN_WORDS = 1 << 18


@dataclass(frozen=True, slots=True)
class WavFacts:
    """What the headers say, checked.

    Attributes:
        data: the file, or a mended copy of it, to hand to libsndfile.
        warnings: texts for the report.
        shift: bits by which 32-bit samples must be shifted left, for files whose narrower samples sit in the low bits.
        frames: frames that are present; ``None`` where only a decoder can tell (ADPCM and the like).
    """

    data: bytes
    warnings: tuple[str, ...] = ()
    shift: int = 0
    frames: int | None = None


def inspect_wav(raw: bytes) -> WavFacts:
    """Check a RIFF, RIFX, RF64 or BW64 WAVE file.

    Raises:
        SampleError: ``truncated`` (ends before any data), ``wav-header`` (fields of the format chunk contradict each other).
    """
    order = ">" if raw.startswith(b"RIFX") else "<"
    fmt: tuple[int, int] | None = None
    long_size: int | None = None
    position = 12
    while position + 8 <= len(raw):
        name = raw[position : position + 4]
        (size,) = struct.unpack_from(order + "I", raw, position + 4)
        body = position + 8
        if name == b"fmt " and fmt is None:
            fmt = (body, size)
        elif name == b"ds64" and raw[:4] in (b"RF64", b"BW64") and body + 16 <= len(raw):
            (long_size,) = struct.unpack_from("<Q", raw, body + 8)
        elif name == b"data":
            if fmt is None:
                raise SampleError("wav-header", "WAV data comes before the format chunk")
            if size == _UNKNOWN_LENGTH and long_size is not None:
                return _check(raw, order, fmt, body, long_size)
            if size == _UNKNOWN_LENGTH or (size == 0 and not _only_chunks(raw, order, body)):
                # libsndfile reads nothing when the length was never filled in
                size = min(len(raw) - body, _UNKNOWN_LENGTH - 1)
                raw = raw[: position + 4] + struct.pack(order + "I", size) + raw[body:]
                facts = _check(raw, order, fmt, body, size)
                unknown = "the header does not say how long the data is; all that follows it is decoded"
                return replace(facts, warnings=(unknown, *facts.warnings)) if size else facts
            return _check(raw, order, fmt, body, size)
        position = body + size + (size & 1)
    raise SampleError("truncated", f"WAV of {len(raw)} bytes ends before its data chunk")


def _only_chunks(raw: bytes, order: str, position: int) -> bool:
    """Whether the rest of the file is whole chunks, as after data that is really empty."""
    while position + 8 <= len(raw):
        (size,) = struct.unpack_from(order + "I", raw, position + 4)
        if not (raw[position : position + 4].isascii() and raw[position : position + 4].strip(b" ").isalnum()):
            return False
        position += 8 + size + (size & 1)
    return position - len(raw) in (0, 1)


def _check(raw: bytes, order: str, fmt: tuple[int, int], start: int, declared: int) -> WavFacts:
    body, size = fmt
    if size < 16 or body + 16 > len(raw):
        raise SampleError("wav-header", f"WAV format chunk of {size} bytes is too short")
    tag, channels, rate, _, align, bits = struct.unpack_from(order + "HHIIHH", raw, body)
    valid = bits
    if tag == _EXTENSIBLE and size >= 40:
        valid, _, tag = struct.unpack_from(order + "HII", raw, body + 18)  # the GUID starts with the plain tag
    if not channels or not rate:
        raise SampleError("wav-header", f"WAV of {channels} channels at {rate} Hz")
    warnings, present = _extent(len(raw) - start, declared)
    if tag not in (_PCM, _FLOAT):
        return WavFacts(raw, warnings)
    container = -(-bits // 8)
    if tag == _PCM and bits == 24 and align == 4 * channels:
        # a plain header may still mean 24 bits in four bytes each; libsndfile reads it once it is called 32 bits
        raw = raw[: body + 14] + struct.pack(order + "H", 32) + raw[body + 16 :]
        container = 4
    if align != channels * container:
        raise SampleError(
            "wav-header",
            f"WAV block align of {align} bytes contradicts {channels} channels of {bits} bits ({channels * container})",
        )
    if present % align:
        warnings = (*warnings, f"the last {present % align} bytes are not a whole frame and are dropped")
    shift = _low_bits(raw, order, start, present, valid) if tag == _PCM and container == 4 and 0 < valid < 32 else 0
    return WavFacts(raw, warnings, shift, present // align)


def _extent(available: int, declared: int) -> tuple[tuple[str, ...], int]:
    if declared > available:
        return (f"data shorter than its header says: {available} of {declared} bytes",), available
    return (), declared


def _low_bits(raw: bytes, order: str, start: int, present: int, valid: int) -> int:
    """32 - valid when ``valid`` bits sit in the low end of their four bytes, 0 when in the high end as the standard says."""
    words = np.frombuffer(raw, order + "u4", count=present // 4, offset=start)
    spare = 32 - valid
    low_used = high_used = False
    for first in range(0, words.size, _SCAN_WORDS):
        block = words[first : first + _SCAN_WORDS]
        low_used = low_used or bool(np.any(block & np.uint32((1 << spare) - 1)))
        top = block >> np.uint32(valid)
        negative = (block >> np.uint32(valid - 1)) & np.uint32(1)
        high_used = high_used or bool(np.any((top != 0) & ~((top == (1 << spare) - 1) & (negative == 1))))
    return spare if low_used and not high_used else 0
