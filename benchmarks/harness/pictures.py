"""Whether a picture could be a crop out of another, wherever it lies and however it was resized: by search, over means of cells."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from benchmarks.harness.sources import opened

Floats = NDArray[np.float64]

LONGEST = 400
"""Sources are brought down to about this many pixels by whole factors first: cells of a crop stay larger than these."""
COARSE, FINE = 8, 16
"""Cells along each side of a crop: while looking everywhere, and while looking around the best places."""
LEAST_SIDE = 56
KEPT, ROUNDS, TRIES = 8, 14, 16
# Areas and aspects that are looked at first; those between are found from there.
_AREAS = np.exp(np.linspace(np.log(0.08), 0, 9))
_ASPECTS = np.exp(np.linspace(np.log(3 / 4), np.log(4 / 3), 5))


class Source:
    """A source picture as integral image, for means of any rectangle; rectangles are rows of left, top, width, height. ``native``: the side of
    the crops in source pixels, where that is known."""

    def __init__(self, path: Path, native: float | None = None) -> None:
        with Image.open(path) as image:
            self.full = image.size
        image = opened(path)
        self.native = native
        self.factor = max(1, round(max(self.full) / LONGEST))
        if native is not None:
            # Cells of a few pixels are left of crops of known size, however large the picture is.
            self.factor = max(1, min(self.factor, int(native / LEAST_SIDE)))
        small = np.asarray(image.reduce(self.factor) if self.factor > 1 else image, np.float64)
        self.height, self.width = small.shape[:2]
        self.integral = np.zeros((self.height + 1, self.width + 1, 3))
        self.integral[1:, 1:] = small.cumsum(0).cumsum(1)

    def cells(self, boxes: Floats, count: int, *, rounded: bool = False) -> Floats:
        """Means of ``count`` x ``count`` cells of every box: (n, count, count, 3). ``rounded``: cells end at whole pixels; faster."""
        steps = np.arange(count + 1) / count
        x = boxes[:, 0:1] + boxes[:, 2:3] * steps
        y = boxes[:, 1:2] + boxes[:, 3:4] * steps
        if rounded:
            x, y = x.round(), y.round()
            sums = self.integral[y.astype(np.int64)[:, :, None], x.astype(np.int64)[:, None, :]]
        else:
            sums = self._at(x, y)
        sums = np.diff(np.diff(sums, axis=1), axis=2)
        areas = np.diff(y, axis=1)[:, :, None] * np.diff(x, axis=1)[:, None, :]
        found: Floats = sums / areas[:, :, :, None].clip(1e-6)
        return found

    def _at(self, x: Floats, y: Floats) -> Floats:
        """The integral at every pair of a row's coordinates: between pixels, as if each were even all over."""
        left = np.clip(x.astype(np.int64), 0, self.width - 1)
        top = np.clip(y.astype(np.int64), 0, self.height - 1)
        right, below = (x - left)[:, None, :, None], (y - top)[:, :, None, None]
        rows, columns = top[:, :, None], left[:, None, :]
        upper = self.integral[rows, columns] * (1 - right) + self.integral[rows, columns + 1] * right
        lower = self.integral[rows + 1, columns] * (1 - right) + self.integral[rows + 1, columns + 1] * right
        found: Floats = upper * (1 - below) + lower * below
        return found

    def boxes(self) -> Floats:
        """Rectangles all over the picture."""
        if self.native is not None:
            side = min(self.native / self.factor, self.width, self.height)
            sizes = [(side, side)]
        else:
            area = self.width * self.height
            sizes = [((area * part * aspect) ** 0.5, (area * part / aspect) ** 0.5) for part in _AREAS for aspect in _ASPECTS]
            # What a picture takes that no such rectangle fits into.
            sizes.append((min(self.width, self.height * 4 / 3), min(self.height, self.width * 4 / 3)))
        found = []
        for width, height in sizes:
            if width > self.width or height > self.height:
                continue
            x = np.linspace(0, self.width - width, 1 + int((self.width - width) / width * COARSE))
            y = np.linspace(0, self.height - height, 1 + int((self.height - height) / height * COARSE))
            grid = np.stack(np.meshgrid(x, y), 2).reshape(-1, 2)
            found.append(np.concatenate([grid, np.full((len(grid), 2), (width, height))], 1))
        return np.concatenate(found)

    def inside(self, boxes: Floats, fixed: bool) -> Floats:
        """Rectangles moved and cut so that they lie in the picture."""
        out = boxes.copy()
        if not fixed:
            out[:, 2] = out[:, 2].clip(2, self.width)
            out[:, 3] = out[:, 3].clip(2, self.height)
        out[:, 0] = out[:, 0].clip(0, self.width - out[:, 2])
        out[:, 1] = out[:, 1].clip(0, self.height - out[:, 3])
        return out


