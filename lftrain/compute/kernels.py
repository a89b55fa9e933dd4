"""The optimiser's Triton kernel. Imported where Triton is."""

import torch
import triton
import triton.language as tl

BLOCK = 2048


# Triton reads the annotations of a kernel: there may be none but its own.
def _adamw(  # type: ignore[no-untyped-def]
    parameter,
    half,
    gradient,
    average,
    square,
    correction,
    scale,
    bad,
    lr,
    rest1,
    beta2,
    rest2,
    eps,
    decay,
    count,
    HALF: tl.constexpr,
    SCALED: tl.constexpr,
    MAY_BE_BAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block of a parameter and of its averages; ``half``: its copy in fewer bits.

    ``rest``: 1 - beta. ``correction``: 1 - beta1 ** step, and the root of 1 - beta2 ** step.
    """
    good = 1
    if MAY_BE_BAD:
        good = (tl.load(bad) == 0.0).to(tl.int32)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # A step that is skipped neither reads nor writes.
    inside = (at < count) & (good != 0)
    rate = tl.load(lr)
    first, second = tl.load(correction), tl.load(correction + 1)
    g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
    if SCALED:
        g = g / tl.load(scale)
    p = tl.load(parameter + at, mask=inside, other=0.0)
    m = tl.load(average + at, mask=inside, other=0.0)
    v = tl.load(square + at, mask=inside, other=0.0)
    p = p - rate * decay * p
    m = m + (g - m) * rest1
    v = v * beta2 + rest2 * g * g
    p = p - (rate / first) * m / (tl.sqrt(v) / second + eps)
    tl.store(parameter + at, p, mask=inside)
    if HALF:
        tl.store(half + at, p.to(half.dtype.element_ty), mask=inside)
    tl.store(average + at, m, mask=inside)
    tl.store(square + at, v, mask=inside)


_kernel = triton.jit(_adamw)


def update(
    parameter: torch.Tensor,
    master: torch.Tensor | None,
    gradient: torch.Tensor,
    average: torch.Tensor,
    square: torch.Tensor,
    correction: torch.Tensor,
    scale: torch.Tensor | None,
    bad: torch.Tensor | None,
    lr: torch.Tensor | float,
    betas: tuple[float, float],
    eps: float,
    decay: float,
) -> None:
    """One AdamW update of a float32 parameter, or of its master, of which it is a copy; in place; nothing where ``bad`` is not 0.

    ``correction``: float32 (2,), of this step.
    """
    count = parameter.numel()
    rate = lr if isinstance(lr, torch.Tensor) else torch.full((), lr, device=parameter.device)
    _kernel[(triton.cdiv(count, BLOCK),)](
        parameter if master is None else master,
        parameter,
        gradient,
        average,
        square,
        correction,
        correction if scale is None else scale,
        correction if bad is None else bad,
        rate,
        1 - betas[0],
        betas[1],
        1 - betas[1],
        eps,
        decay,
        count,
        HALF=master is not None,
        SCALED=scale is not None,
        MAY_BE_BAD=bad is not None,
        BLOCK=BLOCK,
    )
