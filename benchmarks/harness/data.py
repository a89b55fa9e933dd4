"""Real data by recipe: Debian packages are fetched and unpacked, nothing is installed and nothing is committed."""

from __future__ import annotations

import html
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.harness.multimodal import write_sample
from benchmarks.harness.work import resized

TILE_WIDTH, TILE_HEIGHT = 512, 384
_PHOTO_PACKAGES = (
    "plasma-workspace-wallpapers",
    "mate-backgrounds",
    "lomiri-wallpapers-16.04",
    "lomiri-wallpapers-20.04",
    "ukui-wallpapers",
)


class RecipeError(Exception):
    """A data set could not be fetched or made. The message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """One data set: what it is, its licence, the packages it comes from, and what is made of them."""

    about: str
    licence: str
    packages: tuple[str, ...]
    build: Callable[[Path, Path], None]


def _run(command: Sequence[str | Path], cwd: Path | None = None) -> None:
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise RecipeError(f"{command[0]} is not installed (Debian packages: apt, dpkg, libjpeg-turbo-progs)") from error
    if done.returncode:
        raise RecipeError(f"{' '.join(map(str, command))}: {(done.stderr or done.stdout).strip()[-400:]}")


def photos(unpacked: Path) -> list[Path]:
    """JPEG photos of at least a megapixel, by path."""
    found = []
    for path in sorted(unpacked.rglob("*")):
        if path.suffix.lower() in (".jpg", ".jpeg") and path.is_file() and not path.is_symlink():
            with Image.open(path) as image:
                if image.width * image.height >= 1_000_000:
                    found.append(path)
    return found


def _flat(path: Path, root: Path) -> str:
    return re.sub(r"\W+", "_", path.relative_to(root).with_suffix("").as_posix())[-80:]


def _tiles(unpacked: Path, target: Path) -> None:
    """Lossless, non-overlapping tiles of 512 x 384: the camera's own quantisation and subsampling stay."""
    jobs = []
    for photo in photos(unpacked):
        with Image.open(photo) as image:
            width, height = image.size
        for y in range(0, height - TILE_HEIGHT + 1, TILE_HEIGHT):
            for x in range(0, width - TILE_WIDTH + 1, TILE_WIDTH):
                crop = f"{TILE_WIDTH}x{TILE_HEIGHT}+{x}+{y}"
                out = target / f"{_flat(photo, unpacked)}_{x}_{y}.jpg"
                jobs.append(["jpegtran", "-copy", "none", "-crop", crop, "-outfile", out, photo])
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(_run, jobs))


def _photos(unpacked: Path, target: Path) -> None:
    """Photos of at least 6 megapixels, as they are."""
    for photo in photos(unpacked):
        with Image.open(photo) as image:
            large = image.width * image.height >= 6_000_000
        if large:
            shutil.copyfile(photo, target / f"{_flat(photo, unpacked)}.jpg")


def _captions(path: Path) -> dict[str, str]:
    """A stamp's captions by language; the first line is English."""
    first, *rest = path.read_text(encoding="utf-8", errors="replace").splitlines() or [""]
    named = (line.partition(".utf8=") for line in rest)
    return {"en": first.strip()} | {language.strip(): text.strip() for language, mark, text in named if mark}


def _stamps(unpacked: Path, target: Path) -> None:
    """Every stamp that is described in speech, with the caption in the language of the first of its recordings."""
    number = 0
    texts: list[str] = []
    for stamp in sorted(unpacked.rglob("*.png")):
        captions = _captions(stamp.with_suffix(".txt")) if stamp.with_suffix(".txt").exists() else {}
        spoken = {
            path.stem.partition("_desc_")[2] or "en": path for path in sorted(stamp.parent.glob(f"{stem(stamp)}_desc*.ogg"))
        }
        language = next((name for name in spoken if captions.get(name)), None)
        if language is not None:
            write_sample(target, number, stamp, captions, language, spoken[language])
            number += 1
            texts += captions.values()
    _byte_pairs(texts, 8192).save(str(target / "tokenizer.json"))


def stem(path: Path) -> str:
    """A file's stem, safe in a glob pattern."""
    return re.sub(r"([][*?])", r"[\1]", path.stem)


_TAGS = re.compile(rb"<(script|style)\b.*?</\1>|<[^>]*>", re.DOTALL | re.IGNORECASE)
VOCABULARY = 32_768
_TRAINED_BYTES = 16 << 20


def text_of(unpacked: Path) -> Iterator[str]:
    """Text of every HTML and text file, tags stripped, entities resolved."""
    for path in sorted(unpacked.rglob("*")):
        if path.suffix in (".html", ".txt", ".rst") and path.is_file() and not path.is_symlink():
            yield html.unescape(_TAGS.sub(b" ", path.read_bytes()).decode("utf-8", "replace"))


