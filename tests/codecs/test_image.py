"""Stored pictures: exact, checked before allocation, typed errors for damaged bytes, no hold on PIL's global switches."""

from __future__ import annotations

import struct
import sys
import threading
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFile, features

sys.path.insert(0, str(Path(__file__).parent))
from image_samples import chunk, options, photo, png, png16, save

from lfdata.codecs import pil_versions
from lfdata.codecs.image import IMAGE_CODECS, ImageDecoder, make_image_encoder
from lfdata.codecs.pil import strict_pil, supported_formats
from lfdata.errors import LfdataError, SampleError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # PIL's remarks
FORMATS = [f for f in ("JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP", "ICO", "AVIF") if f != "AVIF" or features.check("avif")]
STORED = ("codec=webp", "codec=webp,lossless=yes", "codec=jpeg,restart=rows", "codec=png", "codec=raw")


def test_codec_numbers_are_fixed() -> None:
    assert IMAGE_CODECS == {"webp": 1, "jpeg": 2, "png": 3, "raw": 4, "gif": 5, "tiff": 6, "bmp": 7, "avif": 8}


@pytest.mark.parametrize("text", STORED)
def test_decoding_gives_what_pil_gives(text: str) -> None:
    encoder = make_image_encoder(options(text))
    encoded = encoder.encode(save(photo(), "PNG"))
    pixels = ImageDecoder(encoder.params).decode(memoryview(encoded.payload), encoded.sizes)
    if "raw" in text:
        assert bytes(encoded.payload) == photo().tobytes()
    else:
        from io import BytesIO

        with Image.open(BytesIO(encoded.payload)) as image:
            assert np.array_equal(pixels, np.asarray(image))
    if "lossless" in text or "png" in text or "raw" in text:
        assert np.array_equal(pixels, photo())


def test_raw_is_row_major_little_endian() -> None:
    deep = np.arange(24, dtype=np.uint16).reshape(2, 4, 3) * 2000
    encoded = make_image_encoder(options("codec=raw,bits16=keep")).encode(deep)
    assert bytes(encoded.payload) == deep.astype("<u2").tobytes()
    assert encoded.sizes == {"width": 4, "height": 2, "channels": 3, "codec": 4, "bits": 16}


