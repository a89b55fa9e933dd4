"""Files that lie or are damaged: the true length and scale are stored with a warning, or the sample is refused by name."""

from __future__ import annotations

import contextlib
import hashlib
import io
import resource
import struct
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nonimage_odd import ODD, names, needs_odd

from lfdata.codecs.audio import Audio, AudioDecoder, AudioEncoder
from lfdata.errors import SampleError

soundfile = pytest.importorskip("soundfile")

RNG = np.random.default_rng(6)
SIGNAL = (np.sin(np.arange(40_000) / 20) * 20_000 + RNG.normal(0, 300, 40_000)).astype(np.int16)
PLAIN_FORMAT = struct.pack("<HHIIHH", 1, 1, 8000, 16000, 2, 16)


def write(samples: np.ndarray, form: str, subtype: str, rate: int = 24_000) -> bytes:
    out = io.BytesIO()
    soundfile.write(out, samples, rate, format=form, subtype=subtype)
    return out.getvalue()


FLAC = write(SIGNAL, "FLAC", "PCM_16")
VORBIS = write(SIGNAL, "OGG", "VORBIS")
MP3 = write(SIGNAL, "MP3", "MPEG_LAYER_III")


def encode(raw: bytes, **options: str) -> tuple[Audio, str]:
    encoder = AudioEncoder(options)
    encoded = encoder.encode(raw)
    return AudioDecoder(encoder.params).decode(encoded.payload, encoded.sizes), "; ".join(encoded.warnings)


def code(raw: bytes, **options: str) -> str:
    with pytest.raises(SampleError) as caught:
        AudioEncoder(options).encode(raw)
    return caught.value.code


def wav(data: bytes, declared: int | None = None, fmt: bytes = PLAIN_FORMAT, order: str = "<") -> bytes:
    size = len(data) if declared is None else declared
    chunks = b"fmt " + struct.pack(order + "I", len(fmt)) + fmt + b"data" + struct.pack(order + "I", size) + data
    return (b"RIFF" if order == "<" else b"RIFX") + struct.pack(order + "I", 4 + len(chunks)) + b"WAVE" + chunks


def streaminfo(raw: bytes, bits: int | None = None, total: int | None = None) -> bytes:
    info = int.from_bytes(raw[18:26], "big")
    if bits is not None:
        info = info & ~(31 << 36) | (bits - 1) << 36
    if total is not None:
        info = info >> 36 << 36 | total
    return raw[:18] + info.to_bytes(8, "big") + raw[26:]


def odd_expectations() -> dict[str, tuple[object, ...]]:
    """By end of name: an error code, or (frames, channels, rate, part of the warning)."""
    return {
        "02 - wrong maximum framesize.flac": (195891, 1, 44100, ""),
        "03 - wrong bit depth.flac": (89903, 1, 24000, "the frames 16"),
        "05 - wrong total number of samples.flac": (109487, 1, 24000, "header says 39842"),
        "01 - changing samplerate.flac": ("rate-change",),
        "22 - 12 bit per sample.flac": (218666, 2, 44100, ""),
        "nonstandard-01.wav": (1, 2, 48000, ""),
        "24bit-4byte-48kHz-stereo.wav": (2, 2, 48000, ""),
        "ieeefloat-44100Hz-mono.wav": (4, 1, 44100, "4 samples beyond full scale"),
        "emptyfile.mp3": ("empty",),
        "bad-xing.mp3": (4608, 2, 44100, "cut short"),
        "empty.ogg": (162496, 2, 44100, ""),
        "silence-2s-PCM-16000-08-ID3v23.wav": (32000, 2, 16000, ""),
        "test_audio_16000.pcm": ("unknown-format",),
        "incomplete-chunk.wav": ("truncated",),
        "early-eof.wav": (236, 1, 44100, "944 of 17640 bytes"),
        "early-eof-no-data.wav": ("truncated",),
        "be-1ch-4bytes.wav": (4410, 1, 44100, ""),
        "24bit-inconsistent.wav": ("wav-header",),
    }


