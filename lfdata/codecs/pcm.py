"""16-bit PCM: what kind ``audio`` stores, how it is read back, and how other samples become it. NumPy only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lfdata.codecs.base import Buffer
from lfdata.errors import OptionError, SampleError

DEFAULT_CHUNK_FRAMES = 16384  # 0.34 s at 48 kHz: the smallest piece of a recording that is read and checked alone
PCM_WIDTHS = ("8u", "16", "24", "32", "f32")


class Audio(NamedTuple):
    """Decoded audio.

    Attributes:
        samples: int16, shape (frames, channels), owned and writable; full scale is -32768 to 32767.
        rate: frames a second.
    """

    samples: NDArray[np.int16]
    rate: int


class AudioDecoder:
    """Payload (little-endian int16, channels interleaved) -> :class:`Audio`."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        if params.get("sample_format", "s16le") != "s16le":
            raise OptionError(f"audio: the schema's sample format {params.get('sample_format')!r} is not s16le")

    def decode(self, payload: Buffer, sizes: Mapping[str, Any]) -> Audio:
        """Decode one recording. Raises ``SampleError`` (``corrupt``) when sizes and payload length disagree."""
        frames, channels, rate = int(sizes["frames"]), int(sizes["channels"]), int(sizes["rate"])
        if frames < 0 or channels < 1 or rate < 1 or frames * channels * 2 != len(payload):
            raise SampleError(
                "corrupt", f"{frames} frames of {channels} channels at {rate} Hz do not match {len(payload)} stored bytes"
            )
        samples = np.frombuffer(payload, dtype="<i2").astype(np.int16, copy=True).reshape(frames, channels)
        return Audio(samples, rate)


def to_units(block: NDArray[Any]) -> NDArray[np.float64]:
    """Samples as float64 in 16-bit units (full scale 32768), exact for every source type.

    Args:
        block: int16, int32 (full scale 2**31) or floating point (full scale 1.0).

    Raises:
        SampleError: ``nan`` for NaN or infinite samples.
    """
    if block.dtype == np.int16:
        return block.astype(np.float64)
    if block.dtype == np.int32:
        return block * np.float64(1 / 65536)
    if not bool(np.all(np.isfinite(block))):
        raise SampleError("nan", "the audio holds NaN or infinite samples")
    return block * np.float64(32768)


def to_int16(units: NDArray[Any]) -> tuple[NDArray[np.int16], int]:
    """16-bit samples from :func:`to_units`' scale, rounded half to even and clipped; and how many lay beyond full scale.

    Positive full scale itself (32768) becomes 32767 and is not counted.
    """
    rounded = np.rint(units)
    clipped = int(np.count_nonzero((rounded < -32768) | (rounded > 32768)))
    return np.clip(rounded, -32768, 32767).astype("<i2"), clipped


def read_headerless(raw: bytes, width: str, channels: int) -> NDArray[Any]:
    """Headerless little-endian PCM as a (frames, channels) array that :func:`to_units` understands.

    Args:
        raw: the samples.
        width: one of :data:`PCM_WIDTHS`: unsigned 8 bit, signed 16, 24 or 32 bit, 32-bit float.
        channels: interleaved channels.

    Raises:
        SampleError: ``truncated`` when the bytes are not whole frames.
    """
    size = {"8u": 1, "16": 2, "24": 3, "32": 4, "f32": 4}[width] * channels
    if len(raw) % size:
        raise SampleError("truncated", f"{len(raw)} bytes of headerless PCM are not whole frames of {size} bytes")
    if width == "8u":
        values: NDArray[Any] = (np.frombuffer(raw, np.uint8).astype(np.int16) - 128) * np.int16(256)
    elif width == "24":
        wide = np.zeros((len(raw) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(raw, np.uint8).reshape(-1, 3)
        values = wide.view("<i4").reshape(-1)
    else:
        values = np.frombuffer(raw, {"16": "<i2", "32": "<i4", "f32": "<f4"}[width])
    return values.reshape(-1, channels)
