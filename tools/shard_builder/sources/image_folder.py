"""Image folders: ``ROOT/CLASS/**/FILE``. One sample a picture, in the byte order of the relative paths.

Fields: ``image`` (the file), ``label`` (int32: index of the class among the sorted class directories) and ``class`` (its name). A
picture directly in the root has neither label nor class.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from lfdata.errors import OptionError, SampleError, SourceError
from shard_builder.sources.base import BadRecord, FieldSpec, RawSample, Record
from shard_builder.sources.files import DEFAULT_LIMIT, Root, show
from shard_builder.sources.options import SourceOptions

EXTENSIONS = ("jpg", "jpeg", "jpe", "jfif", "png", "webp", "gif", "bmp", "tif", "tiff", "avif", "ico", "mpo")
COLUMNS = ("image", "label", "class", "path")

_VALID = {
    "extensions": f"<endings of pictures, joined by ';'; default {';'.join(EXTENSIONS)}>",
    "links": "follow|skip",
    "max_file_bytes": "<largest file read, such as 512M; default 4G>",
}
_LABEL = {"dtype": "int32"}
_MAX_DEPTH = 200

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[bytes, int]).decode


class ImageFolder:
    """The source of kind ``image-folder``.

    Args:
        location: the root directory.
        fields: declared fields over the columns ``image`` (bytes), ``label`` (int), ``class`` and ``path`` (text), or ``None``.
        options: ``extensions``, ``links``, ``max_file_bytes``.

    Raises:
        SourceError, OptionError: at once, for a root that cannot be read and for fields that make no sense.
    """

    kind = "image-folder"

    def __init__(self, location: str, fields: list[FieldSpec] | None, options: dict[str, Any]) -> None:
        reader = SourceOptions(self.kind, options, _VALID)
        self._given = reader.given
        self._links = reader.choice("links", ("follow", "skip"), "follow") == "follow"
        self._limit = reader.size("max_file_bytes", DEFAULT_LIMIT)
        endings = (reader.text("extensions") or ";".join(EXTENSIONS)).replace(",", ";").lower().split(";")
        self._extensions = sorted({ending.strip().lstrip(".") for ending in endings} - {""})
        self._endings = tuple(b"." + os.fsencode(ending) for ending in self._extensions)
        if not self._endings:
            raise reader.bad("extensions")
        self._root = Root(location)
        self._classes = self._list_classes(location)
        self.fields = self._default_fields() if fields is None else fields
        for spec in self.fields:
            if spec.column not in COLUMNS or spec.origin == "base64":
                raise OptionError(f"field {spec.name!r}: an image folder has the columns {', '.join(COLUMNS)}, not {spec.column!r}@{spec.origin}")
        self._skipped: Counter[str] = Counter()
        self._warnings: list[str] = []

    def _list_classes(self, location: str) -> list[bytes]:
        try:
            with os.scandir(os.fsencode(self._root.path)) as entries:
                return sorted(e.name for e in entries if not e.name.startswith(b".") and e.is_dir(follow_symlinks=False))
        except OSError as error:
            raise SourceError(f"{location}: cannot be listed: {error.strerror}") from error

    def _default_fields(self) -> list[FieldSpec]:
        image = [FieldSpec("image", "image", "image", "file")]
        labelled = [FieldSpec("label", "scalar", "label", options=_LABEL), FieldSpec("class", "text", "class")]
        return image + (labelled if self._classes else [])

    def describe(self) -> dict[str, Any]:
        """See :class:`shard_builder.sources.base.Source`."""
        return {
            "kind": self.kind,
            "fields": [msgspec.structs.asdict(spec) for spec in self.fields],
            "extensions": self._extensions,
            "links": "follow" if self._links else "skip",
            "max_file_bytes": self._limit,
        }

    def notes(self) -> dict[str, Any]:
        """Class names (their order gives the labels), what was skipped by reason, warnings."""
        return {"classes": [show(name) for name in self._classes], "skipped": dict(sorted(self._skipped.items())), "warnings": list(self._warnings)}

    def config(self) -> dict[str, Any]:
        """See :class:`shard_builder.sources.base.Source`."""
        fields = [msgspec.structs.asdict(spec) for spec in self.fields]
        return {"kind": self.kind, "location": self._root.path, "fields": fields, "options": self._given}

    def stage(self, unit: int, directory: Path) -> None:
        """Nothing to do: every file can be read by itself."""

    def unstage(self, unit: int, directory: Path) -> None:
        """Nothing to do."""

    def scan(self) -> Iterator[Record | BadRecord]:
        """Every picture, sorted by the bytes of its relative path. One directory's names at a time are held in memory."""
        self._skipped.clear()
        self._warnings.clear()
        labels = {name: label for label, name in enumerate(self._classes)}
        stack = [iter(self._list(b""))]
        while stack:
            path = next(stack[-1], None)
            if path is None:
                stack.pop()
            elif not path.endswith(b"/"):
                record = self._record(path, labels)
                if record is not None:
                    yield record
            elif len(stack) >= _MAX_DEPTH:
                yield BadRecord(path[:-1], show(path[:-1]), "depth", f"directories nested more than {_MAX_DEPTH} levels are not read")
            else:
                try:
                    names = self._list(path)
                except OSError as error:
                    yield BadRecord(path[:-1], show(path[:-1]), "unreadable", f"the directory cannot be listed: {error.strerror}")
                    continue
                stack.append(iter(names))

    def _list(self, directory: bytes) -> list[bytes]:
        """Relative paths in a directory; directories end in a slash, which also sorts them as their contents sort."""
        found = []
        with os.scandir(os.path.join(os.fsencode(self._root.path), directory)) as entries:
            for entry in entries:
                if entry.name.startswith(b"."):
                    self._skipped["hidden"] += 1
                elif entry.is_dir(follow_symlinks=False):
                    found.append(directory + entry.name + b"/")
                else:
                    found.append(directory + entry.name)
        return sorted(found)

    def _record(self, path: bytes, labels: dict[bytes, int]) -> Record | BadRecord | None:
        if not path.lower().endswith(self._endings):
            self._skipped["other-extension"] += 1
            return None
        top, slash, _ = path.partition(b"/")
        try:
            size = self._root.size(path, links=self._links)
        except SampleError as error:
            if self._is_link(path):
                self._skipped["link-outside" if error.code == "outside-root" else "link-broken" if self._links else "link"] += 1
                return None
            return BadRecord(path, show(path), error.code, error.reason)
        label = labels.get(top, -1) if slash else -1
        return Record(path, _encode((path, label)), size)

    def _is_link(self, path: bytes) -> bool:
        try:
            return stat.S_ISLNK(os.lstat(os.path.join(os.fsencode(self._root.path), path)).st_mode)
        except OSError:
            return False

    def load(self, locator: bytes) -> RawSample:
        """One picture. Raises :class:`SampleError`."""
        path, label = _decode(locator)
        values: dict[str, Any] = {}
        for spec in self.fields:
            match spec.column:
                case "image":
                    values[spec.name] = self._root.read(path, self._limit, links=self._links)
                case "label" if label >= 0:
                    values[spec.name] = label
                case "class" if label >= 0:
                    values[spec.name] = os.fsdecode(path.partition(b"/")[0])
                case "path":
                    values[spec.name] = os.fsdecode(path)
        return RawSample(values, show(path))