def odd(end: str) -> bytes:
    (name,) = names(end)
    return (ODD / name).read_bytes()


@needs_odd
@pytest.mark.parametrize("name", names(".wav", ".flac", ".mp3", ".ogg", ".pcm", ".opus", ".aiff"))
def test_odd_audio_files(name: str) -> None:
    matching = [want for end, want in odd_expectations().items() if name.endswith(end)]
    assert len(matching) == 1, f"{name}: say what is expected of it"
    raw, want = (ODD / name).read_bytes(), matching[0]
    if len(want) == 1:
        assert code(raw) == want[0]
        return
    audio, warned = encode(raw)
    assert (*audio.samples.shape, audio.rate) == want[:3]
    assert (str(want[3]) in warned) if want[3] else not warned


@needs_odd
@pytest.mark.parametrize(
    ("end", "width"),
    [
        ("wrong maximum framesize.flac", 0),
        ("wrong bit depth.flac", 0),
        ("wrong total number of samples.flac", 0),
        ("12 bit per sample.flac", 4),
    ],
)
def test_odd_flac_decodes_to_the_md5_the_file_carries(end: str, width: int) -> None:
    raw = odd(end)
    samples = encode(raw)[0].samples >> width
    assert hashlib.md5(samples.astype("<i2").tobytes()).digest() == raw[26:42]


@needs_odd
def test_odd_values_have_the_right_scale() -> None:
    assert encode(odd("24bit-4byte-48kHz-stereo.wav"))[0].samples.tolist() == [[0, 90], [32767, -32659]]
    assert not encode(odd("ID3v23.wav"))[0].samples.any()
    big, little = encode(odd("be-1ch-4bytes.wav"))[0].samples, encode(odd("early-eof.wav"))[0].samples
    assert np.array_equal(big[: len(little)], little)  # the same recording in either byte order
    pcm = odd("test_audio_16000.pcm")
    audio, _ = encode(pcm, pcm_rate="16000", pcm_width="16", pcm_channels="1")
    assert audio.samples.tobytes() == pcm


@pytest.mark.parametrize("declared", [0, 0xFFFFFFFF, 0x7FFFFFFF, 80_002])
def test_wav_of_unknown_or_overstated_length_gives_all_that_is_there(declared: int) -> None:
    audio, warned = encode(wav(SIGNAL.tobytes(), declared))
    assert np.array_equal(audio.samples[:, 0], SIGNAL)
    assert "header" in warned


def test_wav_length_that_is_shorter_than_the_file_is_believed_with_chunks_behind() -> None:
    raw = wav(SIGNAL[:100].tobytes()) + b"LIST\x04\0\0\0abcd"
    assert np.array_equal(encode(raw)[0].samples[:, 0], SIGNAL[:100])
    empty, warned = encode(wav(b"") + b"LIST\x04\0\0\0abcd")
    assert empty.samples.shape == (0, 1) and "no audio" in warned


def test_a_cut_last_wav_frame_is_dropped_and_said() -> None:
    audio, warned = encode(wav(SIGNAL[:10].tobytes() + b"x"))
    assert len(audio.samples) == 10 and "not a whole frame" in warned


@pytest.mark.parametrize(
    "fmt",
    [
        struct.pack("<HHIIHH", 1, 3, 8000, 72000, 4, 24),
        struct.pack("<HHIIHH", 1, 2, 8000, 32000, 2, 16),
        struct.pack("<HHIIHH", 1, 0, 8000, 16000, 2, 16),
        struct.pack("<HHIIHH", 1, 1, 0, 16000, 2, 16),
        struct.pack("<HHIIHH", 3, 1, 8000, 16000, 2, 32),
        b"\x01\x00\x01\x00",
    ],
)
def test_wav_formats_that_contradict_themselves_are_refused(fmt: bytes) -> None:
    assert code(wav(bytes(90), fmt=fmt)) == "wav-header"


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("extensible", [False, True])
@pytest.mark.parametrize("high", [False, True])
def test_24_bits_in_four_bytes_have_the_right_scale_at_either_end(order: str, extensible: bool, high: bool) -> None:
    wide = SIGNAL.astype(np.int64) * 256 + 3
    words = (wide * 256 if high else wide).astype(np.int32).astype(order + "i4").tobytes()
    fmt = struct.pack(order + "HHIIHH", 1, 1, 8000, 32000, 4, 24)
    if extensible:
        fmt = struct.pack(order + "HHIIHHHHIIHH", 0xFFFE, 1, 8000, 32000, 4, 32, 22, 24, 4, 1, 0, 16)
        fmt += bytes.fromhex("800000aa00389b71")
    audio, _ = encode(wav(words, fmt=fmt, order=order))
    assert np.array_equal(audio.samples[:, 0], SIGNAL)


