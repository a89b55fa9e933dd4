"""``data.yaml`` of a YOLO data set: plain values only, and paths that stay below the root."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lfdata.errors import SampleError, SourceError
from shard_builder.sources.common import read_small
from shard_builder.sources.files import check_relative, show

SPLITS = ("train", "val", "test")
NAMES = ("data.yaml", "data.yml", "dataset.yaml", "dataset.yml")
_MAX_BYTES = 4 << 20
_MAX_CLASSES = 1_000_000


@dataclass(frozen=True)
class DataSet:
    """What a description says.

    Attributes:
        root: the directory that paths are below. splits: relative paths of directories and lists, by split. names: classes by id.
        keypoints: number and numbers each (2 or 3) of a pose's points.
    """

    name: str
    root: Path
    splits: Mapping[str, list[str]]
    names: Mapping[int, str]
    keypoints: tuple[int, int] | None


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Safe, and without aliases: those can make a small file large."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Refuse ``*alias``."""
        if self.check_event(yaml.events.AliasEvent):
            raise yaml.YAMLError("an alias; write the value out")
        return super().compose_node(parent, index)


def read_data_set(location: str, root: str | None) -> DataSet:
    """Read a description. ``root``: the directory that its paths are relative to.

    Raises:
        SourceError: it is missing, no YAML, or says what cannot be.
    """
    path = _find(location)
    name = path.name
    try:
        found = _Loader(read_small(path, _MAX_BYTES)).get_single_data()
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise SourceError(f"{name}: not YAML: {' '.join(str(error).split())[:300]}") from None
    if not isinstance(found, dict):
        raise SourceError(f"{name}: names, train and val are expected, found {type(found).__name__}")
    base = _root(found.get("path"), path, root)
    splits = {split: _entries(found[split], split, base, name) for split in SPLITS if found.get(split)}
    if not splits:
        raise SourceError(f"{name}: names no train, val or test")
    return DataSet(name, base, splits, _classes(found, name), _keypoints(found.get("kpt_shape"), name))


def _find(location: str) -> Path:
    path = Path(os.path.abspath(location))
    if not path.is_dir():
        return path
    for name in NAMES:
        if (path / name).exists():
            return path / name
    raise SourceError(f"{location}: holds no {NAMES[0]}")


def _root(stated: Any, path: Path, given: str | None) -> Path:
    """``given``; else ``path`` of the description where it lies below; else the description's directory."""
    if given is not None:
        base = Path(os.path.abspath(given))
        if not base.is_dir():
            raise SourceError(f"{base}: the root is not a directory")
        return base
    if stated in (None, "", "."):
        return path.parent
    if not isinstance(stated, str):
        raise SourceError(f"{path.name}: path is a text, not {str(stated)[:80]!r}")
    base = Path(os.path.normpath(path.parent / stated))
    if not base.is_relative_to(path.parent) or not base.is_dir():
        raise SourceError(
            f"{path.name}: its path {stated!r} is no directory below its own; say where the data set is with the option root=DIR"
        )
    return base


def _entries(value: Any, split: str, root: Path, name: str) -> list[str]:
    texts = value if isinstance(value, list) else [value]
    found = []
    for text in texts:
        if not isinstance(text, str) or not text:
            raise SourceError(f"{name}: {split} is a path or a list of paths, not {str(value)[:80]!r}")
        entry = os.path.normpath(text)
        if os.path.isabs(entry) and Path(entry).is_relative_to(root):
            entry = os.path.relpath(entry, root)
        while entry.startswith("../"):
            # Some tools write paths as if data.yaml lay one directory deeper.
            entry = entry[3:]
        try:
            if entry != ".":
                check_relative(entry)
        except SampleError as error:
            raise SourceError(f"{name}: {split}: {error.reason}") from None
        if not (root / entry).exists():
            raise SourceError(
                f"{name}: {split}: there is no {show(entry)!r} below {root.name}; the option root=DIR sets the root"
            )
        if not (root / entry).is_dir() and not entry.lower().endswith(".txt"):
            raise SourceError(f"{name}: {split}: {show(entry)!r} is neither a directory nor a list (.txt)")
        found.append(entry)
    return found


def _classes(found: Mapping[str, Any], name: str) -> dict[int, str]:
    names, count = found.get("names"), found.get("nc")
    if isinstance(names, list):
        names = dict(enumerate(names))
    if names is None and count is None:
        return {}
    if count is not None and (type(count) is not int or not 0 < count <= _MAX_CLASSES):
        raise SourceError(f"{name}: nc is a number of classes, not {str(count)[:80]!r}")
    if names is None:
        return {number: str(number) for number in range(int(count or 0))}
    if not isinstance(names, dict) or not all(type(number) is int and number >= 0 for number in names):
        raise SourceError(f"{name}: names is a list, or texts by number, not {str(names)[:80]!r}")
    if count is not None and count != len(names):
        raise SourceError(f"{name}: nc is {count}, but there are {len(names)} names")
    return {number: str(text) for number, text in sorted(names.items())}


def _keypoints(shape: Any, name: str) -> tuple[int, int] | None:
    if shape is None:
        return None
    if not (
        isinstance(shape, list) and len(shape) == 2 and type(shape[0]) is int and 0 < shape[0] <= 10_000 and shape[1] in (2, 3)
    ):
        raise SourceError(f"{name}: kpt_shape is a number of points and 2 or 3, not {str(shape)[:80]!r}")
    return shape[0], int(shape[1])
