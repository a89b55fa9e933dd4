"""Which sections a file must have, by its schema: every field exactly the columns of its kind, of the right type and count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lfdata.errors import CorruptError
from lfdata.format import layout
from lfdata.format.columns import scalar_dtype
from lfdata.format.layout import Entry
from lfdata.format.meta import FieldMeta

MAX_NDIM = 32
_AUX = ("aux_first", "aux_count", "aux")
_U64 = 4

Place = tuple[bytes, int, int]
"""Section type, field ordinal, role."""
Wanted = dict[Place, tuple[int, int | None]]
"""Element type and count (``None``: any) by place."""


def field_dtype(file: object, field: FieldMeta) -> np.dtype[Any]:
    """Element type of a field with one. Raises :class:`CorruptError` where the schema names none that its kind can have."""
    try:
        dtype = scalar_dtype(field)
    except ValueError as error:
        raise CorruptError(file, None, str(error)) from error
    if field.kind == "tokens" and dtype.kind != "u":
        raise CorruptError(file, None, f"field {field.name!r}: token ids of type {dtype.name}; they must be unsigned")
    return dtype


def field_ndim(file: object, field: FieldMeta) -> int:
    """Number of dimensions of an ``array`` field."""
    ndim = field.params.get("ndim")
    if type(ndim) is not int or not 0 <= ndim <= MAX_NDIM:
        raise CorruptError(file, None, f"field {field.name!r}: ndim {ndim!r} is not between 0 and {MAX_NDIM}")
    return ndim


def chunk_frames(file: object, field: FieldMeta) -> int:
    """Frames a chunk of an ``audio`` field."""
    frames = field.params.get("chunk_frames")
    if type(frames) is not int or not 1 <= frames < 1 << 48:
        raise CorruptError(file, None, f"field {field.name!r}: chunk_frames {frames!r} is not a positive number of frames")
    return frames


def check_schema(
    file: object, end: int, kind: int, rows: int, fields: Sequence[FieldMeta], found: Mapping[Place, Entry]
) -> None:
    """Refuse a file whose sections are not those its schema asks for.

    Args:
        file: name, for messages. end: offset of the directory, for what is missing.
        kind: the file's kind. rows: its rows.
        found: known sections by place, without row groups.
    """
    wanted = _wanted(file, kind, rows, fields)
    for place, entry in found.items():
        if place not in wanted:
            where = f"field {entry.field}, role {entry.role}" if entry.field != layout.NO_FIELD else "no field"
            raise CorruptError(file, entry.offset, f"section {entry.type.decode()} ({where}) is not in the schema")
        element, count = wanted[place]
        if entry.element != element or (count is not None and entry.count != count):
            name = f"section {entry.type.decode()} (field {entry.field}, role {entry.role})"
            raise CorruptError(
                file,
                entry.offset,
                f"{name}: {entry.count} elements of type {entry.element}; expected {count} of type {element}",
            )
    _check_missing(file, end, wanted, found)


def _check_missing(file: object, end: int, wanted: Wanted, found: Mapping[Place, Entry]) -> None:
    for place in wanted:
        type_, number, role = place
        name = layout.ROLES[role]
        if place in found or type_ == b"DICT" or (type_ == b"COLM" and name == "present"):
            continue
        if type_ == b"COLM" and name in _AUX and not any((type_, number, layout.ROLE_CODES[r]) in found for r in _AUX):
            continue
        raise CorruptError(file, end, f"section {type_.decode()} (field {number}, role {role}) is missing")


def _wanted(file: object, kind: int, rows: int, fields: Sequence[FieldMeta]) -> Wanted:
    none = layout.NO_FIELD
    wanted: Wanted = {(b"META", none, 0): (0, None), (b"BSUM", none, 0): (_U64, None)}
    if kind != layout.KIND_SIDECAR:
        wanted |= {(b"KHSH", none, 0): (_U64, rows), (b"KROW", none, 0): (_U64, rows)}
    if kind == layout.KIND_BASE:
        wanted |= {(b"KEYS", none, 0): (0, None), (b"KOFF", none, 0): (_U64, rows + 1)}
    for number, field in enumerate(fields):
        wanted |= _columns(file, kind, rows, number, field)
        if kind != layout.KIND_INDEX:
            wanted |= _payload(file, rows, number, field)
    return wanted


def _columns(file: object, kind: int, rows: int, number: int, field: FieldMeta) -> Wanted:
    codes = layout.ROLE_CODES
    wanted: Wanted = {(b"COLM", number, codes["present"]): (1, rows)}
    if field.kind == "audio":
        chunk_frames(file, field)
    for role in layout.SIZE_ROLES[field.kind]:
        element = layout.ROLE_ELEMENTS[codes[role]] or layout.ELEMENT_CODES[field_dtype(file, field)]
        wanted[(b"COLM", number, codes[role])] = (element, rows * field_ndim(file, field) if role == "dims" else rows)
    if field.kind in ("image", "audio") and kind != layout.KIND_INDEX:
        wanted |= {(b"COLM", number, codes[role]): (_U64, None if role == "aux" else rows) for role in _AUX}
    return wanted


def _payload(file: object, rows: int, number: int, field: FieldMeta) -> Wanted:
    if field.kind == "scalar":
        return {}
    wanted: Wanted = {(b"LOCR", number, 0): (13, rows)}
    if field.kind in ("tokens", "array"):
        element = layout.ELEMENT_CODES[field_dtype(file, field)]
        if field.kind == "tokens":
            wanted[(b"TOKN", number, 0)] = (element, None)
    if field.kind == "json":
        wanted[(b"DICT", number, 0)] = (0, None)
    return wanted
