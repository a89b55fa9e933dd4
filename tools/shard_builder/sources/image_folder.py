"""Source: a folder of images, one directory a class (``root/class/**/image.jpg``), or images directly in the root."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from lfdata.errors import OptionError, SampleError, SourceError
from shard_builder.sources.base import BadRecord, FieldSpec, RawSample, Record
from shard_builder.sources.files import MAX_FILE_BYTES, kind_of, read_file, resolve_inside

EXTENSIONS = "jpg jpeg jpe jfif png webp gif bmp tif tiff avif ppm pgm pbm mpo ico"
DEFAULT_FIELDS = (
    FieldSpec("image", "image", "image", "file"),
    FieldSpec("label", "scalar", "label", "inline", {"dtype": "int32"}),
    FieldSpec("class", "text", "class"),
)
# What a field may be made of.
COLUMNS = ("image", "label", "class", "path")
_OPTIONS = ("extensions", "links", "max_file_bytes")


class ImageFolder:
    """Images below ``location`` in the order of their paths' bytes; the key is the relative path, extension included.

    Options (text): ``extensions`` (separated by spaces or commas; content decides what a file is, the extension only which files
    are looked at); ``links`` = ``skip`` (default) or ``follow``: links to files inside the root; ``max_file_bytes``. Links to
    directories are never followed. Hidden files are left out. Fields take the columns image, label (the class directory's place
    in sorted order), class and path.
    """

    kind = "image-folder"

    def __init__(self, location: str, fields: Sequence[FieldSpec] | None = None, stage_dir: Path | None = None, **options: str) -> None:
        del stage_dir
        unknown = options.keys() - set(_OPTIONS)
        if unknown:
            raise OptionError(f"image folder: unknown option {sorted(unknown)[0]!r}; valid: {', '.join(_OPTIONS)}")
        self.location = location
        self.root = Path(location)
        if not self.root.is_dir():
            raise SourceError(f"{location}: not a directory")
        self._given = dict(options)
        self._extensions = frozenset("." + e.lower().lstrip(".") for e in options.get("extensions", EXTENSIONS).replace(",", " ").split())
        self._links = options.get("links", "skip")
        if self._links not in ("skip", "follow"):
            raise OptionError(f"image folder: links is {self._links!r}; valid: skip, follow")
        self._limit = int(options.get("max_file_bytes", MAX_FILE_BYTES))
        self._classes = self._class_names()
        self._asked = fields
        self.fields: Sequence[FieldSpec] = self._fields(fields)
        self._numbers = {name: number for number, name in enumerate(self._classes)}
        self._skipped: Counter[str] = Counter()
        self._unreadable: list[str] = []

    def _class_names(self) -> list[str]:
        try:
            with os.scandir(self.root) as entries:
                names = [e.name for e in entries if not e.name.startswith(".") and e.is_dir(follow_symlinks=False)]
        except OSError as error:
            raise SourceError(f"{self.location}: {error.strerror}") from error
        return sorted(names, key=os.fsencode)

    def _fields(self, fields: Sequence[FieldSpec] | None) -> Sequence[FieldSpec]:
        if fields is None:
            return DEFAULT_FIELDS if self._classes else DEFAULT_FIELDS[:1]
        for spec in fields:
            if spec.column not in COLUMNS:
                raise OptionError(f"field {spec.name!r}: an image folder has no column {spec.column!r}; it has {', '.join(COLUMNS)}")
        return tuple(fields)

    # -- plan pass ----------------------------------------------------------------------------------------------------

    def scan(self) -> Iterator[Record | BadRecord]:
        """Every image, in the order of its relative path's bytes."""
        self._skipped.clear()
        self._unreadable.clear()
        yield from self._walk(b"")

    def _walk(self, prefix: bytes) -> Iterator[Record | BadRecord]:
        root = os.fsencode(self.root)
        try:
            with os.scandir(os.path.join(root, prefix)) as found:
                # A directory sorts as its name with the separator: then the walk is the order of full paths.
                entries = sorted(((e.name + b"/" if e.is_dir(follow_symlinks=False) else e.name, e) for e in found), key=lambda pair: pair[0])
        except OSError as error:
            yield BadRecord(prefix.rstrip(b"/"), os.fsdecode(prefix), "unreadable", f"the directory cannot be listed: {error.strerror}")
            return
        for name, entry in entries:
            if name.startswith(b"."):
                self._skipped["hidden"] += 1
            elif name.endswith(b"/"):
                yield from self._walk(prefix + name)
            else:
                yield from self._file(prefix + name, entry)

    def _file(self, path: bytes, entry: os.DirEntry[bytes]) -> Iterator[Record | BadRecord]:
        if os.path.splitext(path)[1].lower().decode("utf-8", "replace") not in self._extensions:
            self._skipped["other files"] += 1
            return
        text = os.fsdecode(path)
        try:
            if entry.is_symlink():
                if self._links == "skip":
                    self._skipped["links"] += 1
                    return
                size = resolve_inside(self.root, text).stat().st_size
            else:
                found = entry.stat(follow_symlinks=False)
                if not stat.S_ISREG(found.st_mode):
                    yield BadRecord(path, text, "not-a-file", f"not a regular file but a {kind_of(found.st_mode)}")
                    return
                size = found.st_size
        except SampleError as error:
            yield BadRecord(path, text, error.code, error.reason)
            return
        except OSError as error:
            yield BadRecord(path, text, "unreadable", error.strerror or str(error))
            return
        yield Record(path, path, size)

    def describe(self) -> dict[str, Any]:
        """Provenance: kind, options and fields."""
        return {"kind": self.kind, "options": self._given, "fields": [msgspec.structs.asdict(spec) for spec in self.fields]}

    def notes(self) -> dict[str, Any]:
        """Class names in label order, and what was left out."""
        classes = [os.fsencode(name).decode("utf-8", "backslashreplace") for name in self._classes]
        return {"classes": classes, "skipped": dict(sorted(self._skipped.items()))}

    def stage(self, unit: int, directory: Path) -> None:
        """Files are readable as they are."""

    def unstage(self, unit: int, directory: Path) -> None:
        """Nothing was staged."""

    # -- workers ------------------------------------------------------------------------------------------------------

    def load(self, locator: bytes) -> RawSample:
        """Read one image."""
        path = os.fsdecode(locator)
        top = path.partition("/")[0] if "/" in path else None
        values: dict[str, Any] = {}
        for spec in self.fields:
            if spec.column == "image":
                values[spec.name] = read_file(self.root, path, self._limit)
            elif spec.column == "path":
                values[spec.name] = locator
            elif top is not None:
                values[spec.name] = self._numbers[top] if spec.column == "label" else os.fsencode(top)
        return RawSample(values, path)

    def config(self) -> Mapping[str, Any]:
        """Arguments that rebuild this source."""
        fields = None if self._asked is None else [msgspec.structs.asdict(spec) for spec in self._asked]
        return {"kind": self.kind, "location": str(self.root.absolute()), "fields": fields, "options": self._given}
