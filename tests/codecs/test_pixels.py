"""Rectangles of stored pictures: the native decoder against the definition (PIL), and what damaged payloads do to both."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent))
from image_samples import exif, options, photo, png16, save

from lfdata.codecs import jpeg
from lfdata.codecs.base import Encoded, PackedPayloads
from lfdata.codecs.image import IMAGE_CODECS, make_image_encoder
from lfdata.codecs.pil_versions import pil_report
from lfdata.codecs.pixels import CropDecoder, native_module, native_report, resized
from lfdata.errors import OptionError, SampleError

POISON = 0xA5
KEEP = make_image_encoder({"codec": "keep"})
needs_native = pytest.mark.skipif(native_module is None, reason="lfdata.codecs._pixels is not built")
needs_jpegtran = pytest.mark.skipif(shutil.which("jpegtran") is None, reason="jpegtran (libjpeg-turbo-progs) is not installed")
ENGINES = [pytest.param(None, id="native", marks=needs_native), pytest.param(False, id="pil")]


def same_libraries() -> bool:
    """Whether PIL decodes with the very libraries of the native module: then whole pixels are equal to the last bit."""
    pil, native = pil_report(), native_report()
    return (pil["libjpeg_turbo"], pil["libwebp"]) == (native.get("libjpeg"), native.get("libwebp"))


EXACT = 0 if same_libraries() else 2


def jpeg_of(pixels: np.ndarray | Image.Image, **how: Any) -> bytes:
    return save(pixels, "JPEG", **{"quality": 90, **how})


def columns(items: Sequence[Encoded], **other: int) -> dict[str, np.ndarray]:
    """The index columns of some encoded pictures."""
    names = ("width", "height", "channels", "codec", "bits")
    return {name: np.array([other.get(name, item.sizes[name]) for item in items]) for name in names}


def crops(
    items: Sequence[Encoded],
    boxes: Any,
    size: tuple[int, int],
    *,
    params: Any = None,
    flips: Any = None,
    channels: int = 3,
    native: bool | None = None,
    sizes: dict[str, np.ndarray] | None = None,
    **how: Any,
) -> tuple[np.ndarray, dict[int, SampleError]]:
    """Decode into poisoned memory."""
    decoder = CropDecoder(KEEP.params if params is None else params, channels=channels, native=native)
    out = np.full((len(items), *size, channels), POISON, np.uint8)
    flips = np.zeros(len(items), bool) if flips is None else np.asarray(flips, bool)
    bad = decoder.crop_resize(
        [item.payload for item in items], sizes or columns(items), np.array(boxes, np.float64), flips, out, **how
    )
    return out, bad


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    error = float(((a.astype(np.float64) - b) ** 2).mean())
    return 10 * float(np.log10(255**2 / max(error, 1e-9)))


def assert_alike(
    items: Sequence[Encoded], boxes: Any, size: tuple[int, int], *, most: int = 2, least: float = 45.0, **how: Any
) -> None:
    """Native and fallback give the same pixels, up to ``most`` levels and with a signal to noise ratio of ``least``."""
    found, bad = crops(items, boxes, size, **how)
    wanted, bad_too = crops(items, boxes, size, native=False, **how)
    assert not bad and not bad_too, (bad, bad_too)
    for number in range(len(items)):
        difference = np.abs(found[number].astype(int) - wanted[number])
        ratio = psnr(found[number], wanted[number])
        assert difference.max() <= most and ratio >= least, (number, boxes[number], size, int(difference.max()), ratio)


def turned_440() -> bytes:
    """A 4:4:0 JPEG, which PIL does not write: a 4:2:2 one turned losslessly."""
    tool = shutil.which("jpegtran")
    if tool is None:
        pytest.skip("no jpegtran")
    lying = jpeg_of(photo(144, 208, 5), subsampling=1)
    return subprocess.run([tool, "-rotate", "90"], input=lying, capture_output=True, check=True, timeout=60).stdout


KINDS = {
    "444": lambda: jpeg_of(photo(211, 147), subsampling=0),
    "422": lambda: jpeg_of(photo(211, 147), subsampling=1),
    "420": lambda: jpeg_of(photo(211, 147), subsampling=2),
    "440": turned_440,
    "grey": lambda: jpeg_of(photo(211, 147)[:, :, 0]),
    "rgb": lambda: jpeg_of(photo(211, 147), keep_rgb=True, subsampling=0),
    "progressive": lambda: jpeg_of(photo(211, 147), progressive=True),
    "progressive-444": lambda: jpeg_of(photo(211, 147), progressive=True, subsampling=0),
    "restarts": lambda: jpeg_of(photo(211, 147), restart_marker_blocks=3),
    "webp": lambda: save(photo(211, 147), "WEBP", quality=80),
    "webp-lossless": lambda: save(photo(211, 147), "WEBP", lossless=True),
}
BOXES = [
    (0, 0, 1, 1),
    (0, 0, 208, 144),
    (207, 143, 208, 144),
    (0, 143, 208, 144),
    (207, 0, 208, 144),
    (0.25, 0.75, 100.5, 77.125),
    (17, 33, 18, 90),
    (33.3, 17.7, 160.1, 18.2),
    (100, 60, 207.999, 143.999),
    (3, 5, 60, 47),
    (96, 64, 160, 128),
    (1e-9, 0, 0.5, 0.5),
]


@pytest.fixture(scope="module")
def kinds() -> dict[str, Encoded]:
    return {name: KEEP.encode(make()) for name, make in KINDS.items() if name != "440" or shutil.which("jpegtran")}


@needs_native
def test_report_and_choice() -> None:
    report = native_report()
    assert report["native"] and report["libjpeg"] and report["libwebp"] and report["simd"] in ("avx2", "none")
    CropDecoder(KEEP.params, native=True)


def test_without_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lfdata.codecs.pixels.native_module", None)
    assert native_report()["native"] is False and "not built" in native_report()["why"]
    with pytest.raises(OptionError, match="not built"):
        CropDecoder(KEEP.params, native=True)
    with pytest.raises(OptionError, match="2 channels"):
        CropDecoder(KEEP.params, channels=2)
    item = KEEP.encode(jpeg_of(photo(40, 30)))
    out, bad = crops([item], [(0, 0, 40, 30)], (30, 40))
    assert not bad and np.array_equal(out[0], np.asarray(Image.open(BytesIO(item.payload))))


@needs_native
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(1, 1), (24, 16), (64, 64), (150, 5)], ids=str)
def test_native_equals_fallback(kinds: dict[str, Encoded], kind: str, size: tuple[int, int]) -> None:
    if kind not in kinds:
        pytest.skip("no jpegtran")
    # Where the box is at least twice as large as the output, the decoder makes it smaller: that has tests of its own.
    boxes = [b for b in BOXES if "webp" in kind or b[2] - b[0] < 2 * size[1] or b[3] - b[1] < 2 * size[0]]
    assert_alike([kinds[kind]] * len(boxes), boxes, size)
    assert_alike([kinds[kind]] * len(boxes), boxes, size, flips=np.arange(len(boxes)) % 2)


@needs_native
@pytest.mark.parametrize("kind", KINDS)
def test_whole_pixels_are_exact(kinds: dict[str, Encoded], kind: str) -> None:
    """Same size, integral offsets, odd ones too: nothing is filtered, so nothing may differ."""
    if kind not in kinds:
        pytest.skip("no jpegtran")
    width, height = 41, 27
    spots = [
        (x, y)
        for x in (0, 1, 2, 7, 8, 15, 16, 17, 31, 33, 62, 65, 113, 166, 167)
        for y in (0, 1, 9, 15, 16, 17, 31, 50, 83, 117)
    ]
    boxes = [(x, y, x + width, y + height) for x, y in spots]
    items = [kinds[kind]] * len(boxes)
    assert_alike(items, boxes, (height, width), most=EXACT, least=0)
    whole = [(0, 0, kinds[kind].sizes["width"], kinds[kind].sizes["height"])]
    assert_alike(items[:1], whole, (whole[0][3], whole[0][2]), most=EXACT, least=0)


@needs_native
@pytest.mark.parametrize(
    "size", [(1, 1), (1, 9), (9, 1), (2, 2), (3, 50), (17, 15), (16, 16), (8, 33), (1, 300), (300, 1)], ids=str
)
def test_small_and_thin_pictures(size: tuple[int, int]) -> None:
    pixels = photo(size[1], size[0], 3)
    made = [jpeg_of(pixels, subsampling=s) for s in (0, 1, 2)] + [jpeg_of(pixels[:, :, 0]), save(pixels, "WEBP", quality=90)]
    items = [KEEP.encode(data) for data in made]
    box = [(0, 0, size[1], size[0])] * len(items)
    assert_alike(items, box, size, most=EXACT, least=0)
    assert_alike(items, [(0.1 * size[1], 0.3 * size[0], 0.9 * size[1], 0.95 * size[0])] * len(items), (7, 5), least=0)
    assert_alike(items[:4], [(0, 0, size[1], size[0])] * 4, (1, 1), least=24, most=16)


@needs_native
@pytest.mark.parametrize("times", [1.0, 1.9, 2.0, 3.7, 4.0, 7.9, 8.0, 11.0])
def test_scaled_inside_the_dct(times: float) -> None:
    """The picture is made smaller in the inverse DCT where the box is 2, 4 or 8 times the output: another filter, a near result."""
    pixels = np.asarray(Image.fromarray(photo(96, 72, 9)).resize((800, 600), Image.Resampling.BICUBIC))
    items = [KEEP.encode(jpeg_of(pixels, subsampling=s, progressive=p)) for s in (0, 1, 2) for p in (False, True)]
    items += [KEEP.encode(jpeg_of(pixels[:, :, 1])), KEEP.encode(jpeg_of(pixels, keep_rgb=True))]
    size = (48, 56)
    for x0, y0 in ((0.0, 0.0), (13.0, 7.0), (101.3, 55.5), (800 - size[1] * times, 600 - size[0] * times)):
        box = (x0, y0, x0 + size[1] * times, y0 + size[0] * times)
        if box[2] <= 800 and box[3] <= 600:
            # At exactly 8 a box filter stands in for the triangle, and 4:2:2 has colour twice as coarse along the row.
            assert_alike(items, [box] * len(items), size, most=24, least=36 if times == 8 else 40)


@needs_native
def test_very_small_results() -> None:
    """Thousands of inputs for an output: weights below the rounding of one."""
    ramp = np.broadcast_to(np.linspace(0, 255, 12000).astype(np.uint8)[None, :, None], (9, 12000, 3))
    items = [KEEP.encode(save(ramp, "WEBP", lossless=True)), KEEP.encode(jpeg_of(ramp))]
    assert_alike(items, [(0, 0, 12000, 9)] * 2, (9, 1))
    assert_alike(items, [(5, 0, 11990, 9)] * 2, (1, 2))


@needs_native
@pytest.mark.parametrize("kind", KINDS)
def test_grey_output(kinds: dict[str, Encoded], kind: str) -> None:
    """Grey is the luminance of the file where PIL computes it from colours, which differs where colours were clipped."""
    if kind not in kinds:
        pytest.skip("no jpegtran")
    boxes = [b for b in BOXES if b[2] - b[0] < 90]
    assert_alike([kinds[kind]] * len(boxes), boxes, (50, 60), channels=1, most=8, least=42)


def test_what_only_pil_decodes() -> None:
    pixels = photo(67, 45, 8)
    alpha = np.dstack([pixels, np.where(pixels[:, :, 0] > 99, 255, 40).astype(np.uint8)])
    kept = [
        save(Image.fromarray(pixels).convert("CMYK"), "JPEG", quality=90),
        save(alpha, "WEBP", lossless=True, exact=True),
        save(alpha, "PNG"),
        save(pixels[:, :, 0], "PNG"),
        save(Image.fromarray(pixels).quantize(16), "GIF"),
        save(pixels, "BMP"),
    ]
    items = [KEEP.encode(data) for data in kept]
    boxes = [(0, 0, 67, 45), (3, 4, 60, 44), (0.5, 0.25, 30, 40), (1, 1, 2, 2), (9, 9, 67, 45), (0, 0, 67, 1)]
    for channels in (1, 3):
        assert_alike(items, boxes, (20, 30), channels=channels, most=0)
    raw = make_image_encoder({"codec": "raw"})
    assert_alike([raw.encode(pixels), raw.encode(alpha)], boxes[:2], (20, 30), params=raw.params, most=0)
    whole, bad = crops([raw.encode(pixels)], [(0, 0, 67, 45)], (45, 67), params=raw.params)
    assert not bad and np.array_equal(whole[0], pixels)


@pytest.mark.parametrize("native", ENGINES)
def test_long_sides(native: bool | None) -> None:
    """Longer than a JPEG can be, among pictures that are not."""
    raw = make_image_encoder({"codec": "raw"})
    line = np.arange(1_500_000, dtype=np.uint32).astype(np.uint8).reshape(1, -1)
    items = [raw.encode(line), raw.encode(photo(9, 9))]
    out, bad = crops(items, [(7, 0, 71, 1), (0, 0, 9, 9)], (1, 64), params=raw.params, native=native)
    assert not bad and np.array_equal(out[0, 0, :, 1], line[0, 7:71])
    whole, bad = crops(items[:1], [(0, 0, 1_500_000, 1)], (1, 1_500_000), params=raw.params, channels=1, native=native)
    assert not bad and np.array_equal(whole[0, :, :, 0], line)


def test_sixteen_bits_and_pixel_limits() -> None:
    deep = make_image_encoder({"codec": "png", "bits16": "keep"})
    items = [deep.encode(png16(np.arange(48, dtype=np.uint16).reshape(4, 4, 3) * 1000)), deep.encode(photo(8, 8))]
    _, bad = crops(items, [(0, 0, 4, 4), (0, 0, 8, 8)], (4, 4), params=deep.params)
    assert {number: error.code for number, error in bad.items()} == {0: "bits16"}
    decoder = CropDecoder(KEEP.params, max_pixels=99)
    item = KEEP.encode(jpeg_of(photo(10, 10)))
    bad = decoder.crop_resize(
        [item.payload], columns([item]), np.array([[0.0, 0, 10, 10]]), np.zeros(1, bool), np.empty((1, 4, 4, 3), np.uint8)
    )
    assert bad[0].code == "pixel-limit"


@pytest.mark.parametrize("native", ENGINES)
@pytest.mark.parametrize("fmt", ["JPEG", "WEBP"])
def test_orientation_of_kept_files(native: bool | None, fmt: str) -> None:
    pixels = photo(90, 60, 4)
    items = [KEEP.encode(save(pixels, fmt, exif=exif(o), quality=95)) for o in range(1, 9)]
    boxes = [(5, 3, i.sizes["width"] - 9, i.sizes["height"] - 2.5) for i in items]
    out, bad = crops(items, boxes, (33, 35), native=native)
    assert not bad
    upright = np.asarray(Image.open(BytesIO(items[0].payload)).convert("RGB"))
    turns = [
        lambda p: p,
        lambda p: p[:, ::-1],
        lambda p: p[::-1, ::-1],
        lambda p: p[::-1],
        lambda p: p.transpose(1, 0, 2),
        lambda p: p.transpose(1, 0, 2)[:, ::-1],
        lambda p: p.transpose(1, 0, 2)[::-1, ::-1],
        lambda p: p.transpose(1, 0, 2)[::-1],
    ]
    for number, turn in enumerate(turns):
        wanted = resized(np.ascontiguousarray(turn(upright)), boxes[number], (33, 35), 3, False)
        assert np.abs(out[number].astype(int) - wanted).max() <= 2, number + 1


@needs_native
@pytest.mark.parametrize("fmt", ["JPEG", "WEBP"])
def test_colour_profiles_go_through_pil(fmt: str) -> None:
    from PIL import ImageCms

    lab = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    item = KEEP.encode(save(photo(60, 40), fmt, icc_profile=lab))
    assert_alike([item], [(2, 3, 50, 40)], (30, 30), most=0)
    ignoring = make_image_encoder({"codec": "keep", "icc": "ignore"})
    assert_alike([item], [(2, 3, 50, 40)], (30, 30), params=ignoring.params)


DAMAGED = {
    "420": lambda: jpeg_of(photo(96, 80, 11), subsampling=2),
    "progressive": lambda: jpeg_of(photo(96, 80, 11), progressive=True),
    "webp": lambda: save(photo(96, 80, 11), "WEBP", quality=80),
    "webp-lossless": lambda: save(photo(48, 40, 11), "WEBP", lossless=True),
}


def _written(items: Sequence[Encoded], native: bool | None) -> tuple[np.ndarray, dict[int, SampleError]]:
    """Decode and check that rows without an error are pixels and not what the memory held before."""
    width, height = items[0].sizes["width"], items[0].sizes["height"]
    boxes = [(0, 0, width, height)] * len(items)
    decoder, found = CropDecoder(KEEP.params, native=native), []
    for poison in (POISON, POISON ^ 0xFF):
        out = np.full((len(items) + 1, 41, 51, 3), poison, np.uint8)
        bad = decoder.crop_resize(
            [i.payload for i in items], columns(items), np.array(boxes, np.float64), np.zeros(len(items), bool), out, threads=2
        )
        assert (out[-1] == poison).all()
        found.append((out, bad))
    (first, bad), (second, bad_too) = found
    assert {n: e.code for n, e in bad.items()} == {n: e.code for n, e in bad_too.items()}
    fine = [n for n in range(len(items)) if n not in bad]
    assert np.array_equal(first[fine], second[fine])
    return first, bad


@pytest.mark.parametrize("native", ENGINES)
@pytest.mark.parametrize("kind", DAMAGED)
def test_cut_payloads(native: bool | None, kind: str) -> None:
    """The whole picture is asked for: what is cut must be an error, up to the few bytes that hold no pixels."""
    item = KEEP.encode(DAMAGED[kind]())
    step = max(1, len(item.payload) // 100)
    cuts = [*range(0, len(item.payload), step), *range(len(item.payload) - 6, len(item.payload))]
    items = [Encoded(item.payload[:cut], item.sizes, None, ()) for cut in cuts]
    out, bad = _written(items, native)
    whole, _ = _written([item], native)
    for number, cut in enumerate(cuts):
        if number in bad:
            assert bad[number].code in ("truncated", "corrupt", "codec", "size-mismatch"), bad[number]
        else:
            assert cut >= len(item.payload) - 32, (cut, len(item.payload))
            assert psnr(out[number], whole[0]) > 30


@pytest.mark.parametrize("native", ENGINES)
@pytest.mark.parametrize("kind", DAMAGED)
def test_changed_bytes(native: bool | None, kind: str) -> None:
    item = KEEP.encode(DAMAGED[kind]())
    rng = np.random.default_rng(5)
    items = []
    for offset in np.unique(np.r_[0:40, np.linspace(0, len(item.payload) - 1, 90).astype(int)]).tolist():
        data = bytearray(item.payload)
        data[offset] ^= int(rng.integers(1, 256))
        items.append(Encoded(bytes(data), item.sizes, None, ()))
    _written(items, native)


@needs_native
def test_damage_is_judged_as_pil_judges_it() -> None:
    """Whole pictures: the same payloads are errors, with the same codes, and the others give the same pixels."""
    rng = np.random.default_rng(6)
    for make in DAMAGED.values():
        item = KEEP.encode(make())
        items = []
        for offset in np.linspace(2, len(item.payload) - 1, 60).astype(int).tolist():
            data = bytearray(item.payload)
            data[offset] ^= int(rng.integers(1, 256))
            items.append(Encoded(bytes(data), item.sizes, None, ()))
        out, bad = _written(items, None)
        wanted, bad_too = _written(items, False)
        assert set(bad) <= set(bad_too)
        assert all(bad[n].code == bad_too[n].code for n in bad)
        for number in set(range(len(items))) - set(bad_too):
            assert np.abs(out[number].astype(int) - wanted[number]).max() <= 2, number


def test_incomplete_pictures_with_an_end_marker() -> None:
    """libjpeg shows what is there without a warning: some scans, or a few rows and grey."""
    whole = jpeg_of(photo(96, 80, 11), progressive=True)
    scans = [at for at in range(len(whole)) if whole[at : at + 2] == b"\xff\xda"]
    plain = jpeg_of(photo(96, 80, 11))
    tall = KEEP.encode(plain)
    items = [Encoded(whole[:at] + b"\xff\xd9", tall.sizes, None, ()) for at in scans[1:]]
    items += [Encoded(plain[: len(plain) // 2] + b"\xff\xd9", tall.sizes, None, ())]
    for native in (None, False):
        _, bad = _written(items, native)
        assert {n: e.code for n, e in bad.items()} == dict.fromkeys(range(len(items)), "truncated")


def test_too_many_scans() -> None:
    whole = jpeg_of(photo(64, 48, 2), progressive=True)
    item = KEEP.encode(whole)
    last = whole.rindex(b"\xff\xda")
    made = Encoded(whole[:-2] + whole[last:-2] * 5000 + b"\xff\xd9", item.sizes, None, ())
    for native in (None, False):
        _, bad = _written([made, item], native)
        assert {n: e.code for n, e in bad.items()} == {0: "corrupt"}


@pytest.mark.parametrize("native", ENGINES)
def test_wrong_index(native: bool | None, kinds: dict[str, Encoded]) -> None:
    items = [kinds["420"], kinds["webp"], kinds["420"], kinds["webp"], kinds["grey"]]
    right = columns(items)
    boxes = [(0, 0, 90, 90)] * 5
    for name, wrong in (("width", 212), ("height", 100), ("width", 70_000), ("height", 2_000_000)):
        sizes = {**right, name: right[name].copy()}
        sizes[name][[0, 1]] = wrong
        out, bad = crops(items, boxes, (30, 30), native=native, sizes=sizes)
        assert {n: e.code for n, e in bad.items()} == {0: "size-mismatch", 1: "size-mismatch"} or wrong == 2_000_000
        assert set(bad) == {0, 1}
        good, _ = crops(items, boxes, (30, 30), native=native)
        assert np.array_equal(out[2:], good[2:])
    for name, wrong in (("width", 0), ("height", -3), ("codec", 0), ("codec", 99), ("codec", 258), ("bits", 7)):
        sizes = {**right, name: right[name].copy()}
        sizes[name][[0, 1]] = wrong
        _, bad = crops(items, boxes, (30, 30), native=native, sizes=sizes)
        assert set(bad) == {0, 1}, name
    swapped = {**right, "codec": right["codec"][::-1].copy()}
    swapped["codec"][:] = [1, 2, 2, 1, 2]
    _, bad = crops(items, boxes, (30, 30), native=native, sizes=swapped)
    assert set(bad) == {0, 1}


@pytest.mark.parametrize("native", ENGINES)
@pytest.mark.parametrize("restart", ["rows", "blocks"])
def test_restart_marked(restart: str, native: bool | None) -> None:
    for how, pixels in (
        ("420", photo(140, 300)),
        ("444", photo(140, 300)),
        ("420", photo(300, 533)),
        ("420", photo(140, 300)[:, :, :1]),
        ("420", photo(9, 5)),
    ):
        encoder = make_image_encoder({"codec": "jpeg", "restart": restart, "subsampling": how})
        item = encoder.encode(np.ascontiguousarray(pixels))
        plain = make_image_encoder({"codec": "jpeg", "subsampling": how}).encode(np.ascontiguousarray(pixels))
        width, height = item.sizes["width"], item.sizes["height"]
        rng = np.random.default_rng(1)
        corners = np.sort(rng.random((40, 2, 2)), axis=1) * (width, height)
        boxes = np.concatenate([corners[:, 0], corners[:, 1]], axis=1)
        boxes[:6] = [
            (0, 0, width, height),
            (0, 0, width, 1),
            (0, height - 1, width, height),
            (0, height / 2, 1, height / 2 + 1),
            (width - 1, 0, width, height),
            (width / 2, height / 3, width / 2 + 1, height),
        ]
        for size in ((12, 17), (60, 30), (3, 3)):
            whole, bad = crops([plain] * 40, boxes, size, native=native)
            cut, bad_too = crops([item] * 40, boxes, size, params=encoder.params, native=native)
            assert not bad and not bad_too and np.array_equal(whole, cut)


@needs_jpegtran
@pytest.mark.parametrize("native", ENGINES)
@pytest.mark.parametrize("restart", ["rows", "blocks"])
def test_kept_jpegs_with_restart_markers_give_the_same_crops(restart: str, native: bool | None) -> None:
    rng = np.random.default_rng(4)
    marked = make_image_encoder({"codec": "keep", "restart": restart})
    for make in KINDS.values():
        plain = KEEP.encode(make())
        if plain.sizes["codec"] != IMAGE_CODECS["jpeg"]:
            continue
        item = marked.encode(make())
        width, height = item.sizes["width"], item.sizes["height"]
        corners = np.sort(rng.random((30, 2, 2)), axis=1) * (width, height)
        boxes = np.concatenate([corners[:, 0], corners[:, 1]], axis=1)
        for size in ((12, 17), (60, 30)):
            whole, bad = crops([plain] * 30, boxes, size, native=native)
            cut, bad_too = crops([item] * 30, boxes, size, params=marked.params, native=native)
            assert not bad and not bad_too and np.array_equal(whole, cut)


@needs_native
@pytest.mark.parametrize(
    "sampling", ["2x4", "4x2", "1x4", "4x1", "3x1", "1x3", "2x2,2x1,2x1", "2x2,1x2,1x1", "1x1,2x2,2x2", "4x4"]
)
def test_odd_chroma_sampling_gives_the_same_pixels_each_time(sampling: str) -> None:
    if (tool := shutil.which("cjpeg")) is None:
        pytest.skip("cjpeg (libjpeg-turbo-progs) is not installed")
    pixels = np.ascontiguousarray(photo(300, 200))
    image = b"P6 %d %d 255\n" % (pixels.shape[1], pixels.shape[0]) + pixels.tobytes()
    for restart in ((), ("-restart", "1")):
        made = subprocess.run([tool, "-sample", sampling, *restart], input=image, capture_output=True, timeout=60, check=False)
        if made.returncode:
            pytest.skip(made.stderr.decode())
        try:
            item = KEEP.encode(made.stdout)
        except SampleError:
            pytest.skip("PIL does not decode it either")
        rng = np.random.default_rng(5)
        corners = np.sort(rng.random((40, 2, 2)), axis=1) * (item.sizes["width"], item.sizes["height"])
        boxes = np.concatenate([corners[:, 0], corners[:, 1]], axis=1)
        first, bad = crops([item] * 40, boxes, (24, 24), threads=2)
        again, _ = crops([item] * 40, boxes, (24, 24), threads=1)
        wanted, _ = crops([item] * 40, boxes, (24, 24), native=False)
        assert not bad and np.array_equal(first, again)
        small = [n for n, box in enumerate(boxes) if min(box[2] - box[0], box[3] - box[1]) < 48]
        assert small and min(psnr(first[n], wanted[n]) for n in small) > 40


@needs_native
@pytest.mark.parametrize("side", [64, 500, 512, 640])
def test_what_lies_beside_a_crop_is_not_decoded(side: int) -> None:
    """The last group of every row is another picture's: only crops that see it change."""
    encoder = make_image_encoder({"codec": "jpeg", "restart": "blocks", "quality": "90"})
    item, other = (encoder.encode(np.ascontiguousarray(p)) for p in (photo(side, side), 255 - photo(side, side)))
    columns = -(-side // 16)
    group = jpeg.restart_group(columns)
    assert group < columns
    last = columns // group - 1
    first, second = (groups_of(item), groups_of(other))
    head, mixed = (
        first[0],
        [b if n % (last + 1) == last else a for n, (a, b) in enumerate(zip(first[1], second[1], strict=True))],
    )
    data = head + b"".join(part + bytes((0xFF, 0xD0 + n % 8)) for n, part in enumerate(mixed))
    changed = replace(item, payload=data[:-2] + b"\xff\xd9")
    boxes = np.array([[0.0, 8, 16, 40], [side - 12.0, 8, side, 40]])
    before, bad = crops([item] * 2, boxes, (16, 16), params=encoder.params)
    after, bad_too = crops([changed] * 2, boxes, (16, 16), params=encoder.params)
    assert not bad and not bad_too
    assert np.array_equal(before[0], after[0]) and not np.array_equal(before[1], after[1])


def groups_of(item: Any) -> tuple[bytes, list[bytes]]:
    """What comes before the groups of a JPEG, and each of them."""
    data = bytes(item.payload)
    start = jpeg.parse(data).scan_offset
    return data[:start], re.split(rb"\xff[\xd0-\xd7]", data[start:-2])


@needs_native
def test_damage_among_groups_is_found_or_not_seen() -> None:
    """A byte of a picture with groups is another: the crop fails, or it is what the whole picture has there."""
    encoder = make_image_encoder({"codec": "jpeg", "restart": "blocks"})
    item = encoder.encode(photo(140, 300))
    rng, box = np.random.default_rng(8), np.array([[60.0, 200, 130, 260]])
    found, failed, start = 0, 0, jpeg.parse(bytes(item.payload)).scan_offset
    for at in rng.integers(start, len(item.payload) - 2, 300).tolist():
        data = bytearray(item.payload)
        data[at] = int(rng.integers(0, 256))
        broken = [replace(item, payload=bytes(data))]
        cut, bad = crops(broken, box, (60, 70), params=encoder.params)
        whole, bad_too = crops(broken, box, (60, 70), params=encoder.params, native=False)
        failed += bool(bad)
        if not bad and not bad_too:
            found += 1
            assert np.abs(cut.astype(int) - whole).max() <= EXACT, at
    assert found > 100, (found, failed)


@needs_native
def test_damaged_restart_markers_are_told_as_in_whole_pictures() -> None:
    encoder = make_image_encoder({"codec": "jpeg", "restart": "rows"})
    item = encoder.encode(photo(140, 300))
    assert item.aux is not None
    payload, starts = bytearray(item.payload), [int(at) for at in item.aux]
    boxes = np.array([[0.0, 200, 100, 260]])
    plain, _ = crops([item], boxes, (30, 30), params=encoder.params)
    # Above the rows that are needed nothing is decoded, so nothing is found.
    payload[starts[2] + 10 : starts[3] - 10] = bytes(starts[3] - starts[2] - 20)
    found, bad = crops([replace(item, payload=bytes(payload))], boxes, (30, 30), params=encoder.params)
    assert not bad and np.array_equal(found, plain)
    for at, code in ((starts[2] - 1, 0xD7), (starts[14] - 1, 0xD1), (starts[14] - 1, 0xD9), (starts[2] - 2, 0x12)):
        broken = bytearray(item.payload)
        broken[at] = code
        items = [replace(item, payload=bytes(broken))]
        found, bad = crops(items, boxes, (30, 30), params=encoder.params)
        wanted, bad_too = crops(items, boxes, (30, 30), params=encoder.params, native=False)
        assert set(bad) == set(bad_too) and (bad or np.abs(found.astype(int) - wanted).max() <= EXACT), (at, code)
    short = replace(item, payload=bytes(item.payload)[: starts[14]])
    _, bad = crops([short], boxes, (30, 30), params=encoder.params)
    assert bad[0].code == "truncated"
    taller = columns([item], height=1000)
    for box in (boxes, np.array([[0.0, 800, 100, 990]])):
        _, bad = crops([item], box, (30, 30), params=encoder.params, sizes=taller)
        assert bad[0].code == "size-mismatch"


@needs_native
def test_calls_at_a_time_share_threads_in_the_order_of_their_turns() -> None:
    items = [KEEP.encode(jpeg_of(photo(900, 700)))] * 24
    box = np.array([[0.0, 0, 900, 700]] * 24)
    ended: list[int] = []

    def call(turn: int) -> None:
        crops(items, box, (64, 64), threads=1, turn=turn)
        ended.append(turn)

    expected, _ = crops(items, box, (64, 64), threads=0)
    for _ in range(3):
        ended.clear()
        calls = [threading.Thread(target=call, args=(turn,)) for turn in (9, 7, 5, 3)]
        for one in calls:
            one.start()
        for one in calls:
            one.join()
        assert sorted(ended) == [3, 5, 7, 9] and ended.index(3) < ended.index(7)
    again, bad = crops(items, box, (64, 64), threads=3)
    assert not bad and np.array_equal(expected, again)


@needs_native
def test_a_forked_child_has_threads_of_its_own() -> None:
    items, boxes = _mixed()
    first, _ = crops(items, boxes, (40, 44), threads=3)
    if (child := os.fork()) == 0:
        out, _ = crops(items, boxes, (40, 44), threads=3)
        os._exit(0 if np.array_equal(out, first) else 7)
    assert os.waitpid(child, 0)[1] == 0


def _mixed() -> tuple[list[Encoded], np.ndarray]:
    items = [KEEP.encode(make()) for name, make in KINDS.items() if name != "440"] * 2
    items.insert(5, Encoded(items[0].payload[:900], items[0].sizes, None, ()))
    items.insert(9, KEEP.encode(save(photo(211, 147), "PNG")))
    rng = np.random.default_rng(3)
    boxes = np.array([(x, y, x + w, y + h) for x, y, w, h in rng.random((len(items), 4)) * (100, 70, 100, 70) + (0, 0, 9, 7)])
    return items, boxes


@needs_native
def test_threads_give_the_same_bytes() -> None:
    items, boxes = _mixed()
    first, bad = crops(items, boxes, (40, 44), threads=1)
    assert {n: e.code for n, e in bad.items()} == {5: "truncated"}
    first[5] = 0
    for threads in (0, 2, 7, 100):
        out, bad = crops(items, boxes, (40, 44), threads=threads)
        out[5] = 0
        assert set(bad) == {5} and np.array_equal(out, first)


@needs_native
def test_places_and_flips() -> None:
    items, boxes = _mixed()
    plain, _ = crops(items, boxes, (40, 44))
    flips = np.arange(len(items)) % 3 == 0
    places = np.random.default_rng(4).permutation(len(items) + 4)[: len(items)]
    decoder = CropDecoder(KEEP.params)
    out = np.full((len(items) + 4, 40, 44, 3), POISON, np.uint8)
    bad = decoder.crop_resize([i.payload for i in items], columns(items), boxes, flips, out, places=places, threads=2)
    assert set(bad) == {5}
    for number, place in enumerate(places.tolist()):
        wanted = plain[number][:, ::-1] if flips[number] else plain[number]
        assert number == 5 or np.array_equal(out[place], wanted)
    assert (out[np.setdiff1d(np.arange(len(out)), places)] == POISON).all()


@pytest.fixture
def plain_code() -> Iterator[None]:
    assert native_module is not None
    before = native_report()["simd"]
    native_module.use_simd(False)
    assert native_report()["simd"] == "none"
    yield
    native_module.use_simd(before != "none")
    assert native_report()["simd"] == before


@needs_native
def test_vector_instructions_change_nothing(plain_code: None) -> None:
    assert native_module is not None
    items, boxes = _mixed()
    for size, channels in (((40, 44), 3), ((7, 300), 3), ((1, 1), 3), ((31, 33), 1)):
        native_module.use_simd(False)
        plain, _ = crops(items, boxes, size, channels=channels, flips=np.arange(len(items)) % 2)
        native_module.use_simd(True)
        quick, _ = crops(items, boxes, size, channels=channels, flips=np.arange(len(items)) % 2)
        plain[5] = quick[5] = 0
        assert np.array_equal(plain, quick)


@needs_native
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_after_a_fork() -> None:
    items, boxes = _mixed()
    before, _ = crops(items, boxes, (40, 44), threads=2)
    child = os.fork()
    if child == 0:
        after, _ = crops(items, boxes, (40, 44), threads=2)
        before[5] = after[5] = 0
        os._exit(0 if np.array_equal(before, after) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@needs_native
def test_calls_from_many_threads() -> None:
    items, boxes = _mixed()
    decoder = CropDecoder(KEEP.params)
    payloads, sizes, flips = [i.payload for i in items], columns(items), np.zeros(len(items), bool)
    wanted, _ = crops(items, boxes, (40, 44))
    results: list[bool] = []

    def work(threads: int) -> None:
        for _ in range(5):
            out = np.full((len(items), 40, 44, 3), POISON, np.uint8)
            bad = decoder.crop_resize(payloads, sizes, boxes, flips, out, threads=threads)
            out[5] = wanted[5]
            results.append(set(bad) == {5} and np.array_equal(out, wanted))

    workers = [threading.Thread(target=work, args=(1 + n % 3,)) for n in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert results == [True] * 30


@pytest.mark.parametrize("native", ENGINES)
def test_payloads_of_any_buffer(native: bool | None, kinds: dict[str, Encoded]) -> None:
    item = kinds["420"]
    box = (3, 4, 99, 77)
    wanted, _ = crops([item], [box], (20, 20), native=native)
    for made in (bytearray(item.payload), memoryview(item.payload), np.frombuffer(item.payload, np.uint8)):
        out, bad = crops([Encoded(made, item.sizes, None, ())], [box], (20, 20), native=native)
        assert not bad and np.array_equal(out, wanted)
    _, bad = crops([Encoded(b"", item.sizes, None, ())] * 2, [box] * 2, (20, 20), native=native)
    assert set(bad) == {0, 1}
    assert crops([], np.empty((0, 4)), (20, 20), native=native, sizes=columns([]))[1] == {}


@pytest.mark.parametrize("native", ENGINES)
def test_refused_arguments(native: bool | None, kinds: dict[str, Encoded]) -> None:
    item = kinds["420"]
    decoder = CropDecoder(KEEP.params, native=native)
    right: dict[str, Any] = {
        "payloads": [item.payload],
        "sizes": columns([item]),
        "boxes": np.array([[0.0, 0, 50, 50]]),
        "flips": np.zeros(1, bool),
        "out": np.zeros((1, 8, 8, 3), np.uint8),
    }
    assert decoder.crop_resize(**right) == {}
    frozen = np.zeros((1, 8, 8, 3), np.uint8)
    frozen.flags.writeable = False
    wrong: list[tuple[str, Any]] = [
        ("out", np.zeros((1, 8, 16, 3), np.uint8)[:, :, ::2]),
        ("out", np.zeros((1, 3, 8, 8), np.uint8).transpose(0, 2, 3, 1)),
        ("out", np.zeros((1, 8, 8, 1), np.uint8)),
        ("out", np.zeros((1, 8, 8, 4), np.uint8)),
        ("out", np.zeros((8, 8, 3), np.uint8)),
        ("out", np.zeros((1, 0, 8, 3), np.uint8)),
        ("out", np.zeros((0, 8, 8, 3), np.uint8)),
        ("out", np.zeros((1, 8, 8, 3), np.int8)),
        ("out", np.zeros((1, 8, 8, 3), np.float32)),
        ("out", frozen),
        ("places", np.array([1])),
        ("places", np.array([-1])),
        ("places", np.array([0, 0])),
        ("flips", np.zeros(2, bool)),
        ("boxes", np.zeros((1, 3))),
        ("boxes", np.zeros((2, 4))),
        ("payloads", [item.payload] * 2),
    ]
    nan, inf = float("nan"), float("inf")
    for box in (
        (-1, 0, 5, 5),
        (0, 0, 0, 5),
        (9, 0, 5, 5),
        (0, 0, 212, 5),
        (0, 0, 5, 148),
        (nan, 0, 5, 5),
        (0, 0, nan, 5),
        (0, 0, inf, 5),
    ):
        wrong.append(("boxes", np.array([box], np.float64)))
    for name, value in wrong:
        with pytest.raises(OptionError):
            decoder.crop_resize(**{**right, name: value})


@pytest.mark.parametrize("native", ENGINES)
def test_grey_webp(native: bool | None) -> None:
    """Stored as three channels; one is the grey, whatever the codec did to the other two."""
    for how in ("codec=webp,quality=60", "codec=webp,lossless=yes"):
        encoder = make_image_encoder(options(how))
        item = encoder.encode(np.ascontiguousarray(photo(80, 60)[:, :, :1]))
        assert item.sizes["codec"] == IMAGE_CODECS["webp"] and item.sizes["channels"] == 1
        for channels in (1, 3):
            out, bad = crops([item], [(3, 5, 70, 50)], (40, 40), params=encoder.params, channels=channels, native=native)
            wanted, _ = crops([item], [(3, 5, 70, 50)], (40, 40), params=encoder.params, channels=channels, native=False)
            assert not bad and np.abs(out.astype(int) - wanted).max() <= 2
            assert (out == out[..., :1]).all()


def _without(data: bytes, code: int) -> bytes:
    """A JPEG without its segments of one kind (before the scan)."""
    at, parts = 2, [data[:2]]
    while data[at + 1] != 0xDA:
        end = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        if data[at + 1] != code:
            parts.append(data[at:end])
        at = end
    return b"".join([*parts, data[at:]])


@pytest.mark.parametrize("native", ENGINES)
def test_a_picture_owes_nothing_to_the_one_before(native: bool | None) -> None:
    """Quantization and Huffman tables of one picture must not serve the next, which lacks them."""
    whole = jpeg_of(photo(96, 80, 11), quality=40, optimize=True)
    items = [KEEP.encode(whole)]
    items += [Encoded(_without(whole, code), items[0].sizes, None, ()) for code in (0xDB, 0xC4)]
    boxes = [(0, 0, 96, 80)]
    alone = [crops([item], boxes, (41, 51), native=native) for item in items]
    _, bad = alone[1]
    assert bad
    together, bad = crops(items, boxes * 3, (41, 51), native=native, threads=1)
    assert set(bad) == {n for n, (_, one) in enumerate(alone) if one}
    for number, (out, one) in enumerate(alone):
        assert one or np.array_equal(together[number], out[0])


@needs_native
def test_parts_of_one_buffer_decode_as_their_copies_do(kinds: dict[str, Encoded]) -> None:
    items = [kinds["420"], kinds["webp"], kinds["grey"], kinds["420"]]
    payloads = [bytes(item.payload) for item in items]
    values = np.frombuffer(b"xy".join([b"", *payloads]), np.uint8)
    stops = np.cumsum([len(data) + 2 for data in payloads]).astype(np.int64)
    starts = stops - [len(data) for data in payloads]
    boxes, out, again = np.array([(0, 0, 90, 90)] * 4, np.float64), *np.zeros((2, 4, 30, 30, 3), np.uint8)
    decoder = CropDecoder(KEEP.params)
    sizes, flips = columns(items), np.zeros(4, bool)
    assert decoder.crop_resize(payloads, sizes, boxes, flips, out) == {}
    assert decoder.crop_resize(PackedPayloads(values, starts, stops), sizes, boxes, flips, again) == {}
    assert np.array_equal(out, again) and out.any(axis=(1, 2, 3)).all()
    for start, stop in ((-1, 5), (5, 4), (0, len(values) + 1)):
        wrong = starts.copy(), stops.copy()
        wrong[0][1], wrong[1][1] = start, stop
        with pytest.raises(IndexError, match="payload 1"):
            decoder.crop_resize(PackedPayloads(values, *wrong), sizes, boxes, flips, again)
    assert native_module is not None
    with pytest.raises(ValueError, match="bounds"):
        native_module.decode((values, starts, stops[:2]), *[np.zeros(0)] * 6, (3, 3, 3), 0, 0, 0, np.zeros(0, np.int32))


@needs_native
def test_a_process_that_decodes_natively_does_not_import_pil() -> None:
    code = "import sys, lfdata.loader.serve; sys.exit(any(name.startswith('PIL') for name in sys.modules))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], check=False, env=environment).returncode == 0
