"""Pictures in float64, and the comparison with what a device makes of them. As a script: of the kernel, by Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from lfdata.device.images import IMAGENET_MEAN, IMAGENET_STD, Images
from lfdata.device.rule import Rule

# Of max(1, |value|): docs/scheduler.md.
TOLERANCES = {"float32": 2.0**-19, "float16": 2.0**-11 + 2.0**-19, "bfloat16": 2.0**-8 + 2.0**-19}
# Of pictures and, where they are cropped, of crops.
SHAPES = [((5, 33, 47, 3), (17, 31)), ((1, 1, 1, 3), (1, 1)), ((20, 7, 9, 3), (7, 4)), ((9, 40, 38, 1), (33, 38))]
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "mixup": {"partner": "partner", "weight": "weight"},
    "cutmix": {"partner": "partner", "box": "box"},
    "mixup and cutmix": {"partner": "partner", "weight": "weight", "box": "box"},
    "drawn mixup": {"mixup": 0.3},
    "drawn cutmix": {"cutmix": 1.0},
    "drawn": {"mixup": 0.3, "cutmix": 1.0},
}
FLIPS: dict[str, dict[str, Any]] = {"": {}, " flipped": {"flip": "flip"}, " flipped at random": {"flip": 0.5}}
CROPS: dict[str, dict[str, Any]] = {"": {}, " cropped": {"crop": 1, "offset": "offset"}, " cropped at random": {"crop": 1}}
CASES: dict[str, dict[str, Any]] = {
    way + flipped + cropped: WAYS[way] | FLIPS[flipped] | CROPS[cropped]
    for way in WAYS
    for flipped in FLIPS
    for cropped in CROPS
}


def tolerance(dtype: str, value: float) -> float:
    """How far a value may be from the exact one."""
    return TOLERANCES[dtype] * max(1.0, abs(value))


def scene(shape: tuple[int, ...], size: tuple[int, int] | None = None, seed: int = 0) -> dict[str, torch.Tensor]:
    """Pictures and everything that may be asked about their rows, crops of a size included; under the names of what is drawn, too."""
    made = torch.Generator().manual_seed(sum(shape) + seed)
    rows, height, width, _ = shape
    size = size or (height, width)

    def whole(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=made)

    top, left = (whole(-1, side + 1, rows) for side in size)
    sides = whole(0, max(size), 2, rows)
    found = {
        "image": whole(0, 256, *shape).to(torch.uint8),
        "flip": whole(0, 2, rows).bool(),
        "partner": whole(0, rows, rows),
        "weight": torch.rand(rows, generator=made),
        "box": torch.stack([top, top + sides[0], left, left + sides[1]], 1).to(torch.int32),
        "offset": torch.stack([whole(0, height - size[0] + 1, rows), whole(0, width - size[1] + 1, rows)], 1).to(torch.int32),
    }
    # Half of the rows are for MixUp.
    empty = torch.where(whole(0, 2, rows, 1) == 0, found["box"], 0)
    others = ("crop", "offset"), ("flip", "flip"), ("partner", "partner"), ("weight", "weight")
    return found | {f"image.{name}": found[other] for name, other in others} | {"image.box": empty}


def as_float64(op: Images, batch: dict[str, torch.Tensor], name: str = "image") -> np.ndarray:
    """(rows, channels, height, width), row by row. What is drawn is in the batch."""
    whole = batch[name].numpy().astype(np.float64)
    rows, (height, width) = len(whole), whole.shape[1:3]
    mixes = op.mixup is not None or op.cutmix is not None
    offset, flip = np.zeros((rows, 2), int), np.zeros(rows, bool)
    if op.crop is not None:
        height, width = op.crop  # type: ignore[misc]
        offset = batch[op.offset or f"{name}.crop"].numpy()
    if op.flip is not None:
        flip = batch[op.flip if isinstance(op.flip, str) else f"{name}.flip"].numpy() != 0
    source = np.stack([one[top : top + height, left : left + width] for one, (top, left) in zip(whole, offset, strict=True)])
    source = np.stack([one[:, ::-1] if mirrored else one for one, mirrored in zip(source, flip, strict=True)])
    found = source.copy()
    partners = batch[f"{name}.partner" if mixes else op.partner].numpy() if mixes or op.partner else np.arange(rows)
    weights = batch[f"{name}.weight" if mixes else op.weight].numpy() if mixes or op.weight else np.ones(rows)
    boxes = batch[f"{name}.box" if mixes else op.box].numpy() if op.cutmix is not None or op.box else np.zeros((rows, 4), int)
    for row, (partner, own, box) in enumerate(zip(partners, weights.astype(np.float64), boxes, strict=True)):
        top, bottom, left, right = box
        cut = (slice(max(0, top), max(0, bottom)), slice(max(0, left), max(0, right)))
        if not mixes or bottom <= top or right <= left:
            found[row] = source[row] * own + source[partner] * (1 - own)
        found[row][cut] = source[partner][cut]
    found = (found / 255 - np.array(op.mean)) / np.array(op.std)
    return found.transpose(0, 3, 1, 2)


def made(case: str, dtype: str, channels_last: bool, channels: int, size: tuple[int, int]) -> Images:
    """The operation of a case."""
    options = dict(CASES[case])
    if "crop" in options:
        options["crop"] = size
    return Images(IMAGENET_MEAN[:channels], IMAGENET_STD[:channels], dtype, channels_last, **options)


def checked(case: str, dtype: str, channels_last: bool, device: torch.device, run: Callable[..., None] | None = None) -> None:
    """An operation against float64. ``run``: by this instead of what :class:`Images` chooses."""
    for shape, size in SHAPES:
        op = made(case, dtype, channels_last, shape[3], size)
        compared(op, scene(shape, size if op.crop is not None else None), device, run)


def compared(op: Images, batch: dict[str, torch.Tensor], device: torch.device, run: Callable[..., None] | None = None) -> None:
    """A batch against float64."""
    images = batch["image"]
    there = {name: value.to(device) for name, value in batch.items()}
    flat = torch.full((op.bytes(images.nbytes, images.shape[1:]),), 0xFF, dtype=torch.uint8, device=device)
    out = op.out(flat, images.shape)
    if run is None:
        op.run("image", there["image"], out, there)
    else:
        run(op, there, out)
    if device.type == "cuda":
        torch.cuda.synchronize()
    expected = as_float64(op, batch)
    assert out.shape == expected.shape and out.dtype == op.dtype
    if min(out.shape) > 1:
        assert out.is_contiguous(memory_format=torch.channels_last if op.channels_last else torch.contiguous_format)
    error = np.abs(out.double().cpu().numpy() - expected) / np.maximum(1.0, np.abs(expected))
    dtype = str(op.dtype).removeprefix("torch.")
    # Triton's interpreter cuts bfloat16 off instead of rounding it.
    factor = 2 if dtype == "bfloat16" and run is not None and device.type == "cpu" else 1
    assert error.max(initial=0) <= factor * TOLERANCES[dtype], (op, images.shape, error.max())


def by_kernel(op: Images, batch: dict[str, Any], out: torch.Tensor) -> None:
    """The kernel itself."""
    from lfdata.device import kernels
    from lfdata.device.images import _factors

    images = batch["image"]
    scale, bias = _factors(tuple(op.mean), tuple(op.std), images.device)
    rule = Rule(
        **{what: batch[field] for what, field in op.fields("image").items()},
        either=op.mixup is not None or op.cutmix is not None,
    )
    kernels.pictures(images, out, scale, bias, rule)


def unknown(device: torch.device, run: Callable[..., None] | None = None) -> None:
    """Rows that are not there and crops that reach out of their picture are NaN, and nothing else is."""
    for spoil, nan in (
        ({"image.partner": (2, 4)}, [2]),
        ({"image.partner": (2, -1)}, [2]),
        ({"image.crop": (1, torch.tensor([3, 0]))}, [0, 1]),
        ({"image.crop": (1, torch.tensor([-1, 0]))}, [0, 1]),
        ({"image.crop": (1, torch.tensor([0, 2]))}, [0, 1]),
        ({"image.crop": (3, torch.tensor([0, -1]))}, [3]),
    ):
        batch = scene((4, 6, 5, 3), (4, 4))
        batch["image.partner"] = torch.tensor([1, 2, 0, 2])
        batch["image.weight"][:] = 0.5
        batch["image.box"][:] = torch.tensor([0, 9, 0, 2], dtype=torch.int32)
        for name, (row, value) in spoil.items():
            batch[name][row] = value
        op = Images(dtype="float32", crop=4, flip=0.5, mixup=1.0, cutmix=1.0)
        there = {name: value.to(device) for name, value in batch.items()}
        images = there["image"]
        out = op.out(torch.empty(op.bytes(images.nbytes, images.shape[1:]), dtype=torch.uint8, device=device), images.shape)
        op.run("image", images, out, there) if run is None else run(op, there, out)
        found = torch.isnan(out).cpu().flatten(1)
        assert found.all(1).nonzero().flatten().tolist() == nan, (spoil, found.all(1))
        assert found.any(1).nonzero().flatten().tolist() == nan, (spoil, found.any(1))


if __name__ == "__main__":
    # The interpreter is slow: each combination once, with the dtypes and orders in turn.
    for number, case in enumerate(CASES):
        checked(case, list(TOLERANCES)[number % 3], number % 2 == 0, torch.device("cpu"), by_kernel)
    unknown(torch.device("cpu"), by_kernel)
