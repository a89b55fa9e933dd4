"""W2's pictures as they should be: by either of two filters that do not alias."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from benchmarks.harness.sources import opened
from benchmarks.harness.work import centre, resized

CROP = 224
ENOUGH_DB = 60.0
"""A picture that is this near to the first reference is not compared with the second."""


def reference(path: Path) -> NDArray[np.uint8]:
    """Full decode, antialiased bilinear resize (a triangle as wide as the scale), centre crop: (224, 224, 3)."""
    return triangle(opened(path))


def triangle(image: Any) -> NDArray[np.uint8]:
    """The same of a picture of PIL's."""
    image = image.resize(resized(*image.size), Image.Resampling.BILINEAR)
    x, y = centre(*image.size)
    return np.asarray(image.crop((x, y, x + CROP, y + CROP)))


def area(image: Any) -> NDArray[np.uint8]:
    """The same by the mean over the area of every pixel, parts of source pixels included; only where pictures are made smaller."""
    size = resized(*image.size)
    pixels = np.asarray(image, np.float64)
    for axis, (full, small, start) in enumerate(zip(image.size, size, centre(*size), strict=True)):
        # The first axis of the array is the second of the size.
        pixels = _means(pixels, 1 - axis, full / small, start)
    return pixels.round().clip(0, 255).astype(np.uint8)


def _means(pixels: NDArray[np.float64], axis: int, scale: float, start: int) -> NDArray[np.float64]:
    edges = (start + np.arange(CROP + 1)) * scale
    low = int(edges[0])
    lines = np.moveaxis(pixels, axis, 0)[low : math.ceil(edges[-1]) + 1]
    total = np.concatenate([np.zeros_like(lines[:1]), lines.cumsum(0)])
    whole = np.minimum((edges - low).astype(np.int64), len(lines) - 1)
    part = (edges - low - whole)[:, None, None]
    at = total[whole] * (1 - part) + total[whole + 1] * part
    return np.moveaxis(np.diff(at, axis=0) / scale, 0, axis)


def nearness(image: NDArray[np.uint8], path: Path) -> tuple[float, float]:
    """Mean absolute difference and PSNR (dB) to the reference that is nearer."""
    source = opened(path)
    best = _difference(image, triangle(source))
    if best[1] < ENOUGH_DB and min(source.size) > 256:
        best = max(best, _difference(image, area(source)), key=lambda found: found[1])
    return best


def _difference(image: NDArray[np.uint8], wanted: NDArray[np.uint8]) -> tuple[float, float]:
    difference = image.astype(np.float32) - wanted
    return float(np.abs(difference).mean()), 10 * math.log10(255**2 / max(1e-9, float((difference**2).mean())))
