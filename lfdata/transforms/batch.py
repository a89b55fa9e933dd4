"""Pictures mixed across the global batch: MixUp, CutMix, Mosaic.

A row's partners depend on (seed, epoch, step, row) and the size of the global batch alone, never on ranks or pools. Pictures are
uint8 (height, width, channels), of one size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from lfdata.codecs.lazy_pil import pil
from lfdata.errors import OptionError
from lfdata.order.permutation import Permutation, make_key
from lfdata.transforms.base import BATCH, Declared, Transform, put, put_float, put_range, refuse
from lfdata.transforms.beta import HIGHEST, LOWEST, quantile

Pixels = NDArray[np.uint8]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_PARTNERS = 7  # third number of the keys of partners (docs/order.md)


class BatchTransform(Transform, frozen=True, kw_only=True):
    """Base of what mixes rows of the global batch.

    Args (by name):
        field: the pictures' field.
        labels: fields whose values of the partner come with the batch, to be mixed by whoever trains.
    """

    kinds: ClassVar[tuple[str, ...]] = ("image",)
    stage: ClassVar[int] = BATCH

    field: str = "image"
    labels: tuple[str, ...] = ()

    def check(self) -> None:
        """Check what all have. Raises :class:`OptionError`."""
        if not isinstance(self.field, str) or not self.field:
            raise refuse(self, "field", self.field, "the name of a field")
        labels = tuple(self.labels) if isinstance(self.labels, tuple | list) else None
        if labels is None or not all(isinstance(label, str) and label for label in labels) or self.field in labels:
            raise refuse(self, "labels", self.labels, "a tuple of names of other fields")
        put(self, "labels", labels)

    @property
    def partners(self) -> int:
        """Pictures needed beside a row's own."""
        return 1

    def extras(self) -> Mapping[str, Declared]:
        """What :meth:`apply` returns, for one row."""
        return {"lam": Declared((), "float32")}

    def declare(self, before: Declared) -> Declared:
        """As before: uint8 pictures of one size."""
        if len(before.shape) != 3 or before.nbytes is None or before.dtype != "uint8":
            raise OptionError(
                f"{type(self).__name__} takes uint8 pictures of one size (end the geometry with a crop or Resize(mode='exact')), "
                f"not {before.dtype} of shape {before.shape}"
            )
        return before

    def apply(self, images: Pixels, partner_images: Pixels, u: Floats) -> dict[str, NDArray[Any]]:
        """Mix in place.

        Args:
            images: uint8 (r, height, width, channels), changed.
            partner_images: uint8 (r, partners, height, width, channels): as they were before anything was mixed, so other memory.
            u: float64 (r or 1, draws) in [0, 1); 1: the same for all rows.

        Returns:
            Arrays of r rows as :meth:`extras` declares them.
        """
        raise NotImplementedError


class MixUp(BatchTransform, frozen=True):
    """lam times the picture plus 1 - lam times its partner, rounded; lam from Beta(alpha, alpha), alpha 0.001 to 10. Draws: one.

    Returns ``lam``, float32 (r,): the share of a row's own picture and label.
    """

    alpha: float = 0.2

    def __post_init__(self) -> None:
        self.check()
        put_float(self, "alpha", LOWEST, HIGHEST)

    @property
    def draws(self) -> int:
        """One."""
        return 1

    def apply(self, images: Pixels, partner_images: Pixels, u: Floats) -> dict[str, NDArray[Any]]:
        """Mix in place."""
        _check(self, images, partner_images, u)
        lam = np.broadcast_to(quantile(self.alpha, u[:, 0]).astype(np.float32), len(images)).copy()
        for row in np.flatnonzero(lam < 1).tolist():
            mixed = images[row].astype(np.float32)
            mixed *= lam[row]
            other = partner_images[row, 0].astype(np.float32)
            other *= np.float32(1) - lam[row]
            mixed += other
            images[row] = np.rint(mixed, out=mixed)
        return {"lam": lam}


class CutMix(BatchTransform, frozen=True):
    """A rectangle of the partner over the picture. Draws: lam, x, y.

    Its sides are sqrt(1 - lam) of the picture's, with lam from Beta(alpha, alpha), alpha 0.001 to 10; its centre is any pixel; what
    lies outside is cut off. Returns ``lam``, float32 (r,): the share of the picture that is left.
    """

    alpha: float = 1.0

    def __post_init__(self) -> None:
        self.check()
        put_float(self, "alpha", LOWEST, HIGHEST)

    @property
    def draws(self) -> int:
        """Three."""
        return 3

    def apply(self, images: Pixels, partner_images: Pixels, u: Floats) -> dict[str, NDArray[Any]]:
        """Mix in place."""
        _check(self, images, partner_images, u)
        boxes, lam = self.boxes(images.shape[1:3], u)
        for row in range(len(images)):
            top, bottom, left, right = boxes[row if len(u) > 1 else 0].tolist()
            images[row, top:bottom, left:right] = partner_images[row, 0, top:bottom, left:right]
        return {"lam": np.broadcast_to(lam, len(images)).copy()}

    def boxes(self, size: tuple[int, ...], u: Floats) -> tuple[Ints, NDArray[np.float32]]:
        """Rectangles in pictures of a size (height, width), and what they leave.

        Args:
            u: float64 (n, 3) in [0, 1).

        Returns:
            Top, bottom, left, right, int64 (n, 4); and ``lam``, float32 (n,).
        """
        height, width = size
        half = 0.5 * np.sqrt(1.0 - quantile(self.alpha, u[:, 0]))
        left, right = _span(u[:, 1], half, width)
        top, bottom = _span(u[:, 2], half, height)
        lam = 1.0 - (bottom - top) * (right - left) / (height * width)
        return np.stack([top, bottom, left, right], axis=1), lam.astype(np.float32)


