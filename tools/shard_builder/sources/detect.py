"""Which kind of source a location looks like: by names, and a first look at the file that decides where names do not."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from lfdata.errors import SourceError

TABLES = (".jsonl", ".ndjson", ".csv", ".tsv")
TARS = (".tar", ".tar.gz", ".tgz")
PARQUET = (".parquet", ".pq")
_PICTURES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif")
_HEAD = 1 << 16
_TOKENS = b"MMIDIDX\0\0"

_BY_ENDING = (
    (TABLES, "table"),
    (TARS, "webdataset"),
    (PARQUET, "parquet"),
    ((".arrow",), "arrow"),
    ((".h5", ".hdf5", ".he5"), "hdf5"),
)


def guess_kind(location: str) -> str:
    """Kind of source that a location looks like. Raises :class:`SourceError` naming what is supported."""
    lower = location.lower()
    for endings, kind in _BY_ENDING:
        if lower.endswith(endings) and not os.path.isdir(location):
            return kind
    if lower.endswith(".json") and all(_coco_document(Path(part)) for part in location.split("::")):
        return "coco"
    if _token_index(Path(location)):
        return "megatron"
    path = Path(location)
    if lower.endswith((".yaml", ".yml")) and path.is_file():
        return "yolo"
    if not path.exists() and ("{" in location or "::" in location):
        return "webdataset"
    if path.is_dir():
        return _directory(path)
    if not path.exists():
        raise SourceError(f"{location}: no such file or directory")
    raise SourceError(
        f"{location}: not a kind of source this version knows (docs/sources.md lists them). It takes a folder of images (with a "
        f"directory a class), a table ({', '.join(TABLES)}), WebDataset tars ({', '.join(TARS)}, brace patterns, a folder of tars), "
        f"Parquet files ({', '.join(PARQUET)}) and more; --kind says which"
    )


def _directory(path: Path) -> str:
    names = _names(path)
    if os.path.lexists(path / "meta" / "info.json"):
        return "lerobot"
    for looks, kind in _DIRECTORIES:
        if looks(path, names):
            return kind
    return "image-folder"


def _names(path: Path) -> list[str]:
    try:
        return [name for name in os.listdir(path) if not name.startswith(".")]
    except OSError as error:
        raise SourceError(f"{path}: cannot be listed: {error.strerror}") from error


def _has(names: list[str], endings: tuple[str, ...]) -> bool:
    return any(name.lower().endswith(endings) for name in names)


def _saved(_path: Path, names: list[str]) -> bool:
    return "dataset_dict.json" in names or {"state.json", "dataset_info.json"} <= set(names)


def _coco_document(path: Path) -> bool:
    """Whether a file begins as a COCO document does."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(_HEAD)
    return head.lstrip()[:1] == b"{" and any(
        name in head for name in (b'"images"', b'"annotations"', b'"categories"', b'"licenses"')
    )


def _coco(path: Path, names: list[str]) -> bool:
    return "annotations" in names and (path / "annotations").is_dir() and _has(_names(path / "annotations"), (".json",))


def _token_index(path: Path) -> bool:
    """Whether this is, or is the prefix of, an index of tokens."""
    prefix = path.with_suffix("") if path.suffix.lower() in (".idx", ".bin") else path
    index = Path(f"{prefix}.idx")
    if not prefix.name or not index.is_file():
        return False
    with index.open("rb") as file:
        return file.read(len(_TOKENS)) == _TOKENS


def _voc(_path: Path, names: list[str]) -> bool:
    return {"Annotations", "JPEGImages"} <= set(names)


def _yolo(_path: Path, names: list[str]) -> bool:
    return bool({"data.yaml", "data.yml", "dataset.yaml", "dataset.yml"} & set(names))


def _mds(path: Path, names: list[str]) -> bool:
    """An index that names MDS shards, here; or one in a directory below, where the split is still to be said."""
    places = (
        [path]
        if "index.json" in names
        else [path / name for name in sorted(names) if (path / name / "index.json").is_file()][:1]
    )
    for place in places:
        with (place / "index.json").open("rb") as file:
            head = file.read(_HEAD)
        if b'"shards"' in head and (b'"mds"' in head or b"[]" in head):
            return True
    return False


def _tars(_path: Path, names: list[str]) -> bool:
    return _has(names, TARS)


def _parquet(path: Path, names: list[str]) -> bool:
    """Parquet here or one directory below, and no pictures beside it: those would be what the files are about."""
    if _has(names, _PICTURES):
        return False
    if _has(names, PARQUET):
        return True
    below = [_names(path / name) for name in names if (path / name).is_dir() and not (path / name).is_symlink()]
    return any(_has(inner, PARQUET) for inner in below) and not any(_has(inner, _PICTURES) for inner in below)


_DIRECTORIES: tuple[tuple[Callable[[Path, list[str]], bool], str], ...] = (
    (_saved, "arrow"),
    (_mds, "mds"),
    (_voc, "voc"),
    (_yolo, "yolo"),
    (_coco, "coco"),
    (_tars, "webdataset"),
    (_parquet, "parquet"),
)
