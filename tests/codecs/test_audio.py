"""Recordings are stored at their true length and right scale, or refused; formats, options and stored form."""

from __future__ import annotations

import io
import json
import pickle
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lfdata.codecs.audio import Audio, AudioDecoder, AudioEncoder
from lfdata.errors import OptionError, SampleError

soundfile = pytest.importorskip("soundfile")

RNG = np.random.default_rng(5)
SIGNAL = (np.sin(np.arange(50_000) / 20) * 20_000 + RNG.normal(0, 300, 50_000)).astype(np.int16)


def write(samples: np.ndarray, form: str = "WAV", subtype: str = "PCM_16", rate: int = 24_000) -> bytes:
    out = io.BytesIO()
    soundfile.write(out, samples, rate, format=form, subtype=subtype)
    return out.getvalue()


def decode(raw: object, **options: str) -> Audio:
    encoder = AudioEncoder(options)
    encoded = encoder.encode(raw)
    audio = AudioDecoder(encoder.params).decode(encoded.payload, encoded.sizes)
    assert audio.samples.dtype == np.int16 and audio.samples.flags.writeable and audio.samples.ndim == 2
    assert len(encoded.payload) == audio.samples.size * 2
    return audio


def warnings(raw: object, **options: str) -> tuple[str, ...]:
    return AudioEncoder(options).encode(raw).warnings


def code(raw: object, **options: str) -> str:
    with pytest.raises(SampleError) as caught:
        AudioEncoder(options).encode(raw)
    return caught.value.code


@pytest.mark.parametrize(
    ("form", "subtype"),
    [
        ("WAV", "PCM_16"),
        ("WAVEX", "PCM_16"),
        ("WAV", "PCM_24"),
        ("WAV", "PCM_32"),
        ("RF64", "PCM_16"),
        ("W64", "PCM_16"),
        ("AIFF", "PCM_16"),
        ("AIFF", "PCM_24"),
        ("CAF", "PCM_16"),
        ("AU", "PCM_16"),
        ("FLAC", "PCM_16"),
        ("FLAC", "PCM_24"),
    ],
)
@pytest.mark.parametrize("channels", [1, 2, 5])
def test_16_bit_values_are_bit_exact_in_every_container(form: str, subtype: str, channels: int) -> None:
    samples = SIGNAL.reshape(-1, 1).repeat(channels, axis=1) // np.arange(1, channels + 1, dtype=np.int16)
    samples[:2] = [[-32768], [32767]]
    raw = write(samples, form, subtype)
    assert np.array_equal(decode(raw).samples, samples)
    assert decode(raw).rate == 24_000
    assert warnings(raw) == ()


@given(hnp.arrays(np.int16, hnp.array_shapes(min_dims=2, max_dims=2, min_side=0, max_side=40).filter(lambda s: s[1] > 0)))
def test_numpy_input_is_bit_exact(samples: np.ndarray) -> None:
    assert np.array_equal(decode((samples, 8000)).samples, samples)


@given(st.lists(st.floats(-2, 2, width=32), min_size=1, max_size=30))
def test_floats_are_scaled_rounded_half_to_even_and_clipped(values: list[float]) -> None:
    want = np.clip(np.rint(np.array(values, np.float64) * 32768), -32768, 32767)
    for raw in ((np.array(values, np.float32), 8000), write(np.array(values, np.float32), subtype="FLOAT")):
        assert np.array_equal(decode(raw).samples[:, 0], want)


def test_wider_integers_are_rounded_not_truncated() -> None:
    values = np.array([0, 1, 127, 128, 129, 384, -128, -129, -384, 2**23 - 1, -(2**23)])
    want = [0, 0, 0, 0, 1, 2, 0, -1, -2, 32767, -32768]  # 0.5 -> 0, 1.5 -> 2: half to even
    raw = write((values * 256).astype(np.int32), subtype="PCM_24")
    assert decode(raw).samples[:, 0].tolist() == want
    packed = b"".join(int(v).to_bytes(3, "little", signed=True) for v in values)
    assert decode(packed, pcm_rate="8000", pcm_width="24", pcm_channels="1").samples[:, 0].tolist() == want