def means(image: NDArray[np.uint8], count: int) -> Floats:
    """Means of ``count`` x ``count`` cells of a square picture whose side they divide."""
    side = len(image) // count
    found: Floats = image[: side * count, : side * count].reshape(count, side, count, side, 3).mean((1, 3))
    return found


def distance(source: Source, image: NDArray[np.uint8], kept: int = KEPT) -> float:
    """Root mean square difference between the cells of a picture and of the rectangle of the source that is nearest to it.

    Args:
        source: what it should be a crop of.
        image: (side, side, 3), maybe flipped, but where its size in the source is known.
        kept: places that are looked at closely; more take longer, and miss the right one less often.
    """
    coarse, fine = means(image, COARSE), means(image, FINE)
    flips = (False,) if source.native is not None else (False, True)
    boxes = source.boxes()
    looked = source.cells(boxes, COARSE, rounded=True)
    scores = np.stack([_rms(looked, coarse[:, ::-1] if flip else coarse) for flip in flips])
    order = np.argsort(scores, axis=None)[:kept]
    rng = np.random.default_rng(0)
    best = np.inf
    for flip in flips:
        mine = boxes[[place % len(boxes) for place in order.tolist() if place // len(boxes) == int(flip)]]
        if len(mine):
            best = min(best, _refined(source, mine, fine[:, ::-1] if flip else fine, rng, source.native is not None))
    return float(best)


def _refined(source: Source, boxes: Floats, wanted: Floats, rng: Any, fixed: bool) -> float:
    """The least distance around some rectangles: each of them is moved and resized at random, by less and less."""
    scores = _rms(source.cells(boxes, FINE), wanted)
    reach = 0.5 / COARSE
    for _ in range(ROUNDS):
        moves = rng.normal(0, reach, (len(boxes), TRIES, 4))
        if fixed:
            moves[:, :, 2:] = 0
        sides = boxes[:, None, [2, 3, 2, 3]]
        tried = boxes[:, None] + moves * sides
        # Resized about its middle.
        tried[:, :, :2] -= (tried[:, :, 2:] - boxes[:, None, 2:]) / 2
        flat = source.inside(tried.reshape(-1, 4), fixed)
        found = _rms(source.cells(flat, FINE), wanted).reshape(len(boxes), TRIES)
        choice = found.argmin(1)
        rows = np.arange(len(boxes))
        better = found[rows, choice] < scores
        boxes = np.where(better[:, None], flat.reshape(len(boxes), TRIES, 4)[rows, choice], boxes)
        scores = np.where(better, found[rows, choice], scores)
        keep = np.argsort(scores)[: max(3, len(boxes) // 2)]
        boxes, scores = boxes[keep], scores[keep]
        reach *= 0.78
    return float(scores.min())


def _rms(found: Floats, wanted: Floats) -> Floats:
    values: Floats = np.sqrt(((found - wanted) ** 2).mean((1, 2, 3)))
    return values
