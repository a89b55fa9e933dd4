"""Headers that claim huge pictures: refused by the limit, quickly, within bounded memory, when encoding and when decoding."""

from __future__ import annotations

import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from image_samples import chunk, options, photo, png, save

from lfdata.codecs.image import IMAGE_CODECS, ImageDecoder, make_image_encoder
from lfdata.errors import SampleError

SIDE = 60000
REPO = Path(__file__).resolve().parents[2]


def _gif_screen() -> bytes:
    data = bytearray(save(photo(8, 8), "GIF"))
    data[6:10] = struct.pack("<HH", SIDE, SIDE)
    return bytes(data)


def _gif_frame() -> bytes:
    data = bytearray(save(photo(8, 8), "GIF"))
    at = data.index(b"\x2c\0\0\0\0\x08\0\x08\0")
    data[at + 5 : at + 9] = struct.pack("<HH", SIDE, SIDE)
    return bytes(data)


def _webp(extended: bool) -> bytes:
    side = SIDE if extended else 16383
    if extended:
        body = b"VP8X" + struct.pack("<I", 10) + b"\0\0\0\0" + (side - 1).to_bytes(3, "little") * 2
        body += save(photo(8, 8), "WEBP")[12:]
    else:
        data = save(photo(8, 8), "WEBP", lossless=True)
        word = (side - 1) | (side - 1) << 14
        body = data[12:21] + struct.pack("<I", word | int.from_bytes(data[21:25], "little") & 0xF0000000) + data[25:]
    return b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WEBP" + body


def _tiff() -> bytes:
    tags = [
        (256, 4, SIDE),
        (257, 4, SIDE),
        (258, 3, 8),
        (259, 3, 1),
        (262, 3, 1),
        (273, 4, 8),
        (277, 3, 1),
        (278, 4, SIDE),
        (279, 4, 9),
    ]
    ifd = struct.pack("<H", len(tags)) + b"".join(struct.pack("<HHII", t, k, 1, v) for t, k, v in tags) + b"\0" * 4
    return b"II*\0" + struct.pack("<I", 8) + ifd


def _bmp(width: int, height: int) -> bytes:
    data = bytearray(save(photo(8, 8), "BMP"))
    data[18:26] = struct.pack("<ii", width, height)
    return bytes(data)


def _ico(embedded: bytes) -> bytes:
    return b"\0\0\1\0\1\0" + struct.pack("<BBBBHHII", 16, 16, 0, 0, 1, 32, len(embedded), 22) + embedded


def _jpeg() -> bytes:
    data = bytearray(save(photo(8, 8), "JPEG"))
    at = data.index(b"\xff\xc0")
    data[at + 5 : at + 9] = struct.pack(">HH", SIDE, SIDE)
    return bytes(data)


BOMBS = {
    "png": png(SIDE, SIDE, 8, 6, b"\0" * 100),
    "png-interlaced": png(2**31 - 1, 2**31 - 1, 16, 6, b"\0" * 100),
    "gif-screen": _gif_screen(),
    "gif-frame": _gif_frame(),
    "webp-extended": _webp(True),
    "webp-lossless": _webp(False),
    "tiff": _tiff(),
    "bmp": _bmp(SIDE, SIDE),
    "bmp-negative-height": _bmp(SIDE, -SIDE),
    "bmp-negative-width": _bmp(-SIDE, SIDE),
    "ico-png": _ico(png(SIDE, SIDE, 8, 6, b"\0" * 100)),
    "ico-bmp": _ico(_bmp(SIDE, SIDE)[14:]),
    "jpeg": _jpeg(),
}


@pytest.mark.parametrize("name", BOMBS)
def test_refused_at_once_when_encoding(name: str) -> None:
    encoder = make_image_encoder({})
    began = time.monotonic()
    with pytest.raises(SampleError) as caught:
        encoder.encode(BOMBS[name])
    assert caught.value.code == "pixel-limit", caught.value
    assert time.monotonic() - began < 1