def test_clipping_is_reported_for_uncompressed_sources() -> None:
    assert warnings((np.array([0.5, 1.0, -1.0]), 8000)) == ()
    assert warnings((np.array([0.5, 1.5, -1.5]), 8000)) == ("2 samples beyond full scale were clipped",)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_are_refused(bad: float) -> None:
    samples = np.array([0.0, bad], np.float32)
    assert code((samples, 8000)) == "nan"
    assert code(write(samples, subtype="FLOAT")) == "nan"
    assert code(write(samples.astype(np.float64), subtype="DOUBLE")) == "nan"


def test_eight_bit_silence_is_zero() -> None:
    assert decode((np.array([128, 0, 255], np.uint8), 8000)).samples[:, 0].tolist() == [0, -32768, 127 * 256]
    assert decode(bytes([128, 0, 255]), pcm_rate="8000", pcm_width="8u", pcm_channels="1").samples[0, 0] == 0
    assert not decode(write(np.zeros(50), subtype="PCM_U8")).samples.any()


@pytest.mark.parametrize(
    ("width", "raw"),
    [
        ("16", SIGNAL[:100].astype("<i2").tobytes()),
        ("24", b"".join((int(v) * 256).to_bytes(3, "little", signed=True) for v in SIGNAL[:100])),
        ("32", (SIGNAL[:100].astype("<i4") * 65536).astype("<i4").tobytes()),
        ("f32", (SIGNAL[:100] / np.float32(32768)).astype("<f4").tobytes()),
    ],
)
def test_headerless_pcm_needs_its_options(width: str, raw: bytes) -> None:
    audio = decode(raw, pcm_rate="16000", pcm_width=width, pcm_channels="2")
    assert audio.rate == 16_000 and np.array_equal(audio.samples, SIGNAL[:100].reshape(50, 2))
    with pytest.raises(SampleError, match="pcm_rate"):
        AudioEncoder({}).encode(b"\0" * 64 + raw)
    assert code(raw[:-1], pcm_rate="16000", pcm_width=width, pcm_channels="2") == "truncated"


def test_a_file_among_headerless_pcm_is_still_read_as_a_file() -> None:
    options = {"pcm_rate": "8000", "pcm_width": "16", "pcm_channels": "1"}
    assert np.array_equal(decode(write(SIGNAL, "FLAC"), **options).samples[:, 0], SIGNAL)


def test_channel_policies() -> None:
    left, right = np.array([100, -3, 7], np.int16), np.array([101, -4, 8], np.int16)
    raw = (np.stack([left, right], axis=1), 8000)
    assert decode(raw, channels="mono").samples[:, 0].tolist() == [100, -4, 8]  # 100.5, -3.5, 7.5: half to even
    assert decode(raw, channels="first").samples[:, 0].tolist() == left.tolist()
    assert decode(raw, channels="stereo").samples.shape == (3, 2)
    assert decode((left, 8000), channels="stereo").samples.tolist() == [[v, v] for v in left.tolist()]
    assert decode((left, 8000), channels="mono").samples[:, 0].tolist() == left.tolist()
    assert code((np.zeros((4, 3), np.int16), 8000), channels="stereo") == "channels"


