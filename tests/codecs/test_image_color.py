"""Colour, depth, alpha, orientation, masks: what went in comes out, once, in the stated form."""

from __future__ import annotations

import sys
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageCms, ImageOps

sys.path.insert(0, str(Path(__file__).parent))
from image_samples import asymmetric, chunk, exif, options, photo, png, png16, save, scaled

from lfdata.codecs.base import Encoded
from lfdata.codecs.image import ImageDecoder, make_image_encoder
from lfdata.errors import SampleError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # PIL's remarks


def roundtrip(raw: object, text: str) -> tuple[np.ndarray, Encoded]:
    encoder = make_image_encoder(options(text))
    encoded = encoder.encode(raw)  # type: ignore[arg-type]
    pixels = ImageDecoder(encoder.params).decode(encoded.payload, encoded.sizes)
    sizes = encoded.sizes
    assert pixels.shape == (sizes["height"], sizes["width"], sizes["channels"])
    assert pixels.dtype.itemsize * 8 == sizes["bits"]
    assert pixels.flags.writeable
    assert pixels.flags.owndata
    return pixels, encoded


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("fmt", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize(
    "text", ["codec=keep", "codec=raw", "codec=webp,lossless=yes", "codec=jpeg,quality=100,subsampling=444"]
)
def test_orientation_is_applied_once(orientation: int, fmt: str, text: str) -> None:
    how: dict[str, object] = {"exif": exif(orientation)} if fmt != "TIFF" else {"tiffinfo": {274: orientation}}
    how |= {"JPEG": {"quality": 95, "subsampling": "4:4:4"}, "WEBP": {"lossless": True}}.get(fmt, {})
    data = save(asymmetric(), fmt, **how)
    with Image.open(BytesIO(data)) as image:
        expected = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
    pixels, encoded = roundtrip(data, text)
    assert pixels.shape == ((16, 24, 3) if orientation < 5 else (24, 16, 3))
    assert np.abs(pixels.astype(int) - expected).max() <= (0 if "jpeg" not in text else 60)
    if text == "codec=keep":
        assert encoded.payload == data


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_of_sixteen_bit_pictures(orientation: int) -> None:
    pixels = (asymmetric().astype(np.uint16) * 257) ^ 3
    data = png16(pixels, chunk(b"eXIf", exif(orientation).removeprefix(b"Exif\0\0")))
    out, _ = roundtrip(data, "codec=raw,bits16=keep")
    flat, _ = roundtrip(save(asymmetric(), "PNG", exif=exif(orientation)), "codec=raw")
    assert np.array_equal(out ^ 3, flat.astype(np.uint16) * 257)


@pytest.mark.parametrize(
    "block",
    [
        b"Exif\0\0II*\0\xff\xff\xff\xff",
        b"Exif\0\0MM\0*\0\0\0\x08\xff\xff",
        b"Exif\0\0junk",
        b"Exif\0\0II*\0\x08\0\0\0\1\0\x12\1\3\0\1\0\0\0\x63\0\0\0",
    ],
)
def test_damaged_exif_means_upright(block: bytes) -> None:
    pixels, _ = roundtrip(save(asymmetric(), "JPEG", exif=block), "codec=keep")
    assert pixels.shape == (16, 24, 3)


def _without_adobe(data: bytes) -> bytes:
    start = data.index(b"\xff\xee")
    return data[:start] + data[start + 2 + int.from_bytes(data[start + 2 : start + 4], "big") :]


@pytest.mark.parametrize("text", ["codec=keep", "codec=png"])
def test_cmyk_has_the_right_polarity_with_and_without_the_adobe_marker(text: str) -> None:
    inks = np.zeros((16, 32, 4), np.uint8)
    inks[:, 16:] = (0, 255, 255, 0)  # paper white, then red
    adobe = save(Image.fromarray(inks, mode="CMYK"), "JPEG", quality=95)
    plain = _without_adobe(save(Image.fromarray(255 - inks, mode="CMYK"), "JPEG", quality=95))
    for data in (adobe, plain):
        pixels, _ = roundtrip(data, text)
        assert pixels[4, 4].min() > 240, "paper must be white"
        assert pixels[4, 28, 0] > 240, "magenta and yellow make red"
        assert pixels[4, 28, 1:].max() < 40


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize("interlaced", [False, True])
def test_sixteen_bits_are_kept_whole_or_scaled_exactly(channels: int, interlaced: bool) -> None:
    rng = np.random.default_rng(channels)
    pixels = rng.integers(0, 65536, (13, 11, channels), dtype=np.uint16)
    pixels[0, :6] = np.array([0, 128, 129, 255, 256, 65535], np.uint16)[:, None]
    data = _interlaced16(pixels) if interlaced else png16(pixels)
    kept, encoded = roundtrip(data, "codec=png,bits16=keep")
    assert encoded.sizes["bits"] == 16
    assert np.array_equal(kept, pixels)
    assert np.array_equal(roundtrip(data, "codec=raw,bits16=keep")[0], pixels)
    assert np.array_equal(roundtrip(data, "codec=keep,bits16=keep")[0], pixels)
    for text in ("codec=png", "codec=raw", "codec=keep", "codec=webp,lossless=yes"):
        assert np.array_equal(roundtrip(data, text)[0], scaled(pixels)), text
    assert np.array_equal(roundtrip(pixels, "codec=raw")[0], scaled(pixels))


def _interlaced16(pixels: np.ndarray) -> bytes:
    rows = b""
    for x0, y0, dx, dy in ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)):
        part = pixels[y0::dy, x0::dx]
        if part.size:
            rows += b"".join(b"\0" + row.astype(">u2").tobytes() for row in part)
    height, width, channels = pixels.shape
    data = bytearray(png(width, height, 16, {1: 0, 2: 4, 3: 2, 4: 6}[channels], rows))
    data[28] = 1
    header = chunk(b"IHDR", bytes(data[16:29]))
    return bytes(data[:8]) + header + bytes(data[8 + len(header) :])


