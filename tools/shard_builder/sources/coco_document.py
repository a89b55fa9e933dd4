"""COCO documents: one JSON object each, of which only ids and byte ranges are kept.

Reading one takes its bytes and about 200 bytes for every image and annotation; when it is done, 24 bytes an annotation remain.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from lfdata.errors import SourceError
from shard_builder.sources.common import open_regular
from shard_builder.sources.files import show

Id = int | str
Range = tuple[int, int]
"""Offset and length in the document."""


class _Document(msgspec.Struct):
    images: list[msgspec.Raw]
    annotations: list[msgspec.Raw] = []
    categories: list[msgspec.Raw] = []


class ImageEntry(msgspec.Struct):
    """What a document must say of an image."""

    id: Id
    file_name: str


class _Annotation(msgspec.Struct):
    image_id: Id
    id: Id | None = None
    category_id: Id | None = None
    caption: str | None = None


class _Category(msgspec.Struct):
    id: Id
    name: str


@dataclass(slots=True)
class Problem:
    """Something wrong with an image (``image`` is its id) or with an entry that belongs to none (``image`` is ``None``)."""

    image: Id | None
    where: str
    code: str
    reason: str


@dataclass(slots=True)
class Document:
    """What remains of one document.

    Attributes:
        images: entries in order, with the place of their text.
        of_image: annotations by image id, as a slice of ``places``.
        places: int64 array, one row an annotation: offset, length.
    """

    name: str
    images: list[tuple[ImageEntry, Range]] = field(default_factory=list)
    of_image: dict[Id, slice] = field(default_factory=dict)
    places: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 2), np.int64))
    categories: dict[Id, dict[str, Any]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    has_captions: bool = False
    has_objects: bool = False


_image = msgspec.json.Decoder(ImageEntry).decode
_annotation = msgspec.json.Decoder(_Annotation).decode
_category = msgspec.json.Decoder(_Category).decode


def read_document(path: str, name: str, limit: int) -> Document:
    """Read a document. Raises :class:`SourceError` where it is missing, too large, or no COCO document."""
    with os.fdopen(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise SourceError(
                f"{show(name)}: {size} bytes of JSON; the limit is {limit} (option max_json_bytes). Reading it takes its size in "
                "memory, and about 200 bytes for every annotation"
            )
        data = np.frombuffer(file.read(), np.uint8)
    if not data.size:
        raise SourceError(f"{show(name)}: an empty file")
    try:
        parsed = msgspec.json.decode(data.data, type=_Document)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise SourceError(f"{show(name)}: not a COCO document: {error}") from None
    found = Document(name)
    base = data.ctypes.data
    _take_categories(found, parsed.categories)
    _take_images(found, parsed.images, base)
    _take_annotations(found, parsed.annotations, base)
    return found


def _range(raw: msgspec.Raw, base: int) -> Range:
    """Where the text of an entry lies: entries are views of the document."""
    view = np.frombuffer(raw, np.uint8)
    return view.ctypes.data - base, len(view)


def _take_categories(found: Document, entries: list[msgspec.Raw]) -> None:
    for number, raw in enumerate(entries):
        try:
            category = _category(raw)
        except (msgspec.MsgspecError, ValueError) as error:
            raise SourceError(f"{show(found.name)}: category {number} (from 0): {error}") from None
        if category.id in found.categories:
            raise SourceError(f"{show(found.name)}: two categories have the id {category.id!r}")
        found.categories[category.id] = msgspec.json.decode(raw)


def _take_images(found: Document, entries: list[msgspec.Raw], base: int) -> None:
    for number, raw in enumerate(entries):
        try:
            found.images.append((_image(raw), _range(raw, base)))
        except (msgspec.MsgspecError, ValueError) as error:
            where = f"{show(found.name)}: image {number} (from 0)"
            found.problems.append(Problem(None, where, "json", f"not an image entry: {error}"))
    counts = Counter(image.id for image, _ in found.images)
    for image_id, count in counts.items():
        if count > 1:
            where = f"{show(found.name)}: image id {image_id!r}"
            reason = f"{count} images have this id: nobody knows whose the annotations are"
            found.problems.append(Problem(image_id, where, "duplicate-id", reason))


def _take_annotations(found: Document, entries: list[msgspec.Raw], base: int) -> None:
    order = {image.id: place for place, (image, _) in enumerate(found.images)}
    seen: set[Id] = set()
    owners, places = np.zeros(len(entries), np.int64), np.zeros((len(entries), 2), np.int64)
    for number, raw in enumerate(entries):
        where = f"{show(found.name)}: annotation {number} (from 0)"
        try:
            annotation = _annotation(raw)
        except (msgspec.MsgspecError, ValueError) as error:
            owners[number] = -1
            found.problems.append(Problem(None, where, "json", f"not an annotation: {error}"))
            continue
        owner = owners[number] = order.get(annotation.image_id, -1)
        places[number] = _range(raw, base)
        if annotation.caption is None:
            found.has_objects = True
        else:
            found.has_captions = True
        if owner < 0:
            reason = f"belongs to image {annotation.image_id!r}, which is not there"
            found.problems.append(Problem(None, where, "dangling", reason))
            continue
        if annotation.category_id is not None and annotation.category_id not in found.categories:
            reason = f"an annotation of category {annotation.category_id!r}, which is not there"
            found.problems.append(Problem(annotation.image_id, where, "dangling", reason))
        if annotation.id is not None:
            if annotation.id in seen:
                reason = f"an annotation whose id {annotation.id!r} another one has"
                found.problems.append(Problem(annotation.image_id, where, "duplicate-id", reason))
            seen.add(annotation.id)
    kept = np.flatnonzero(owners >= 0)
    kept = kept[np.argsort(owners[kept], kind="stable")]
    found.places = places[kept]
    ids = [image.id for image, _ in found.images]
    sorted_owners = owners[kept]
    edges = np.flatnonzero(np.diff(sorted_owners, prepend=-1, append=len(ids)))
    for start, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        found.of_image[ids[int(sorted_owners[start])]] = slice(start, stop)
