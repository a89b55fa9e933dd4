"""The Triton kernel for pictures. Imported where Triton is."""

import torch
import triton
import triton.language as tl

BLOCK = 1024


# Triton reads the annotations of a kernel: there may be none but its own.
def _pictures(  # type: ignore[no-untyped-def]
    source,
    out,
    scale,
    bias,
    flip,
    partner,
    weight,
    box,
    rows,
    pixels,
    width,
    CHANNELS: tl.constexpr,
    PLANAR: tl.constexpr,
    FLIP: tl.constexpr,
    MIX: tl.constexpr,
    BOX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block of the pixels of a row: uint8 (rows, pixels, channels) in, planes or pixels out."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < pixels
    x = at % width
    mirrored = at + width - 1 - 2 * x
    own = at
    if FLIP:
        own = tl.where(tl.load(flip + row) != 0, mirrored, at)
    first = source + row * pixels * CHANNELS
    if MIX:
        other = tl.load(partner + row).to(tl.int64)
        known = (other >= 0) & (other < rows)
        other = tl.where(known, other, row)
        theirs = at
        if FLIP:
            theirs = tl.where(tl.load(flip + other) != 0, mirrored, at)
        second = source + other * pixels * CHANNELS
        share = tl.load(weight + row)
        # A partner that is no row of the batch must not pass for a picture.
        share = tl.where(known, share, float("nan"))
        shares = tl.zeros([BLOCK], tl.float32) + share
        if BOX:
            y = at // width
            top, bottom = tl.load(box + row * 4), tl.load(box + row * 4 + 1)
            left, right = tl.load(box + row * 4 + 2), tl.load(box + row * 4 + 3)
            cut = (y >= top) & (y < bottom) & (x >= left) & (x < right) & known
            shares = tl.where(cut, 0.0, shares)
    for channel in tl.static_range(CHANNELS):
        value = tl.load(first + own * CHANNELS + channel, mask=inside, other=0).to(tl.float32)
        if MIX:
            mixed = tl.load(second + theirs * CHANNELS + channel, mask=inside, other=0).to(tl.float32)
            value = value * shares + mixed * (1.0 - shares)
        value = value * tl.load(scale + channel) + tl.load(bias + channel)
        place = out + row * pixels * CHANNELS
        if PLANAR:
            place += channel * pixels + at
        else:
            place += at * CHANNELS + channel
        tl.store(place, value.to(out.dtype.element_ty), mask=inside)


_kernel = triton.jit(_pictures)


def pictures(
    images: torch.Tensor,
    out: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor,
    flip: torch.Tensor | None,
    partner: torch.Tensor | None,
    weight: torch.Tensor | None,
    box: torch.Tensor | None,
) -> None:
    """As :func:`lfdata.device.images.by_torch`, on the current stream. ``out``: contiguous or channels last."""
    rows, height, width, channels = images.shape
    pixels = height * width
    if not rows or not pixels:
        return
    grid = (rows, triton.cdiv(pixels, BLOCK))
    _kernel[grid](
        images,
        out,
        scale,
        bias,
        images if flip is None else flip.view(torch.uint8) if flip.dtype == torch.bool else flip,
        images if partner is None else partner,
        scale if weight is None else weight,
        images if box is None else box,
        rows,
        pixels,
        width,
        CHANNELS=channels,
        PLANAR=out.is_contiguous(),
        FLIP=flip is not None,
        MIX=partner is not None,
        BOX=box is not None,
        BLOCK=BLOCK,
    )