@pytest.mark.parametrize("compression", ["raw", "tiff_deflate", "tiff_lzw"])
def test_sixteen_bit_grey_tiff(compression: str) -> None:
    pixels = np.random.default_rng(3).integers(0, 65536, (9, 14), dtype=np.uint16)
    data = save(Image.fromarray(pixels), "TIFF", compression=compression)
    assert np.array_equal(roundtrip(data, "codec=keep,bits16=keep")[0][:, :, 0], pixels)
    assert np.array_equal(roundtrip(data, "codec=raw")[0][:, :, 0], scaled(pixels))


@pytest.mark.parametrize("order", ["<", ">"])
def test_sixteen_bit_colour_tiff(order: str) -> None:
    pixels = np.random.default_rng(4).integers(0, 65536, (9, 14, 3), dtype=np.uint16)
    assert np.array_equal(roundtrip(_rgb16_tiff(pixels, order), "codec=png,bits16=keep")[0], pixels)
    assert np.array_equal(roundtrip(_rgb16_tiff(pixels, order), "codec=raw")[0], scaled(pixels))


def _rgb16_tiff(pixels: np.ndarray, order: str) -> bytes:
    import struct

    height, width, _ = pixels.shape
    body = pixels.astype(f"{order}u2").tobytes()
    tags = [(256, 4, 1, width), (257, 4, 1, height), (258, 3, 3, 8 + len(body)), (259, 3, 1, 1), (262, 3, 1, 2), (273, 4, 1, 8)]
    tags += [(277, 3, 1, 3), (278, 4, 1, height), (279, 4, 1, len(body))]
    out = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}I", 8 + len(body) + 6) + body
    out += struct.pack(f"{order}3H", 16, 16, 16) + struct.pack(f"{order}H", len(tags))
    for tag, kind, count, value in tags:
        cell = struct.pack(f"{order}HH", value, 0) if kind == 3 and count == 1 else struct.pack(f"{order}I", value)
        out += struct.pack(f"{order}HHI", tag, kind, count) + cell
    return out + b"\0" * 4


def test_transparent_colours_of_png_become_alpha() -> None:
    grey = np.array([[0, 7], [7, 200]], np.uint8)
    rows = b"".join(b"\0" + r.tobytes() for r in grey)
    out, _ = roundtrip(png(2, 2, 8, 0, rows, chunk(b"tRNS", b"\0\7")), "codec=png")
    assert out.tolist() == [[[0, 255], [7, 0]], [[7, 0], [200, 255]]]
    two_bit, _ = roundtrip(png(4, 1, 2, 0, b"\0\x1b", chunk(b"tRNS", b"\0\2")), "codec=png")
    assert two_bit.tolist() == [[[0, 255], [85, 255], [170, 0], [255, 255]]]
    one_bit, _ = roundtrip(png(2, 1, 1, 0, b"\0\x40", chunk(b"tRNS", b"\0\1")), "codec=png")
    assert one_bit.tolist() == [[[0, 255], [255, 0]]]
    deep = np.array([[[1, 2, 3], [1, 2, 4]]], np.uint16)
    key = chunk(b"tRNS", np.array([1, 2, 3], ">u2").tobytes())
    out16, _ = roundtrip(png16(deep, key), "codec=png,bits16=keep")
    assert out16[0, :, 3].tolist() == [0, 65535]
    rgb = png(2, 1, 8, 2, b"\0\1\2\3\1\2\4", key)
    assert roundtrip(rgb, "codec=png")[0][0, :, 3].tolist() == [0, 255]


