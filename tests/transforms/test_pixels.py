"""Pixel transforms: nothing at no strength, known values, the same bytes for the same draws, in place, grey and colour."""

from __future__ import annotations

import colorsys
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageOps

from lfdata import transforms as T
from lfdata.errors import OptionError, SampleError

ALL = [T.ColorJitter(0.4, 0.4, 0.4, 0.1), T.RandAugment(), T.RandAugment(5, 30, fill=9), T.RandomGrayscale(0.5)]
CHANGES = [
    "identity",
    "shear_x",
    "shear_y",
    "move_x",
    "move_y",
    "rotate",
    "bright",
    "color",
    "contrast",
    "sharp",
    "poster",
    "solar",
    "auto",
    "equal",
]


def picture(channels: int, height: int = 37, width: int = 51) -> NDArray[np.uint8]:
    rng = np.random.default_rng(4)
    smooth = np.add.outer(np.arange(height) * 3, np.arange(width) * 2)[:, :, None] + np.arange(channels) * 40
    return np.clip(smooth + rng.integers(0, 20, smooth.shape), 0, 255).astype(np.uint8)


def augment(
    image: NDArray[np.uint8], change: str, magnitude: int, *, negative: bool = False, fill: int = 0
) -> NDArray[np.uint8]:
    found = image.copy()
    u = np.array([(CHANGES.index(change) + 0.5) / 14, 0.25 if negative else 0.75])
    T.RandAugment(1, magnitude, 31, fill).apply(found, u)
    return found


@pytest.mark.parametrize("op", ALL)
@pytest.mark.parametrize("channels", [1, 3])
def test_same_draws_same_bytes_in_place(op: Any, channels: int) -> None:
    rng = np.random.default_rng(1)
    changed = 0
    for _ in range(60):
        u = rng.random(op.draws)
        slab = np.full((4, 37, 51, channels), 77, np.uint8)
        slab[1] = slab[2] = picture(channels)
        op.apply(slab[1], u)
        op.apply(slab[2], u)
        assert (slab[1] == slab[2]).all() and (slab[0] == 77).all() and (slab[3] == 77).all()
        changed += not (slab[1] == picture(channels)).all()
        # Not one piece of memory: every second row and column of something larger.
        wide = np.full((74, 102, channels), 33, np.uint8)
        wide[::2, ::2] = picture(channels)
        op.apply(wide[::2, ::2], u)
        assert (wide[::2, ::2] == slab[1]).all() and (wide[1::2] == 33).all()
    assert changed > 10 or (channels == 1 and isinstance(op, T.RandomGrayscale))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("shape", [(1, 1), (1, 40), (40, 1), (2, 3)])
def test_small_pictures(channels: int, shape: tuple[int, int]) -> None:
    for op in ALL:
        for number in range(28):
            image = picture(channels, *shape)
            op.apply(image, np.resize([number / 28, 0.3, 0.9, 0.6, 0.1], op.draws))
    for change in CHANGES:
        assert augment(picture(channels, *shape), change, 30).shape == (*shape, channels)


@pytest.mark.parametrize("channels", [1, 3])
def test_no_strength_no_change(channels: int) -> None:
    rng = np.random.default_rng(2)
    for op in (T.ColorJitter(), T.ColorJitter((1, 1), (1, 1), (1, 1), (0, 0)), T.RandAugment(0), T.RandomGrayscale(0.0)):
        image = picture(channels)
        op.apply(image, rng.random(op.draws))
        assert (image == picture(channels)).all()
    for change in CHANGES[:11]:
        assert (augment(picture(channels), change, 0) == picture(channels)).all(), change


def test_jitter_by_known_values() -> None:
    image = np.array([[[10, 100, 200], [60, 60, 60], [0, 255, 128]]], np.uint8)

    def jitter(**options: Any) -> list[Any]:
        found = image.copy()
        T.ColorJitter(**options).apply(found, np.full(5, 0.5))
        return found.tolist()[0]

    assert jitter(brightness=(0.5, 0.5)) == [[5, 50, 100], [30, 30, 30], [0, 127, 64]]
    assert jitter(brightness=(2, 2)) == [[20, 200, 255], [120, 120, 120], [0, 255, 255]]
    assert jitter(brightness=(0, 0)) == [[0, 0, 0]] * 3
    grey = [int(v) for v in np.asarray(Image.fromarray(image).convert("L"))[0]]
    assert jitter(saturation=(0, 0)) == [[v] * 3 for v in grey]
    assert jitter(contrast=(0, 0)) == [[int(np.mean(grey) + 0.5)] * 3] * 3
    # Half a turn of the hue: the opposite colour, within the steps of an 8-bit hue.
    turned = jitter(hue=(0.5, 0.5))
    for before, after in zip(image.tolist()[0], turned, strict=True):
        h, s, v = colorsys.rgb_to_hsv(*(x / 255 for x in before))
        assert after == pytest.approx([x * 255 for x in colorsys.hsv_to_rgb((h + 127 / 255) % 1, s, v)], abs=9)
    minus, plus = jitter(hue=(-0.25, -0.25)), jitter(hue=(0.25, 0.25))
    assert minus != plus != turned


