"""What the ``meta`` folder of a LeRobot data set says: features, episodes, tasks, statistics; v2.0, v2.1 and v3.0 alike."""

from __future__ import annotations

import json
import math
import re
import string
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from lfdata.errors import SampleError, SourceError
from shard_builder.sources.files import read_file, resolve_inside, show
from shard_builder.sources.lerobot_parquet import MetaTable
from shard_builder.sources.lerobot_stats import joined

INFO = "meta/info.json"
VERSIONS = ("v2.0", "v2.1", "v3.0")
# Dtypes of numbers that become scalars and arrays.
NUMBERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64", "bool")
MAX_NOTE_BYTES = 1 << 20
MAX_NOTED_TASKS = 1000
_NUMBER_FORMAT = re.compile(r"(0?[0-9]{1,2}d)?\Z")
_PATH_FIELDS = {"episode_chunk", "episode_index", "chunk_index", "file_index", "video_key"}


class Feature(msgspec.Struct, frozen=True):
    """One feature as ``info.json`` declares it: a dtype of NumPy, ``string``, ``image`` or ``video``, and a shape."""

    dtype: str
    shape: tuple[int, ...] = ()
    names: Any = None

    @property
    def scalar(self) -> bool:
        """Whether a frame has one value of it: the shapes () and (1,) are stored alike."""
        return math.prod(self.shape) == 1 and len(self.shape) <= 1


class Info(msgspec.Struct, frozen=True):
    """The parts of ``info.json`` that matter here."""

    codebase_version: str
    fps: float
    features: dict[str, Feature]
    data_path: str
    total_episodes: int
    total_frames: int
    video_path: str | None = None
    chunks_size: int = 1000
    robot_type: str | None = None


class _EpisodeLine(msgspec.Struct):
    episode_index: int
    length: int


class _TaskLine(msgspec.Struct):
    task_index: int
    task: str


@dataclass(frozen=True, slots=True)
class Video:
    """Where an episode's frames of one camera lie: the file, and the time in it at which the episode begins."""

    path: str
    start: float


@dataclass(frozen=True, slots=True)
class Episode:
    """One episode. ``first``: place of its first frame among all frames of the data set."""

    index: int
    length: int
    first: int
    data: str
    videos: dict[str, Video]


