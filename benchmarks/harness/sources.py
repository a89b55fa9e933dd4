"""Source pictures as every subject gets them: readable, upright."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps

from benchmarks.harness.work import Workload, image_files, put

ORIENTATION = 0x0112
QUALITY = 95


class SourceError(Exception):
    """A source file cannot be used. The message names it."""


def opened(path: Path, jpeg: bool = False) -> Any:
    """A source picture, RGB. Raises :class:`SourceError` where PIL cannot read it; with ``jpeg``, also where it is another kind of file."""
    try:
        with Image.open(path) as image:
            if jpeg and image.format not in ("JPEG", "MPO"):
                raise ValueError(f"a {image.format} file, though its name says JPEG")
            return image.convert("RGB")
    except Exception as error:
        raise SourceError(f"{path}: {error}; take the file out of the folder, or mend it") from error


def orientation(path: Path) -> int:
    """EXIF orientation, 1 to 8; 1 where there is none, or no picture."""
    try:
        with Image.open(path) as image:
            found = image.getexif().get(ORIENTATION, 1)
    except Exception:
        # Whoever decodes it says what is wrong with it.
        return 1
    return found if isinstance(found, int) and 1 <= found <= 8 else 1


def upright(work: Workload, source: Path, home: Path, say: Callable[[str], None]) -> Path:
    """The source itself, or where some of its pictures are stored turned (EXIF), a copy below ``home`` with those upright: loaders do not
    agree on who has to turn them, and what is compared must be the same work."""
    if work.source != "images":
        return source
    files = image_files(source)
    turned = {path for path in files if orientation(path) != 1}
    if not turned:
        return source
    digest = hashlib.sha256(str(source.resolve()).encode("utf-8", "surrogateescape"))
    for path in files:
        found = path.stat()
        digest.update(f"{path.relative_to(source)}\0{found.st_size}\0{found.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
    place = home / digest.hexdigest()[:16]
    if place.is_dir():
        return place
    say(f"{len(turned)} of {len(files)} pictures are stored turned: they are encoded anew upright, for all subjects")
    half = place.with_name(f".{place.name}.{os.getpid()}")
    shutil.rmtree(half, ignore_errors=True)
    try:
        for path in files:
            target = half / path.relative_to(source)
            if path in turned:
                target.parent.mkdir(parents=True, exist_ok=True)
                with Image.open(path) as image:
                    made = ImageOps.exif_transpose(image).convert("RGB")
                made.save(target, "JPEG", quality=QUALITY)
            else:
                put(path, target)
        half.rename(place)
    except BaseException:
        shutil.rmtree(half, ignore_errors=True)
        raise
    return place


def small_photo(source: Path, pixels: int) -> str:
    """Why a folder has no photos to cut native crops from; empty if it has."""
    for path in image_files(source):
        try:
            with Image.open(path) as image:
                width, height = image.size
        except Exception:
            continue
        if width * height < pixels:
            return f"{path.name} is {width} x {height}; this workload is for photos of {pixels:,} pixels and more"
    return ""
