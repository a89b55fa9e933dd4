"""Pictures of every kind of file, as a data set; and how far DALI's are from ours."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from shardkit import Part, scalar, write_dataset

from lfdata.codecs.base import Encoded
from lfdata.codecs.registry import make_encoder
from lfdata.format.meta import FieldMeta

KEEP = make_encoder("image", {"codec": "keep"})
FIELDS = (FieldMeta("image", "image", KEEP.params), FieldMeta("label", "scalar", {"dtype": "int64"}))
# docs/scheduler.md, "GPU decode": by a picture, of the definition's pixels.
MEAN, MOST = 0.5, 8
TURNED = 6


def scene(seed: int, height: int, width: int) -> np.ndarray:
    """Like a photo: smooth, with some edges and grain."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    waves = [np.sin(x / rng.uniform(5, 20) + c) * np.cos(y / rng.uniform(5, 20)) for c in range(3)]
    edges = ((x // 16 + y // 16) % 2)[..., None] * 30
    return (np.stack(waves, -1) * 80 + 110 + edges + rng.normal(0, 4, (height, width, 3))).clip(0, 255).astype(np.uint8)


def file(pixels: np.ndarray, kind: str = "JPEG", mode: str = "RGB", **options: Any) -> bytes:
    """A file of a kind."""
    made = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(made, kind, **options)
    return made.getvalue()


def exif(orientation: int) -> bytes:
    found = Image.Exif()
    found[0x0112] = orientation
    return found.tobytes()


# Whether DALI gets it.
KINDS: dict[str, tuple[bool, Callable[[np.ndarray], bytes]]] = {
    "4:2:0": (True, lambda pixels: file(pixels, quality=92)),
    "4:4:4": (True, lambda pixels: file(pixels, quality=95, subsampling=0)),
    "4:2:2": (True, lambda pixels: file(pixels, quality=90, subsampling=1)),
    "grey": (True, lambda pixels: file(pixels, mode="L")),
    "progressive": (True, lambda pixels: file(pixels, progressive=True)),
    "upright": (True, lambda pixels: file(pixels, exif=exif(1))),
    "turned": (False, lambda pixels: file(pixels, exif=exif(TURNED))),
    "cmyk": (False, lambda pixels: file(pixels, mode="CMYK")),
    "webp": (False, lambda pixels: file(pixels, "WEBP", quality=90)),
    "png": (False, lambda pixels: file(pixels, "PNG")),
}


def cut(encoded: Encoded) -> Encoded:
    """Without its last third."""
    whole = bytes(encoded.payload)
    return Encoded(whole[: len(whole) * 2 // 3], encoded.sizes)


def broken(encoded: Encoded) -> Encoded:
    """No decoder takes its tables, which are not looked at before."""
    whole = bytearray(encoded.payload)
    at = whole.index(b"\xff\xc4")
    whole[at + 5 : at + 21] = b"\xff" * 16
    return Encoded(bytes(whole), encoded.sizes)


def write(
    root: Path,
    count: int,
    kinds: Sequence[str] = ("4:2:0",),
    bad: Callable[[Encoded], Encoded] = cut,
    wrong: Sequence[int] = (),
) -> Path:
    """Pictures of some kinds in turn, of many sizes; ``wrong`` ones spoiled."""
    rows = []
    for number in range(count):
        pixels = scene(number, 60 + 7 * (number % 9), 70 + 11 * (number % 7))
        image = KEEP.encode(KINDS[kinds[number % len(kinds)]][1](pixels))
        rows.append((b"p%d" % number, {"image": bad(image) if number in wrong else image, "label": scalar(number, "int64")}))
    half = max(1, count // 2)
    write_dataset(root, FIELDS, [Part(rows[at : at + half]) for at in range(0, count, half)], name=f"files-{count}")
    return root


def apart(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Pictures are within the tolerance of each other."""
    error = (ours.cpu().int() - theirs.cpu().int()).abs().flatten(1).float()
    if error.numel():
        assert error.mean(1).max() <= MEAN and error.max() <= MOST, (error.mean(1).tolist(), error.max(1).values.tolist())


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], field: str = "image") -> None:
    """Batches with the same names, dtypes, shapes and values, but for the tolerance of the pictures."""
    assert list(ours) == list(theirs)
    for name, value in ours.items():
        other = theirs[name].cpu()
        assert (other.dtype, other.shape) == (value.dtype, value.shape), name
        if name == field:
            apart(value, other)
        else:
            assert torch.equal(value.cpu(), other), name


def kept(loader: Any, epochs: int = 1, most: int = 1 << 30) -> list[dict[str, torch.Tensor]]:
    """Copies of batches."""
    found = []
    for _ in range(epochs):
        for number, batch in enumerate(loader):
            found.append({name: value.cpu().clone() for name, value in batch.items()})
            if number + 1 == most:
                break
    return found