def _palette_png(fmt: str = "PNG", **how: object) -> tuple[bytes, np.ndarray]:
    index = np.arange(48, dtype=np.uint8).reshape(6, 8) % 7
    image = Image.fromarray(index, mode="P")
    image.putpalette([v for i in range(7) for v in (250 - i * 30, i * 30, 100 + i)])
    return save(image, fmt, **how), index


def test_palettes_become_colours_for_pictures_and_stay_indices_for_masks() -> None:
    for fmt in ("PNG", "GIF", "BMP", "TIFF"):
        data, index = _palette_png(fmt)
        for text in ("codec=png", "codec=webp,lossless=yes", "codec=keep"):
            colours, _ = roundtrip(data, text)
            assert np.array_equal(colours[:, :, 0], 250 - index * 30), (fmt, text)
            for role in ("mask", "depth"):
                labels, _ = roundtrip(
                    data, text.replace(",lossless=yes", "") + f",role={role}" + ",lossless=yes" * ("webp" in text)
                )
                assert np.array_equal(labels[:, :, 0], index), (fmt, text)
                assert labels.shape[2] == 1


def test_palette_transparency() -> None:
    data, index = _palette_png(transparency=3)
    out, _ = roundtrip(data, "codec=png")
    assert np.array_equal(out[:, :, 3] == 0, index == 3)
    data, index = _palette_png(transparency=bytes([0, 50, 100, 150, 200, 250, 255]))
    out, _ = roundtrip(data, "codec=webp,lossless=yes")
    assert np.array_equal(out[:, :, 3], np.array([0, 50, 100, 150, 200, 250, 255])[index])
    assert np.array_equal(roundtrip(data, "codec=png,role=mask")[0][:, :, 0], index)


