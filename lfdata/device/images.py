"""Pictures as a model takes them: scaled, laid out, in its dtype; one pass over uint8."""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch

from lfdata.errors import OptionError

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# Rows at a time on the CPU, where float32 in between should stay in the cache.
ROWS = 8
log = logging.getLogger("lfdata")
Tensors = Mapping[str, torch.Tensor]


class Op(Protocol):
    """What is done to a field on the device."""

    def check(self, name: str, dtype: str, row: tuple[int, ...]) -> None:
        """Whether it can be done to rows of that dtype and shape. Raises :class:`OptionError`."""
        ...

    def bytes(self, size: int) -> int:
        """Of the result, from those of the rows."""
        ...

    def out(self, flat: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """The result's tensor over its bytes, for rows of a shape."""
        ...

    def run(self, name: str, rows: torch.Tensor, out: torch.Tensor, batch: Tensors) -> None:
        """Fill it. ``batch``: the others of the batch, on the device."""
        ...


@dataclass(frozen=True)
class Images:
    """uint8 (rows, height, width, channels) -> (value / 255 - mean) / std, (rows, channels, height, width).

    Args:
        mean, std: by channel, of values from 0 to 1.
        dtype: ``"float32"``, ``"float16"`` or ``"bfloat16"``, or torch's.
        channels_last: memory order of the result.
        flip: name of a field, one number a row: rows to mirror from left to right.
        partner: name of a field, int64 by row: which row of the same batch is mixed with it.
        weight: name of a field, float32 by row: the share of the row's own pixels (MixUp). Without it 1.
        box: name of a field, int32 (rows, 4): top, bottom, left, right of where the partner's pixels stand instead (CutMix).
    """

    mean: Sequence[float] = IMAGENET_MEAN
    std: Sequence[float] = IMAGENET_STD
    dtype: Any = "bfloat16"
    channels_last: bool = False
    flip: str | None = None
    partner: str | None = None
    weight: str | None = None
    box: str | None = None

    def __post_init__(self) -> None:
        mean, std = tuple(float(one) for one in self.mean), tuple(float(one) for one in self.std)
        dtype = DTYPES.get(self.dtype, self.dtype) if isinstance(self.dtype, str) else self.dtype
        if dtype not in DTYPES.values():
            raise OptionError(f"Images: dtype {self.dtype!r}; there are {', '.join(DTYPES)}")
        if len(mean) != len(std) or not mean or not all(map(math.isfinite, (*mean, *std))) or min(std) <= 0:
            raise OptionError(f"Images: mean {mean} and std {std} are one number a channel, std above 0")
        if self.partner is None and (self.weight is not None or self.box is not None):
            raise OptionError("Images: weight and box say how rows are mixed with their partners: name a field with partner=")
        for name, value in (("mean", mean), ("std", std), ("dtype", dtype)):
            object.__setattr__(self, name, value)

    def check(self, name: str, dtype: str, row: tuple[int, ...]) -> None:
        """Pictures of one size."""
        if dtype != "|u1" or len(row) != 3 or row[2] != len(self.mean):
            raise OptionError(
                f"ops of field {name!r}: Images takes uint8 pictures of one size and {len(self.mean)} channels (as many as mean has), "
                f"not {dtype} of shape {row}: end the geometry with a crop or Resize(mode='exact')"
            )

    def bytes(self, size: int) -> int:
        """One value of the new dtype a byte."""
        return size * int(self.dtype.itemsize)

    def out(self, flat: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """(rows, channels, height, width)."""
        rows, height, width, channels = shape
        values = flat.view(self.dtype)
        if self.channels_last:
            return values.view(rows, height, width, channels).permute(0, 3, 1, 2)
        return values.view(rows, channels, height, width)

    def run(self, name: str, rows: torch.Tensor, out: torch.Tensor, batch: Tensors) -> None:
        """By Triton where it is, else by torch."""
        try:
            flip, partner, weight, box = (
                None if one is None else batch[one] for one in (self.flip, self.partner, self.weight, self.box)
            )
        except KeyError as error:
            raise OptionError(f"ops of field {name!r}: the batch has no {error}; there are {', '.join(batch)}") from None
        count = len(rows)
        kinds = (
            ("partner", partner, torch.int64, (count,)),
            ("weight", weight, torch.float32, (count,)),
            ("box", box, torch.int32, (count, 4)),
        )
        for what, tensor, dtype, shape in kinds:
            if tensor is not None and (tensor.dtype != dtype or tuple(tensor.shape) != shape):
                raise OptionError(
                    f"ops of field {name!r}: {what} is {dtype} of shape {shape}, not {tensor.dtype} of {tuple(tensor.shape)}"
                )
        if flip is not None and (flip.is_floating_point() or tuple(flip.shape) != (count,)):
            raise OptionError(
                f"ops of field {name!r}: flip is a whole number a row ({count}), not {flip.dtype} of {tuple(flip.shape)}"
            )
        if partner is not None and weight is None:
            weight = _ones(count, rows.device)
        scale, bias = _factors(tuple(self.mean), tuple(self.std), rows.device)
        kernels = _kernels() if rows.is_cuda else None
        (by_torch if kernels is None else kernels.pictures)(rows, out, scale, bias, flip, partner, weight, box)


def by_torch(
    images: torch.Tensor,
    out: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor,
    flip: torch.Tensor | None = None,
    partner: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    box: torch.Tensor | None = None,
) -> None:
    """``images`` (rows, height, width, channels), mirrored and mixed, times ``scale`` plus ``bias``, as (rows, channels, height, width)."""
    if (
        partner is not None
        and not images.is_cuda
        and len(partner)
        and not 0 <= int(partner.min()) <= int(partner.max()) < len(images)
    ):
        raise OptionError(
            f"partners are rows of the batch, 0 to {len(images) - 1}, not {int(partner.min())} to {int(partner.max())}"
        )
    together = max(1, len(images)) if images.is_cuda else ROWS
    for first in range(0, len(images), together):
        here = slice(first, first + together)
        value = _mirrored(images[here], None if flip is None else flip[here])
        if partner is not None and weight is not None:
            own = weight[here, None, None, None]
            if box is not None:
                own = torch.where(_in_box(box[here], images), 0.0, own)
            theirs = _mirrored(images[partner[here]], None if flip is None else flip[partner[here]])
            value = value * own + theirs * (1 - own)
        value = value.mul_(scale).add_(bias)
        out[here].copy_(value.permute(0, 3, 1, 2))


def _mirrored(images: torch.Tensor, flip: torch.Tensor | None) -> torch.Tensor:
    """As float32, in memory of its own."""
    if flip is not None:
        images = torch.where((flip != 0)[:, None, None, None], images.flip(2), images)
    return images.to(torch.float32)


def _in_box(box: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
    """bool (rows, height, width, 1)."""
    y = torch.arange(images.shape[1], device=images.device)[None, :, None, None]
    x = torch.arange(images.shape[2], device=images.device)[None, None, :, None]
    top, bottom, left, right = (box[:, side, None, None, None] for side in range(4))
    return (y >= top) & (y < bottom) & (x >= left) & (x < right)


@cache
def _factors(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 by channel: value * scale + bias is (value / 255 - mean) / std."""
    scale = torch.tensor([1 / (255 * one) for one in std], dtype=torch.float32)
    bias = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)], dtype=torch.float32)
    return scale.to(device), bias.to(device)


@cache
def _ones(count: int, device: torch.device) -> torch.Tensor:
    return torch.ones(count, dtype=torch.float32, device=device)


@cache
def _kernels() -> Any:
    """The module of kernels; ``None`` where there is no Triton."""
    try:
        return importlib.import_module("lfdata.device.kernels")
    except Exception as error:
        # Also of a Triton that does not go with this torch.
        log.warning("pictures are made by torch, not by one kernel: Triton cannot be imported: %r", error)
        return None
