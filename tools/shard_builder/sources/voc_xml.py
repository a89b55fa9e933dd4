"""Annotations of Pascal VOC: XML without entities, read into objects with boxes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any
from xml.parsers import expat

from lfdata.errors import SampleError

MAX_BYTES = 64 << 20
_MAX_DEPTH = 32
_MAX_ELEMENTS = 1_000_000
_CORNERS = ("xmin", "ymin", "xmax", "ymax")
_FLAGS = ("difficult", "truncated", "occluded")


@dataclass(slots=True)
class Element:
    """An element: its name, its text, its children in order."""

    name: str
    chunks: list[str] = field(default_factory=list)
    children: list[Element] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text, white space included."""
        return "".join(self.chunks)

    def child(self, name: str) -> Element | None:
        """The first child of a name."""
        return next((one for one in self.children if one.name == name), None)

    def words(self, name: str) -> str | None:
        """The text of the first child of a name, without the white space around it."""
        found = self.child(name)
        return None if found is None else found.text.strip()


def parse_xml(data: bytes) -> Element:
    """The root element. Raises :class:`SampleError`: ``xml``, ``entity`` (a document type that declares entities), ``depth``."""
    parser = expat.ParserCreate()
    parser.buffer_text = True
    stack: list[Element] = [Element("")]
    count = 0

    def start(name: str, _attributes: dict[str, str]) -> None:
        nonlocal count
        count += 1
        if len(stack) > _MAX_DEPTH or count > _MAX_ELEMENTS:
            raise SampleError("depth", f"elements nested more than {_MAX_DEPTH} deep, or more than {_MAX_ELEMENTS}")
        element = Element(name)
        stack[-1].children.append(element)
        stack.append(element)

    def end(_name: str) -> None:
        stack.pop()

    def text(found: str) -> None:
        stack[-1].chunks.append(found)

    def refuse(*_: Any) -> Any:
        raise SampleError("entity", "the XML declares entities, which annotations have no use for; they are not read")

    parser.StartElementHandler, parser.EndElementHandler, parser.CharacterDataHandler = start, end, text
    parser.EntityDeclHandler = refuse
    parser.ExternalEntityRefHandler = refuse
    try:
        parser.Parse(data, True)
    except expat.ExpatError as error:
        raise SampleError("xml", f"not XML: {error}") from None
    except (ValueError, LookupError) as error:  # an encoding that is not known
        raise SampleError("xml", f"not XML: {error}") from None
    return stack[0].children[0]


def objects_of(root: Element) -> list[dict[str, Any]]:
    """Objects as plain values: name, ``bndbox`` as four numbers, flags as integers, parts; other children as text.

    Raises:
        SampleError: ``voc`` (another document, an object without a name), ``bbox``.
    """
    if root.name != "annotation":
        raise SampleError("voc", f"the element {root.name[:80]!r}, where <annotation> is expected")
    return [_object(one) for one in root.children if one.name == "object"]


def _object(element: Element) -> dict[str, Any]:
    name = element.words("name")
    if not name:
        raise SampleError("voc", "an object without a name")
    found: dict[str, Any] = {}
    parts = []
    for child in element.children:
        if child.name == "bndbox":
            found["bndbox"] = _box(child, name)
        elif child.name == "part":
            parts.append(_object(child))
        elif child.name in _FLAGS:
            found[child.name] = _flag(child)
        elif child.name not in found:
            found[child.name] = _plain(child)
    return found | ({"parts": parts} if parts else {})


def _plain(element: Element) -> Any:
    if not element.children:
        return element.text.strip()
    found: dict[str, Any] = {}
    for child in element.children:
        value = _plain(child)
        if child.name not in found:
            found[child.name] = value
        elif isinstance(found[child.name], list):
            found[child.name].append(value)
        else:
            found[child.name] = [found[child.name], value]
    return found


def _flag(element: Element) -> int | str:
    text = element.text.strip()
    return int(text) if text in ("0", "1") else text


def _box(element: Element, name: str) -> list[int | float]:
    texts = [element.words(corner) for corner in _CORNERS]
    try:
        numbers = [float(text or "") for text in texts]
    except ValueError:
        raise SampleError("bbox", f"the box of {name!r} has no four numbers but {texts}") from None
    left, top, right, bottom = numbers
    if not all(map(math.isfinite, numbers)) or right < left or bottom < top:
        raise SampleError("bbox", f"the box of {name!r} is turned or infinite: {texts}")
    return [int(number) if number.is_integer() else number for number in numbers]


def file_name(root: Element) -> str | None:
    """The image that an annotation names."""
    return root.words("filename") or None
