"""Source: Pascal VOC. One sample a name of an image set: image, objects, and masks where there are any."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from lfdata.errors import OptionError, SampleError, SourceError
from shard_builder.fields import check_unique
from shard_builder.sources.base import BadRecord, FieldSpec, RawSample, Record
from shard_builder.sources.common import PlainSource, open_regular, refuse_columns
from shard_builder.sources.files import check_relative, read_file, show, size_inside
from shard_builder.sources.voc_xml import MAX_BYTES, file_name, objects_of, parse_xml

ANNOTATIONS, IMAGES, SETS = "Annotations", "JPEGImages", "ImageSets"
MASKS = {"segmentation": "SegmentationClass", "instances": "SegmentationObject"}
COLUMNS = ("image", "objects", "annotation", *MASKS)
IMAGE = FieldSpec("image", "image", "image", "file")
OBJECTS = FieldSpec("objects", "json", "objects")

_VALID = {
    "set": "<image set below ImageSets, such as trainval, Main/train or Segmentation/val; default: all annotations>",
    "missing": "error|absent",
    "max_file_bytes": "<largest image file, such as 512M; default 4G>",
}
_ENDINGS = (".jpg", ".jpeg", ".png", ".JPG", ".JPEG", ".PNG")
_MAX_LINE = 4096
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[bytes, bytes, bool]).decode
"""(name, path of the image, whether there is an annotation)"""


class Voc(PlainSource):
    """The source of kind ``voc``.

    Args:
        location: the directory with ``Annotations`` and ``JPEGImages``, such as ``VOCdevkit/VOC2012``.
        fields: of :data:`COLUMNS`; by default the image and objects, and the masks whose directories are there.

    Raises:
        SourceError: a directory or image set that is missing. OptionError: fields or options that make no sense.
    """

    kind = "voc"

    def __init__(
        self, location: str, fields: Sequence[FieldSpec] | None = None, stage_dir: Path | None = None, **options: str
    ) -> None:
        del stage_dir
        super().__init__(location, options, _VALID)
        self.root = Path(os.path.abspath(location))
        for needed in (ANNOTATIONS, IMAGES):
            if not (self.root / needed).is_dir():
                raise SourceError(f"{location}: has no directory {needed}")
        self._strict = self._options.choice("missing", ("error", "absent"), "error") == "error"
        self._set = self._options.text("set")
        self._set_path = None if self._set is None else self._find_set(self._set)
        if fields is None:
            masks = [name for name, folder in MASKS.items() if (self.root / folder).is_dir()]
            fields = [IMAGE, OBJECTS, *(FieldSpec(name, "image", name, "file", {"role": "mask"}) for name in masks)]
        refuse_columns(fields, COLUMNS, "a VOC data set")
        check_unique(fields)
        self.fields = tuple(fields)
        self._masks = [spec.column for spec in self.fields if spec.column in MASKS]
        self._objects = any(spec.column in ("objects", "annotation") for spec in self.fields)

    def _find_set(self, name: str) -> str:
        try:
            check_relative(name)
        except SampleError:
            raise OptionError(f"voc: set={name!r} is no name below {SETS}") from None
        for place in (name, f"Main/{name}"):
            if (self.root / SETS / f"{place}.txt").is_file():
                return os.path.join(SETS, f"{place}.txt")
        have = sorted(str(path.relative_to(self.root / SETS))[:-4] for path in (self.root / SETS).glob("**/*.txt"))
        raise SourceError(f"{SETS}: there is no set {name!r}; there is {', '.join(have[:50]) or 'none'}")

    # -- plan pass ----------------------------------------------------------------------------------------------------

    def scan(self) -> Iterator[Record | BadRecord]:
        """Every name of the set in its order, or of all annotations in byte order."""
        for name, place in self._names():
            yield self._record(name, place)

    def _names(self) -> Iterator[tuple[str, str]]:
        if self._set_path is None:
            try:
                names = sorted((n for n in os.listdir(self.root / ANNOTATIONS) if n.lower().endswith(".xml")), key=os.fsencode)
            except OSError as error:
                raise SourceError(f"{ANNOTATIONS}: cannot be listed: {error.strerror}") from error
            yield from ((name[:-4], f"{ANNOTATIONS}/{show(name)}") for name in names if not name.startswith("."))
            return
        with os.fdopen(open_regular(self.root / self._set_path), "rb") as file:
            number = 0
            while line := file.readline(_MAX_LINE):
                number += 1
                words = os.fsdecode(line).split()
                if len(words) > 1:
                    raise SourceError(
                        f"{self._set_path}:{number}: {show(line.strip())[:80]!r} has a flag: this is the set "
                        "of one class; take the set of all classes"
                    )
                if words:
                    yield words[0], f"{self._set_path}:{number}"

    def _record(self, name: str, place: str) -> Record | BadRecord:
        key = os.fsencode(name)
        try:
            check_relative(name)
            annotation = f"{ANNOTATIONS}/{name}.xml"
            there = os.path.lexists(self.root / annotation)
            size = size_inside(self.root, annotation) if there else 0
            if not there and self._strict and self._objects:
                raise SampleError("missing-file", f"no such file: {show(annotation)!r}; missing=absent stores the image alone")
            image = self._image(name, there)
            size += size_inside(self.root, image)
            for column in self._masks:
                mask = f"{MASKS[column]}/{name}.png"
                size += size_inside(self.root, mask) if os.path.lexists(self.root / mask) else 0
        except SampleError as error:
            return BadRecord(key, place, error.code, error.reason)
        return Record(key, _encode((key, os.fsencode(image), there)), size)

    def _image(self, name: str, there: bool) -> str:
        """The image of a name: a file of that name, or the one that the annotation names."""
        for ending in _ENDINGS:
            if os.path.lexists(self.root / IMAGES / (name + ending)):
                return f"{IMAGES}/{name}{ending}"
        stated = file_name(parse_xml(read_file(self.root, f"{ANNOTATIONS}/{name}.xml", MAX_BYTES))) if there else None
        if stated is None:
            raise SampleError("missing-file", f"no image {show(name)!r} in {IMAGES}")
        return f"{IMAGES}/{stated}"

    def describe(self) -> dict[str, Any]:
        """See :class:`shard_builder.sources.base.Source`."""
        return super().describe() | {"set": self._set_path}

    def notes(self) -> dict[str, Any]:
        """Nothing beyond the description."""
        return {}

    # -- workers ------------------------------------------------------------------------------------------------------

    def place(self, locator: bytes) -> str:
        """The image's path."""
        return show(_decode(locator)[1])

    def load(self, locator: bytes) -> RawSample:
        """One image with its annotation. Raises :class:`SampleError`."""
        encoded, image, there = _decode(locator)
        name, path = os.fsdecode(encoded), show(image)
        values: dict[str, Any] = {}
        files: dict[str, str] = {}
        for spec in self.fields:
            try:
                if spec.column == "image":
                    values[spec.name] = read_file(self.root, os.fsdecode(image), self._max_file)
                elif spec.column in MASKS:
                    mask = f"{MASKS[spec.column]}/{name}.png"
                    files[spec.name] = show(mask)
                    if os.path.lexists(self.root / mask):
                        values[spec.name] = read_file(self.root, mask, self._max_file)
                elif there:
                    files[spec.name] = show(f"{ANNOTATIONS}/{name}.xml")
                    data = read_file(self.root, f"{ANNOTATIONS}/{name}.xml", MAX_BYTES)
                    objects = objects_of(parse_xml(data))
                    values[spec.name] = objects if spec.column == "objects" else data
            except SampleError as error:
                error.field, error.path = spec.name, error.path or files.get(spec.name, path)
                raise
        return RawSample(values, path, files)