@pytest.mark.parametrize("bits", [8, 12, 20, 24, 32])
def test_flac_whose_streaminfo_lies_about_depth_is_decoded_as_its_frames_say(bits: int) -> None:
    audio, warned = encode(streaminfo(FLAC, bits=bits))
    assert np.array_equal(audio.samples[:, 0], SIGNAL)
    assert "the frames 16" in warned


@pytest.mark.parametrize("total", [0, 1, 5000, 39_999, 40_001, 2**36 - 1])
def test_flac_length_is_the_decoded_one(total: int) -> None:
    audio, warned = encode(streaminfo(FLAC, total=total))
    assert np.array_equal(audio.samples[:, 0], SIGNAL)
    assert ("header says" in warned) == (total != 0)


def test_flac_between_id3_tags_is_found() -> None:
    assert np.array_equal(encode(b"ID3\4\0\0\0\0\0\x0a" + bytes(10) + FLAC + b"TAG" + bytes(125))[0].samples[:, 0], SIGNAL)


def test_damaged_or_joined_flac_is_refused() -> None:
    half = len(FLAC) // 2
    other = write(SIGNAL, "FLAC", "PCM_16", 48_000)
    stereo = write(np.stack([SIGNAL, SIGNAL], 1), "FLAC", "PCM_16")
    assert code(FLAC[:half]) == "corrupt"
    assert code(FLAC[:half] + b"\0" * 500 + FLAC[half:]) == "corrupt"
    for changed in (other, stereo):
        assert code(FLAC + changed[changed.index(b"\xff\xf8") :]) in ("rate-change", "corrupt")
    assert code(FLAC[:30]) == "flac-header"


def test_ogg_damage_is_refused_and_a_cut_is_said() -> None:
    at = len(VORBIS) // 2
    flipped = VORBIS[:at] + bytes((VORBIS[at] ^ 1,)) + VORBIS[at + 1 :]
    assert code(flipped) == "corrupt"
    page = VORBIS.rindex(b"OggS")
    previous = VORBIS.rindex(b"OggS", 0, page)
    assert code(VORBIS[:previous] + VORBIS[page:]) == "corrupt"  # a page is missing
    audio, warned = encode(VORBIS[:-50])
    assert 0 < len(audio.samples) < len(SIGNAL) and "cut short" in warned
    audio, warned = encode(VORBIS + b"TAG" + bytes(125))
    assert len(audio.samples) == len(SIGNAL) and "after the end" in warned


@pytest.mark.parametrize("subtype", ["VORBIS", "OPUS"])
def test_chained_ogg_streams_are_joined_or_refused_never_dropped(subtype: str) -> None:
    one = write(SIGNAL, "OGG", subtype)
    single, _ = encode(one)
    joined, warned = encode(one + one)
    assert np.array_equal(joined.samples, np.concatenate([single.samples, single.samples])) and not warned
    assert code(one + write(SIGNAL, "OGG", subtype, 48_000)) == "rate-change"
    stereo = write(np.stack([SIGNAL, SIGNAL], 1), "OGG", subtype)
    assert code(one + stereo) == "rate-change"
    assert len(encode(one + stereo, channels="mono")[0].samples) == 2 * len(SIGNAL)


def mp3_frame_length(raw: bytes) -> int:
    return raw.index(raw[:2], 2)