def _byte_pairs(texts: Iterable[str], size: int) -> Any:
    """A byte-pair tokenizer of ``size`` ids learnt from texts."""
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError as error:
        raise RecipeError("tokenizers is not installed: pip install 'lfdata[tokenizers]'") from error
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _tokens(unpacked: Path, target: Path) -> None:
    """Byte-pair ids of the whole corpus, with a vocabulary learnt from its first 16 MiB; added to ``tokens.npy``."""
    vocabulary = target / "tokenizer.json"
    if not vocabulary.exists():
        _byte_pairs(_first(text_of(unpacked), _TRAINED_BYTES), VOCABULARY).save(str(vocabulary))
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(vocabulary))
    parts = [np.load(target / "tokens.npy", allow_pickle=False)] if (target / "tokens.npy").exists() else []
    parts += [np.array(tokenizer.encode(text).ids, np.uint16) for text in text_of(unpacked)]
    np.save(target / "tokens.npy", np.concatenate(parts))


def _first(texts: Iterator[str], size: int) -> Iterator[str]:
    for text in texts:
        yield text
        size -= len(text)
        if size <= 0:
            return


def _tiles_again(shorter: int | None, quality: int = 90, subsampling: str = "4:2:0") -> Callable[[Path, Path], None]:
    """The tiles encoded again, with the shorter side brought down; what data sets hold that were made for training."""

    def build(unpacked: Path, target: Path) -> None:
        known = set(target.iterdir())
        _tiles(unpacked, target)
        for path in sorted(set(target.iterdir()) - known):
            with Image.open(path) as picture:
                made: Any = picture.convert("RGB")
            if shorter is not None:
                made = made.resize(resized(made.width, made.height, shorter), Image.Resampling.BICUBIC)
            made.save(path, quality=quality, subsampling=subsampling)

    return build


RECIPES = {
    "tiles-q90": Recipe(
        "the tiles, encoded again as JPEG of quality 90", "CC-BY(-SA), GPL", _PHOTO_PACKAGES, _tiles_again(None)
    ),
    "tiles-256": Recipe(
        "the tiles with a shorter side of 256, as JPEG of quality 90", "CC-BY(-SA), GPL", _PHOTO_PACKAGES, _tiles_again(256)
    ),
    "tiles-444": Recipe(
        "the tiles as 500 x 375 JPEG of quality 99 without chroma subsampling, near to ImageNet's files in size and cost",
        "CC-BY(-SA), GPL",
        _PHOTO_PACKAGES,
        _tiles_again(375, 99, "4:4:4"),
    ),
    "tiles": Recipe(
        "2,120 JPEG tiles of 512 x 384 cut without loss from 64 photos", "CC-BY(-SA), GPL", _PHOTO_PACKAGES, _tiles
    ),
    "photos": Recipe("photos of 6 megapixels and more", "CC-BY(-SA), GPL", _PHOTO_PACKAGES, _photos),
    "tokens": Recipe(
        "byte-pair ids of the kernel's, Python's and Debian's documentation",
        "GPL-2, PSF, CC-BY-SA",
        ("python3.11-doc", "linux-doc-6.1", "debian-handbook"),
        _tokens,
    ),
    "stamps": Recipe(
        "pictures of 1024 x 1024 with a caption, its recording and an annotation, from stamps that are described in speech",
        "GPL-2",
        ("tuxpaint-stamps-default",),
        _stamps,
    ),
}


def fetch(name: str, home: Path, say: Callable[[str], None]) -> Path:
    """The data set's folder below ``home``, fetched and made if it is not there yet.

    Raises:
        RecipeError: a package could not be fetched, or a tool is missing.
    """
    recipe, target = RECIPES[name], home / "data" / name
    if target.is_dir():
        return target
    packages, unpacked = home / "packages", home / "unpacked"
    for package in recipe.packages:
        place = unpacked / package
        if place.is_dir():
            continue
        packages.mkdir(parents=True, exist_ok=True)
        say(f"fetching {package}")
        _run(["apt-get", "download", package], packages)
        found = sorted(packages.glob(f"{package}_*.deb"))
        if not found:
            raise RecipeError(f"apt-get download {package} left no package in {packages}")
        half = unpacked / f".{package}"
        shutil.rmtree(half, ignore_errors=True)
        half.mkdir(parents=True)
        _run(["dpkg-deb", "-x", found[-1], half])
        half.rename(place)
    say(f"making {name}: {recipe.about}")
    half = target.with_name(f".{name}")
    shutil.rmtree(half, ignore_errors=True)
    half.mkdir(parents=True)
    for package in recipe.packages:
        recipe.build(unpacked / package, half)
    half.rename(target)
    return target