class Mosaic(BatchTransform, frozen=True):
    """With probability ``p``, four pictures as the quarters of one, each scaled to its quarter. Draws: whether, x, y.

    The point where they meet is drawn evenly: between these two shares of the width, and of the height (``centre``). The row's own is
    upper left, then come its partners: upper right, lower left, lower right.

    Returns ``lam``, float32 (r,): the share of a row's own; ``areas``, float32 (r, 4): the share of each; ``centre``, int64 (r, 2):
    y and x, for moving boxes. A row that is left alone has areas 1, 0, 0, 0 and its lower right corner as the centre.
    """

    p: float = 1.0
    centre: tuple[float, float] = (0.25, 0.75)

    def __post_init__(self) -> None:
        self.check()
        put_float(self, "p", 0.0, 1.0)
        put_range(self, "centre", 0.0, 1.0)

    @property
    def draws(self) -> int:
        """Three."""
        return 3

    @property
    def partners(self) -> int:
        """Three."""
        return 3

    def extras(self) -> Mapping[str, Declared]:
        """Own share, all shares, and centre."""
        return {"lam": Declared((), "float32"), "areas": Declared((4,), "float32"), "centre": Declared((2,), "int64")}

    def apply(self, images: Pixels, partner_images: Pixels, u: Floats) -> dict[str, NDArray[Any]]:
        """Mix in place."""
        _check(self, images, partner_images, u)
        count, height, width = images.shape[:3]
        full = np.array([height, width], np.int64)
        low, high = self.centre
        drawn = np.rint((low + u[:, [2, 1]] * (high - low)) * full).astype(np.int64)
        drawn = np.where(u[:, :1] < self.p, np.clip(drawn, 1, full), full)
        centre = np.broadcast_to(drawn, (count, 2)).copy()
        for row in np.flatnonzero((centre < full).any(axis=1)).tolist():
            y, x = centre[row].tolist()
            own = images[row].copy()
            quarters = ((0, y, 0, x), (0, y, x, width), (y, height, 0, x), (y, height, x, width))
            for number, (top, bottom, left, right) in enumerate(quarters):
                if top < bottom and left < right:
                    source = partner_images[row, number - 1] if number else own
                    _scale(source, images[row, top:bottom, left:right])
        share = centre / full
        down = np.stack([share[:, 0], share[:, 0], 1 - share[:, 0], 1 - share[:, 0]], axis=1)
        across = np.stack([share[:, 1], 1 - share[:, 1], share[:, 1], 1 - share[:, 1]], axis=1)
        areas = (down * across).astype(np.float32)
        return {"lam": areas[:, 0].copy(), "areas": areas, "centre": centre}


def partners(op: BatchTransform, seed: int, epoch: int, step: int, rows: Any, size: int) -> Ints:
    """Which rows of the global batch a row is mixed with.

    Partner number j of row r is at r in the permutation of the global batch with the key (seed, epoch, 7, step, j). It may be the
    row itself, as with any random permutation. All transforms share partners, so what one has read serves the next.

    Args:
        rows: rows of the global batch, 0 to ``size`` - 1, shape (r,).
        size: samples of the global batch.

    Returns:
        int64 (r, ``op.partners``).
    """
    wanted = np.asarray(rows, np.int64)
    columns = [Permutation(size, make_key(seed, epoch, _PARTNERS, step, number))(wanted) for number in range(op.partners)]
    return np.stack(columns, axis=1)


def _check(op: BatchTransform, images: Pixels, others: Pixels, u: Floats) -> None:
    shape = images.shape
    good = images.ndim == 4 and images.dtype == others.dtype == np.uint8 and others.shape == (shape[0], op.partners, *shape[1:])
    if not good or u.shape not in ((shape[0], op.draws), (1, op.draws)):
        raise ValueError(
            f"{type(op).__name__}: pictures {images.dtype} {shape}, partners {others.dtype} {others.shape}, draws {u.shape}"
        )


def _span(u: Floats, half: Floats, length: int) -> tuple[Ints, Ints]:
    middle = np.minimum((u * length).astype(np.int64), length - 1)
    reach = (half * length).astype(np.int64)
    return np.maximum(middle - reach, 0), np.minimum(middle + reach, length)


def _scale(source: Pixels, target: Pixels) -> None:
    size = target.shape[1], target.shape[0]
    if source.shape[2] == 3:
        target[...] = np.asarray(pil().Image.fromarray(source).resize(size, pil().Image.Resampling.BILINEAR))
        return
    for channel in range(source.shape[2]):  # one by one: PIL would weight colours by transparency
        target[:, :, channel] = np.asarray(
            pil().Image.fromarray(source[:, :, channel]).resize(size, pil().Image.Resampling.BILINEAR)
        )
