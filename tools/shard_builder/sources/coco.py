"""Source: COCO documents. Detection, captions, segmentation and keypoints of one image are one sample."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from lfdata.errors import OptionError, SampleError, SourceError
from shard_builder.fields import check_unique
from shard_builder.sources.base import BadRecord, FieldSpec, RawSample, Record
from shard_builder.sources.coco_document import Document, Id, ImageEntry, Problem, read_document
from shard_builder.sources.coco_shapes import check_annotation
from shard_builder.sources.common import PlainSource, open_regular, read_exactly, refuse_columns
from shard_builder.sources.files import read_file, show, size_inside

COLUMNS = ("image", "annotations", "captions", "caption", "info", "id", "file_name")
IMAGE = FieldSpec("image", "image", "image", "file")
ANNOTATIONS = FieldSpec("annotations", "json", "annotations")
CAPTIONS = FieldSpec("captions", "json", "captions")

_VALID = {
    "images": "<directory of the images; default: the first usual place where the first image is>",
    "split": "<name of a split, such as val2017; for a directory>",
    "key": "file_name|id",
    "shapes": "check|keep",
    "max_json_bytes": "<largest document, such as 512M; default 4G>",
    "max_file_bytes": "<largest image file, such as 512M; default 4G>",
}
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[bytes, Id, tuple[int, int, int], list[tuple[int, int, int]], int]).decode


class Coco(PlainSource):
    """The source of kind ``coco``: one sample an image, in the order of the documents.

    Args:
        location: documents joined by ``::``, or a directory with ``annotations/*_SPLIT.json``.
        fields: of :data:`COLUMNS`; by default the image, and annotations and captions where there are any.

    Raises:
        SourceError: a document that is missing, too large or no COCO; no images where they should be; categories that contradict
            each other. OptionError: fields or options that make no sense.
    """

    kind = "coco"
    local_options = ("images",)

    def __init__(
        self, location: str, fields: Sequence[FieldSpec] | None = None, stage_dir: Path | None = None, **options: str
    ) -> None:
        del stage_dir
        super().__init__(location, options, _VALID)
        self._key = self._options.choice("key", ("file_name", "id"), "file_name")
        self._check = self._options.choice("shapes", ("check", "keep"), "check") == "check"
        self._limit = self._options.size("max_json_bytes", 4 << 30)
        self._split = self._options.text("split")
        self._paths = self._find(location)
        self._names = [os.path.basename(path) for path in self._paths]
        self._descriptors: dict[int, int] = {}
        self._documents: list[Document] | None = None
        self._categories: list[dict[str, Any]] = []
        given = self._options.text("images")
        if given is None:
            self.root = self._find_images(location)
        else:
            self.root = self.directory_option("images", Path(given))
        if fields is None:
            documents = self._load()
            objects = any(document.has_objects for document in documents)
            captions = any(document.has_captions for document in documents)
            fields = [IMAGE, *([ANNOTATIONS] if objects else []), *([CAPTIONS] if captions else [])]
        refuse_columns(fields, COLUMNS, "a COCO data set")
        check_unique(fields)
        self.fields = tuple(fields)

    def __del__(self) -> None:
        for descriptor in getattr(self, "_descriptors", {}).values():
            os.close(descriptor)

    # -- what it is ---------------------------------------------------------------------------------------------------

    def _find(self, location: str) -> list[str]:
        if not os.path.isdir(location):
            if self._split is not None:
                raise OptionError("coco: split=NAME is for directories; a document is its own split")
            return [os.path.abspath(part) for part in location.split("::")]
        folder = os.path.join(os.path.abspath(location), "annotations")
        folder = folder if os.path.isdir(folder) else os.path.abspath(location)
        names = sorted(n for n in os.listdir(folder) if n.lower().endswith(".json") and not n.startswith("."))
        splits = sorted({_split_of(name) for name in names})
        if self._split is None and len(splits) != 1:
            have = ", ".join(splits) or "no .json file"
            raise SourceError(f"{location}: say which split with the option split=NAME; there is {have}")
        chosen = [name for name in names if self._split in (None, _split_of(name))]
        if not chosen:
            raise SourceError(f"{location}: no document of the split {self._split!r}; there is {', '.join(splits)}")
        return [os.path.join(folder, name) for name in chosen]

    def _find_images(self, location: str) -> Path:
        first = next((image for document in self._load() for image, _ in document.images), None)
        home = Path(self._paths[0]).parent
        split = _split_of(self._names[0])
        base = Path(os.path.abspath(location)) if os.path.isdir(location) else home.parent
        places = [base / split, base / "images" / split, base / "images", home, base]
        for place in places:
            if first is None or (place.is_dir() and _there(place, first.file_name)):
                return place if place.is_dir() else home
        assert first is not None
        tried = ", ".join(dict.fromkeys(os.path.relpath(place, base) for place in places))
        raise SourceError(
            f"{show(self._names[0])}: the first image, {show(first.file_name)!r}, is in none of the usual places ({tried}); "
            "say where the images are with the option images=DIR"
        )

    def config(self) -> dict[str, Any]:
        """Arguments that rebuild this source."""
        found = super().config()
        options = {name: value for name, value in found["options"].items() if name != "split"}
        return found | {"location": "::".join(self._paths), "options": options | {"images": str(self.root)}}

    def describe(self) -> dict[str, Any]:
        """See :class:`shard_builder.sources.base.Source`."""
        return super().describe() | {"documents": [show(name) for name in self._names]}

    def notes(self) -> dict[str, Any]:
        """The categories, as the documents have them."""
        return {"categories": self._categories} if self._categories else {}

    # -- plan pass ----------------------------------------------------------------------------------------------------

    def _load(self) -> list[Document]:
        if self._documents is None:
            pairs = zip(self._paths, self._names, strict=True)
            self._documents = [read_document(path, name, self._limit) for path, name in pairs]
        return self._documents

    def scan(self) -> Iterator[Record | BadRecord]:
        """Every image, then what belongs to none. Reads the documents whole; see :mod:`~shard_builder.sources.coco_document`."""
        documents = self._load()
        self._categories = _merged_categories(documents)
        problems: dict[Id, Problem] = {}
        for document in documents:
            for problem in document.problems:
                if problem.image is not None:
                    problems.setdefault(problem.image, problem)
        names: dict[Id, str] = {}
        for number, document in enumerate(documents):
            for image, place in document.images:
                if image.id not in names:
                    names[image.id] = image.file_name
                    yield self._record(image, (number, *place), problems.get(image.id), documents)
                elif names[image.id] != image.file_name and image.id not in problems:
                    reason = f"image {image.id!r} is {show(names[image.id])!r} in another document"
                    raise SourceError(f"{show(document.name)}: {reason}; the documents do not belong together")
        for document in documents:
            for problem in document.problems:
                if problem.image is None:
                    yield BadRecord(b"", problem.where, problem.code, problem.reason)
        self._documents = None

    def _record(
        self, image: ImageEntry, entry: tuple[int, int, int], problem: Problem | None, documents: list[Document]
    ) -> Record | BadRecord:
        file = image.file_name.encode("utf-8", "surrogateescape")
        key = file if self._key == "file_name" else str(image.id).encode()
        where = show(image.file_name)
        if problem is not None:
            return BadRecord(key, where, problem.code, f"{problem.where}: {problem.reason}")
        if not file:
            return BadRecord(key, f"image {image.id!r}", "no-key", "an image without a file name")
        places: list[tuple[int, int, int]] = []
        for number, document in enumerate(documents):
            chosen = document.of_image.get(image.id)
            if chosen is not None:
                places += [(number, offset, length) for offset, length in document.places[chosen].tolist()]
        try:
            size = size_inside(self.root, image.file_name)
            digest = self._digest([entry, *places])
        except SampleError as error:
            return BadRecord(key, where, error.code, error.reason)
        return Record(key, _encode((file, image.id, entry, places, digest)), size + sum(place[2] for place in places))

    # -- workers ------------------------------------------------------------------------------------------------------

    def _text(self, place: tuple[int, int, int]) -> bytes:
        document, offset, length = place
        if document not in self._descriptors:
            self._descriptors[document] = open_regular(self._paths[document])
        return read_exactly(self._descriptors[document], length, offset)

    def _digest(self, places: Sequence[tuple[int, int, int]]) -> int:
        digest = xxhash.xxh64()
        for place in places:
            digest.update(self._text(place))
        return digest.intdigest()

    def place(self, locator: bytes) -> str:
        """The image's file."""
        return show(_decode(locator)[0])

    def load(self, locator: bytes) -> RawSample:
        """One image with what is known about it. Raises :class:`SampleError`."""
        file, image_id, entry, places, digest = _decode(locator)
        name, path = os.fsdecode(file), show(file)
        try:
            texts = [self._text(place) for place in (entry, *places)]
            if xxhash.xxh64_intdigest(b"".join(texts)) != digest:
                raise SampleError("changed", "the document changed after it was scanned")
            about = _Annotations(texts[1:], [place[0] for place in places], self._check)
            values: dict[str, Any] = {}
            for spec in self.fields:
                match spec.column:
                    case "image":
                        value: Any = read_file(self.root, name, self._max_file)
                    case "annotations":
                        value = about.objects()
                    case "captions":
                        value = about.captions()
                    case "caption":
                        value = about.caption()
                    case "info":
                        value = texts[0]
                    case "id":
                        value = image_id
                    case _:
                        value = name
                if value is not None:
                    values[spec.name] = value
        except SourceError as error:
            raise SampleError("unreadable", str(error), path=path) from error
        except SampleError as error:
            error.path = error.path or path
            raise
        return RawSample(values, path)


class _Annotations:
    """The annotations of one image, from the texts of the documents.

    Objects with one id in several documents are one object with the members of all. Texts of objects that stand alone go on as
    they are, so that every number keeps its spelling and the strict rules for JSON hold.

    Raises:
        SampleError: ``json``, ``conflict``, and what :func:`check_annotation` finds.
    """

    def __init__(self, texts: Sequence[bytes], documents: Sequence[int], check: bool) -> None:
        self._captions: list[tuple[bytes, dict[str, Any]]] = []
        self._objects: dict[tuple[Any, ...], list[tuple[bytes, dict[str, Any]]]] = {}
        for number, (text, document) in enumerate(zip(texts, documents, strict=True)):
            try:
                value = msgspec.json.decode(text, type=dict[str, Any])
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                raise SampleError("json", f"an annotation is no JSON: {error}") from None
            if isinstance(value.get("caption"), str):
                self._captions.append((text, value))
                continue
            if check:
                check_annotation(value)
            same = (value["id"],) if value.get("id") is not None else (document, number)
            self._objects.setdefault(same, []).append((text, value))

    def objects(self) -> bytes:
        """JSON text of the list of annotations but captions."""
        return _list(
            parts[0][0] if len(parts) == 1 else _merged([value for _, value in parts]) for parts in self._objects.values()
        )

    def captions(self) -> bytes:
        """JSON text of the list of captions."""
        return _list(text for text, _ in self._captions)

    def caption(self) -> str | None:
        """The first caption."""
        return str(self._captions[0][1]["caption"]) if self._captions else None


def _list(texts: Iterable[bytes]) -> bytes:
    return b"[" + b",".join(texts) + b"]"


def _merged(values: Sequence[Mapping[str, Any]]) -> bytes:
    whole: dict[str, Any] = {}
    for value in values:
        for name, member in value.items():
            if whole.setdefault(name, member) != member:
                reason = f"annotation {value['id']!r} has another {name!r} in another document"
                raise SampleError("conflict", f"{reason}; convert the documents one by one if they do not belong together")
    return msgspec.json.encode(whole)


def _split_of(name: str) -> str:
    """``val2017`` of ``person_keypoints_val2017.json``."""
    return name.rpartition(".")[0].rpartition("_")[2]


def _there(place: Path, name: str) -> bool:
    try:
        size_inside(place, name)
    except SampleError:
        return False
    return True


def _merged_categories(documents: Sequence[Document]) -> list[dict[str, Any]]:
    found: dict[Id, dict[str, Any]] = {}
    for document in documents:
        for category_id, category in document.categories.items():
            before = found.setdefault(category_id, {})
            for name, member in category.items():
                if before.setdefault(name, member) != member:
                    raise SourceError(
                        f"{show(document.name)}: category {category_id!r} has another {name!r} in another document"
                    )
    return list(found.values())
