"""The Triton kernel for pictures. Imported where Triton is."""

import torch
import triton
import triton.language as tl

from lfdata.device.rule import Rule

BLOCK = 1024


# Triton reads the annotations of a kernel: there may be none but its own.
def _pictures(  # type: ignore[no-untyped-def]
    source,
    out,
    scale,
    bias,
    offset,
    flip,
    partner,
    weight,
    box,
    rows,
    source_height,
    source_width,
    height,
    width,
    CHANNELS: tl.constexpr,
    PLANAR: tl.constexpr,
    CROP: tl.constexpr,
    FLIP: tl.constexpr,
    MIX: tl.constexpr,
    WEIGHT: tl.constexpr,
    BOX: tl.constexpr,
    EITHER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block of the result's pixels of a row: uint8 (rows, height, width, channels) in, planes or pixels out."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pixels = height * width
    inside = at < pixels
    y = at // width
    x = at - y * width
    own_x = x
    if FLIP:
        own_x = tl.where(tl.load(flip + row) != 0, width - 1 - x, x)
    first = source + row * source_height * source_width * CHANNELS
    # What is no part of a picture, or no row of the batch, must not pass for one, nor be read.
    there = row >= 0
    if CROP:
        top, left = tl.load(offset + row * 2), tl.load(offset + row * 2 + 1)
        there = (top >= 0) & (top <= source_height - height) & (left >= 0) & (left <= source_width - width)
        own = (y + tl.where(there, top, 0)) * source_width + own_x + tl.where(there, left, 0)
    else:
        own = y * width + own_x
    if MIX:
        other = tl.load(partner + row).to(tl.int64)
        known = (other >= 0) & (other < rows)
        other = tl.where(known, other, row)
        their_x = x
        if FLIP:
            their_x = tl.where(tl.load(flip + other) != 0, width - 1 - x, x)
        second = source + other * source_height * source_width * CHANNELS
        if CROP:
            their_top, their_left = tl.load(offset + other * 2), tl.load(offset + other * 2 + 1)
            known = known & (their_top >= 0) & (their_top <= source_height - height)
            known = known & (their_left >= 0) & (their_left <= source_width - width)
            theirs = (y + tl.where(known, their_top, 0)) * source_width + their_x + tl.where(known, their_left, 0)
        else:
            theirs = y * width + their_x
        share = 1.0
        if WEIGHT:
            share = tl.load(weight + row)
        if BOX:
            box_top, box_bottom = tl.load(box + row * 4), tl.load(box + row * 4 + 1)
            box_left, box_right = tl.load(box + row * 4 + 2), tl.load(box + row * 4 + 3)
            if EITHER:
                share = tl.where((box_top < box_bottom) & (box_left < box_right), 1.0, share)
        there = there & known
        shares = tl.zeros([BLOCK], tl.float32) + share
        if BOX:
            cut = (y >= box_top) & (y < box_bottom) & (x >= box_left) & (x < box_right)
            shares = tl.where(cut, 0.0, shares)
    for channel in tl.static_range(CHANNELS):
        value = tl.load(first + own * CHANNELS + channel, mask=inside, other=0).to(tl.float32)
        if MIX:
            mixed = tl.load(second + theirs * CHANNELS + channel, mask=inside, other=0).to(tl.float32)
            value = value * shares + mixed * (1.0 - shares)
        value = value * tl.load(scale + channel) + tl.load(bias + channel)
        if CROP or MIX:
            value = tl.where(there, value, float("nan"))
        place = out + row * pixels * CHANNELS
        if PLANAR:
            place += channel * pixels + at
        else:
            place += at * CHANNELS + channel
        tl.store(place, value.to(out.dtype.element_ty), mask=inside)


_kernel = triton.jit(_pictures)


def pictures(images: torch.Tensor, out: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor, rule: Rule) -> None:
    """As :func:`lfdata.device.rule.by_torch`, on the current stream. ``out``: contiguous or channels last. What is not there is NaN."""
    rows, channels, height, width = out.shape
    if not rows or not height * width:
        return
    grid = (rows, triton.cdiv(height * width, BLOCK))
    offset, flip, partner, weight, box = rule.offset, rule.flip, rule.partner, rule.weight, rule.box
    _kernel[grid](
        images,
        out,
        scale,
        bias,
        images if offset is None else offset,
        images if flip is None else flip.view(torch.uint8) if flip.dtype == torch.bool else flip,
        images if partner is None else partner,
        scale if weight is None else weight,
        images if box is None else box,
        rows,
        images.shape[1],
        images.shape[2],
        height,
        width,
        CHANNELS=channels,
        PLANAR=out.is_contiguous(),
        CROP=offset is not None,
        FLIP=flip is not None,
        MIX=partner is not None,
        WEIGHT=weight is not None,
        BOX=box is not None,
        EITHER=rule.either,
        BLOCK=BLOCK,
    )
