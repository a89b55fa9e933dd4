"""Options: defaults, every refused value lists what is valid, stored policies are not trusted, sizes follow the stated rule."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from image_samples import options, photo, save

from lfdata.codecs.image import ImageDecoder, ImageEncoder, ImagePolicy, make_image_encoder
from lfdata.codecs.image_store import target_size
from lfdata.errors import OptionError


def test_defaults() -> None:
    policy = ImagePolicy.from_options({})
    assert policy == ImagePolicy()
    assert (policy.codec, policy.quality, policy.method, policy.alpha, policy.icc) == ("webp", 80, 4, "keep", "srgb")
    assert ImagePolicy.from_options(options("codec=jpeg")).quality == 90
    assert ImagePolicy.from_options(options("codec=jpeg")).alpha == "blend:ffffff"
    assert ImagePolicy.from_options(options("codec=keep")).animation == "keep"
    mask = ImagePolicy.from_options(options("role=mask"))
    assert (mask.codec, mask.lossless, mask.resample, mask.icc, mask.bits16) == ("webp", True, "nearest", "ignore", "keep")
    assert ImagePolicy.from_options(options("role=depth")).codec == "png"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("colour=rgb", "valid options: codec="),
        ("codec=gif", "webp|jpeg|png|raw|keep"),
        ("quality=101", "0..100"),
        ("quality=-1", "0..100"),
        ("quality=high", "0..100"),
        ("codec=png,quality=3", "no quality"),
        ("method=7", "0..6"),
        ("codec=png,method=3", "codec=webp"),
        ("codec=jpeg,subsampling=422", "420|444"),
        ("restart=rows", "codec=jpeg and codec=keep"),
        ("codec=png,restart=rows", "codec=keep"),
        ("codec=jpeg,restart=yes", "rows"),
        ("longest=0", "longest=N"),
        ("longest=12.5", "longest=N"),
        ("longest=9999999", "longest=N"),
        ("exact=12", "WxH"),
        ("exact=0x5", "WxH"),
        ("exact=-1x5", "WxH"),
        ("exact=99999x5", "WxH"),
        ("longest=5,exact=5x5", "exclude each other"),
        ("resample=cubic", "lanczos|bicubic"),
        ("resample=nearest", "masks"),
        ("role=sketch", "picture|mask|label|depth"),
        ("role=mask,codec=jpeg", "never lossy"),
        ("role=mask,lossless=no", "never lossy"),
        ("role=mask,resample=lanczos", "nearest"),
        ("role=depth,bits16=scale", "keeps its values"),
        ("role=mask,icc=srgb", "keeps its values"),
        ("alpha=blend:12345", "blend:RRGGBB"),
        ("alpha=blend:12345g", "blend:RRGGBB"),
        ("alpha=white", "blend:RRGGBB"),
        ("codec=jpeg,alpha=keep", "cannot keep alpha"),
        ("animation=keep", "codec=keep"),
        ("codec=keep,animation=first", "every frame"),
        ("codec=keep,longest=64", "untouched"),
        ("bits16=keep", "bits16=scale"),
        ("max_pixels=0", "max_pixels"),
        ("transcode=yes", "codec=keep"),
        ("upscale=1", "yes|no"),
    ],
)
def test_senseless_options_are_refused_with_what_is_valid(text: str, says: str) -> None:
    with pytest.raises(OptionError) as caught:
        ImagePolicy.from_options(options(text))
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "text", ["", "codec=jpeg,restart=rows,exact=64x32", "role=mask,codec=png,longest=9", "codec=keep", "alpha=blend:AbCdEf"]
)
def test_params_are_json_and_give_the_policy_back(text: str) -> None:
    encoder = make_image_encoder(options(text))
    stored = json.loads(json.dumps(encoder.params))
    assert ImagePolicy.from_params(stored) == encoder.policy
    assert stored["pil"]["pillow"]
    assert stored["pil"]["libwebp"]
    assert "/" not in json.dumps(stored["pil"])
    assert ImageEncoder.kind == "image"


@pytest.mark.parametrize(
    "change",
    [{"codec": "exe"}, {"codec": 3}, {"role": None}, {"alpha": "blend:zz"}, {"max_pixels": "x"}, {"exact": [1, 2.5, "3"]}],
)
def test_a_hostile_schema_is_refused_or_harmless(change: dict[str, object]) -> None:
    params = {**make_image_encoder({}).params, **change}
    if "exact" in change:
        assert ImageDecoder(params).max_pixels == 200_000_000
        return
    with pytest.raises(OptionError, match="stored"):
        ImageDecoder(params)


def test_the_same_bytes_every_time() -> None:
    data = save(photo(), "PNG")
    for text in ("", "codec=jpeg,restart=rows", "codec=png", "codec=raw", "lossless=yes", "longest=50"):
        first, second = (bytes(make_image_encoder(options(text)).encode(data).payload) for _ in range(2))
        assert first == second


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 2000), st.sampled_from(["longest", "shorter"]))
def test_sizes_keep_aspect_and_never_grow(width: int, height: int, wanted: int, rule: str) -> None:
    policy = ImagePolicy.from_options({rule: str(wanted)})
    new = target_size(width, height, policy)
    side = (max if rule == "longest" else min)(width, height)
    assert min(new) >= 1
    assert new[0] <= width
    assert new[1] <= height
    if side > wanted:
        assert (max if rule == "longest" else min)(new) == wanted
        assert abs(new[0] * side - width * wanted) * 2 <= side or new[0] == 1
    else:
        assert new == (width, height)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("longest=40", (40, 27)),
        ("shorter=32", (48, 32)),
        ("exact=30x70", (30, 70)),
        ("longest=400", (96, 64)),
        ("longest=192,upscale=yes", (192, 128)),
        ("shorter=128,upscale=yes", (192, 128)),
        ("exact=192x64", (192, 64)),
    ],
)
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_stored_size(text: str, size: tuple[int, int], dtype: type) -> None:
    encoder = make_image_encoder(options("codec=raw,bits16=keep," + text))
    encoded = encoder.encode(photo(96, 64).astype(dtype))
    assert (encoded.sizes["width"], encoded.sizes["height"]) == size
    assert ImageDecoder(encoder.params).decode(encoded.payload, encoded.sizes).shape == (size[1], size[0], 3)


@pytest.mark.parametrize("resample", ["lanczos", "bicubic", "bilinear", "box"])
def test_sixteen_bit_resizing_agrees_with_eight_bit_resizing(resample: str) -> None:
    small, results = photo(90, 60), []
    for pixels, unit in ((small, 1), (small.astype(np.uint16) * 257, 257)):
        encoder = make_image_encoder(options(f"codec=raw,bits16=keep,exact=40x31,resample={resample}"))
        encoded = encoder.encode(pixels)
        results.append(ImageDecoder(encoder.params).decode(encoded.payload, encoded.sizes) / unit)
    assert np.abs(results[0] - results[1]).max() <= 2.0


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_colour_under_transparency_does_not_bleed_when_resized(dtype: type) -> None:
    top = np.iinfo(dtype).max
    pixels = np.zeros((32, 32, 4), dtype)
    pixels[:, :16] = (top, 0, 0, top)
    pixels[:, 16:] = (0, top, 0, 0)
    encoder = make_image_encoder(options("codec=raw,bits16=keep,exact=9x9"))
    encoded = encoder.encode(pixels)
    out = ImageDecoder(encoder.params).decode(encoded.payload, encoded.sizes)
    seen = out[out[..., 3] > top // 50]
    assert len(seen)
    assert seen[:, 1].max() <= top // 50


def test_a_label_image_is_a_mask() -> None:
    assert ImagePolicy.from_options({"role": "label"}) == ImagePolicy.from_options({"role": "mask"})
