"""Workloads: what has to come out. Used by the harness and, in its own process, by every subject; needs numpy only."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

JPEG_SUFFIXES = (".jpg", ".jpeg")


@dataclass(frozen=True, slots=True)
class Workload:
    """One kind of work.

    Attributes:
        name, title: as on the command line, and in words.
        batch: samples a batch.
        arrays: shape of one sample and dtype, by array name.
        source: what the source folder holds: ``images`` (JPEG files) or ``tokens`` (``tokens.npy``, one flat array of ids).
        random: whether outputs are drawn at random, so that only their distribution can be checked.
        tolerance: largest mean absolute difference from the reference, for deterministic outputs.
    """

    name: str
    title: str
    batch: int
    arrays: dict[str, tuple[tuple[int, ...], str]]
    source: str = "images"
    random: bool = False
    tolerance: float = 0.0


SEQUENCE = 2048
IMAGE: dict[str, tuple[tuple[int, ...], str]] = {"image": ((224, 224, 3), "uint8")}
WORKLOADS = {
    work.name: work
    for work in (
        Workload("W1", "random-resized crop 224 and flip", 64, IMAGE, random=True),
        Workload("W2", "resize shorter side to 256, centre crop 224", 64, IMAGE, tolerance=3.0),
        Workload("W3", "token sequences of 2,048 in random order", 16, {"tokens": ((SEQUENCE,), "uint16")}, source="tokens"),
    )
}


@dataclass(frozen=True, slots=True)
class Settings:
    """How a subject is run: worker processes or threads, seed, and the source folder for those that read it in place."""

    workers: int
    seed: int
    source: Path


@dataclass(slots=True)
class Batch:
    """Keys (int, one a sample) and arrays (one row a sample), as numpy arrays or what numpy reads in place."""

    keys: Any
    arrays: dict[str, Any]


class Subject(Protocol):
    """What a module of ``benchmarks.subjects`` offers."""

    TITLE: str
    IMPORTS: tuple[str, ...]
    FORMAT: str
    WORKLOADS: tuple[str, ...]

    def workers(self, workload: Workload, cores: int) -> list[int]:
        """Worker counts to sweep."""
        ...

    def prepare(self, workload: Workload, source: Path, target: Path) -> None:
        """Build the subject's own format from the source files into the empty directory ``target``."""
        ...

    def batches(self, workload: Workload, prepared: Path, settings: Settings) -> Iterator[Iterator[Batch]]:
        """Epochs without end, each an iterator over its batches."""
        ...


def image_files(source: Path) -> list[Path]:
    """Pictures of a source folder; a sample's key is its position here."""
    return sorted(path for path in source.rglob("*") if path.suffix.lower() in JPEG_SUFFIXES and path.is_file())


def sequences(source: Path) -> NDArray[np.uint16]:
    """Sequences of a token source, a mapped array (n, SEQUENCE); a sample's key is its row. What does not fill one is left out."""
    tokens: NDArray[np.uint16] = np.load(source / "tokens.npy", mmap_mode="r", allow_pickle=False)
    return tokens[: len(tokens) // SEQUENCE * SEQUENCE].reshape(-1, SEQUENCE)


def source_files(work: Workload, source: Path) -> list[Path]:
    """Files of a source folder that a workload reads."""
    if work.source == "images":
        return image_files(source)
    return [path for path in [source / "tokens.npy"] if path.is_file()]


def count_samples(work: Workload, source: Path) -> int:
    """Samples of a source folder."""
    files = source_files(work, source)
    return len(files) if work.source == "images" or not files else len(sequences(source))


def sweep(cores: int) -> list[int]:
    """Worker counts 1, 2, 4, ... up to the cores."""
    counts = [1]
    while counts[-1] * 2 <= cores:
        counts.append(counts[-1] * 2)
    return counts if counts[-1] == cores else [*counts, cores]


def draw_crop(rng: Any, width: int, height: int) -> tuple[int, int, int, int]:
    """A random-resized crop as the field defines it: x, y, width, height.

    Area uniform in 8 % to 100 %, log of the aspect uniform in 3/4 to 4/3, ten attempts, then the largest centred crop of allowed
    aspect. ``rng`` has ``uniform(low, high)`` and ``randint(low, high)`` (both ends included).
    """
    area = width * height
    for _ in range(10):
        target = area * rng.uniform(0.08, 1.0)
        aspect = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(target * aspect)), round(math.sqrt(target / aspect))
        if 0 < w <= width and 0 < h <= height:
            return rng.randint(0, width - w), rng.randint(0, height - h), w, h
    ratio = width / height
    w = width if ratio <= 4 / 3 else round(height * 4 / 3)
    h = height if ratio >= 3 / 4 else round(width * 4 / 3)
    return (width - w) // 2, (height - h) // 2, w, h


def resized(width: int, height: int, shorter: int = 256) -> tuple[int, int]:
    """Size after bringing the shorter side to ``shorter``; the longer one is cut down to an integer."""
    if width <= height:
        return shorter, int(shorter * height / width)
    return int(shorter * width / height), shorter


def centre(width: int, height: int, size: int = 224) -> tuple[int, int]:
    """Left and top of a centre crop."""
    return round((width - size) / 2), round((height - size) / 2)


def touch(arrays: dict[str, Any]) -> int:
    """Read one byte of every page of a batch, as a consumer would at least."""
    total = 0
    for array in arrays.values():
        flat: NDArray[np.uint8] = np.asarray(array).reshape(-1).view(np.uint8)
        total += int(flat[::4096].sum())
    return total
