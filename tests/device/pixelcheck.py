"""Pictures in float64, and the comparison with what a device makes of them. As a script: of the kernel, by Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from lfdata.device.images import IMAGENET_MEAN, IMAGENET_STD, Images

# Of max(1, |value|): docs/scheduler.md.
TOLERANCES = {"float32": 2.0**-19, "float16": 2.0**-11 + 2.0**-19, "bfloat16": 2.0**-8 + 2.0**-19}
SHAPES = [(5, 33, 47, 3), (1, 1, 1, 3), (20, 7, 9, 3)]
CASES: dict[str, dict[str, str]] = {
    "plain": {},
    "flip": {"flip": "flip"},
    "mixup": {"partner": "partner", "weight": "weight"},
    "cutmix": {"partner": "partner", "box": "box"},
    "all": {"flip": "flip", "partner": "partner", "weight": "weight", "box": "box"},
}


def tolerance(dtype: str, value: float) -> float:
    """How far a value may be from the exact one."""
    return TOLERANCES[dtype] * max(1.0, abs(value))


def scene(shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Pictures and everything that may be asked about their rows."""
    made = torch.Generator().manual_seed(sum(shape))
    rows, height, width, _ = shape
    top, left = (torch.randint(-1, side + 1, (rows,), generator=made) for side in (height, width))
    sides = torch.randint(0, max(height, width), (2, rows), generator=made)
    return {
        "image": torch.randint(0, 256, shape, generator=made, dtype=torch.uint8),
        "flip": torch.randint(0, 2, (rows,), generator=made).bool(),
        "partner": torch.randint(0, rows, (rows,), generator=made),
        "weight": torch.rand(rows, generator=made),
        "box": torch.stack([top, top + sides[0], left, left + sides[1]], 1).to(torch.int32),
    }


def as_float64(op: Images, batch: dict[str, torch.Tensor]) -> np.ndarray:
    """(rows, channels, height, width), step by step."""
    source = batch["image"].numpy().astype(np.float64)
    if op.flip:
        source = np.stack([row[:, ::-1] if flip else row for row, flip in zip(source, batch[op.flip].tolist(), strict=True)])
    found = source.copy()
    if op.partner:
        for row, partner in enumerate(batch[op.partner].tolist()):
            own = float(batch[op.weight][row]) if op.weight else 1.0
            found[row] = source[row] * own + source[partner] * (1 - own)
            if op.box:
                top, bottom, left, right = (max(0, side) for side in batch[op.box][row].tolist())
                found[row][top:bottom, left:right] = source[partner][top:bottom, left:right]
    found = (found / 255 - np.array(op.mean)) / np.array(op.std)
    return found.transpose(0, 3, 1, 2)


def checked(case: str, dtype: str, channels_last: bool, device: torch.device, run: Callable[..., None] | None = None) -> None:
    """An operation against float64. ``run``: by this instead of what :class:`Images` chooses."""
    for shape in SHAPES:
        batch = scene(shape)
        op = Images(IMAGENET_MEAN, IMAGENET_STD, dtype, channels_last, **CASES[case])
        there = {name: value.to(device) for name, value in batch.items()}
        flat = torch.full((op.bytes(batch["image"].nbytes),), 0xFF, dtype=torch.uint8, device=device)
        out = op.out(flat, batch["image"].shape)
        if run is None:
            op.run("image", there["image"], out, there)
        else:
            run(op, there, out)
        if device.type == "cuda":
            torch.cuda.synchronize()
        expected = as_float64(op, batch)
        assert out.shape == expected.shape and out.dtype == op.dtype
        if shape[1] > 1:
            assert out.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
        error = np.abs(out.double().cpu().numpy() - expected) / np.maximum(1.0, np.abs(expected))
        # Triton's interpreter cuts bfloat16 off instead of rounding it.
        factor = 2 if dtype == "bfloat16" and run is not None and device.type == "cpu" else 1
        assert error.max() <= factor * TOLERANCES[dtype], (case, dtype, channels_last, shape, error.max())


def by_kernel(op: Images, batch: dict[str, Any], out: torch.Tensor) -> None:
    """The kernel itself."""
    from lfdata.device import kernels
    from lfdata.device.images import _factors

    images = batch["image"]
    weight = batch[op.weight] if op.weight else torch.ones(len(images), device=images.device)
    scale, bias = _factors(tuple(op.mean), tuple(op.std), images.device)
    flip, partner, box = (batch[name] if name else None for name in (op.flip, op.partner, op.box))
    kernels.pictures(images, out, scale, bias, flip, partner, weight if op.partner else None, box)


if __name__ == "__main__":
    for case in CASES:
        for dtype in TOLERANCES:
            for channels_last in (False, True):
                checked(case, dtype, channels_last, torch.device("cpu"), by_kernel)
    wrong = scene((4, 6, 5, 3))
    wrong["partner"][2] = 4
    op = Images(dtype="float32", partner="partner", weight="weight")
    out = op.out(torch.empty(op.bytes(wrong["image"].nbytes), dtype=torch.uint8), wrong["image"].shape)
    by_kernel(op, wrong, out)
    assert torch.isnan(out[2]).all() and not torch.isnan(out[[0, 1, 3]]).any(), "a partner that is no row passed for a picture"