@pytest.mark.parametrize(("bits", "labels"), [(1, [0, 1, 1, 0]), (2, [0, 1, 2, 3]), (4, [0, 3, 9, 15])])
def test_narrow_label_images_keep_their_values(bits: int, labels: list[int]) -> None:
    packed = 0
    for value in labels:
        packed = packed << bits | value
    body = packed << (-4 * bits % 8)
    data = png(4, 1, bits, 0, b"\0" + body.to_bytes(-(-4 * bits // 8), "big"))
    for text in ("codec=png", "codec=raw", "codec=webp", "codec=keep"):
        assert roundtrip(data, text + ",role=mask")[0].ravel().tolist() == labels
    assert roundtrip(data, "codec=png")[0].ravel().tolist() == [v * 255 // (2**bits - 1) for v in labels]


@pytest.mark.parametrize("text", ["codec=png", "codec=raw", "codec=webp", "codec=keep"])
def test_masks_come_out_exactly_as_they_went_in(text: str) -> None:
    labels = np.random.default_rng(9).integers(0, 256, (37, 53), dtype=np.uint8)
    data = save(labels, "PNG")
    assert np.array_equal(roundtrip(data, text + ",role=mask")[0][:, :, 0], labels)
    if text != "codec=keep":
        half, _ = roundtrip(data, text + ",role=mask,exact=20x20")
        assert set(np.unique(half)) <= set(np.unique(labels))
        assert np.array_equal(roundtrip(labels, text + ",role=mask")[0][:, :, 0], labels)


def test_lossy_files_are_not_kept_as_masks_and_deep_ones_do_not_fit_webp() -> None:
    for data in (save(photo(), "JPEG"), save(photo(), "WEBP"), save(photo(), "TIFF", compression="jpeg")):
        with pytest.raises(SampleError, match="lossy-mask"):
            make_image_encoder(options("codec=keep,role=mask")).encode(data)
        assert "lossy" in make_image_encoder(options("codec=png,role=mask")).encode(data).warnings[0]
    assert roundtrip(save(photo(), "WEBP", lossless=True), "codec=keep,role=mask")[1].sizes["channels"] == 3
    with pytest.raises(SampleError, match="bits16"):
        make_image_encoder(options("codec=webp,role=depth")).encode(np.zeros((4, 4), np.uint16))
    depth = np.arange(64, dtype=np.uint16).reshape(8, 8) * 1000
    assert np.array_equal(roundtrip(save(Image.fromarray(depth), "PNG"), "role=depth")[0][:, :, 0], depth)


@pytest.mark.parametrize("text", ["codec=webp", "codec=webp,lossless=yes", "codec=png", "codec=raw"])
@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_every_number_of_channels_survives_every_codec(text: str, channels: int) -> None:
    pixels = np.concatenate((photo(), photo(seed=1)), axis=2)[:, :, :channels]
    out, encoded = roundtrip(pixels, text)
    assert encoded.sizes["channels"] == channels
    if text == "codec=webp":
        assert np.abs(out.astype(int) - pixels)[:, :, : channels - (channels in (2, 4)) or 1].mean() < 30
    else:
        assert np.array_equal(out, pixels)


def test_alpha_policies() -> None:
    pixels = np.zeros((2, 2, 4), np.uint8)
    pixels[:] = (200, 100, 0, 0)
    pixels[0] = (200, 100, 0, 255)
    data = save(pixels, "PNG")
    assert np.array_equal(roundtrip(data, "codec=png")[0], pixels)
    for text in ("codec=png", "codec=keep"):
        assert np.array_equal(roundtrip(data, text + ",alpha=drop")[0], pixels[:, :, :3])
        blended, _ = roundtrip(data, text + ",alpha=blend:0a1422")
        assert blended.tolist() == [[[200, 100, 0]] * 2, [[10, 20, 34]] * 2]
    assert roundtrip(data, "codec=jpeg")[1].sizes["channels"] == 3
    deep, _ = roundtrip(png16(pixels.astype(np.uint16) * 257), "codec=png,bits16=keep,alpha=blend:0a1422")
    assert np.array_equal(deep, blended.astype(np.uint16) * 257)


def _profile(space: str) -> bytes:
    return ImageCms.ImageCmsProfile(ImageCms.createProfile(space)).tobytes()


def test_profiles() -> None:
    pixels = photo()
    same, encoded = roundtrip(save(pixels, "PNG", icc_profile=_profile("sRGB")), "codec=png")
    assert np.array_equal(same, pixels)
    assert not encoded.warnings
    for bad in (b"not a profile at all", _profile("sRGB")[:200], _profile("LAB")):
        out, encoded = roundtrip(save(pixels, "PNG", icc_profile=bad), "codec=png")
        assert np.array_equal(out, pixels)
        assert "ICC profile ignored" in encoded.warnings[0]
        assert not roundtrip(save(pixels, "PNG", icc_profile=bad), "codec=png,icc=ignore")[1].warnings


@pytest.mark.parametrize("text", ["codec=webp", "codec=png", "codec=jpeg"])
def test_no_metadata_is_written(text: str) -> None:
    data = save(photo(), "JPEG", exif=exif(6), icc_profile=b"x" * 300, comment=b"secret", dpi=(7, 7))
    payload = bytes(make_image_encoder(options(text)).encode(data).payload)
    with Image.open(BytesIO(payload)) as image:
        image.load()
        assert not {"icc_profile", "exif", "comment", "xmp"} & set(image.info)
    assert b"secret" not in payload


@pytest.mark.parametrize("fmt", ["GIF", "PNG", "WEBP", "TIFF"])
def test_animation_policies(fmt: str) -> None:
    frames = [Image.fromarray(photo(seed=s)) for s in range(3)]
    data = save(frames[0], fmt, save_all=True, append_images=frames[1:], **({"lossless": True} if fmt == "WEBP" else {}))
    first, encoded = roundtrip(data, "codec=png")
    assert "first" in encoded.warnings[0]
    kept, encoded = roundtrip(data, "codec=keep")
    assert encoded.payload == data
    assert np.array_equal(kept, first)
    if fmt != "GIF":
        assert np.array_equal(first[:, :, :3], photo(seed=0))
    for codec in ("codec=png", "codec=keep"):
        with pytest.raises(SampleError, match="animated"):
            make_image_encoder(options(codec + ",animation=error")).encode(data)


def test_pixels_that_are_no_picture_are_refused() -> None:
    for image in (Image.fromarray(np.ones((4, 4), np.float32)), Image.fromarray(np.full((4, 4), 70000, np.int32))):
        with pytest.raises(SampleError, match="unsupported"):
            make_image_encoder({}).encode(save(image, "TIFF"))
    for bad in (
        np.ones((4, 4), np.float32),
        np.ones((4, 4, 5), np.uint8),
        np.ones((0, 4), np.uint8),
        np.ones(4, np.uint8),
        "text",
    ):
        with pytest.raises(SampleError, match="type"):
            make_image_encoder({}).encode(bad)  # type: ignore[arg-type]
    with pytest.raises(SampleError, match="codec-limit"):
        make_image_encoder({}).encode(np.zeros((1, 16384), np.uint8))