@pytest.mark.parametrize("name", [n for n in BOMBS if not n.startswith("ico")])
def test_refused_when_decoding_although_the_index_lies_small_or_agrees(name: str) -> None:
    decoder = ImageDecoder(make_image_encoder({"codec": "keep"}).params)
    codec = IMAGE_CODECS[name.split("-")[0]]
    for side in (8, SIDE):
        sizes = {"width": side, "height": side, "channels": 3, "codec": codec, "bits": 8}
        with pytest.raises(SampleError) as caught:
            decoder.decode(BOMBS[name], sizes)
        assert caught.value.code == "pixel-limit"


_CHILD = """
import resource, sys
from pathlib import Path
sys.path[:0] = [{repo!r}, {here!r}]
from test_image_bombs import BOMBS
from lfdata.codecs.image import make_image_encoder
from lfdata.errors import SampleError
encoders = [make_image_encoder({{"codec": c}}) for c in ("webp", "keep")]
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)
for name, data in BOMBS.items():
    for encoder in encoders:
        try:
            encoder.encode(data)
        except SampleError as error:
            assert error.code == "pixel-limit", (name, error)
        else:
            raise AssertionError(name)
sys.stdout.write("refused")
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc to know what the process uses")
def test_bombs_need_less_than_64_mib() -> None:
    code = _CHILD.format(repo=str(REPO), here=str(Path(__file__).parent))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, b"refused"), done.stderr.decode()


def test_small_files_cannot_claim_pictures_within_the_limit() -> None:
    cases = [png(14000, 14000, 8, 6, b"\0" * 1000), _ico(png(14000, 14000, 8, 6, b"\0" * 1000))]
    with pytest.raises(SampleError, match="truncated"):
        make_image_encoder({}).encode(cases[0])


def test_the_limit_is_settable_and_exact() -> None:
    data = save(photo(100, 50), "PNG")
    assert make_image_encoder(options("max_pixels=5000")).encode(data).sizes["width"] == 100
    encoder = make_image_encoder(options("max_pixels=4999"))
    with pytest.raises(SampleError, match="100x50 = 5000 pixels are over the limit of 4999"):
        encoder.encode(data)
    big = make_image_encoder({}).encode(data)
    assert ImageDecoder(encoder.params).decode(big.payload, big.sizes).shape == (50, 100, 3)
    with pytest.raises(SampleError, match="pixel-limit"):
        ImageDecoder(encoder.params, max_pixels=4999).decode(big.payload, big.sizes)
    with pytest.raises(SampleError, match="pixel-limit"):
        make_image_encoder(options("max_pixels=100,exact=100x100")).encode(save(photo(8, 8), "PNG"))


def test_a_picture_over_pils_own_limit_is_read_when_ours_allows_it() -> None:
    width, height = 16000, 11500  # 184 M pixels: PIL.Image.open raises DecompressionBombError
    rows = (b"\0" + b"\0" * (width // 8)) * height
    out = make_image_encoder(options("codec=png,longest=64")).encode(png(width, height, 1, 0, rows))
    assert (out.sizes["width"], out.sizes["height"]) == (64, 46)


def test_frames_of_a_kept_animation_are_limited_together() -> None:
    frames = [photo(64, 64, seed) for seed in range(6)]
    from PIL import Image

    images = [Image.fromarray(f) for f in frames]
    data = save(images[0], "PNG", save_all=True, append_images=images[1:])
    assert make_image_encoder(options("codec=keep,max_pixels=24576")).encode(data).payload == data
    with pytest.raises(SampleError, match="together"):
        make_image_encoder(options("codec=keep,max_pixels=24575")).encode(data)


def test_text_chunks_do_not_expand_without_bound() -> None:
    import zlib

    text = chunk(b"zTXt", b"key\0\0" + zlib.compress(b"\0" * (64 << 20)))
    data = png(1, 1, 8, 0, b"\0\7", text)
    with pytest.raises(SampleError):
        make_image_encoder({}).encode(data)
    assert np.array_equal(np.frombuffer(data[:4], "u1"), np.frombuffer(b"\x89PNG", "u1"))
