"""Source: YOLO data sets (``data.yaml``, images and label files). Labels stay numbers: boxes, segments, oriented boxes, poses."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from lfdata.errors import SampleError, SourceError
from shard_builder.fields import check_unique
from shard_builder.sources.base import BadRecord, FieldSpec, RawSample, Record
from shard_builder.sources.common import PlainSource, open_regular, refuse_columns
from shard_builder.sources.files import read_file, show, size_inside
from shard_builder.sources.yolo_yaml import SPLITS, DataSet, read_data_set

COLUMNS = ("image", "labels", "split", "path")
DEFAULT_FIELDS = (
    FieldSpec("image", "image", "image", "file"),
    FieldSpec("labels", "json", "labels"),
    FieldSpec("split", "text", "split"),
)
PICTURES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".mpo", ".avif", ".dng", ".pfm")

_VALID = {
    "split": "|".join(SPLITS) + " (default: all that there are)",
    "root": "<directory that the paths in data.yaml are relative to; default: its own, and path in it>",
    "missing": "background|absent|error",
    "coordinates": "check|any",
    "max_file_bytes": "<largest image file, such as 512M; default 4G>",
}
_MAX_LABELS = 64 << 20
_MAX_LINE = 1 << 16
_MAX_DEPTH = 32
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[str, bytes, bool]).decode
"""(split, image, whether there is a label file)"""


class Yolo(PlainSource):
    """The source of kind ``yolo``: one sample an image, splits in the order train, val, test.

    Args:
        location: ``data.yaml``, or a directory that holds it.
        fields: of :data:`COLUMNS`. ``labels`` is for ``json`` a list of ``{"class": id, "values": numbers}``, for ``array`` the
            rows of numbers, class first.

    Raises:
        SourceError: a description that is missing or makes no sense. OptionError: fields or options that make no sense.
    """

    kind = "yolo"

    def __init__(
        self, location: str, fields: Sequence[FieldSpec] | None = None, stage_dir: Path | None = None, **options: str
    ) -> None:
        del stage_dir
        super().__init__(location, options, _VALID)
        self._missing = self._options.choice("missing", ("background", "absent", "error"), "background")
        self._bounds = self._options.choice("coordinates", ("check", "any"), "check") == "check"
        self._data: DataSet = read_data_set(location, self._options.text("root"))
        self.root = self._data.root
        split = self._options.text("split")
        if split is not None and split not in self._data.splits:
            have = ", ".join(self._data.splits)
            raise SourceError(f"{self._data.name}: has no split {split!r}; there is {have}")
        self._splits = [split] if split is not None else list(self._data.splits)
        fields = DEFAULT_FIELDS if fields is None else fields
        refuse_columns(fields, COLUMNS, "a YOLO data set")
        check_unique(fields)
        self.fields = tuple(fields)
        self._counts: Counter[str] = Counter()

    # -- protocol -----------------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """See :class:`shard_builder.sources.base.Source`."""
        return super().describe() | {"classes": len(self._data.names), "splits": self._splits}

    def notes(self) -> dict[str, Any]:
        """Names of classes, the shape of poses, and how many images have no label file."""
        found: dict[str, Any] = {"class_names": {str(number): name for number, name in self._data.names.items()}}
        if self._data.keypoints:
            found["keypoint_shape"] = list(self._data.keypoints)
        if self._counts:
            found["without_label_file"] = dict(sorted(self._counts.items()))
        return found

    def scan(self) -> Iterator[Record | BadRecord]:
        """Every image of every split. The names of one directory a level are held in memory."""
        self._counts.clear()
        for split in self._splits:
            for entry in self._data.splits[split]:
                if entry.lower().endswith(".txt"):
                    yield from self._listed(split, entry)
                else:
                    yield from self._below(split, entry, 0)

    def _below(self, split: str, folder: str, depth: int) -> Iterator[Record | BadRecord]:
        if depth > _MAX_DEPTH:
            yield BadRecord(os.fsencode(folder), show(folder), "depth", f"directories nested more than {_MAX_DEPTH} deep")
            return
        try:
            with os.scandir(self.root / folder) as entries:
                found = [(e.name, e.is_dir(follow_symlinks=False)) for e in entries if not e.name.startswith(".")]
        except OSError as error:
            raise SourceError(f"{show(folder)}: cannot be listed: {error.strerror}") from error
        for name, is_folder in sorted(found, key=lambda item: os.fsencode(item[0]) + (b"/" if item[1] else b"")):
            path = os.path.join(folder, name) if folder not in ("", ".") else name
            if is_folder:
                yield from self._below(split, path, depth + 1)
            elif name.lower().endswith(PICTURES):
                yield self._record(split, path)

    def _listed(self, split: str, entry: str) -> Iterator[Record | BadRecord]:
        home = os.path.dirname(entry)
        with os.fdopen(open_regular(self.root / entry), "rb") as file:
            number = 0
            while line := file.readline(_MAX_LINE):
                number += 1
                text = os.fsdecode(line.strip())
                if not text:
                    continue
                path = os.path.normpath(os.path.join(home, text)) if text.startswith("./") else text
                if os.path.isabs(path) and path.startswith(str(self.root) + "/"):
                    path = os.path.relpath(path, self.root)
                if not path.lower().endswith(PICTURES):
                    yield BadRecord(
                        os.fsencode(path), f"{show(entry)}:{number}", "not-a-path", f"{show(path)[:200]!r} is no image"
                    )
                else:
                    yield self._record(split, path)

    def _record(self, split: str, path: str) -> Record | BadRecord:
        key = os.fsencode(path)
        try:
            size = size_inside(self.root, path)
            labels = label_path(path)
            there = os.path.lexists(self.root / labels)
            if there:
                size += size_inside(self.root, labels)
            elif self._missing == "error":
                raise SampleError("missing-file", f"no label file {show(labels)!r}; the option missing says what that means")
            else:
                self._counts[split] += 1
        except SampleError as error:
            return BadRecord(key, show(path), error.code, error.reason)
        return Record(key, _encode((split, key, there)), size)

    # -- workers ------------------------------------------------------------------------------------------------------

    def place(self, locator: bytes) -> str:
        """The path of the image."""
        return show(_decode(locator)[1])

    def load(self, locator: bytes) -> RawSample:
        """One image and its labels. Raises :class:`SampleError`."""
        split, encoded, there = _decode(locator)
        path = os.fsdecode(encoded)
        values: dict[str, Any] = {}
        files: dict[str, str] = {}
        for spec in self.fields:
            try:
                if spec.column == "image":
                    values[spec.name] = read_file(self.root, path, self._max_file)
                elif spec.column == "labels":
                    files[spec.name] = show(label_path(path))
                    if there or self._missing == "background":
                        rows = self._labels(path) if there else []
                        values[spec.name] = as_array(rows) if spec.kind == "array" else as_objects(rows)
                else:
                    values[spec.name] = split if spec.column == "split" else encoded
            except SampleError as error:
                error.field, error.path = spec.name, f"{show(path)}: {error.path}" if error.path else show(path)
                raise
        return RawSample(values, show(path), files)

    def _labels(self, path: str) -> list[tuple[int, list[float]]]:
        name = label_path(path)
        try:
            text = read_file(self.root, name, _MAX_LABELS).decode()
        except UnicodeDecodeError as error:
            raise SampleError("utf8", f"not UTF-8 at byte {error.start}", path=show(name)) from None
        rows = []
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                try:
                    rows.append(parse_line(line, self._data, self._bounds))
                except SampleError as error:
                    error.path = f"{show(name)}:{number}"
                    raise
        return rows


def label_path(path: str) -> str:
    """The label file of an image: ``labels`` for the last ``images`` of its directories, and ``.txt`` for its ending."""
    folders = path.split("/")
    places = [place for place, folder in enumerate(folders[:-1]) if folder == "images"]
    if places:
        folders[places[-1]] = "labels"
    return os.path.splitext("/".join(folders))[0] + ".txt"


def parse_line(line: str, data: DataSet, bounds: bool) -> tuple[int, list[float]]:
    """Class and numbers of one line.

    A box has four numbers, a segment or an oriented box an even number of six or more, a pose a box and as many numbers as the shape
    of keypoints in ``data.yaml`` says.

    Raises:
        SampleError: ``label`` (no numbers, or a number of them that cannot be), ``class`` (an id that no class has), ``coordinates``
            (outside 0 to 1).
    """
    try:
        numbers = [float(word) for word in line.split()]
    except ValueError:
        raise SampleError("label", f"not numbers: {line[:80]!r}") from None
    if not all(map(math.isfinite, numbers)) or not numbers[0].is_integer():
        raise SampleError("label", f"a class and finite numbers are expected: {line[:80]!r}")
    label, values = int(numbers[0]), numbers[1:]
    if label < 0 or (data.names and label not in data.names):
        raise SampleError("class", f"class {label} is none of the {len(data.names)} in {data.name}")
    pose = math.prod(data.keypoints) if data.keypoints else 0
    if data.keypoints and len(values) == 4 + pose:
        step = data.keypoints[1]
        places = values[:4] + [v for place, v in enumerate(values[4:]) if place % step < 2]
    elif len(values) == 4 or (len(values) >= 6 and len(values) % 2 == 0):
        places = values
    else:
        expected = f", or {4 + pose} for a pose" if pose else ""
        raise SampleError("label", f"{len(values)} numbers behind the class; a box has 4, a segment pairs from 6 on{expected}")
    if bounds and not all(0 <= value <= 1 for value in places):
        wrong = next(value for value in places if not 0 <= value <= 1)
        raise SampleError("coordinates", f"{wrong} lies outside 0 to 1; coordinates=any accepts it")
    return label, values


def as_objects(rows: Sequence[tuple[int, list[float]]]) -> list[dict[str, Any]]:
    """Labels as a ``json`` field takes them."""
    return [{"class": label, "values": values} for label, values in rows]


def as_array(rows: Sequence[tuple[int, list[float]]]) -> Any:
    """Labels as rows of numbers, class first. Raises :class:`SampleError` (``ragged``)."""
    if not rows:
        return np.zeros((0, 5))
    lengths = {len(values) for _, values in rows}
    if len(lengths) > 1:
        raise SampleError("ragged", f"lines of {min(lengths)} to {max(lengths)} numbers make no array; use a json field")
    return np.array([[label, *values] for label, values in rows])