class Meta:
    """The opened ``meta`` folder of ``root``. ``cameras``: features of dtype ``video``.

    Raises:
        SourceError: a file that is missing, damaged or contradicts another, naming it; a version that is not read here.
    """

    def __init__(self, root: Path, location: str) -> None:
        self.root, self.location = root, location
        self.info = self._read_info()
        self.new = self.info.codebase_version.startswith("v3")
        self.cameras = [name for name, feature in self.info.features.items() if feature.dtype == "video"]
        if self.cameras and not self.info.video_path:
            raise SourceError(f"{location}/{INFO}: features are videos, but there is no video_path")
        self._columns = self._new_episodes() if self.new else self._old_episodes()
        self._check_totals()
        self.tasks = self._read_tasks()
        self.subtasks = self._subtasks()

    def __len__(self) -> int:
        return len(self._columns["index"])

    @property
    def episodes(self) -> NDArray[np.int64]:
        """Their indices, ascending."""
        return self._columns["index"]

    def episode(self, ordinal: int) -> Episode:
        """The episode at a place in :attr:`episodes`."""
        column = {name: values[ordinal] for name, values in self._columns.items()}
        index, length, first = (int(column[name]) for name in ("index", "length", "first"))
        where = {"episode_index": index, "episode_chunk": index // self.info.chunks_size}
        if not self.new:
            data = self._path(self.info.data_path, where)
            videos = {
                key: Video(self._path(self.info.video_path or "", where | {"video_key": key}), 0.0) for key in self.cameras
            }
            return Episode(index, length, first, data, videos)
        place = {"chunk_index": int(column["data/chunk_index"]), "file_index": int(column["data/file_index"])}
        videos = {}
        for key in self.cameras:
            part = {name: int(column[f"videos/{key}/{name}"]) for name in ("chunk_index", "file_index")} | {"video_key": key}
            videos[key] = Video(self._path(self.info.video_path or "", part), float(column[f"videos/{key}/from_timestamp"]))
        return Episode(index, length, first, self._path(self.info.data_path, place), videos)

    # -- info ---------------------------------------------------------------------------------------------------------

    def _text(self, path: str) -> bytes:
        try:
            return read_file(self.root, path)
        except SampleError as error:
            raise SourceError(f"{self.location}/{path}: {error.reason}") from None

    def _read_info(self) -> Info:
        data = self._text(INFO)
        where = f"{self.location}/{INFO}"
        version = _version(where, data)
        if version.startswith("v1"):
            raise SourceError(
                f"{where}: codebase_version {version}: data sets before v2.0 are not read; upgrade it with LeRobot's own converters "
                "(lerobot.common.datasets.v2.convert_dataset_v1_to_v2, then v21)"
            )
        if version not in VERSIONS:
            raise SourceError(f"{where}: codebase_version {version!r}; this version reads {', '.join(VERSIONS)}")
        try:
            info = msgspec.json.decode(data, type=Info)
        except msgspec.DecodeError as error:
            raise SourceError(f"{where}: it does not describe a data set of {version}: {error}") from None
        if not info.features or not (math.isfinite(info.fps) and info.fps > 0) or info.chunks_size < 1:
            raise SourceError(f"{where}: needs features, fps above 0 and chunks_size above 0")
        if bad := [name for name, feature in info.features.items() if any(side < 1 for side in feature.shape)]:
            raise SourceError(f"{where}: feature {bad[0]!r} has the shape {info.features[bad[0]].shape}")
        return info

    def _path(self, template: str, values: Mapping[str, Any]) -> str:
        """A path template filled in. Only plain names and numbers: a format string may do more, and this one comes with the data."""
        parts = []
        try:
            for text, name, form, conversion in string.Formatter().parse(template):
                parts.append(text)
                if name is None:
                    continue
                if name not in _PATH_FIELDS or name not in values or conversion or not _NUMBER_FORMAT.match(form or ""):
                    raise ValueError(f"{{{name}}}")
                parts.append(format(values[name], form or ""))
        except ValueError as error:
            has = ", ".join(sorted(values))
            raise SourceError(
                f"{self.location}/{INFO}: the path {template!r} cannot be used: {error}; it may name {has}"
            ) from None
        return "".join(parts)

    # -- episodes -----------------------------------------------------------------------------------------------------

    def _old_episodes(self) -> dict[str, NDArray[Any]]:
        lines = self._lines("meta/episodes.jsonl", _EpisodeLine)
        found = {"index": np.array([line.episode_index for line in lines], np.int64)}
        found["length"] = np.array([line.length for line in lines], np.int64)
        found = self._ordered("meta/episodes.jsonl", found)
        found["first"] = np.cumsum(found["length"]) - found["length"]
        return found

    def _lines(self, path: str, kind: Any) -> list[Any]:
        found = []
        decoder = msgspec.json.Decoder(kind)
        for number, line in enumerate(self._text(path).split(b"\n"), 1):
            if not line.strip():
                continue
            try:
                found.append(decoder.decode(line))
            except msgspec.DecodeError as error:
                raise SourceError(f"{self.location}/{path}: line {number}: {error}") from None
        return found

    def _new_episodes(self) -> dict[str, NDArray[Any]]:
        names = {"index": "episode_index", "length": "length", "first": "dataset_from_index"}
        plain = ["data/chunk_index", "data/file_index"]
        plain += [f"videos/{key}/{name}" for key in self.cameras for name in ("chunk_index", "file_index")]
        floats = [f"videos/{key}/from_timestamp" for key in self.cameras]
        types = dict.fromkeys([*names.values(), *plain], np.int64) | dict.fromkeys(floats, np.float64)
        files = self._parquet_files("meta/episodes")
        parts = [MetaTable(self.root, path, self.location).columns(types) for path in files]
        joined = {name: np.concatenate([part[name] for part in parts]) for name in types}
        for short, name in names.items():
            joined[short] = joined.pop(name)
        for name in floats:
            if not np.isfinite(joined[name]).all():
                raise SourceError(f"{self.location}/meta/episodes: {name} is not finite")
        return self._ordered("meta/episodes", joined)

    def _parquet_files(self, folder: str) -> list[str]:
        """Parquet files below a folder, in the order of their names."""
        top = self.root / folder
        found = sorted(show(str(path.relative_to(self.root))) for path in top.glob("*/*.parquet"))
        if not found:
            raise SourceError(f"{self.location}/{folder}: no parquet files there")
        return found

    def _ordered(self, path: str, columns: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        index, length = columns["index"], columns["length"]
        if len(index) and (int(index.min()) < 0 or int(length.min()) < 0):
            raise SourceError(f"{self.location}/{path}: an episode of negative index or length")
        order = np.argsort(index, kind="stable")
        ordered = {name: values[order] for name, values in columns.items()}
        same = np.flatnonzero(np.diff(ordered["index"]) == 0)
        if len(same):
            raise SourceError(f"{self.location}/{path}: episode {int(ordered['index'][same[0]])} is listed twice")
        return ordered

    def _check_totals(self) -> None:
        found = {"total_episodes": len(self), "total_frames": int(self._columns["length"].sum())}
        stated = {"total_episodes": self.info.total_episodes, "total_frames": self.info.total_frames}
        for name, count in found.items():
            if stated[name] != count:
                listed = "meta/episodes" if self.new else "meta/episodes.jsonl"
                raise SourceError(
                    f"{self.location}/{INFO}: {name} is {stated[name]}, but {listed} makes it {count}; correct the one that is wrong"
                )

    # -- tasks and notes ----------------------------------------------------------------------------------------------

    def _read_tasks(self) -> dict[int, str]:
        if self.new:
            return MetaTable(self.root, "meta/tasks.parquet", self.location).texts("task_index")
        return {line.task_index: line.task for line in self._lines("meta/tasks.jsonl", _TaskLine)}

    def _subtasks(self) -> dict[int, str]:
        path = "meta/subtasks.parquet"
        if "subtask_index" not in self.info.features or not (self.root / path).is_file():
            return {}
        return MetaTable(self.root, path, self.location).texts("subtask_index")

    def notes(self) -> tuple[dict[str, Any], list[str]]:
        """Facts worth keeping beside the samples, and warnings about those that could not be."""
        warnings: list[str] = []
        found: dict[str, Any] = {
            "codebase_version": self.info.codebase_version,
            "fps": self.info.fps,
            "robot_type": self.info.robot_type,
            "episodes": len(self),
            "frames": int(self._columns["length"].sum()),
            "features": {name: msgspec.to_builtins(feature) for name, feature in self.info.features.items()},
        }
        if len(self.tasks) <= MAX_NOTED_TASKS:
            found["tasks"] = {str(number): task for number, task in sorted(self.tasks.items())}
        else:
            warnings.append(f"{len(self.tasks)} tasks are too many for the notes; the samples have them")
        for name, path in (("modality", "meta/modality.json"), ("statistics", "meta/stats.json")):
            value = self._optional_json(path, warnings)
            if value is not None:
                found[name] = value
        path = "meta/episodes_stats.jsonl"
        if "statistics" not in found and (self.root / path).is_file():
            try:
                lines = (line for line in self._text(path).split(b"\n") if line.strip())
                found["statistics"] = _finite(joined(json.loads(line)["stats"] for line in lines))
            except (SourceError, ValueError, KeyError, TypeError, RecursionError) as error:
                warnings.append(f"{path} is left out of the notes: {error}")
        return found, warnings

    def _optional_json(self, path: str, warnings: list[str]) -> Any:
        try:
            if not (self.root / path).is_file():
                return None
            resolve_inside(self.root, path)
            data = read_file(self.root, path, MAX_NOTE_BYTES)
            return _finite(json.loads(data))
        except SampleError as error:
            warnings.append(f"{path} is left out of the notes: {error.reason}")
        except (ValueError, RecursionError) as error:
            warnings.append(f"{path} is left out of the notes: not JSON: {error}")
        return None


def _version(where: str, data: bytes) -> str:
    """What ``info.json`` says of its version. Raises :class:`SourceError`: the file is not one that describes a data set."""
    again = "the copy of the data set is incomplete or damaged: fetch it again"
    if not data.strip():
        raise SourceError(f"{where}: the file is empty; {again}")
    try:
        found = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SourceError(f"{where}: not JSON: {error}; {again}") from None
    if not isinstance(found, dict):
        kind = {list: "a list", str: "a text", type(None): "null", bool: "true or false"}.get(type(found), "a number")
        raise SourceError(
            f"{where}: holds {kind} where an object describes the data set (codebase_version, fps, features, ...); {again}"
        )
    if "codebase_version" not in found:
        told = "an empty object" if not found else "an object without codebase_version"
        raise SourceError(f"{where}: holds {told}, so nothing says what the data set is; {again}")
    version = found["codebase_version"]
    if not isinstance(version, str):
        raise SourceError(f"{where}: codebase_version is {version!r:.100}, not a text such as {VERSIONS[-1]!r}; {again}")
    return version


def _finite(value: Any) -> Any:
    """JSON values with ``None`` for what JSON has no number for."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
