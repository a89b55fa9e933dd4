"""Source: a folder of images, one directory a class (``root/class/**/image.jpg``), or images directly in the root."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from lfdata.errors import OptionError, SampleError, SourceError
from shard_builder.fields import check_unique
from shard_builder.sources.base import BadRecord, FieldSpec, RawSample, Record
from shard_builder.sources.files import MAX_FILE_BYTES, kind_of, read_file, show, size_inside
from shard_builder.sources.options import SourceOptions

EXTENSIONS = "jpg jpeg jpe jfif png webp gif bmp tif tiff avif ppm pgm pbm mpo ico"
DEFAULT_FIELDS = (
    FieldSpec("image", "image", "image", "file"),
    FieldSpec("label", "scalar", "label", "inline", {"dtype": "int32"}),
    FieldSpec("class", "text", "class"),
)
# What a field may be made of.
COLUMNS = ("image", "label", "class", "path")
_VALID = {
    "extensions": "<endings of the files to take, separated by spaces or commas>",
    "links": "skip|follow",
    "max_file_bytes": "<largest file read, such as 512M; default 4G>",
}
_MAX_DEPTH = 128
_LISTED = 20


class ImageFolder:
    """Images below ``location`` in the order of their paths' bytes; the key is the relative path, extension included.

    Options (text): ``extensions`` (separated by spaces or commas; content decides what a file is, the extension only which
    files are looked at); ``links`` = ``skip`` (default) or ``follow``: links to files inside the root; ``max_file_bytes``.
    Links to directories are never followed. Hidden files are left out. Fields take the columns image, label (the class
    directory's place in sorted order), class and path.
    """

    kind = "image-folder"

    def __init__(
        self, location: str, fields: Sequence[FieldSpec] | None = None, stage_dir: Path | None = None, **options: str
    ) -> None:
        del stage_dir
        reader = SourceOptions(self.kind, options, _VALID)
        self.location = location
        self.root = Path(os.path.abspath(location))
        if not self.root.is_dir():
            raise SourceError(f"{location}: not a directory")
        self._given = reader.given
        endings = (reader.text("extensions") or EXTENSIONS).replace(",", " ").split()
        self._extensions = frozenset("." + ending.lower().lstrip(".") for ending in endings)
        self._links = reader.choice("links", ("skip", "follow"), "skip")
        self._limit = reader.size("max_file_bytes", MAX_FILE_BYTES)
        self._classes = self._class_names()
        self.fields: Sequence[FieldSpec] = self._fields(fields)
        self._numbers = {name: number for number, name in enumerate(self._classes)}
        self._skipped: Counter[str] = Counter()
        self._warnings: list[str] = []

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
                has = ", ".join(COLUMNS)
                raise OptionError(f"field {spec.name!r}: an image folder has no column {spec.column!r}; it has {has}")
        check_unique(fields)
        return tuple(fields)

    # -- plan pass ----------------------------------------------------------------------------------------------------

    def scan(self) -> Iterator[Record | BadRecord]:
        """Every image, in the order of its relative path's bytes. The names of one directory a level are held in memory."""
        self._skipped.clear()
        self._warnings.clear()
        levels: list[Iterator[bytes]] = [iter((b"",))]
        while levels:
            path = next(levels[-1], None)
            if path is None:
                levels.pop()
            elif path and not path.endswith(b"/"):
                yield from self._file(path)
            elif len(levels) > _MAX_DEPTH:
                yield BadRecord(
                    path[:-1], show(path[:-1]), "depth", f"directories nested more than {_MAX_DEPTH} deep are not read"
                )
            else:
                try:
                    levels.append(iter(self._names(path)))
                except OSError as error:
                    reason = f"the directory cannot be listed: {error.strerror}"
                    yield BadRecord(path[:-1], show(path[:-1]), "unreadable", reason)

    def _names(self, prefix: bytes) -> list[bytes]:
        """What a directory holds. A directory comes with a slash, and so sorts as the full paths below it do."""
        found = []
        with os.scandir(os.path.join(os.fsencode(self.root), prefix)) as entries:
            for entry in entries:
                if entry.name.startswith(b"."):
                    self._skipped["hidden"] += 1
                else:
                    found.append(prefix + entry.name + (b"/" if entry.is_dir(follow_symlinks=False) else b""))
        return sorted(found)

    def _file(self, path: bytes) -> Iterator[Record | BadRecord]:
        full = os.path.join(os.fsencode(self.root), path)
        try:
            mode = os.lstat(full).st_mode
        except OSError as error:
            yield BadRecord(path, show(path), "unreadable", error.strerror or str(error))
            return
        is_link = stat.S_ISLNK(mode)
        if is_link and (self._links == "skip" or os.path.isdir(full)):
            self._skipped["links"] += 1
        elif os.path.splitext(path)[1].lower().decode("utf-8", "replace") not in self._extensions:
            self._skipped["other files"] += 1
        elif not is_link and not stat.S_ISREG(mode):
            yield BadRecord(path, show(path), "not-a-file", f"not a regular file but a {kind_of(mode)}")
        else:
            try:
                yield Record(path, path, size_inside(self.root, os.fsdecode(path)))
            except SampleError as error:
                if not is_link:
                    yield BadRecord(path, show(path), error.code, error.reason)
                    return
                self._skipped["links outside" if error.code == "outside-root" else "links broken"] += 1
                if len(self._warnings) < _LISTED:
                    self._warnings.append(f"{show(path)}: a link is left out: {error.reason}")

    def describe(self) -> dict[str, Any]:
        """Provenance: kind, options and fields."""
        return {"kind": self.kind, "options": self._given, "fields": [msgspec.structs.asdict(spec) for spec in self.fields]}

    def notes(self) -> dict[str, Any]:
        """Class names in label order, and what was left out."""
        classes = [show(name) for name in self._classes]
        return {"classes": classes, "skipped": dict(sorted(self._skipped.items())), "warnings": list(self._warnings)}

    def stage(self, unit: int, directory: Path) -> None:
        """Files are readable as they are."""

    def unstage(self, unit: int, directory: Path) -> None:
        """Nothing was staged."""

    def place(self, locator: bytes) -> str:
        """The path of the image."""
        return show(os.fsdecode(locator))

    # -- workers ------------------------------------------------------------------------------------------------------

    def load(self, locator: bytes) -> RawSample:
        """Read one image. Raises :class:`SampleError`."""
        path = os.fsdecode(locator)
        if self._links == "skip":
            self._refuse_link(locator)
        top = path.partition("/")[0] if "/" in path else None
        values: dict[str, Any] = {}
        for spec in self.fields:
            if spec.column == "image":
                values[spec.name] = read_file(self.root, path, self._limit)
            elif spec.column == "path":
                values[spec.name] = locator
            elif top is not None:
                values[spec.name] = self._numbers[top] if spec.column == "label" else os.fsencode(top)
        return RawSample(values, show(path))

    def _refuse_link(self, path: bytes) -> None:
        """A link that took the file's place after the scan is as little followed as one that was there before."""
        try:
            if os.path.islink(os.path.join(os.fsencode(self.root), path)):
                raise SampleError("changed", "the file was replaced by a link after it was scanned", path=show(path))
        except ValueError:  # a NUL; read_file says so
            return

    def config(self) -> dict[str, Any]:
        """Arguments that rebuild this source."""
        fields = [msgspec.structs.asdict(spec) for spec in self.fields]
        return {"kind": self.kind, "location": str(self.root), "fields": fields, "options": self._given}
