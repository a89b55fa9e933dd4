"""Source files as peers store them: whole, by part; and pictures made smaller, for those that build a set."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness import multimodal
from benchmarks.harness.work import Workload, image_files, resized
from benchmarks.subjects.pixels import turbo, with_turbo


def stored_files(workload: Workload, source: Path) -> list[dict[str, Path]]:
    """The files that every sample is stored as, by part, in the order of the keys."""
    if workload.work == "multimodal":
        return multimodal.parts_of(source)
    return [{"jpg": path} for path in image_files(source)]


def read(paths: Mapping[str, Path]) -> dict[str, Any]:
    """Bytes of a sample, by part."""
    return {part: path.read_bytes() for part, path in paths.items()}


def decoder(workload: Workload, source: Path) -> Callable[[Mapping[str, Any]], Any]:
    """Bytes by part to the workload's picture, or to its arrays by name."""
    if workload.work == "multimodal":
        return multimodal.with_libraries(source, turbo)
    decode = with_turbo(workload)
    return lambda parts: decode(parts["jpg"])


def shrink(path: Path) -> Any:
    """A picture brought to a shorter side of 256 by PIL."""
    from PIL import Image

    with Image.open(path) as image:
        return image.convert("RGB").resize(resized(*image.size), Image.Resampling.BILINEAR)


def shrunk(path: Path) -> bytes:
    """The same as JPEG."""
    out = io.BytesIO()
    shrink(path).save(out, "JPEG", quality=90, subsampling="4:2:0")
    return out.getvalue()
