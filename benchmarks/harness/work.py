"""Workloads: what has to come out. Used by the harness and, in its own process, by every subject; needs numpy only."""

from __future__ import annotations

import hashlib
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

JPEG_SUFFIXES = (".jpg", ".jpeg")
MULTIMODAL_PARTS = ("jpg", "txt", "ogg", "json")


@dataclass(frozen=True, slots=True)
class Workload:
    """One kind of work.

    Attributes:
        name, title: as on the command line, and in words.
        work: what is done to a sample: ``crop``, ``centre``, ``native`` (pictures), ``tokens``, ``multimodal``, ``bytes`` (stored
            bytes of one sample), ``build`` (a picture into the subject's format).
        batch: samples a batch.
        arrays: shape of one sample and dtype, by array name.
        source: what the source folder holds: ``images`` (JPEG files), ``tokens`` (``tokens.npy``, one flat array of ids) or
            ``multimodal`` (files of one stem a sample, see :mod:`benchmarks.harness.multimodal`).
        random: whether outputs are drawn at random, so that only their distribution can be checked.
        tolerance: largest mean absolute difference from the reference, for deterministic pictures.
        least_psnr: least median PSNR in dB over the pictures that are compared with the reference.
        measure: how: ``rate`` (whole epochs, warm), ``cold`` (one epoch, page cache emptied), ``paced`` (a consumer that takes a fixed
            time a batch), ``resume`` (seconds from a saved state at 90 % of an epoch to the next batch), ``reads`` (single reads and
            their latency), ``build`` (files to the finished format).
    """

    name: str
    title: str
    work: str
    batch: int
    arrays: dict[str, tuple[tuple[int, ...], str]]
    source: str = "images"
    random: bool = False
    tolerance: float = 0.0
    least_psnr: float = 0.0
    measure: str = "rate"

    @property
    def form(self) -> str:
        """What a subject's prepared files depend on besides the source: workloads of one form share them."""
        return "images" if self.work in ("crop", "centre", "bytes") else self.work

    @property
    def metric(self) -> str:
        """The figure that subjects are compared by."""
        return "resume_s" if self.measure == "resume" else "samples_s"


