"""Pictures as a model takes them: scaled, laid out, in its dtype; one pass over uint8."""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from numbers import Real
from typing import Any, Protocol, runtime_checkable

import torch

import lfdata.transforms as T
from lfdata.device.rule import Rule, by_torch
from lfdata.errors import OptionError
from lfdata.loader.drawn import BOX, CROP, FLIP, PARTNER, WEIGHT
from lfdata.loader.options import flag, real
from lfdata.loader.spec import DrawSpec
from lfdata.transforms.beta import HIGHEST, LOWEST

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
log = logging.getLogger("lfdata")
Tensors = Mapping[str, torch.Tensor]


@runtime_checkable
class Op(Protocol):
    """What is done to a field on the device."""

    def check(self, name: str, dtype: str, row: tuple[int, ...]) -> None:
        """Whether it can be done to rows of that dtype and shape. Raises :class:`OptionError`."""
        ...

    def bytes(self, size: Any, row: tuple[int, ...]) -> Any:
        """Of the result, from those of the rows (a number, or an array of several batches') and the shape of one."""
        ...

    def draws(self, name: str, row: tuple[int, ...], rows: int) -> DrawSpec | None:
        """What the loader is to draw for it, of batches of so many rows."""
        ...

    def fields(self, name: str) -> Mapping[str, str]:
        """Which other fields of a batch it takes, by what they are to it."""
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

    What is random is drawn by the loader, which puts it into the batch under the name of the field: ``image.crop``, int32 (rows, 2), and
    ``image.flip``, bool (rows,); ``image.partner``, int64 (rows,), ``image.weight``, float32 (rows,), and ``image.box``, int32 (rows, 4).

    Args:
        mean, std: by channel, of values from 0 to 1; a number for pictures of one channel.
        dtype: ``"float32"``, ``"float16"`` or ``"bfloat16"``, or torch's.
        channels_last: memory order of the result.
        crop: (height, width) of the part of each picture that is taken, or a number for a square: anywhere in it, with equal chance.
        offset: name of a field, int32 (rows, 2): top and left of that part instead.
        flip: probability with which a row is mirrored from left to right; or the name of a field, one number a row: rows to mirror.
        mixup: alpha of MixUp, 0.001 to 10: a row's share is drawn from Beta(alpha, alpha), the rest is another row of the batch.
        cutmix: alpha of CutMix, likewise: a rectangle of 1 - that share is another row's.
        mix_prob: that a row is mixed at all. switch_prob: that it is by CutMix, where both are given.
        partner: name of a field, int64 by row: which row of the same batch is mixed with it.
        weight: name of a field, float32 by row: the share of the row's own pixels (MixUp). Without it 1.
        box: name of a field, int32 (rows, 4): top, bottom, left, right of where the partner's pixels stand instead (CutMix).
    """

    mean: Sequence[float] | float = IMAGENET_MEAN
    std: Sequence[float] | float = IMAGENET_STD
    dtype: Any = "bfloat16"
    channels_last: bool = False
    flip: str | float | None = None
    partner: str | None = None
    weight: str | None = None
    box: str | None = None
    crop: int | tuple[int, int] | None = None
    offset: str | None = None
    mixup: float | None = None
    cutmix: float | None = None
    mix_prob: float = 1.0
    switch_prob: float = 0.5

    def __post_init__(self) -> None:
        mean, std = _numbers("mean", self.mean), _numbers("std", self.std)
        dtype = DTYPES.get(self.dtype, self.dtype) if isinstance(self.dtype, str) else self.dtype
        if dtype not in DTYPES.values():
            raise OptionError(f"Images: dtype {self.dtype!r}; there are {', '.join(DTYPES)}")
        if len(mean) != len(std) or not mean or not all(map(math.isfinite, (*mean, *std))) or min(std) <= 0:
            raise OptionError(f"Images: mean {mean} and std {std} are one number a channel, std above 0")
        for name, value in (
            ("mean", mean),
            ("std", std),
            ("dtype", dtype),
            ("channels_last", flag("Images: channels_last", self.channels_last)),
        ):
            object.__setattr__(self, name, value)
        if self.crop is not None:
            try:
                object.__setattr__(self, "crop", T.RandomCrop(self.crop).target)
            except OptionError:
                raise OptionError(f"Images: crop is {self.crop!r}; it must be a number of pixels or (height, width)") from None
        elif self.offset is not None:
            raise OptionError("Images: offset says where a crop lies: give its size with crop=")
        if self.flip is not None and not isinstance(self.flip, str):
            object.__setattr__(self, "flip", real("Images: flip", self.flip, 0, 1))
        for name in ("mixup", "cutmix"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, real(f"Images: {name}", value, LOWEST, HIGHEST))
        for name in ("mix_prob", "switch_prob"):
            object.__setattr__(self, name, real(f"Images: {name}", getattr(self, name), 0, 1))
        for name in ("offset", "partner", "weight", "box"):
            if (value := getattr(self, name)) is not None and not isinstance(value, str):
                raise OptionError(f"Images: {name} is the name of a field, not {value!r}")
        if self.partner is None and (self.weight is not None or self.box is not None):
            raise OptionError("Images: weight and box say how rows are mixed with their partners: name a field with partner=")
        if self.partner is not None and self._mixes:
            raise OptionError(
                "Images: mixup= and cutmix= draw partners, and partner= names a field that has them: leave one out"
            )

    @property
    def _mixes(self) -> bool:
        return self.mixup is not None or self.cutmix is not None

    def check(self, name: str, dtype: str, row: tuple[int, ...]) -> None:
        """Pictures of one size."""
        channels = len(_numbers("mean", self.mean))
        if dtype != "|u1" or len(row) != 3 or row[2] != channels:
            raise OptionError(
                f"ops of field {name!r}: Images takes uint8 pictures of one size and {channels} channels (as many as mean has), "
                f"not {dtype} of shape {row}: end the geometry with a crop or Resize(mode='exact')"
            )
        height, width = self._size(row)
        if height > row[0] or width > row[1]:
            raise OptionError(
                f"ops of field {name!r}: a crop of {height} x {width} does not fit into pictures of {row[0]} x {row[1]}"
            )

    def _size(self, row: Sequence[int]) -> tuple[int, int]:
        """(height, width) of the result."""
        return self.crop if isinstance(self.crop, tuple) else (row[0], row[1])

    def bytes(self, size: Any, row: tuple[int, ...]) -> Any:
        """Values of the new dtype in place of bytes, of as many pixels as a crop has."""
        height, width = self._size(row)
        return size // max(1, row[0] * row[1]) * height * width * int(self.dtype.itemsize)

    def draws(self, name: str, row: tuple[int, ...], rows: int) -> DrawSpec | None:
        """Whatever is given as a number."""
        crop, flip = self.crop is not None and self.offset is None, None if isinstance(self.flip, str) else self.flip
        if not crop and flip is None and not self._mixes:
            return None
        mix = (self.mixup, self.cutmix, self.mix_prob, self.switch_prob)
        return DrawSpec(name, rows, self._size(row), crop, flip, *mix)

    def out(self, flat: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """(rows, channels, height, width)."""
        rows, channels, (height, width) = shape[0], shape[3], self._size(shape[1:])
        values = flat.view(self.dtype)
        if self.channels_last:
            return values.view(rows, height, width, channels).permute(0, 3, 1, 2)
        return values.view(rows, channels, height, width)

    def fields(self, name: str) -> dict[str, str]:
        """Which fields of a batch say what is done to the rows of one: by what they are, ``offset``, ``flip``, ``partner``, ...."""
        offset = name + CROP if self.crop is not None and self.offset is None else self.offset
        flip = self.flip if self.flip is None or isinstance(self.flip, str) else name + FLIP
        partner, weight, box = self.partner, self.weight, self.box
        if self._mixes:
            partner, weight, box = name + PARTNER, name + WEIGHT, None if self.cutmix is None else name + BOX
        found = {"offset": offset, "flip": flip, "partner": partner, "weight": weight, "box": box}
        return {what: field for what, field in found.items() if field is not None}

    def run(self, name: str, rows: torch.Tensor, out: torch.Tensor, batch: Tensors) -> None:
        """By Triton where it is, else by torch."""
        try:
            rule = Rule(**{what: batch[field] for what, field in self.fields(name).items()}, either=self._mixes)
        except KeyError as error:
            raise OptionError(f"ops of field {name!r}: the batch has no {error}; there are {', '.join(batch)}") from None
        rule.check(name, len(rows))
        scale, bias = _factors(self.mean, self.std, rows.device)
        kernels = _kernels() if rows.is_cuda else None
        (by_torch if kernels is None else kernels.pictures)(rows, out, scale, bias, rule)


def _numbers(name: str, value: Any) -> tuple[float, ...]:
    """By channel. Raises :class:`OptionError`."""
    try:
        if isinstance(value, Real) and not isinstance(value, bool):
            return (float(value),)
        if isinstance(value, str | bytes | Mapping):
            raise TypeError
        return tuple(float(one) for one in value)
    except (TypeError, ValueError, OverflowError):
        raise OptionError(
            f"Images: {name} is a number for each channel, such as {IMAGENET_MEAN}, or one number for pictures of one channel, not {value!r}"
        ) from None


@cache
def _factors(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 by channel: value * scale + bias is (value / 255 - mean) / std."""
    scale = torch.tensor([1 / (255 * one) for one in std], dtype=torch.float32)
    bias = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)], dtype=torch.float32)
    return scale.to(device), bias.to(device)


@cache
def _kernels() -> Any:
    """The module of kernels; ``None`` where there is no Triton."""
    try:
        return importlib.import_module("lfdata.device.kernels")
    except Exception as error:
        # Also of a Triton that does not go with this torch.
        log.warning("pictures are made by torch, not by one kernel: Triton cannot be imported: %r", error)
        return None
