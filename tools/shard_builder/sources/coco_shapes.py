"""What the geometry of a COCO annotation must look like: boxes, polygons, run lengths (plain and compressed), keypoints."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from lfdata.errors import SampleError

_LARGEST = 1 << 32


def check_annotation(annotation: Mapping[str, Any]) -> None:
    """Check one annotation. Raises :class:`SampleError`: ``bbox``, ``polygon``, ``rle``, ``keypoints``."""
    box = annotation.get("bbox")
    if box is not None and not (_numbers(box) and len(box) == 4):
        raise SampleError("bbox", f"a box is four numbers, not {str(box)[:80]}")
    points = annotation.get("keypoints")
    if points is not None and not (_numbers(points) and len(points) % 3 == 0):
        raise SampleError("keypoints", f"keypoints are triples of numbers, not {str(points)[:80]}")
    segmentation = annotation.get("segmentation")
    if isinstance(segmentation, dict):
        check_rle(segmentation)
    elif isinstance(segmentation, list):
        for polygon in segmentation:
            if not (_numbers(polygon) and len(polygon) >= 6 and len(polygon) % 2 == 0):
                raise SampleError("polygon", f"a polygon is three or more pairs of numbers, not {str(polygon)[:80]}")
    elif segmentation is not None:
        raise SampleError("polygon", f"a segmentation is a list of polygons or an object, not {str(segmentation)[:80]}")


def _numbers(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) in (int, float) and math.isfinite(v) for v in values)


def check_rle(mask: Mapping[str, Any]) -> None:
    """Check run lengths of a mask: runs of 0 and 1 in turn, down the columns, that fill ``size`` (height, width) exactly.

    Raises:
        SampleError: ``rle``.
    """
    size, counts = mask.get("size"), mask.get("counts")
    if not (isinstance(size, list) and len(size) == 2 and all(type(n) is int and 0 < n < _LARGEST for n in size)):
        raise SampleError("rle", f"run lengths need a size of height and width, not {str(size)[:80]}")
    if isinstance(counts, str):
        total = _total(_runs(counts))
    elif isinstance(counts, list) and all(type(n) is int for n in counts):
        total = _total(counts)
    else:
        raise SampleError("rle", f"run lengths are a list of integers or a text, not {str(counts)[:80]}")
    if total != size[0] * size[1]:
        raise SampleError("rle", f"runs of {total} pixels in all, where {size[0]} x {size[1]} are {size[0] * size[1]}")


def _total(runs: Iterable[int]) -> int:
    total = 0
    for run in runs:
        if run < 0:
            raise SampleError("rle", f"a run of {run} pixels")
        total += run
    return total


def _runs(text: str) -> Iterable[int]:
    """Runs out of the compressed form: five bits a character from ``0`` on, a sign in the last; from the fourth run on, differences
    to the run before the last."""
    runs: list[int] = []
    value = shift = 0
    for character in text:
        bits = ord(character) - 48
        if not 0 <= bits < 64:
            raise SampleError("rle", f"a character {character!r} that compressed run lengths do not have")
        value |= (bits & 31) << shift
        shift += 5
        if shift > 35:
            raise SampleError("rle", "a run of more than 32 bits")
        if bits & 32:
            continue
        if bits & 16:
            value -= 1 << shift
        runs.append(value + (runs[-2] if len(runs) > 2 else 0))
        value = shift = 0
    if shift:
        raise SampleError("rle", "compressed run lengths that end within a run")
    return runs