@pytest.mark.parametrize(("source", "target"), [(24_000, 16_000), (8_000, 48_000), (44_100, 16_000), (16_000, 44_100)])
def test_resampling_keeps_duration_and_tone(source: int, target: int) -> None:
    tone = (np.sin(2 * np.pi * 440 * np.arange(source * 2) / source) * 10_000).astype(np.int16)
    audio = decode((tone, source), rate=str(target))
    assert audio.rate == target
    assert abs(len(audio.samples) - 2 * target) <= 1
    want = np.sin(2 * np.pi * 440 * np.arange(len(audio.samples)) / target) * 10_000
    middle = slice(target // 4, -target // 4)
    assert np.abs(audio.samples[middle, 0] - want[middle]).max() < 20
    again = AudioEncoder({"rate": str(target)}).encode((tone, source))
    assert bytes(again.payload) == audio.samples.tobytes()


def test_the_same_rate_is_not_resampled() -> None:
    assert np.array_equal(decode(write(SIGNAL), rate="24000").samples[:, 0], SIGNAL)
    assert code((SIGNAL[:10], 1), rate="48000") == "rate"


def test_limits_are_counted_while_decoding() -> None:
    raw = write(SIGNAL)
    assert len(decode(raw, max_seconds="3").samples) == len(SIGNAL)
    assert code(raw, max_seconds="2") == "size-limit"
    assert len(decode(raw, max_bytes="100000").samples) == len(SIGNAL)
    assert code(raw, max_bytes="99999") == "size-limit"
    assert code((SIGNAL[:5], 100), rate="25600", max_bytes="2000") == "size-limit"


@pytest.mark.parametrize("raw", [b"hello, this is text" * 10, b"\x89PNG\r\n\x1a\n" + bytes(99), b"\0", bytes(4000)])
def test_what_is_no_audio_is_refused(raw: bytes) -> None:
    assert code(raw) in ("unknown-format", "truncated")


@pytest.mark.parametrize("raw", [5, "path.wav", None, np.zeros(3), (np.zeros(3), 8000.0), ([0, 1], 8000), (np.zeros(3), True)])
def test_other_types_are_refused(raw: object) -> None:
    assert code(raw) == "type"


@pytest.mark.parametrize(
    "raw",
    [
        (np.zeros((2, 2, 2)), 8000),
        (np.zeros((2, 0)), 8000),
        (np.zeros(2, np.int64), 8000),
        (np.zeros(2), 0),
        (np.array(1.0), 8000),
    ],
)
def test_other_arrays_are_refused(raw: object) -> None:
    assert code(raw) in ("shape", "dtype", "rate")


def test_zero_length_audio_is_kept() -> None:
    assert decode((np.zeros((0, 2), np.int16), 8000)).samples.shape == (0, 2)
    encoded = AudioEncoder({"rate": "16000"}).encode((np.zeros((0, 2), np.float32), 8000))
    assert encoded.sizes == {"frames": 0, "channels": 2, "rate": 16000} and not encoded.payload


def test_payload_is_little_endian_and_interleaved() -> None:
    encoded = AudioEncoder({}).encode((np.array([[1, 2], [3, 4]], np.int16), 8000))
    assert bytes(encoded.payload) == struct.pack("<4h", 1, 2, 3, 4)
    assert encoded.sizes == {"frames": 2, "channels": 2, "rate": 8000}


def test_params_are_complete_and_survive_json_and_pickling() -> None:
    options = {"rate": "16000", "channels": "mono", "chunk_frames": "1024", "max_seconds": "9", "max_bytes": "999999"}
    options.update(pcm_rate="8000", pcm_width="8u", pcm_channels="2")
    encoder = AudioEncoder(options)
    assert json.loads(json.dumps(encoder.params)) == encoder.params
    assert encoder.params["chunk_frames"] == 1024
    assert pickle.loads(pickle.dumps(encoder)).params == encoder.params
    assert AudioEncoder({}).params["chunk_frames"] == 16384


@pytest.mark.parametrize(
    "options",
    [
        {"rate": "0"},
        {"rate": "fast"},
        {"channels": "5.1"},
        {"chunk_frames": "0"},
        {"on_rate_change": "ignore"},
        {"pcm_rate": "8000"},
        {"pcm_rate": "8000", "pcm_width": "12", "pcm_channels": "1"},
        {"pcm_rate": "8000", "pcm_width": "16", "pcm_channels": "0"},
        {"bitrate": "128"},
    ],
)
def test_bad_options_are_refused(options: dict[str, str]) -> None:
    with pytest.raises(OptionError, match="audio"):
        AudioEncoder(options)


@pytest.mark.parametrize("sizes", [(3, 1, 8000), (1, 1, 8000), (-2, -1, 8000), (2, 0, 8000), (2, 1, 0), (2**62, 4, 8000)])
def test_sizes_that_do_not_match_the_payload_are_an_error(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(SampleError):
        AudioDecoder({}).decode(bytes(4), dict(zip(("frames", "channels", "rate"), sizes, strict=True)))