@pytest.mark.parametrize("fmt", FORMATS)
def test_keep_leaves_bytes_untouched_and_names_the_format(fmt: str) -> None:
    data = save(photo(32, 32), fmt)
    encoder = make_image_encoder({"codec": "keep"})
    if fmt == "ICO":
        with pytest.raises(SampleError, match="cannot be kept"):
            encoder.encode(data)
        return
    encoded = encoder.encode(bytearray(data))
    assert encoded.payload == data
    assert encoded.sizes["codec"] == IMAGE_CODECS[fmt.lower()]
    assert ImageDecoder(encoder.params).decode(encoded.payload, encoded.sizes).shape == (32, 32, encoded.sizes["channels"])


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_file_cut_anywhere_is_an_error_never_half_a_picture(fmt: str) -> None:
    data = save(photo(40, 32), fmt, **({"sizes": [(32, 32)]} if fmt == "ICO" else {}))
    # A TIFF may end in its directory's padding, an AVIF reader may ignore the last box: cut into the pixels there.
    last = {"TIFF": len(data) - 300, "AVIF": len(data) // 2}.get(fmt, len(data) - 1)
    for text in ("codec=raw", "codec=keep"):
        encoder = make_image_encoder(options(text))
        for end in {*range(0, last, max(1, last // 60)), last, last - 1, last - 2}:
            if not (fmt == "ICO" and text == "codec=keep"):
                with pytest.raises(SampleError):
                    encoder.encode(data[:end])


def test_a_later_gif_frame_that_is_larger_does_not_change_the_first() -> None:
    frames = [Image.fromarray(photo(16, 16, seed)).convert("P") for seed in range(2)]
    data = bytearray(save(frames[0], "GIF", save_all=True, append_images=frames[1:]))
    at = data.rindex(b"\x2c\0\0\0\0\x10\0\x10\0")
    data[at + 1 : at + 5] = struct.pack("<HH", 8, 4)
    encoder = make_image_encoder({"codec": "keep"})
    encoded = encoder.encode(bytes(data))
    assert ImageDecoder(encoder.params).decode(encoded.payload, encoded.sizes).shape[:2] == (16, 16)


@pytest.mark.parametrize("fmt", ["PNG", "WEBP", "JPEG", "GIF", "TIFF", "BMP"])
def test_damaged_bytes_give_a_sample_error_or_a_whole_picture(fmt: str) -> None:
    data = save(photo(24, 20), fmt, **({"compression": "tiff_lzw"} if fmt == "TIFF" else {}))
    rng = np.random.default_rng(len(fmt))
    encoder = make_image_encoder(options("codec=keep,max_pixels=1000000"))
    decoder = ImageDecoder(encoder.params, max_pixels=1_000_000)
    for _ in range(300):
        bad = bytearray(data)
        for _ in range(rng.integers(1, 4)):
            bad[rng.integers(len(bad))] ^= 1 << rng.integers(8)
        try:
            encoded = encoder.encode(bytes(bad))
        except SampleError as error:
            assert error.code
            assert error.reason
            continue
        pixels = decoder.decode(encoded.payload, encoded.sizes)
        assert pixels.shape[:2] == (encoded.sizes["height"], encoded.sizes["width"])


def test_png_damage_names_the_chunk() -> None:
    data = bytearray(save(photo(), "PNG"))
    data[data.index(b"IDAT") + 50] ^= 1
    with pytest.raises(SampleError, match=r"'IDAT'.*CRC") as caught:
        make_image_encoder({}).encode(bytes(data))
    assert caught.value.code == "crc"
    rows = zlib.compress(b"\0" * (61 * 20))
    with pytest.raises(SampleError, match="truncated"):
        make_image_encoder({}).encode(png(20, 20, 8, 2, b"", idat=rows[: len(rows) // 2]))
    with pytest.raises(SampleError, match="truncated"):
        make_image_encoder({}).encode(png(20, 20, 8, 2, b"\0" * (61 * 11)))


@pytest.mark.parametrize("interlace", [0, 1])
@pytest.mark.parametrize("colour", [0, 2, 4, 6])
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("size", [(9, 7), (8, 8), (1, 5), (5, 1), (1, 1), (2, 2)])
def test_a_png_with_too_few_rows_is_truncated_though_its_stream_ends_well(
    interlace: int, colour: int, bits: int, size: tuple[int, int]
) -> None:
    width, height = size
    depth = bits // 8 * {0: 1, 2: 3, 4: 2, 6: 4}[colour]
    passes = [(0, 0, 1, 1)]
    if interlace:
        passes = [(0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)]
    rows = []
    for x0, y0, dx, dy in passes:
        columns = len(range(x0, width, dx))
        rows += [b"\0" + b"\7" * (columns * depth)] * (len(range(y0, height, dy)) if columns else 0)
    encoder = make_image_encoder(options("codec=keep"))
    for keep in range(len(rows) + 1):
        data = bytearray(png(width, height, bits, colour, b"".join(rows[:keep])))
        data[28] = interlace
        data[8:33] = chunk(b"IHDR", bytes(data[16:29]))
        if keep == len(rows):
            assert encoder.encode(bytes(data)).sizes["height"] == height
        else:
            with pytest.raises(SampleError, match="truncated"):
                encoder.encode(bytes(data))
    black = png(width, height, bits, colour, b"\0" * (height * (1 + width * depth)))
    assert encoder.encode(black).sizes["width"] == width


def test_text_mode_transfer_of_png_is_recognised() -> None:
    data = save(photo(), "PNG").replace(b"\r\n", b"\n")
    with pytest.raises(SampleError, match="signature is damaged"):
        make_image_encoder({}).encode(data)


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "empty"),
        (b"hello", "not-image"),
        (b"fLaC" + b"\0" * 100, "not-image"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "lfs-pointer"),
        (b"\x89PNG\r\n\x1a\n", "truncated"),
        (b"\xff\xd8\xff", "truncated"),
        (b"GIF89a", "truncated"),
        (b"RIFF\4\0\0\0WEBP", "truncated"),
        (b"\0\0\1\0\0\0", "truncated"),
        (b"II*\0\0\0\0\0", "corrupt"),
        (b"\xff\xd8\xff\xd9", "corrupt"),
    ],
)
def test_what_is_no_picture_has_a_code(data: bytes, code: str) -> None:
    with pytest.raises(SampleError) as caught:
        make_image_encoder({}).encode(data)
    assert caught.value.code == code, caught.value


@pytest.mark.parametrize("text", STORED)
@pytest.mark.parametrize(
    "change",
    [
        {"width": 95},
        {"height": 65},
        {"width": 64, "height": 96},
        {"channels": 1},
        {"bits": 16},
        {"codec": 5},
        {"codec": 99},
        {"width": 0},
        {"bits": 7},
        {"channels": 5},
    ],
)
def test_an_index_that_disagrees_with_the_payload_is_an_error(text: str, change: dict[str, int]) -> None:
    encoder = make_image_encoder(options(text))
    encoded = encoder.encode(photo())
    if change == {"channels": 1} and "webp" in text:
        return  # how grey is stored in webp
    if change == {"width": 64, "height": 96} and "raw" in text:
        return  # raw pixels have no header to disagree
    with pytest.raises(SampleError):
        ImageDecoder(encoder.params).decode(encoded.payload, {**encoded.sizes, **change})


@pytest.mark.parametrize("text", STORED)
def test_a_payload_cut_short_is_truncated(text: str) -> None:
    encoder = make_image_encoder(options(text))
    encoded = encoder.encode(photo())
    decoder = ImageDecoder(encoder.params)
    for end in (0, 1, 11, 40, len(encoded.payload) // 2, len(encoded.payload) - 3):
        with pytest.raises(SampleError):
            decoder.decode(encoded.payload[:end], encoded.sizes)


def test_pils_switch_for_truncated_files_does_not_matter_and_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 3000)
    for fmt in ("JPEG", "PNG", "GIF", "BMP"):
        data = save(photo(), fmt)
        assert make_image_encoder({}).encode(data).sizes["width"] == 96
        with pytest.raises(SampleError, match="truncated"):
            make_image_encoder({}).encode(data[: len(data) * 2 // 3])
    assert ImageFile.LOAD_TRUNCATED_IMAGES is True
    assert Image.MAX_IMAGE_PIXELS == 3000


def test_the_switch_is_off_while_any_thread_is_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with strict_pil():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(10)
    with strict_pil():
        assert ImageFile.LOAD_TRUNCATED_IMAGES is False
    assert ImageFile.LOAD_TRUNCATED_IMAGES is False
    leave.set()
    thread.join()
    assert ImageFile.LOAD_TRUNCATED_IMAGES is True


@pytest.mark.parametrize(
    "error",
    [
        *(kind("x") for kind in (OSError, SyntaxError, ValueError, struct.error, ZeroDivisionError, OverflowError, EOFError)),
        *(kind("x") for kind in (KeyError, IndexError, TypeError, AttributeError, RecursionError, UserWarning)),
        *(kind() for kind in (MemoryError, AssertionError, Image.DecompressionBombError, Image.DecompressionBombWarning)),
    ],
)
def test_whatever_pil_raises_is_a_sample_error(error: Exception) -> None:
    with pytest.raises(SampleError) as caught, strict_pil():
        raise error
    assert caught.value.__cause__ is error
    assert caught.value.code in ("corrupt", "truncated", "memory", "pixel-limit")


def test_interrupts_and_our_own_errors_pass_through() -> None:
    for error in (KeyboardInterrupt(), LfdataError("x")):
        with pytest.raises(type(error)) as caught, strict_pil():
            raise error
        assert caught.value is error


def test_threads_share_encoders_and_decoders() -> None:
    encoder = make_image_encoder(options("codec=png"))
    decoder, failures = ImageDecoder(encoder.params), []

    def work(seed: int) -> None:
        for n in range(10):
            pixels = photo(40, 30, seed * 100 + n)
            encoded = encoder.encode(save(pixels, "PNG"))
            if not np.array_equal(decoder.decode(encoded.payload, encoded.sizes), pixels):
                failures.append(seed)

    threads = [threading.Thread(target=work, args=(s,)) for s in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_sixteen_bit_png_is_valid_and_compressed() -> None:
    smooth = np.repeat(np.arange(0, 60000, 100, dtype=np.uint16)[None, :, None], 50, 0).repeat(3, 2)
    encoded = make_image_encoder(options("codec=png,bits16=keep")).encode(png16(smooth))
    assert len(encoded.payload) < smooth.nbytes // 10
    bad = bytes(encoded.payload).replace(b"IEND", b"IENX")
    with pytest.raises(SampleError):
        ImageDecoder({**make_image_encoder(options("codec=png,bits16=keep")).params}).decode(bad, encoded.sizes)


def test_stray_chunks_and_bytes_after_the_end_are_no_harm() -> None:
    data = png(2, 1, 8, 0, b"\0\1\2", chunk(b"prVt", b"anything")) + b"trailing"
    encoder = make_image_encoder({"codec": "keep"})
    encoded = encoder.encode(data)
    assert encoded.payload == data
    assert ImageDecoder(encoder.params).decode(data, encoded.sizes).ravel().tolist() == [1, 2]


def test_report_names_the_pil_and_its_libraries() -> None:
    report = pil_versions.pil_report()
    assert report["distribution"] in ("pillow", "pillow-simd")
    assert report["libwebp"]
    assert report["libjpeg_turbo"]
    assert set(supported_formats()) >= {"jpeg", "png", "webp", "gif", "tiff", "bmp"}


def _checked(monkeypatch: pytest.MonkeyPatch, version: str, library: str | None, package: str | None) -> list[str]:
    monkeypatch.setattr(pil_versions.features, "version_module", lambda _name: version)
    others = [Path("/v/lib/python3.11/site-packages/av.libs/libwebp-2.so.7")]
    monkeypatch.setattr(pil_versions, "loaded_libraries", lambda _stem: others + ([Path(library)] if library else []))
    monkeypatch.setattr(pil_versions, "_dpkg_version", lambda _path: package)
    return pil_versions.check_codec_versions()


def test_dangerous_libwebp_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    wheel, system = "/v/lib/python3.11/site-packages/pillow.libs/libwebp-1.so.7", "/usr/lib/x86_64-linux-gnu/libwebp.so.7.1.5"
    assert _checked(monkeypatch, "1.3.2", wheel, None) == []
    assert _checked(monkeypatch, "1.10.0", wheel, None) == []
    assert _checked(monkeypatch, "1.3.1", wheel, None)[0].startswith("error:")
    assert _checked(monkeypatch, "1.2.4", None, None)[0].startswith("error:")
    assert "unverified" in _checked(monkeypatch, "1.2.4", system, None)[0]


@pytest.mark.skipif(not Path("/usr/bin/dpkg").exists(), reason="dpkg compares the package versions")
def test_a_distributions_backport_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    system = "/usr/lib/x86_64-linux-gnu/libwebp.so.7.1.5"
    assert _checked(monkeypatch, "1.2.4", system, "1.2.4-0.2+deb12u1") == []
    assert _checked(monkeypatch, "1.2.4", system, "1.2.4-0.2")[0].startswith("error:")


def test_the_installed_libwebp_is_found_and_sound() -> None:
    assert pil_versions.loaded_libraries("libwebp")
    assert not [f for f in pil_versions.check_codec_versions() if f.startswith("error:")]