@pytest.mark.parametrize("channels", [1, 3])
def test_brightness_and_contrast_are_what_pil_calls_so_but_for_its_rounding(channels: int) -> None:
    plain = picture(channels)
    pil = Image.fromarray(plain if channels == 3 else plain[:, :, 0])
    for factor in (0.0, 0.3, 0.99, 1.3, 4.0):
        for name, theirs in (("brightness", ImageEnhance.Brightness), ("contrast", ImageEnhance.Contrast)):
            image = plain.copy()
            T.ColorJitter(**{name: (factor, factor)}).apply(image, np.zeros(5))
            wanted = np.asarray(theirs(pil).enhance(factor)).reshape(plain.shape).astype(int)
            assert np.abs(image - wanted).max() <= 1


def test_jitter_in_all_orders() -> None:
    op = T.ColorJitter(0.5, 0.5, 0.5, 0.2)
    results = set()
    for k in range(24):
        image = picture(3)
        op.apply(image, np.array([(k + 0.5) / 24, 0.1, 0.9, 0.8, 0.7]))
        results.add(image.tobytes())
    assert len(results) > 18  # some orders round to the same
    assert T.ColorJitter(0.4) == T.ColorJitter((0.6, 1.4)) and T.ColorJitter(3.0).brightness == (0.0, 4.0)


def test_grey_is_what_pil_calls_grey_but_for_its_rounding() -> None:
    image = np.random.default_rng(0).integers(0, 256, (200, 200, 3)).astype(np.uint8)
    wanted = np.asarray(Image.fromarray(image).convert("L")).astype(int)
    exact = image @ [0.299, 0.587, 0.114]
    T.RandomGrayscale(0.3).apply(image, np.array([0.29]))
    assert np.abs(image - exact[:, :, None]).max() < 0.502 and np.abs(image - wanted[:, :, None]).max() <= 1
    assert (image == image[:, :, :1]).all()
    image = picture(3)
    T.RandomGrayscale(0.3).apply(image, np.array([0.3]))
    assert (image == picture(3)).all()


@pytest.mark.parametrize("channels", [1, 3])
def test_augmentations_by_known_values(channels: int) -> None:
    image = picture(channels, 40, 331)
    moved = augment(image, "move_x", 15, fill=7)  # 150 / 331 of the width, times a half: 75 pixels
    assert (moved[:, 75:] == image[:, :-75]).all() and (moved[:, :75] == 7).all()
    moved = augment(image, "move_x", 15, negative=True)
    assert (moved[:, :-75] == image[:, 75:]).all() and (moved[:, -75:] == 0).all()
    down = int(150 / 331 * 40)
    moved = augment(image, "move_y", 30)
    assert (moved[down:] == image[:-down]).all() and (moved[:down] == 0).all()
    sheared = augment(image, "shear_x", 30)  # row y comes from 0.3 (y + 1/2) further right
    for y in (0, 11, 39):
        by = int(np.floor(0.5 + 0.3 * (y + 0.5)))
        assert (sheared[y, : 331 - by] == image[y, by:]).all() and (sheared[y, 331 - by :] == 0).all()
    assert (augment(image, "shear_y", 30) != image).any() and (augment(image, "rotate", 30, fill=200)[0, 0] == 200).all()
    assert (augment(image, "poster", 30) == (image & 0xF0)).all() and (augment(image, "poster", 15) == (image & 0xFC)).all()
    assert (augment(image, "solar", 30) == 255 - image).all()
    assert (augment(image, "solar", 15) == np.where(image < 127.5, image, 255 - image)).all()
    assert augment(image, "bright", 30).mean() > image.mean() > augment(image, "bright", 30, negative=True).mean()
    assert augment(image, "contrast", 30, negative=True).std() < image.std()
    plane = Image.fromarray(image[:, :, 0])
    assert (augment(image, "auto", 3)[:, :, 0] == np.asarray(ImageOps.autocontrast(plane))).all()
    assert (augment(image, "equal", 3)[:, :, 0] == np.asarray(ImageOps.equalize(plane))).all()


def test_other_pixels_are_refused() -> None:
    for op in ALL:
        for image in (np.zeros((4, 4, 4), np.uint8), np.zeros((4, 4, 3), np.uint16), np.zeros((4, 4), np.uint8)):
            with pytest.raises(SampleError, match="uint8 with 1 or 3 channels"):
                op.apply(image, np.zeros(op.draws))
    for shape, dtype in (((None, None, 4), "uint8"), ((4, 4, 3), "uint16"), ((4,), "uint8")):
        with pytest.raises(OptionError, match="ColorJitter takes uint8 pictures of 1 or 3 channels, not"):
            T.declared([T.ColorJitter()], "image", T.Declared(shape, dtype))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: T.ColorJitter(brightness=-1), "ColorJitter: brightness is -1; it must be a number from 0 to 1000"),
        (lambda: T.ColorJitter(hue=0.6), "ColorJitter: hue is 0.6; it must be a number from 0 to 0.5"),
        (lambda: T.ColorJitter(hue=(0.3, -0.3)), "in this order"),
        (lambda: T.RandAugment(-1), "RandAugment: num_ops is -1"),
        (lambda: T.RandAugment(2, 31), "RandAugment: magnitude is 31; it must be below num_magnitude_bins, which is 31"),
        (lambda: T.RandAugment(fill=256), "RandAugment: fill is 256"),
        (lambda: T.RandomGrayscale(-0.1), "RandomGrayscale: p is -0.1"),
    ],
)
def test_senseless_options_are_refused(make: Any, message: str) -> None:
    with pytest.raises(OptionError) as caught:
        make()
    assert message in str(caught.value)
