"""Colours of a decoded picture: uint8 (height, width, channels) with 1 or 3 channels, changed in place.

Definitions are those that torchvision documents for PIL pictures, and PIL does the work. The same draws give the same bytes with the
same build of PIL.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from lfdata.codecs.lazy_pil import pil
from lfdata.errors import OptionError, SampleError
from lfdata.transforms.base import VALUES, Declared, Transform, put, put_float, put_int, put_range, refuse

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

Pixels = NDArray[np.uint8]
Floats = NDArray[np.float64]

_ORDERS = tuple(itertools.permutations(range(4)))
_GREY = np.uint32(19595), np.uint32(38470), np.uint32(7471)  # what PIL takes for 0.299, 0.587 and 0.114, in 65536ths


class PixelTransform(Transform, frozen=True):
    """Base of what changes pixels."""

    kinds: ClassVar[tuple[str, ...]] = ("image",)
    stage: ClassVar[int] = VALUES

    def declare(self, before: Declared) -> Declared:
        """As before: uint8 with 1 or 3 channels."""
        if len(before.shape) != 3 or before.shape[2] not in (1, 3, None) or before.dtype != "uint8":
            shape = " x ".join("?" if length is None else str(length) for length in before.shape)
            raise OptionError(f"{type(self).__name__} takes uint8 pictures of 1 or 3 channels, not {before.dtype} of {shape}")
        return before

    def apply(self, image: Pixels, u: Floats) -> None:
        """Change a picture in place.

        Args:
            image: uint8 (height, width, 1 or 3).
            u: float64 (draws,), each in [0, 1).

        Raises:
            SampleError: other pixels.
        """
        raise NotImplementedError


class ColorJitter(PixelTransform, frozen=True):
    """Brightness, contrast, saturation and hue by random factors, in random order.

    A number ``a`` means factors from max(0, 1 - a) to 1 + a, for hue shifts from -a to a (of a turn, 0.5 at most); a pair gives both ends.
    Draws: the order, then one for each of the four.
    """

    brightness: float | tuple[float, float] = 0.0
    contrast: float | tuple[float, float] = 0.0
    saturation: float | tuple[float, float] = 0.0
    hue: float | tuple[float, float] = 0.0

    def __post_init__(self) -> None:
        for option in ("brightness", "contrast", "saturation"):
            if isinstance(getattr(self, option), tuple | list):
                put_range(self, option, 0.0, 1000.0)
            else:
                put_float(self, option, 0.0, 1000.0)
                value = getattr(self, option)
                put(self, option, (max(0.0, 1.0 - value), 1.0 + value))
        if isinstance(self.hue, tuple | list):
            put_range(self, "hue", -0.5, 0.5)
        else:
            put_float(self, "hue", 0.0, 0.5)
            put(self, "hue", (0.0 - self.hue, self.hue))

    @property
    def draws(self) -> int:
        """Five."""
        return 5

    def apply(self, image: Pixels, u: Floats) -> None:
        """Change a picture in place; a part whose range is only "no change" is left out."""
        steps: tuple[tuple[Any, Callable[[Picture, float], Picture], float], ...] = (
            (self.brightness, _brightness, 1.0),
            (self.contrast, _contrast, 1.0),
            (self.saturation, _saturation, 1.0),
            (self.hue, _hue, 0.0),
        )
        picture = before = _picture(image)
        for number in _ORDERS[int(u[0] * len(_ORDERS))]:
            (low, high), change, neutral = steps[number]
            if not low == high == neutral:
                picture = change(picture, low + float(u[1 + number]) * (high - low))
        if picture is not before:
            _store(image, picture)


class RandomGrayscale(PixelTransform, frozen=True):
    """All three channels become the grey value with probability ``p``; grey pictures stay. Draws: one."""

    p: float = 0.1

    def __post_init__(self) -> None:
        put_float(self, "p", 0.0, 1.0)

    @property
    def draws(self) -> int:
        """One."""
        return 1

    def apply(self, image: Pixels, u: Floats) -> None:
        """Change a picture in place, or leave it."""
        _check(image)
        if u[0] < self.p and image.shape[2] == 3:
            grey = image[:, :, 0] * _GREY[0]
            grey += image[:, :, 1] * _GREY[1]
            grey += image[:, :, 2] * _GREY[2]
            image[...] = ((grey + np.uint32(0x8000)) >> np.uint32(16))[:, :, None]


class RandAugment(PixelTransform, frozen=True):
    """``num_ops`` of fourteen changes, each drawn anew, at one strength ``magnitude`` of ``num_magnitude_bins``.

    The fourteen, and what a magnitude means for each, are those that torchvision documents; geometric ones take the nearest pixel and
    fill what lies outside with ``fill``. Draws: for each, which one and its sign.
    """

    num_ops: int = 2
    magnitude: int = 9
    num_magnitude_bins: int = 31
    fill: int = 0

    def __post_init__(self) -> None:
        put_int(self, "num_ops", 0, 64)
        put_int(self, "num_magnitude_bins", 2, 1000)
        put_int(self, "magnitude", 0, 999)
        put_int(self, "fill", 0, 255)
        if self.magnitude >= self.num_magnitude_bins:
            raise refuse(self, "magnitude", self.magnitude, f"below num_magnitude_bins, which is {self.num_magnitude_bins}")

    @property
    def draws(self) -> int:
        """Two for each."""
        return 2 * self.num_ops

    def apply(self, image: Pixels, u: Floats) -> None:
        """Change a picture in place."""
        picture = before = _picture(image)
        strength = self.magnitude / (self.num_magnitude_bins - 1)
        for k in range(self.num_ops):
            number, sign = int(u[2 * k] * _CHANGES), -1.0 if u[2 * k + 1] < 0.5 else 1.0
            picture = _change(picture, number, sign * strength, self.fill)
        if picture is not before:
            _store(image, picture)


def _check(image: Pixels) -> None:
    if image.ndim != 3 or image.shape[2] not in (1, 3) or image.dtype != np.uint8:
        raise SampleError(
            "type", f"{image.dtype} pixels of shape {image.shape}; these transforms take uint8 with 1 or 3 channels"
        )


def _picture(image: Pixels) -> Picture:
    _check(image)
    made: Picture = pil().Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image)
    return made


def _store(image: Pixels, picture: Picture) -> None:
    found = np.asarray(picture)
    image[...] = found if found.ndim == 3 else found[:, :, None]


def _spread(picture: Picture, middle: int, factor: float) -> Picture:
    """``middle`` plus ``factor`` times what a value is away from it, cut to an integer within 0 to 255; one table does it."""
    values = np.float32(middle) + np.float32(factor) * (np.arange(256, dtype=np.float32) - np.float32(middle))
    table = np.clip(values, 0, 255).astype(np.uint8).tolist()
    return picture.point(table * len(picture.getbands()))


def _brightness(picture: Picture, factor: float) -> Picture:
    return _spread(picture, 0, factor)


def _contrast(picture: Picture, factor: float) -> Picture:
    counts = np.array(picture.convert("L").histogram(), np.int64)
    mean = int(int(counts @ np.arange(256)) / int(counts.sum()) + 0.5)
    return _spread(picture, mean, factor)


def _saturation(picture: Picture, factor: float) -> Picture:
    made: Picture = pil().ImageEnhance.Color(picture).enhance(factor)
    return made


def _sharpness(picture: Picture, factor: float) -> Picture:
    made: Picture = pil().ImageEnhance.Sharpness(picture).enhance(factor)
    return made


def _hue(picture: Picture, shift: float) -> Picture:
    if picture.mode == "L":
        return picture
    hue, saturation, value = picture.convert("HSV").split()
    turned = np.asarray(hue) + np.uint8(int(shift * 255) & 255)  # wraps, as hues do
    made: Picture = pil().Image.merge("HSV", (pil().Image.fromarray(turned), saturation, value)).convert("RGB")
    return made


_CHANGES = 14


def _change(picture: Picture, number: int, v: float, fill: int) -> Picture:
    """One of RandAugment's fourteen, in torchvision's order; ``v`` is the strength, -1 to 1."""
    outside: Any = fill if picture.mode == "L" else (fill,) * 3
    match number:
        case 0:
            return picture
        case 1:
            return _affine(picture, outside, 1.0, 0.3 * v, 0.0, 0.0, 1.0, 0.0)
        case 2:
            return _affine(picture, outside, 1.0, 0.0, 0.0, 0.3 * v, 1.0, 0.0)
        case 3:
            return _affine(picture, outside, 1.0, 0.0, -float(int(150 / 331 * picture.width * v)), 0.0, 1.0, 0.0)
        case 4:
            return _affine(picture, outside, 1.0, 0.0, 0.0, 0.0, 1.0, -float(int(150 / 331 * picture.height * v)))
        case 5:
            return picture.rotate(30.0 * v, pil().Image.Resampling.NEAREST, fillcolor=outside)
        case 6 | 7 | 8 | 9:
            change = (_brightness, _saturation, _contrast, _sharpness)[number - 6]
            return change(picture, 1.0 + 0.9 * v)
        case 10:
            made: Picture = pil().ImageOps.posterize(picture, 8 - round(4 * abs(v)))
        case 11:
            limit = 255.0 * (1.0 - abs(v))
            table = [value if value < limit else 255 - value for value in range(256)]
            return picture.point(table * len(picture.getbands()))
        case 12:
            made = pil().ImageOps.autocontrast(picture)
        case _:
            made = pil().ImageOps.equalize(picture)
    return made


def _affine(picture: Picture, outside: Any, *matrix: float) -> Picture:
    return picture.transform(
        picture.size, pil().Image.Transform.AFFINE, matrix, pil().Image.Resampling.NEAREST, fillcolor=outside
    )
