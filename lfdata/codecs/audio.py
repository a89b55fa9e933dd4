"""Kind ``audio``: any libsndfile format, stored as interleaved little-endian 16-bit PCM of its true decoded length."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfdata.codecs._common import OptionReader, refuse_lfs_pointer
from lfdata.codecs.audio_flac import inspect_flac
from lfdata.codecs.audio_lengths import shorter_than_declared
from lfdata.codecs.audio_streams import LengthenedBytes, inspect_mp3, inspect_ogg, skip_id3
from lfdata.codecs.audio_wav import inspect_wav
from lfdata.codecs.base import Encoded
from lfdata.codecs.pcm import DEFAULT_CHUNK_FRAMES, PCM_WIDTHS, Audio, AudioDecoder, read_headerless, to_int16, to_units
from lfdata.errors import MissingExtraError, OptionError, SampleError

__all__ = ["Audio", "AudioDecoder", "AudioEncoder"]

DEFAULT_MAX_BYTES = 2 * 1024**3  # of stored PCM: 3 hours of 48 kHz stereo; a small FLAC of silence could otherwise fill memory
MAX_RATIO = 256  # between rates when resampling: beyond it the header is not believable and the filter enormous

_BLOCK_SAMPLES = 1 << 17  # samples decoded at a time, all channels together
_NO_CLAIM = -1  # of expected frames: the header says nothing that could be checked
_UNKNOWN_FRAMES = 2**62  # libsndfile says 2**63-1 when the length is not known
_NARROW = ("PCM_16", "PCM_U8", "PCM_S8", "ULAW", "ALAW")  # libsndfile's int16 is exact for these
_FLOATING = ("FLOAT", "VORBIS", "OPUS", "MPEG_LAYER_I", "MPEG_LAYER_II", "MPEG_LAYER_III")
_MAGICS = (b"RIFF", b"RIFX", b"RF64", b"BW64", b"fLaC", b"OggS", b"ID3", b"FORM", b"caff", b".snd", b"riff")

_VALID = {
    "rate": "keep|<frames a second, 1 to 1000000>",
    "channels": "keep|mono|stereo|first",
    "chunk_frames": "<frames in a separately checked chunk, 64 to 16777216; default 16384>",
    "max_seconds": "<longest recording accepted, in seconds; no limit by default>",
    "max_bytes": f"<largest PCM accepted, in bytes; default {DEFAULT_MAX_BYTES}>",
    "on_rate_change": "error",
    "pcm_rate": "<frames a second of headerless PCM>",
    "pcm_width": "|".join(PCM_WIDTHS),
    "pcm_channels": "<channels of headerless PCM, 1 to 1024>",
}


@dataclass(slots=True)
class _Source:
    """One recording being decoded: blocks of shape (frames, channels), as :func:`lfdata.codecs.pcm.to_units` takes them."""

    rate: int
    channels: int
    blocks: Iterator[NDArray[Any]]
    warnings: list[str] = field(default_factory=list)
    lossy: bool = False


class AudioEncoder:
    """Decodes a recording and stores it as 16-bit PCM.

    Options:
        rate: ``keep`` (default) or the rate to resample to (soxr, HQ).
        channels: ``keep`` (default), ``mono`` (mean of all), ``stereo`` (mono is doubled; more than two are refused) or
            ``first``. Applied before resampling.
        chunk_frames: length of the chunks that are checksummed, and so readable, alone.
        max_seconds, max_bytes: a longer recording is an error. Counted while decoding, whatever headers say.
        on_rate_change: ``error``: a stream whose rate or channels change half-way is refused.
        pcm_rate, pcm_width, pcm_channels: given together; data without a known magic number is then headerless PCM.

    Samples: ``clip(rint(x * 32768), -32768, 32767)`` of full scale 1.0, half to even. 16-bit sources are stored bit for bit
    unless ``rate`` or ``channels`` changes them; unsigned 8-bit 128 becomes 0. Chained Ogg streams are joined; their channels
    may differ unless ``channels=keep``. ``Encoded.sizes``: frames, channels, rate, as stored.
    """

    kind = "audio"

    def __init__(self, options: Mapping[str, str]) -> None:
        reader = OptionReader(self.kind, options, _VALID)
        self._rate = None if reader.text("rate") in (None, "keep") else reader.integer("rate", None, 1, 1_000_000)
        self._channels = reader.choice("channels", ("keep", "mono", "stereo", "first"), "keep")
        self._max_seconds = reader.integer("max_seconds", None, 1, 2**31)
        self._max_bytes = reader.integer("max_bytes", DEFAULT_MAX_BYTES, 0, 2**62) or 0
        self._pcm = _read_pcm_options(reader)
        self._soundfile = _import("soundfile")
        self._soxr = _import("soxr") if self._rate else None
        self.params: dict[str, Any] = {
            "sample_format": "s16le",
            "rate": self._rate or "keep",
            "resampler": "soxr HQ" if self._rate else None,
            "channels": self._channels,
            "chunk_frames": reader.integer("chunk_frames", DEFAULT_CHUNK_FRAMES, 64, 1 << 24),
            "rounding": "half-even",
            "on_rate_change": reader.choice("on_rate_change", ("error",), "error"),
            "max_seconds": self._max_seconds,
            "max_bytes": self._max_bytes,
            "pcm": dict(zip(("rate", "width", "channels"), self._pcm, strict=True)) if self._pcm else None,
        }

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.params,)

    def encode(self, raw: Any) -> Encoded:
        """Encode file bytes, headerless PCM bytes (with the ``pcm_`` options), or ``(samples, rate)``.

        ``samples`` is an array of shape (frames,) or (frames, channels): uint8, int16, int32, float32 or float64.
        Raises ``SampleError``: ``empty``, ``unknown-format``, ``truncated``, ``wav-header``, ``flac-header``, ``bit-depth``,
        ``rate-change``, ``corrupt``, ``nan``, ``channels``, ``rate``, ``size-limit``, ``lfs-pointer``, ``type``.
        """
        source = self._open(raw)
        payload = bytearray()
        clipped = 0
        rate = self._rate or source.rate
        channels = {"keep": source.channels, "stereo": 2}.get(self._channels, 1)
        blocks = self._resampled(source, channels) if rate != source.rate else self._mixed(source)
        for block in blocks:
            samples, beyond = (block.astype("<i2", copy=False), 0) if block.dtype == np.int16 else to_int16(block)
            clipped += beyond
            payload += np.ascontiguousarray(samples).data.cast("B") if samples.size else b""
            self._check_length(len(payload), channels, rate)
        warnings = source.warnings
        if clipped and not source.lossy:  # lossy decoders overshoot full scale by nature
            warnings.append(f"{clipped} samples beyond full scale were clipped")
        frames = len(payload) // (2 * channels)
        return Encoded(payload, {"frames": frames, "channels": channels, "rate": rate}, warnings=tuple(warnings))

    def _check_length(self, stored: int, channels: int, rate: int) -> None:
        if stored > self._max_bytes:
            raise SampleError("size-limit", f"the audio decodes to more than max_bytes={self._max_bytes}")
        if self._max_seconds is not None and stored > self._max_seconds * rate * channels * 2:
            raise SampleError("size-limit", f"the audio is longer than max_seconds={self._max_seconds}")

    def _mixed(self, source: _Source) -> Iterator[NDArray[Any]]:
        """Blocks after the channel policy: int16 as stored, or float64 in 16-bit units."""
        for block in source.blocks:
            if self._channels == "stereo" and block.shape[1] > 2:
                raise SampleError("channels", f"channels=stereo cannot mix {block.shape[1]} channels; use mono, first or keep")
            if self._channels == "first":
                block = block[:, :1]
            elif self._channels == "stereo" and block.shape[1] == 1:
                block = np.repeat(block, 2, axis=1)
            if self._channels == "mono" and block.shape[1] > 1:
                yield to_units(block).mean(axis=1, keepdims=True)
            else:
                yield block if block.dtype == np.int16 else to_units(block)

    def _resampled(self, source: _Source, channels: int) -> Iterator[NDArray[Any]]:
        target = self._rate or source.rate
        if not 1 / MAX_RATIO <= target / source.rate <= MAX_RATIO:
            raise SampleError("rate", f"resampling from {source.rate} to {target} Hz is beyond a factor of {MAX_RATIO}")
        assert self._soxr is not None
        stream = self._soxr.ResampleStream(source.rate, target, channels, dtype="float64", quality="HQ")
        step = max(1, int(_BLOCK_SAMPLES * source.rate / target / channels))  # bounds what one call can return
        for block in self._mixed(source):
            units = np.ascontiguousarray(block, dtype=np.float64)
            for start in range(0, len(units), step):
                yield stream.resample_chunk(units[start : start + step]).reshape(-1, channels)
        yield stream.resample_chunk(np.zeros((0, channels)), last=True).reshape(-1, channels)

    def _open(self, raw: Any) -> _Source:
        if isinstance(raw, tuple) and len(raw) == 2:
            return _from_array(*raw)
        if not isinstance(raw, bytes | bytearray | memoryview):
            raise SampleError("type", f"audio bytes or (samples, rate) expected, got {type(raw).__name__}")
        data = bytes(raw)
        if not data:
            raise SampleError("empty", "zero bytes where audio is expected")
        refuse_lfs_pointer(data)
        if self._pcm and not data.startswith(_MAGICS):
            rate, width, channels = self._pcm
            return _from_samples(read_headerless(data, width, channels), rate)
        return self._from_file(data)

    def _from_file(self, data: bytes) -> _Source:
        warnings: tuple[str, ...] = ()
        shift, expected, least = 0, None, 0
        links: Sequence[bytes] = ()
        tag = skip_id3(data)
        if data.startswith(b"fLaC", tag):
            data = data[tag : -128 if data[-128:].startswith(b"TAG") else None]  # ID3 tags have no place there
        if data[:4] in (b"RIFF", b"RIFX", b"RF64", b"BW64") and data[8:12] == b"WAVE":
            wav = inspect_wav(data)
            data, warnings, shift, expected = wav.data, wav.warnings, wav.shift, wav.frames
            if expected == 0:
                warnings = (*warnings, "the file holds no audio")
        elif data.startswith(b"fLaC"):
            flac = inspect_flac(data)
            data, warnings, expected = flac.data, flac.warnings, flac.declared or None
        elif data.startswith(b"OggS"):
            ogg = inspect_ogg(data)
            (data, *links), warnings = ogg.links, ogg.warnings
        else:
            warnings = shorter_than_declared(data)
        file = self._open_file(data)
        if file.format == "MP3":
            mp3 = inspect_mp3(data)
            warnings, least = (*warnings, *mp3.warnings), mp3.least
            if mp3.length:
                file.close()
                file = self._open_file(mp3.data, mp3.length)
                expected = _NO_CLAIM
        source = _Source(file.samplerate, file.channels, iter(()), list(warnings), file.subtype in _FLOATING[1:])
        first = _file_blocks(file, source, shift, expected, least)
        source.blocks = itertools.chain(first, self._further(links, source)) if links else first
        return source

    def _further(self, links: Sequence[bytes], source: _Source) -> Iterator[NDArray[Any]]:
        """Blocks of the later streams of a chained Ogg file."""
        for data in links:
            file = self._open_file(data)
            if file.samplerate != source.rate or (file.channels != source.channels and self._channels == "keep"):
                file.close()
                raise SampleError(
                    "rate-change",
                    f"chained Ogg streams of {source.rate} Hz, {source.channels} channels and {file.samplerate} Hz, "
                    f"{file.channels} channels: split the file",
                )
            yield from _file_blocks(file, source, 0, None, 0)

    def _open_file(self, data: bytes, length: int = 0) -> Any:
        try:
            return _sequential(self._soundfile)(LengthenedBytes(data, length) if length else io.BytesIO(data))
        except (RuntimeError, ValueError, TypeError, OverflowError) as error:
            reason = str(error).partition(">: ")[2] or str(error)
            hint = "; headerless PCM needs the options pcm_rate, pcm_width and pcm_channels" if not self._pcm else ""
            raise SampleError("unknown-format", f"libsndfile cannot open this audio: {reason[:200]}{hint}") from None


def _read_pcm_options(reader: OptionReader) -> tuple[int, str, int] | None:
    names = ("pcm_rate", "pcm_width", "pcm_channels")
    given = [name for name in names if name in reader]
    if not given:
        return None
    if len(given) < len(names):
        raise OptionError(f"audio: headerless PCM needs all of {', '.join(names)}; got {', '.join(given)}")
    rate, channels = reader.integer("pcm_rate", 0, 1, 1_000_000), reader.integer("pcm_channels", 0, 1, 1024)
    return rate or 0, reader.choice("pcm_width", PCM_WIDTHS, ""), channels or 0


def _import(name: str) -> Any:
    try:
        return __import__(name)
    except (ImportError, OSError) as error:  # OSError: the package is there, its C library is not
        raise MissingExtraError(f"audio needs the package {name}: pip install {name} ({error})") from error


def _rebuild(params: dict[str, Any]) -> AudioEncoder:
    names = ("rate", "channels", "chunk_frames", "max_seconds", "max_bytes", "on_rate_change")
    options = {name: str(params[name]) for name in names if params[name] is not None}
    options.update({f"pcm_{name}": str(value) for name, value in (params["pcm"] or {}).items()})
    return AudioEncoder(options)


def _sequential(soundfile: Any) -> Any:
    """``SoundFile`` that only reads forwards.

    It otherwise seeks after every block, which fails for streams of unknown length and is inexact for MP3.
    """

    class Sequential(soundfile.SoundFile):  # type: ignore[misc]
        def seekable(self) -> bool:
            return False

    return Sequential


def _file_blocks(file: Any, source: _Source, shift: int, expected: int | None, least: int) -> Iterator[NDArray[Any]]:
    if file.subtype in _NARROW and file.format != "FLAC":
        dtype = "int16"
    elif file.subtype in _FLOATING:
        dtype = "float32"
    else:
        dtype = "float64" if file.subtype == "DOUBLE" else "int32"
    frames = max(1, _BLOCK_SAMPLES // file.channels)
    decoded = 0
    with file:
        while True:
            try:
                block = file.read(frames, dtype=dtype, always_2d=True)
            except (RuntimeError, ValueError) as error:
                raise SampleError("corrupt", f"beyond frame {decoded}: {str(error)[:200]}") from None
            if not len(block):
                break
            decoded += len(block)
            yield np.left_shift(block, shift) if shift else block
    if expected is None and file.frames < _UNKNOWN_FRAMES:
        expected = int(file.frames)
    if expected not in (None, _NO_CLAIM, decoded):
        source.warnings.append(f"{decoded} frames decoded where the header says {expected}")
    elif decoded < least:
        source.warnings.append(f"{decoded} frames decoded where at least {least} are expected")


def _from_array(samples: Any, rate: Any) -> _Source:
    if not isinstance(samples, np.ndarray) or isinstance(rate, bool) or not isinstance(rate, int | np.integer):
        raise SampleError("type", "audio as a pair must be (numpy array, integer rate)")
    if samples.dtype.name not in ("uint8", "int16", "int32", "float32", "float64"):
        raise SampleError("dtype", f"audio of {samples.dtype}; uint8, int16, int32, float32 and float64 are accepted")
    if samples.ndim not in (1, 2) or (samples.ndim == 2 and not 1 <= samples.shape[1] <= 1024):
        raise SampleError("shape", f"audio of shape {samples.shape}; (frames,) or (frames, channels) expected")
    if not 1 <= rate <= 1_000_000:
        raise SampleError("rate", f"a rate of {rate} Hz")
    samples = samples.astype(samples.dtype.newbyteorder("="), copy=False)
    if samples.dtype == np.uint8:
        samples = (samples.astype(np.int16) - 128) * np.int16(256)
    return _from_samples(samples if samples.ndim == 2 else samples[:, None], int(rate))


def _from_samples(samples: NDArray[Any], rate: int) -> _Source:
    frames = max(1, _BLOCK_SAMPLES // samples.shape[1])
    blocks = (samples[start : start + frames] for start in range(0, len(samples), frames))
    return _Source(rate, samples.shape[1], blocks)
