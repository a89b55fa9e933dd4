"""Every picture among the odd files, with the outcome its manifest asks for; a new picture there without a rule here fails.

Where the outcome differs from the manifest's wording the reason stands beside the rule.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import features

sys.path.insert(0, str(Path(__file__).parent))
from image_samples import ODD, options

from lfdata.codecs.image import IMAGE_CODECS, ImageDecoder, make_image_encoder
from lfdata.codecs.sniff import sniff
from lfdata.errors import SampleError

pytestmark = [
    pytest.mark.skipif(not (ODD / "manifest.tsv").exists(), reason="the shared odd files are not here"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # PIL's remarks on damaged metadata
]

# (width, height, channels) of the decoded picture, or the code of the error (and a word of its reason).
RULES: dict[str, tuple[int, int, int] | tuple[str, str]] = {
    "pillow__broken_data_stream.png": ("crc", "IDAT"),
    "pillow__hopper_idat_after_image_end.png": (128, 128, 3),
    "pillow__decompression_bomb.gif": ("pixel-limit", "65535x66601"),
    "pillow__decompression_bomb.ico": ("pixel-limit", "65535x65535"),
    "pillow__crash-0c7e0e8e11ce787078f00b5b0ca409a167f070e0.tif": ("corrupt", "decoder error"),
    "pillow__total-pages-zero.tif": (1728, 2156, 1),
    "pillow__hopper_bad_exif.jpg": (500, 500, 1),
    "pillow__exif-dpi-zerodivision.jpg": (200, 200, 3),
    "pillow__empty_gps_ifd.jpg": (10, 10, 3),
    "pillow__hopper_orientation_6.jpg": (128, 128, 3),
    "pillow__hopper_orientation_5.webp": (128, 128, 3),
    "pillow__pil_sample_cmyk.jpg": (100, 100, 3),
    "pillow__sugarshack_no_data.mpo": (640, 480, 3),
    "pillow__syntax_num_frames_invalid.png": (128, 64, 4),
    "pillow__sequence_gap.png": (128, 64, 4),
    "python-pillow_Pillow__Tests_images_apng_delay.png": (128, 64, 4),
    "pillow__badwidth.bmp": ("pixel-limit", "over the limit"),
    "pillow__baddens1.bmp": (127, 64, 1),
    # The manifest says L with transparency, but this file has no tRNS chunk (IHDR, IDAT, IEND only): there is no alpha to keep.
    "pillow__transparent_background_text_L.png": (300, 100, 1),
    "pillow__pngtest_bad.png.bin": ("crc", "CRC"),
    "sharp__truncated.jpg": ("truncated", "truncated"),
    "sharp__truncated.png": ("truncated", "truncated"),
    "sharp__Channel_digital_image_CMYK_color_no_profile.jpg": (500, 333, 3),
    "sharp__prophoto.png": (1, 1, 3),
    "sharp__16-bit-grey-alpha.png": (109, 96, 2),
    "sharp__animated-loop-3.webp": (370, 285, 4),
    "libwebp-test-data__bad_palette_index.webp": (128, 128, 3),
    "libwebp-test-data__big_endian_bug_393.webp": (256, 256, 4),
    "image-png__001ee42973be53a2b52dd9ec6f850d30a1065009": ("crc", "IHDR"),
    # PIL decodes it; there is no end marker, and a cut file is always an error here.
    "jpeg-decoder__id_000182,src_000000,op_flip1,pos_503,+cov.jpg": ("truncated", "truncated"),
    "avif-sample-images__fox.profile0.10bpc.yuv420.avif": (1204, 800, 3),
    "metadata-extractor-images__xcrn0g04.png": ("corrupt", "signature"),
    "metadata-extractor-images__xhdn0g08.png": ("crc", "IHDR"),
    "lfs_pointer__new-test__episode_000000.mp4": ("lfs-pointer", "git lfs pull"),
}
ENDINGS = {"png", "jpg", "jpeg", "gif", "ico", "tif", "tiff", "webp", "bmp", "mpo", "avif", "bin"}
NOT_PICTURES = {"utf8tests__utf8tests.bin"}


def _rows() -> list[dict[str, str]]:
    if not (ODD / "manifest.tsv").exists():
        return []
    with (ODD / "manifest.tsv").open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines, delimiter="\t"))


def _is_picture(name: str) -> bool:
    return name not in NOT_PICTURES and (
        name.rsplit(".", 1)[-1] in ENDINGS or sniff((ODD / name).read_bytes()) in ("png", "jpeg", "webp", "gif", "tiff", "bmp")
    )


def test_no_picture_of_the_manifest_is_forgotten() -> None:
    pictures = {row["file"] for row in _rows() if _is_picture(row["file"])}
    assert pictures <= set(RULES)
    assert len(pictures) >= 33
    assert set(RULES) <= {row["file"] for row in _rows()}


@pytest.mark.parametrize("how", ["codec=webp", "codec=png", "codec=jpeg,alpha=blend:ffffff", "codec=raw", "codec=keep"])
@pytest.mark.parametrize("row", [r for r in _rows() if r["file"] in RULES], ids=lambda r: r["file"])
def test_outcome(row: dict[str, str], how: str) -> None:
    name, data = row["file"], (ODD / row["file"]).read_bytes()
    rule = RULES[name]
    if name.endswith(".avif") and not features.check("avif"):
        rule = ("unsupported", "AVIF")
    if name == "pillow__sequence_gap.png" and how == "codec=keep":
        rule = ("corrupt", "sequence")  # its frames cannot all be read, so the file is not valid as a whole
    encoder = make_image_encoder(options(how))
    if len(rule) == 2:
        with pytest.raises(SampleError) as caught:
            encoder.encode(data)
        assert (caught.value.code, rule[1] in caught.value.reason) == (rule[0], True), caught.value
        return
    encoded = encoder.encode(data)
    pixels = ImageDecoder(encoder.params).decode(encoded.payload, encoded.sizes)
    channels = {2: 1, 4: 3}.get(rule[2], rule[2]) if "blend" in how else rule[2]
    assert pixels.shape == (rule[1], rule[0], channels)
    assert (encoded.sizes["width"], encoded.sizes["height"], encoded.sizes["channels"]) == (rule[0], rule[1], channels)
    assert pixels.dtype == np.uint8
    if how == "codec=keep":
        assert encoded.payload == data
        assert encoded.sizes["codec"] == IMAGE_CODECS[sniff(data)]
    lossless = ImageDecoder(RAW.params).decode(*_pair(RAW.encode(data)))
    if how in ("codec=png", "codec=keep"):
        assert np.array_equal(pixels, lossless)
    elif "jpeg" not in how:
        assert np.abs(pixels[..., : min(channels, 3)].astype(int) - lossless[..., : min(channels, 3)]).mean() < 25


RAW = make_image_encoder({"codec": "raw"})


def _pair(encoded: object) -> tuple[bytes, dict[str, int]]:
    return encoded.payload, encoded.sizes  # type: ignore[attr-defined]


def _decoded(name: str, how: str) -> np.ndarray:
    encoder = make_image_encoder(options(how))
    return ImageDecoder(encoder.params).decode(*_pair(encoder.encode((ODD / name).read_bytes())))


def test_a_profile_is_applied_not_dropped() -> None:
    with_profile, without = (
        _decoded("sharp__prophoto.png", "codec=png"),
        _decoded("sharp__prophoto.png", "codec=png,icc=ignore"),
    )
    assert np.abs(with_profile.astype(int) - without).max() > 4


@pytest.mark.parametrize("name", ["pillow__hopper_orientation_6.jpg", "pillow__hopper_orientation_5.webp"])
@pytest.mark.parametrize("how", ["codec=keep", "codec=png"])
def test_the_hat_is_on_top(name: str, how: str) -> None:
    # Both are the same 128 x 128 portrait as the PNG, stored turned.
    upright = _decoded("pillow__hopper_idat_after_image_end.png", "codec=png")
    assert np.abs(_decoded(name, how).astype(int) - upright).mean() < 8


def test_sixteen_bits_with_alpha_are_scaled_not_clipped() -> None:
    deep = _decoded("sharp__16-bit-grey-alpha.png", "codec=png,bits16=keep,icc=ignore")
    assert deep.dtype == np.uint16
    flat = _decoded("sharp__16-bit-grey-alpha.png", "codec=png,icc=ignore")
    assert np.array_equal(flat, ((deep.astype(np.uint64) * 255 + 32767) // 65535).astype(np.uint8))


def test_cmyk_is_not_a_negative() -> None:
    # The sample says RED in red on black.
    pixels = _decoded("pillow__pil_sample_cmyk.jpg", "codec=png").astype(int)
    assert np.median(pixels) < 8
    red = (pixels[..., 0] > 200) & (pixels[..., 1] < 80) & (pixels[..., 2] < 80)
    assert 0.05 < red.mean() < 0.4
