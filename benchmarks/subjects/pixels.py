"""Picture work shared by subjects that leave decoding to their user: PIL, or libjpeg-turbo with OpenCV's area filter."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.work import Workload, centre, draw_crop, resized

Pixels = NDArray[np.uint8]
SIDE = 224


def anywhere(rng: Any, width: int, height: int) -> tuple[int, int]:
    """Left and top of a crop of 224 that may lie anywhere; ``rng`` has ``randint(low, high)``, both ends included."""
    return rng.randint(0, width - SIDE), rng.randint(0, height - SIDE)


def with_pil(work: Workload) -> Callable[[bytes], Pixels]:
    """Bytes of a JPEG to the workload's picture, through PIL as torchvision does it (bilinear, antialiased)."""
    import io

    from PIL import Image

    bilinear = Image.Resampling.BILINEAR

    def one(data: bytes) -> Pixels:
        image: Any = Image.open(io.BytesIO(data)).convert("RGB")
        if work.work == "native":
            x, y = anywhere(random, *image.size)
            image = image.crop((x, y, x + SIDE, y + SIDE))
        elif work.work == "crop":
            x, y, w, h = draw_crop(random, *image.size)
            image = image.crop((x, y, x + w, y + h)).resize((224, 224), bilinear)
            if random.random() < 0.5:
                image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        else:
            image = image.resize(resized(*image.size), bilinear)
            x, y = centre(*image.size)
            image = image.crop((x, y, x + 224, y + 224))
        return np.asarray(image)

    return one


def turbo(data: bytes) -> Pixels:
    """A whole picture through libjpeg-turbo."""
    import simplejpeg

    image: Pixels = simplejpeg.decode_jpeg(data, "RGB")
    return image


def with_turbo(work: Workload) -> Callable[[bytes], Pixels]:
    """The same with simplejpeg (libjpeg-turbo) and OpenCV, both without the GIL; area filter, so nothing is aliased."""
    import cv2
    import simplejpeg

    cv2.setNumThreads(0)

    def one(data: bytes) -> Pixels:
        image = simplejpeg.decode_jpeg(data, "RGB")
        height, width = image.shape[:2]
        if work.work == "native":
            x, y = anywhere(random, width, height)
            image = image[y : y + SIDE, x : x + SIDE]
        elif work.work == "crop":
            x, y, w, h = draw_crop(random, width, height)
            interpolation = cv2.INTER_AREA if w > 224 or h > 224 else cv2.INTER_LINEAR
            image = cv2.resize(image[y : y + h, x : x + w], (224, 224), interpolation=interpolation)
            if random.random() < 0.5:
                image = cv2.flip(image, 1)
        else:
            size = resized(width, height)
            image = cv2.resize(image, size, interpolation=cv2.INTER_AREA if size[0] <= width else cv2.INTER_LINEAR)
            x, y = centre(image.shape[1], image.shape[0])
            image = image[y : y + 224, x : x + 224]
        return np.ascontiguousarray(image)

    return one
