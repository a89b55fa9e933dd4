"""Where a picture's pixels come from: any list of these folds into one rectangle of the source, a mirroring and an output size.

So a decoder reads only what is needed, only at the scale needed, and resamples once. In one thing that differs from doing them one
after the other: what is scaled down and up again does not lose the detail in between.

Sizes are (height, width), boxes (x0, y0, x1, y1). Rounding, tries and fallbacks are those that torchvision documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from lfdata.errors import OptionError
from lfdata.transforms.base import (
    WHERE,
    Declared,
    Transform,
    Uniform,
    operation,
    put,
    put_choice,
    put_float,
    put_int,
    put_range,
    put_size,
)
from lfdata.transforms.portable import exp, log

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

TRIES = 10
_SNAP = 1e-6  # an edge this near to a whole pixel is meant to lie there


@dataclass(slots=True)
class Placed:
    """Where ``n`` pictures' pixels come from.

    Attributes:
        boxes: float64 (n, 4): x0, y0, x1, y1 in source pixels, within the picture.
        flips: bool (n,): mirrored left to right.
        size: (height, width) of all, or ``None`` where they differ.
        sizes: int64 (n, 2): height and width of each.
        bad: why a picture cannot be placed, by its row; its box is the whole picture.
    """

    boxes: Floats
    flips: NDArray[np.bool_]
    size: tuple[int, int] | None
    sizes: Ints
    bad: dict[int, str]


class State:
    """The rectangle so far. Columns are x and y: ``low``, ``high`` float64 (n, 2) in source pixels, ``extent`` int64 (n, 2) in pixels now."""

    def __init__(self, widths: Any, heights: Any) -> None:
        self.source: Ints = np.stack([np.asarray(widths, np.int64), np.asarray(heights, np.int64)], axis=-1)
        self.extent = self.source
        self.low: Floats = np.zeros(self.source.shape)
        self.high: Floats = self.source.astype(np.float64)
        self.flips: NDArray[np.bool_] = np.zeros(len(self.source), np.bool_)
        self.mirrored = False  # whether any is
        self.bad: dict[int, str] = {}

    def crop(self, at: Ints, extent: Ints) -> None:
        """Take a rectangle of what there is now: corner and extent in pixels now, int64 (n, 2), x and y."""
        scale = (self.high - self.low) / self.extent
        if self.mirrored:
            at = at.copy()
            at[:, 0] = np.where(self.flips, self.extent[:, 0] - extent[:, 0] - at[:, 0], at[:, 0])
        self.high = self.low + (at + extent) * scale
        self.low = self.low + at * scale
        self.extent = extent

    def fit(self, end: Ints, what: str) -> None:
        """Note the pictures that are smaller than ``end`` (n, 2); they go on as if they had been scaled to it."""
        small = (self.extent[:, 0] < end[:, 0]) | (self.extent[:, 1] < end[:, 1])
        if not small.any():
            return
        for row in np.flatnonzero(small).tolist():
            width, height = self.extent[row].tolist()
            self.bad.setdefault(row, f"{what} does not fit into a picture of {width} x {height}")
        self.extent = np.where(small[:, None], end, self.extent)

    def same(self, size: tuple[int, int]) -> Ints:
        """A size (height, width) for all: int64 (n, 2), x and y."""
        found: Ints = np.empty(self.extent.shape, np.int64)
        found[:, 0], found[:, 1] = size[1], size[0]
        return found


class Geometry(Transform, frozen=True):
    """Base of what folds into a rectangle."""

    kinds: ClassVar[tuple[str, ...]] = ("image",)
    stage: ClassVar[int] = WHERE

    @property
    def target(self) -> tuple[int, int] | None:
        """(height, width) that comes out whatever goes in, or ``None``."""
        return None

    def fold(self, state: State, u: Floats) -> None:
        """Change the rectangle. ``u``: float64 (n, draws)."""
        raise NotImplementedError

    def declare(self, before: Declared) -> Declared:
        """A picture of the target size, channels and dtype as before."""
        return Declared((*(self.target or (None, None)), *before.shape[2:]), before.dtype)


class Resize(Geometry, frozen=True):
    """Scale. ``shorter``: the shorter side becomes ``size``, the longer in proportion, cut to an integer; ``exact``: to (height, width).

    Without ``mode`` a number is ``shorter`` and a pair ``exact``.
    """

    size: int | tuple[int, int]
    mode: str | None = None

    def __post_init__(self) -> None:
        pair = isinstance(self.size, tuple | list)
        if self.mode is None:
            put(self, "mode", "exact" if pair else "shorter")
        put_choice(self, "mode", ("shorter", "exact"))
        if self.mode == "exact":
            put_size(self)
        elif pair:
            raise OptionError(f"Resize: size {self.size!r} with mode 'shorter'; give one number, or mode 'exact'")
        else:
            put_int(self, "size", 1, 1 << 20)

    @property
    def target(self) -> tuple[int, int] | None:
        """The size with ``exact``."""
        return self.size if isinstance(self.size, tuple) else None

    def fold(self, state: State, u: Floats) -> None:
        """Change the pixels, not the rectangle."""
        del u
        if isinstance(self.size, tuple):
            state.extent = state.same(self.size)
        else:
            shorter = state.extent.min(axis=1, keepdims=True)
            state.extent = (self.size * state.extent / shorter).astype(np.int64)


class CenterCrop(Geometry, frozen=True):
    """The middle of the picture; half pixels are rounded to the even one. A picture smaller than that is bad."""

    size: int | tuple[int, int]

    def __post_init__(self) -> None:
        put_size(self)

    @property
    def target(self) -> tuple[int, int] | None:
        """The size."""
        return _pair(self.size)

    def fold(self, state: State, u: Floats) -> None:
        """Take the middle."""
        del u
        height, width = _pair(self.size)
        extent = state.same((height, width))
        state.fit(extent, f"a crop of {width} x {height}")
        state.crop(np.rint((state.extent - extent) / 2).astype(np.int64), extent)


class RandomCrop(Geometry, frozen=True):
    """A part of this size, anywhere in the picture with equal chance. A picture smaller than that is bad. Draws: x, y."""

    size: int | tuple[int, int]

    def __post_init__(self) -> None:
        put_size(self)

    @property
    def draws(self) -> int:
        """Two."""
        return 2

    @property
    def target(self) -> tuple[int, int] | None:
        """The size."""
        return _pair(self.size)

    def fold(self, state: State, u: Floats) -> None:
        """Take a part."""
        height, width = _pair(self.size)
        extent = state.same((height, width))
        state.fit(extent, f"a crop of {width} x {height}")
        state.crop(_anywhere(state.extent - extent, u), extent)


class Crop(Geometry, frozen=True):
    """The rectangle with its upper left corner at (x, y). A picture that does not hold it is bad."""

    x: int
    y: int
    width: int
    height: int

    def __post_init__(self) -> None:
        for option, low in (("x", 0), ("y", 0), ("width", 1), ("height", 1)):
            put_int(self, option, low, 1 << 20)

    @property
    def target(self) -> tuple[int, int] | None:
        """(height, width)."""
        return self.height, self.width

    def fold(self, state: State, u: Floats) -> None:
        """Take the rectangle."""
        del u
        at, extent = state.same((self.y, self.x)), state.same((self.height, self.width))
        state.fit(at + extent, f"a crop of {self.width} x {self.height} at ({self.x}, {self.y})")
        state.crop(at, extent)


class RandomResizedCrop(Geometry, frozen=True):
    """A part of random area and shape, anywhere in the picture, scaled to ``size``.

    Ten times, a share of the area is drawn evenly from ``scale`` and width / height from ``ratio`` (evenly in its logarithm); the
    first that fits is taken. If none does: the largest middle part whose shape is within ``ratio``.
    Draws: ten shares, ten shapes, x, y.
    """

    size: int | tuple[int, int]
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)

    def __post_init__(self) -> None:
        put_size(self)
        put_range(self, "scale", 0.0, 1.0, above=True)
        put_range(self, "ratio", 1e-3, 1e3)

    @property
    def draws(self) -> int:
        """22."""
        return 2 * TRIES + 2

    @property
    def target(self) -> tuple[int, int] | None:
        """The size."""
        return _pair(self.size)

    def fold(self, state: State, u: Floats) -> None:
        """Take a part and scale it."""
        first, last = _logarithms(self.ratio)
        sides: Floats = state.extent.astype(np.float64)
        width, height = sides[:, :1], sides[:, 1:]
        area = (u[:, :TRIES] * (self.scale[1] - self.scale[0]) + self.scale[0]) * (width * height)
        shape = exp(u[:, TRIES : 2 * TRIES] * (last - first) + first)
        widths, heights = np.rint(np.sqrt(area * shape)), np.rint(np.sqrt(area / shape))
        fits = (widths <= width) & (heights <= height) & (np.minimum(widths, heights) >= 1)
        rows, chosen = np.arange(len(u)), fits.argmax(axis=1)
        extent: Ints = np.empty(state.extent.shape, np.int64)
        extent[:, 0], extent[:, 1] = widths[rows, chosen], heights[rows, chosen]
        found = fits[rows, chosen]
        if found.all():
            at = _anywhere(state.extent - extent, u[:, 2 * TRIES :])
        else:
            extent = np.where(found[:, None], extent, self._fallback(sides))
            room = state.extent - extent
            at = np.where(found[:, None], _anywhere(room, u[:, 2 * TRIES :]), room // 2)
        state.crop(at, extent)
        state.extent = state.same(_pair(self.size))

    def _fallback(self, sides: Floats) -> Ints:
        width, height = sides[:, 0], sides[:, 1]
        shape = width / height
        found: Ints = np.empty(sides.shape, np.int64)
        found[:, 0] = np.where(shape > self.ratio[1], np.rint(height * self.ratio[1]), width)
        found[:, 1] = np.where(shape < self.ratio[0], np.rint(width / self.ratio[0]), height)
        return np.maximum(found, 1)


class RandomHorizontalFlip(Geometry, frozen=True):
    """Mirror left to right with probability ``p``. Draws: one."""

    p: float = 0.5

    def __post_init__(self) -> None:
        put_float(self, "p", 0.0, 1.0)

    @property
    def draws(self) -> int:
        """One."""
        return 1

    def fold(self, state: State, u: Floats) -> None:
        """Mirror some."""
        state.flips = state.flips ^ (u[:, 0] < self.p)
        state.mirrored = True

    def declare(self, before: Declared) -> Declared:
        """As before."""
        return before


def output_size(ops: Sequence[Geometry]) -> tuple[int, int] | None:
    """(height, width) of what comes out, ``None`` where it depends on the picture."""
    size = None
    for op in ops:
        size = size if isinstance(op, RandomHorizontalFlip) else op.target
    return size


def place(ops: Sequence[Geometry], widths: Any, heights: Any, uniform: Uniform, first: int = 0) -> Placed:
    """Fold a list of transforms.

    Args:
        ops: in their order.
        widths: of the ``n`` sources, in pixels, 1 or more.
        heights: likewise.
        uniform: gives the draws.
        first: position of ``ops[0]`` in the field's list.
    """
    state = State(widths, heights)
    count = len(state.source)
    none: Floats = np.empty((count, 0))
    for number, op in enumerate(ops, first):
        op.fold(state, uniform(operation(number, op), op.draws) if op.draws else none)
    boxes: Floats = np.concatenate([state.low, state.high], axis=1)
    whole = np.rint(boxes)
    boxes = np.where(np.abs(boxes - whole) < _SNAP, whole, boxes)
    if state.bad:
        for row in state.bad:
            boxes[row] = (0, 0, *state.source[row])
    return Placed(boxes, state.flips, output_size(ops), state.extent[:, ::-1], state.bad)


@lru_cache(maxsize=64)
def _logarithms(ratio: tuple[float, float]) -> tuple[float, float]:
    first, last = log(ratio).tolist()
    return first, last


def _pair(size: int | tuple[int, int]) -> tuple[int, int]:
    return size if isinstance(size, tuple) else (size, size)


def _anywhere(room: Ints, u: Floats) -> Ints:
    """0 to ``room``, each with equal chance."""
    found: Ints = (u * (room + 1)).astype(np.int64)
    return np.minimum(found, room)