SEQUENCE = 2048
REENCODED_TOLERANCE, REENCODED_PSNR = 8.0, 42.0
"""The limits for subjects whose format stores pictures encoded anew (``REENCODES``)."""
SIGNATURE = 8
"""A picture's signature: the means of 8 x 8 cells."""
LARGE_PHOTO = 6_000_000
"""Pixels of a photo that W10 takes, at least."""
SIDE, SAMPLE_RATE, SECONDS, TOKENS, NUMBERS = 1024, 16_000, 5, 64, 12
IMAGE: dict[str, tuple[tuple[int, ...], str]] = {"image": ((224, 224, 3), "uint8")}
MULTIMODAL: dict[str, tuple[tuple[int, ...], str]] = {
    "image": ((SIDE, SIDE, 3), "uint8"),
    "tokens": ((TOKENS,), "int32"),
    "audio": ((SAMPLE_RATE * SECONDS,), "int16"),
    "annotation": ((NUMBERS,), "float32"),
}
_CROP: dict[str, Any] = {"work": "crop", "batch": 64, "arrays": IMAGE, "random": True}
WORKLOADS = {
    work.name: work
    for work in (
        Workload("W1", "random-resized crop 224 and flip", **_CROP),
        Workload("W2", "resize shorter side to 256, centre crop 224", "centre", 64, IMAGE, tolerance=1.5, least_psnr=50.0),
        Workload(
            "W3", "token sequences of 2,048 in random order", "tokens", 16, {"tokens": ((SEQUENCE,), "uint16")}, source="tokens"
        ),
        Workload(
            "W4",
            "picture of 1024 x 1024, text, 5 s of speech and annotation",
            "multimodal",
            32,
            MULTIMODAL,
            source="multimodal",
            tolerance=3.0,
        ),
        Workload(
            "W5",
            "files to the subject's format, shorter side 256, JPEG quality 90",
            "build",
            1,
            {},
            tolerance=6.0,
            measure="build",
        ),
        Workload("W6", "stored bytes of single samples at random", "bytes", 1, {}, measure="reads"),
        Workload("W7", "W1 with an empty page cache, one epoch", measure="cold", **_CROP),
        Workload("W8", "W1, from a state saved at 90 % of an epoch to the next batch", measure="resume", **_CROP),
        Workload("W9", "W1 for a consumer that takes a fixed time a batch", measure="paced", **_CROP),
        Workload("W10", "crop 224 at native resolution, anywhere in a photo", "native", 8, IMAGE, random=True),
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
    """What a module of ``benchmarks.subjects`` offers: the kinds of work in ``WORK``, and for them the functions below.

    ``batches`` for all but ``bytes`` and ``build``, ``reader`` for ``bytes``, ``build`` and ``stored`` for ``build``. ``resumable`` is
    for those that can save and load a state; from the others, batches are fetched and thrown away, as their user would have to.

    Optional: ``REENCODES``, how pictures are encoded anew where the format cannot keep the source's bytes, for which there are wider limits;
    ``versions()``, versions that no package's metadata has.
    """

    TITLE: str
    IMPORTS: tuple[str, ...]
    FORMAT: str
    WORK: tuple[str, ...]

    def workers(self, workload: Workload, cores: int) -> list[int]:
        """Worker counts to sweep."""
        ...

    def prepare(self, workload: Workload, source: Path, target: Path) -> None:
        """Build the subject's own format from the source files into the empty directory ``target``."""
        ...

    def batches(self, workload: Workload, prepared: Path, settings: Settings) -> Iterator[Iterator[Batch]]:
        """Epochs without end, each an iterator over its batches."""
        ...

    def reader(self, workload: Workload, prepared: Path, settings: Settings) -> Callable[[int], Any]:
        """A function from a key to the stored bytes of that sample (anything with a buffer)."""
        ...

    def resumable(
        self, workload: Workload, prepared: Path, settings: Settings, state: Any
    ) -> tuple[Iterator[Batch], Callable[[], Any]]:
        """The rest of an epoch from ``state`` on (``None``: from its start), and what gives the state (JSON) after the last batch."""
        ...

    def build(self, workload: Workload, source: Path, target: Path, workers: int) -> None:
        """The source's pictures, shorter side 256 (:func:`resized`), as JPEG of quality 90 in the subject's format."""
        ...

    def stored(self, workload: Workload, target: Path) -> Iterator[tuple[int, bytes]]:
        """Keys and JPEG bytes of what :meth:`build` made."""
        ...


def key_faults(keys: Sequence[int] | NDArray[np.int64], samples: int) -> str:
    """What is wrong with the keys of an epoch, each of which should come once; empty if nothing."""
    found, counts = np.unique(np.asarray(keys, np.int64), return_counts=True)
    known = (found >= 0) & (found < samples)
    again, foreign = found[counts > 1], found[~known]
    missing = samples - int(known.sum())
    if not (missing or len(again) or len(foreign)):
        return ""
    return (
        f"of {samples} keys {missing} are missing, {len(again)} come more than once"
        + (f" (first: {again[0]})" if len(again) else "")
        + (f", {len(foreign)} are unknown (first: {foreign[0]})" if len(foreign) else "")
    )


def signatures(images: Any) -> NDArray[np.float16]:
    """Means of 8 x 8 cells of pictures (n, side, side, 3), whose side they divide: (n, 8, 8, 3)."""
    count, side = len(images), images.shape[1] // SIGNATURE
    cells = np.asarray(images).reshape(count, SIGNATURE, side, SIGNATURE, side, 3)
    found: NDArray[np.float16] = cells.mean((2, 4), dtype=np.float32).astype(np.float16)
    return found


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
    if work.source == "multimodal":
        return sorted(path for path in source.rglob("*") if path.is_file())
    return [path for path in [source / "tokens.npy"] if path.is_file()]


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def count_samples(work: Workload, source: Path) -> int:
    """Samples of a source folder."""
    if work.source == "tokens":
        return len(sequences(source)) if source_files(work, source) else 0
    return len(image_files(source))


def unusable(work: Workload, source: Path) -> str:
    """Why a folder cannot be a workload's source; empty if it can."""
    if work.source == "tokens":
        return unusable_tokens(source)
    samples = count_samples(work, source)
    if not samples:
        return "no .jpg or .jpeg file in it"
    if work.source == "multimodal":
        wanted = [source / "tokenizer.json"]
        wanted += [path.with_suffix(f".{part}") for path in image_files(source) for part in MULTIMODAL_PARTS]
        missing = [path for path in wanted if not path.is_file()]
        return f"{len(missing)} files are missing that belong to a sample, {missing[0].name} first" if missing else ""
    if work.measure == "resume" and samples <= work.batch:
        return f"{samples} pictures are one batch of {work.batch} or less: there is no batch before 90 % of the epoch"
    return ""


def unusable_tokens(source: Path) -> str:
    """The same for tokens."""
    if not source_files(WORKLOADS["W3"], source):
        return "no tokens.npy in it"
    try:
        found = np.load(source / "tokens.npy", mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        return f"tokens.npy cannot be read: {error}"
    if found.dtype != np.uint16 or found.ndim != 1:
        return f"tokens.npy holds {found.dtype} of shape {found.shape}; one flat array of uint16 ids is asked for"
    return "" if len(found) >= SEQUENCE else f"tokens.npy holds {len(found)} ids, not one sequence of {SEQUENCE}"


def limited(work: Workload, source: Path, limit: int, home: Path) -> Path:
    """A folder below ``home`` with ``limit`` samples of a source, spread over it evenly: hard links, or copies on another file system."""
    pictures = image_files(source)
    count = min(limit, len(pictures))
    chosen = [pictures[number * len(pictures) // count] for number in range(count)]
    place = home / hashlib.sha256(f"{source.resolve()}\0{limit}\0{work.source}".encode()).hexdigest()[:16]
    half = place.with_name(f".{place.name}.{os.getpid()}")
    parts = MULTIMODAL_PARTS if work.source == "multimodal" else ()
    files = [file for path in chosen for file in (path, *(path.with_suffix(f".{part}") for part in parts if part != "jpg"))]
    files += [source / "tokenizer.json"] if parts else []
    shutil.rmtree(half, ignore_errors=True)
    try:
        for file in files:
            put(file, half / file.relative_to(source))
        shutil.rmtree(place, ignore_errors=True)
        half.rename(place)
    except BaseException:
        shutil.rmtree(half, ignore_errors=True)
        raise
    return place


def put(file: Path, target: Path) -> None:
    """The file under another name: a hard link, or a copy on another file system."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(file.resolve(), target)
    except OSError:
        shutil.copy2(file, target)


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
        if getattr(array, "is_cuda", False):
            # On the device: reading the sum back also waits until the batch is there.
            total += int(array.reshape(-1)[::4096].sum())
            continue
        flat: NDArray[np.uint8] = np.asarray(array).reshape(-1).view(np.uint8)
        total += int(flat[::4096].sum())
    return total
