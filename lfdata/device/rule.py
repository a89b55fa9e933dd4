"""What is done to the pictures of a batch, row by row; and torch doing it (docs/scheduler.md, "Pictures")."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lfdata.errors import OptionError

# Rows at a time on the CPU, where float32 in between should stay in the cache.
ROWS = 8


@dataclass(frozen=True, slots=True)
class Rule:
    """Tensors with an element a row; ``None``: that is not done.

    Attributes:
        offset: int32 (rows, 2), top and left of the part that is taken. flip: whole numbers (rows,), those to mirror are not 0.
        partner: int64 (rows,). weight: float32 (rows,), the share of a row's own pixels; without it 1.
        box: int32 (rows, 4), top, bottom, left, right of where the partner's pixels stand.
        either: a row with a box that is not empty has its own pixels alone outside of it; its weight is for its label.
    """

    offset: torch.Tensor | None = None
    flip: torch.Tensor | None = None
    partner: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    box: torch.Tensor | None = None
    either: bool = False

    def check(self, name: str, rows: int) -> None:
        """Whether they are for so many rows of a field. Raises :class:`OptionError`."""
        kinds = (
            ("offset", self.offset, torch.int32, (rows, 2)),
            ("partner", self.partner, torch.int64, (rows,)),
            ("weight", self.weight, torch.float32, (rows,)),
            ("box", self.box, torch.int32, (rows, 4)),
        )
        for what, tensor, dtype, shape in kinds:
            if tensor is not None and (tensor.dtype != dtype or tuple(tensor.shape) != shape):
                raise OptionError(
                    f"ops of field {name!r}: {what} is {dtype} of shape {shape}, not {tensor.dtype} of {tuple(tensor.shape)}"
                )
        flip = self.flip
        if flip is not None and (flip.is_floating_point() or tuple(flip.shape) != (rows,)):
            raise OptionError(
                f"ops of field {name!r}: flip is a whole number a row ({rows}), not {flip.dtype} of {tuple(flip.shape)}"
            )


def by_torch(images: torch.Tensor, out: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor, rule: Rule) -> None:
    """``images`` (rows, height, width, channels), cropped, mirrored and mixed, times ``scale`` plus ``bias``, as (rows, channels, height,
    width) of the crop. On the CPU, rows that are not there are an error."""
    size = out.shape[2], out.shape[3]
    if not images.is_cuda and len(images):
        _check(images, size, rule)
    partner, box = rule.partner, rule.box
    together = max(1, len(images)) if images.is_cuda else ROWS
    for first in range(0, len(images), together):
        here = slice(first, first + together)
        value = _pictures(images, here, size, rule)
        if partner is not None:
            own = torch.ones(len(value), device=images.device) if rule.weight is None else rule.weight[here]
            own = own[:, None, None, None]
            if box is not None:
                if rule.either:
                    empty = (box[here, 0] >= box[here, 1]) | (box[here, 2] >= box[here, 3])
                    own = torch.where(empty[:, None, None, None], own, 1.0)
                own = torch.where(_in_box(box[here], size), 0.0, own)
            theirs = _pictures(images, partner[here], size, rule)
            value = value * own + theirs * (1 - own)
        value = value.mul_(scale).add_(bias)
        out[here].copy_(value.permute(0, 3, 1, 2))


def _check(images: torch.Tensor, size: tuple[int, int], rule: Rule) -> None:
    partner, offset = rule.partner, rule.offset
    if partner is not None and not 0 <= int(partner.min()) <= int(partner.max()) < len(images):
        raise OptionError(
            f"partners are rows of the batch, 0 to {len(images) - 1}, not {int(partner.min())} to {int(partner.max())}"
        )
    if offset is not None:
        most = torch.tensor([images.shape[1] - size[0], images.shape[2] - size[1]])
        if len(wrong := torch.nonzero(((offset < 0) | (offset > most)).any(1))):
            row = int(wrong[0])
            raise OptionError(
                f"row {row}: a crop of {size[0]} x {size[1]} at {tuple(offset[row].tolist())} is not within a picture of "
                f"{images.shape[1]} x {images.shape[2]}: top is 0 to {int(most[0])}, left 0 to {int(most[1])}"
            )


def _pictures(images: torch.Tensor, which: slice | torch.Tensor, size: tuple[int, int], rule: Rule) -> torch.Tensor:
    """Some rows as float32, in memory of their own: cropped, then mirrored."""
    offset, flip = (None if one is None else one[which] for one in (rule.offset, rule.flip))
    if offset is None:
        found, there = images[which], None
    elif images.is_cuda:
        found, there = gathered(images, which, offset, size)
    else:
        rows, (height, width) = torch.arange(len(images))[which].tolist(), size
        crops = zip(rows, offset.tolist(), strict=True)
        found, there = torch.stack([images[row, y : y + height, x : x + width] for row, (y, x) in crops]), None
    if flip is not None:
        found = torch.where((flip != 0)[:, None, None, None], found.flip(2), found)
    value = found.to(torch.float32)
    return value if there is None else torch.where(there[:, None, None, None], value, float("nan"))


def gathered(
    images: torch.Tensor, which: slice | torch.Tensor, offset: torch.Tensor, size: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Crops, without waiting for the device to say where they are; and which of them are within their picture."""
    device, (height, width) = images.device, size
    row = torch.arange(len(images), device=device)[which]
    top, left = offset[:, 0].long(), offset[:, 1].long()
    most = images.shape[1] - height, images.shape[2] - width
    there = (top >= 0) & (top <= most[0]) & (left >= 0) & (left <= most[1])
    y = top.clamp(0, most[0])[:, None] + torch.arange(height, device=device)
    x = left.clamp(0, most[1])[:, None] + torch.arange(width, device=device)
    return images[row[:, None, None], y[:, :, None], x[:, None, :]], there


def _in_box(box: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """bool (rows, height, width, 1)."""
    y = torch.arange(size[0], device=box.device)[None, :, None, None]
    x = torch.arange(size[1], device=box.device)[None, None, :, None]
    top, bottom, left, right = (box[:, side, None, None, None] for side in range(4))
    return (y >= top) & (y < bottom) & (x >= left) & (x < right)