def test_mp3_length_is_true_with_and_without_a_header() -> None:
    audio, warned = encode(MP3)
    assert len(audio.samples) == len(SIGNAL) and not warned
    headless, _ = encode(MP3[mp3_frame_length(MP3) :])
    assert len(SIGNAL) <= len(headless.samples) <= len(SIGNAL) + 4 * 1152
    joined, warned = encode(MP3 + MP3)
    assert len(joined.samples) >= 2 * len(SIGNAL) and "are there and are decoded" in warned
    half, warned = encode(MP3[: len(MP3) // 2])
    assert 0 < len(half.samples) < len(SIGNAL) and "cut short" in warned


def test_mp3_that_changes_rate_or_channels_is_refused() -> None:
    assert code(MP3 + write(SIGNAL, "MP3", "MPEG_LAYER_III", 48_000)) == "rate-change"
    assert code(MP3 + write(np.stack([SIGNAL, SIGNAL], 1), "MP3", "MPEG_LAYER_III")) == "rate-change"


@pytest.mark.parametrize("rubbish", [b"\xff" * 3_000_000, b"\xff\xf8" * 1_500_000, MP3[4:300] * 3000])
def test_hostile_mp3_ends_soon(rubbish: bytes) -> None:
    start = time.process_time()
    with contextlib.suppress(SampleError):
        encode(MP3 + rubbish)
    assert time.process_time() - start < 10


def test_hostile_flac_headers_end_soon() -> None:
    first = FLAC.index(b"\xff\xf8")
    contradicting = write(np.stack([SIGNAL, SIGNAL], 1), "FLAC", "PCM_16")
    at = contradicting.index(b"\xff\xf8")
    start = time.process_time()
    assert code(FLAC[: first + 3000] + (contradicting[at : at + 8] + bytes(500)) * 100_000) in ("flac-header", "corrupt")
    assert time.process_time() - start < 20


def test_mp3_with_rubbish_inside_says_so() -> None:
    at = len(MP3) // 2
    assert "damaged MP3" in encode(MP3[:at] + bytes(700) + MP3[at:])[1]


@pytest.mark.parametrize(("form", "subtype"), [("AIFF", "PCM_16"), ("AU", "PCM_16"), ("W64", "PCM_16"), ("RF64", "PCM_16")])
def test_files_cut_short_are_decoded_with_a_warning(form: str, subtype: str) -> None:
    raw = write(SIGNAL, form, subtype)
    audio, warned = encode(raw[: len(raw) // 2])
    assert np.array_equal(audio.samples[:, 0], SIGNAL[: len(audio.samples)])
    assert 0 < len(audio.samples) < len(SIGNAL) and "shorter than its header says" in warned


def test_a_small_file_of_much_silence_stops_at_the_limit() -> None:
    bomb = write(np.zeros(60_000_000, np.int16), "FLAC", "PCM_16")
    assert len(bomb) < 1 << 20
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert code(bomb, max_bytes="1000000") == "size-limit"
    assert code(bomb, max_seconds="10") == "size-limit"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


def test_claims_of_enormous_length_allocate_nothing() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert len(encode(streaminfo(FLAC[:], total=2**36 - 1))[0].samples) == len(SIGNAL)
    assert len(encode(wav(SIGNAL.tobytes(), 0xFFFFFFFE))[0].samples) == len(SIGNAL)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(
    st.sampled_from(["flac", "vorbis", "mp3", "wav"]), st.integers(0, 10**6), st.binary(min_size=1, max_size=8), st.booleans()
)
def test_damage_anywhere_gives_audio_or_our_error(which: str, at: int, patch: bytes, cut: bool) -> None:
    raw = {"flac": FLAC, "vorbis": VORBIS, "mp3": MP3, "wav": wav(SIGNAL.tobytes())}[which]
    at %= len(raw)
    damaged = raw[:at] if cut else raw[:at] + patch + raw[at + len(patch) :]
    with contextlib.suppress(SampleError):
        encode(damaged, max_seconds="60")
