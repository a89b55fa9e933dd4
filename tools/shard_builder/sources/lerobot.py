"""Source: a LeRobot data set (v2.0, v2.1, v3.0): one sample a frame, in the order of episodes; frames of videos become pictures."""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from lfdata.errors import OptionError, SampleError, SourceError
from shard_builder.fields import check_unique
from shard_builder.sources.base import BadRecord, FieldSpec, RawSample, Record
from shard_builder.sources.files import read_file, resolve_inside, show, size_inside
from shard_builder.sources.lerobot_meta import NUMBERS, Episode, Feature, Meta
from shard_builder.sources.lerobot_parquet import ParquetFile, Rows, arrow_library, check_column
from shard_builder.sources.lerobot_scan import INDEX, DataFile, VideoSizes
from shard_builder.sources.options import SourceOptions
from shard_builder.sources.video import VideoFile, av_library, video_versions

TASK, SUBTASK = "task", "subtask"
_TOLERANCE = 1e-4
_VALID = {
    "images": "<codec options of all pictures, such as exact=224x224,codec=jpeg,quality=90>",
    "tolerance": "<seconds that a frame may lie off its timestamp; default 1e-4>",
}
# Records a worker gets at a time: what it decodes between two of its turns goes to others, so few turns are better; in pixels, to bound memory.
_CHUNK_PIXELS, _MOST_CHUNK = 1 << 24, 128

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[int, int, int, float]).decode


class LeRobot:
    """Frames of the data set at ``location`` (the folder with ``meta/info.json``); keys are ``EPISODE/FRAME``, six digits each.

    Options (text): ``images``: codec options for every picture, joined by commas, unless fields are declared; ``tolerance``.
    Fields take the features of ``info.json`` as columns, ``task`` and ``subtask`` (texts). By default every feature becomes a field of its
    own name: videos and images pictures, single numbers scalars, others arrays of the declared dtype and shape; and ``task`` a text.

    Raises:
        SourceError: what ``meta`` says cannot be read, contradicts itself, or is of a version that is not known.
        OptionError: fields or options that make no sense. MissingExtraError: pyarrow or PyAV is not installed.
    """

    kind = "lerobot"

    def __init__(
        self, location: str, fields: Sequence[FieldSpec] | None = None, stage_dir: Path | None = None, **options: str
    ) -> None:
        del stage_dir
        reader = SourceOptions(self.kind, options, _VALID)
        self.location, self._given = location, reader.given
        self.root = Path(os.path.abspath(location))
        if not self.root.is_dir():
            raise SourceError(f"{location}: not a directory")
        arrow_library()
        self._tolerance = _seconds(reader)
        self._meta = Meta(self.root, location)
        self._warnings: list[str] = []
        self.fields: Sequence[FieldSpec] = self._declared(fields, reader)
        columns = {spec.column for spec in self.fields}
        features = self._meta.info.features
        self._videos = [name for name in self._meta.cameras if name in columns]
        self._images = [name for name in columns if name in features and features[name].dtype == "image"]
        self._texts = [name for name in columns if name in features and features[name].dtype == "string"]
        skip = {*self._videos, *self._images, *self._texts, TASK, SUBTASK}
        self._numbers = {name: features[name].shape for name in sorted(columns - skip)}
        needed = {"episode_index", "frame_index"}
        needed |= {"task_index"} if TASK in columns else set()
        needed |= {"subtask_index"} if SUBTASK in columns else set()
        self._numbers |= dict.fromkeys(sorted(needed - set(self._numbers)), ())
        if self._videos:
            av_library()
        self.chunk_records = self._chunk()
        # Of the worker: files that are open.
        self._rows: Rows | None = None
        self._open: OrderedDict[str, VideoFile] = OrderedDict()
        self._episode: tuple[int, Episode] | None = None

    # -- fields -------------------------------------------------------------------------------------------------------

    def _declared(self, fields: Sequence[FieldSpec] | None, reader: SourceOptions) -> tuple[FieldSpec, ...]:
        features = self._meta.info.features
        if fields is None:
            return self._default(_codec_options(reader))
        if "images" in reader.given:
            raise OptionError("lerobot: images= is for the fields that are made by default; give options with --field")
        check_unique(fields)
        texts = [TASK, *([SUBTASK] if self._meta.subtasks else [])]
        for spec in fields:
            if spec.column not in features and spec.column not in texts:
                has = ", ".join([*features, *texts])
                raise OptionError(f"field {spec.name!r}: the data set has no feature {spec.column!r}; it has {has}")
            if spec.column in features and features[spec.column].dtype not in (*NUMBERS, "string", "image", "video"):
                raise OptionError(
                    f"field {spec.name!r}: features of dtype {features[spec.column].dtype!r} are not read by this version"
                )
        return tuple(fields)

    def _default(self, images: dict[str, str]) -> tuple[FieldSpec, ...]:
        found = []
        for name, feature in self._meta.info.features.items():
            if feature.dtype in ("video", "image"):
                found.append(FieldSpec(name, "image", name, options=images))
            elif feature.dtype == "string":
                found.append(FieldSpec(name, "text", name))
            elif feature.dtype not in NUMBERS:
                self._warnings.append(f"feature {name!r} of dtype {feature.dtype!r} is left out: this version does not read it")
            elif feature.scalar:
                found.append(FieldSpec(name, "scalar", name, options={"dtype": feature.dtype}))
            else:
                shape = "x".join(map(str, feature.shape))
                found.append(FieldSpec(name, "array", name, options={"dtype": feature.dtype, "shape": shape}))
        taken = {spec.name for spec in found}
        for name in (TASK, *([SUBTASK] if self._meta.subtasks else [])):
            if name not in taken:
                found.append(FieldSpec(name, "text", name))
        return tuple(found)

    def _chunk(self) -> int:
        """Records that a worker should get at a time."""
        if not self._videos:
            return 16
        sides = [self._meta.info.features[name].shape for name in self._videos]
        pixels = sum(math.prod(shape[:2]) if len(shape) == 3 else 1 << 20 for shape in sides)
        return max(16, min(_MOST_CHUNK, _CHUNK_PIXELS // max(1, pixels)))

    # -- plan pass ----------------------------------------------------------------------------------------------------

    def scan(self) -> Iterator[Record | BadRecord]:
        """Every frame. An episode whose files are missing, or do not have what ``meta`` says, is one bad sample."""
        listed, data, sizes = set(self._meta.episodes.tolist()), DataFile(), VideoSizes(self.root, self._meta, self._videos)
        for ordinal in range(len(self._meta)):
            episode = self._meta.episode(ordinal)
            try:
                if data.path != episode.data:
                    data = self._data_file(episode.data, listed)
                first = data.check(episode, self._meta.tasks if TASK in {s.column for s in self.fields} else None)
                size = data.row_bytes + sizes.of(episode)
            except SampleError as error:
                where = error.path or show(episode.data)
                yield BadRecord(b"%06d" % episode.index, f"episode {episode.index}: {where}", error.code, error.reason)
                continue
            times = data.columns["timestamp"][first : first + episode.length].tolist()
            for frame, time in enumerate(times):
                yield Record(b"%06d/%06d" % (episode.index, frame), _encode((ordinal, first + frame, frame, time)), size)

    def _data_file(self, path: str, listed: set[int]) -> DataFile:
        file = ParquetFile(self.root, path)
        try:
            self._check_schema(file)
            found = DataFile(path, file)
        finally:
            file.close()
        unknown = sorted(set(found.runs) - listed)
        if unknown:
            raise SourceError(f"{self.location}/{path}: has rows of episode {unknown[0]}, which meta does not list")
        return found

    def _check_schema(self, file: ParquetFile) -> None:
        features = self._meta.info.features
        needed = {name: Feature("float32" if name == "timestamp" else "int64") for name in INDEX}
        needed |= {name: features[name] for name in (*self._numbers, *self._images, *self._texts) if name in features}
        for name, feature in needed.items():
            if name not in file.schema:
                raise SourceError(f"{self.location}/{file.path}: no column {name!r}; it has {', '.join(file.schema)}")
            wrong = check_column(file.schema[name], feature.dtype, feature.shape)
            if wrong:
                raise SourceError(f"{self.location}/{file.path}: column {name!r} is not what info.json declares: {wrong}")

    # -- protocol -----------------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """Provenance: kind, version, options, fields, and what decodes videos."""
        fields = [msgspec.structs.asdict(spec) for spec in self.fields]
        for field in fields:
            field["options"] = {n: Path(v).name if n == "tokenizer" else v for n, v in field["options"].items()}
        about = {"kind": self.kind, "version": self._meta.info.codebase_version, "options": self._given, "fields": fields}
        return about | ({"decoder": video_versions()} if self._videos else {})

    def notes(self) -> dict[str, Any]:
        """What ``meta`` says beside the frames: rate, robot, features, tasks, statistics, GR00T's modality."""
        found, warnings = self._meta.notes()
        return {"lerobot": found, "warnings": [*self._warnings, *warnings]}

    def stage(self, unit: int, directory: Path) -> None:
        """Files are readable as they are."""

    def unstage(self, unit: int, directory: Path) -> None:
        """Nothing was staged."""

    def config(self) -> dict[str, Any]:
        """Arguments that rebuild this source."""
        fields = [msgspec.structs.asdict(spec) for spec in self.fields]
        options = {name: value for name, value in self._given.items() if name != "images"}
        return {"kind": self.kind, "location": str(self.root), "fields": fields, "options": options}

    def place(self, locator: bytes) -> str:
        """Episode and frame."""
        ordinal, _, frame, _ = _decode(locator)
        return f"episode {int(self._meta.episodes[ordinal])}, frame {frame}"

    # -- workers ------------------------------------------------------------------------------------------------------

    def load(self, locator: bytes) -> RawSample:
        """Read one frame's row, and decode its pictures. Raises :class:`SampleError`."""
        ordinal, number, frame, time = _decode(locator)
        if self._episode is None or self._episode[0] != ordinal:
            self._episode = ordinal, self._meta.episode(ordinal)
        episode = self._episode[1]
        path = f"{self.place(locator)} ({show(episode.data)}, row {number})"
        try:
            row = self._row(episode, number)
            if [row[name] for name in ("episode_index", "frame_index")] != [episode.index, frame]:
                raise SampleError("changed", "the row is another one than when it was scanned")
            values, files = {}, {}
            for spec in self.fields:
                if spec.column in self._videos:
                    video = episode.videos[spec.column]
                    files[spec.name] = show(video.path)
                    values[spec.name] = self._picture(spec.name, video.path, video.start + time, time)
                elif (value := self._value(spec, row)) is not None:
                    values[spec.name] = value
            return RawSample(values, path, files)
        except SampleError as error:
            error.path = f"{path}: {error.path}" if error.path else path
            raise

    def _row(self, episode: Episode, number: int) -> dict[str, Any]:
        if self._rows is None or self._rows.file.path != episode.data:
            if self._rows is not None:
                self._rows.file.close()
                self._rows = None
            file = ParquetFile(self.root, episode.data)
            self._rows = Rows(file, self._numbers, [*self._images, *self._texts], bool(self._images))
        return self._rows.row(number)

    def _value(self, spec: FieldSpec, row: dict[str, Any]) -> Any:
        features = self._meta.info.features
        if spec.column in features:
            value = row[spec.column]
            if spec.column in self._images and value is not None:
                return self._stored_picture(spec, value)
            return value if value is None or spec.column in self._texts else _as_declared(value, features[spec.column])
        number = row["task_index" if spec.column == TASK else "subtask_index"]
        known = self._meta.tasks if spec.column == TASK else self._meta.subtasks
        text = None if number is None else known.get(int(np.asarray(number).reshape(())))
        if text is None:
            raise SampleError("no-task", f"no {spec.column} has the number {number}", field=spec.name)
        return text

    def _stored_picture(self, spec: FieldSpec, value: Any) -> bytes:
        if isinstance(value, bytes):
            return value
        if value.get("bytes") is not None:
            return bytes(value["bytes"])
        if isinstance(value.get("path"), str):
            return read_file(self.root, value["path"])
        raise SampleError("no-picture", "the row has neither a picture nor the path of one", field=spec.name)

    def _picture(self, field: str, path: str, seconds: float, time: float) -> NDArray[Any]:
        # Timestamps are stored as float32: late in a long episode their own spacing is more than the tolerance.
        tolerance = self._tolerance + float(np.spacing(np.float32(abs(time))))
        try:
            return self._video(path).frame(seconds, tolerance)
        except SampleError as error:
            error.field = field
            raise

    def _video(self, path: str) -> VideoFile:
        """The opened file. As many stay open as there are cameras: frames come in order, camera by camera."""
        found = self._open.pop(path, None)
        if found is None:
            while len(self._open) >= len(self._videos):
                self._open.popitem(last=False)[1].close()
            size_inside(self.root, path)
            found = VideoFile(resolve_inside(self.root, path), show(path))
        self._open[path] = found
        return found


def _as_declared(value: Any, feature: Feature) -> Any:
    """Floats of another width than declared are rounded to it, as the library does when it reads them."""
    array = np.asarray(value)
    if feature.scalar and array.size == 1:
        array = array.reshape(())
    if (
        array.dtype.kind == "f"
        and feature.dtype in ("float16", "float32", "float64")
        and array.dtype != np.dtype(feature.dtype)
    ):
        with np.errstate(over="ignore"):
            rounded = array.astype(feature.dtype)
        if (np.isfinite(array) & ~np.isfinite(rounded)).any():
            raise SampleError("range", f"a finite value is beyond {feature.dtype}")
        array = rounded
    return array


def _codec_options(reader: SourceOptions) -> dict[str, str]:
    found = {}
    for part in (reader.text("images") or "").split(","):
        name, equals, value = part.partition("=")
        if part and (not equals or not name or not value):
            raise reader.bad("images")
        if part:
            found[name.strip()] = value.strip()
    return found


def _seconds(reader: SourceOptions) -> float:
    text = reader.text("tolerance")
    try:
        value = _TOLERANCE if text is None else float(text)
    except ValueError:
        raise reader.bad("tolerance") from None
    if not 0 <= value < math.inf:
        raise reader.bad("tolerance")
    return value
