"""What the index of a file says must fit together: sizes, presence, locators, keys. Used by full verification only.

Every check yields ``(section, row, reason)`` for the first offending row of each rule, and works on whole columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfdata.format import layout
from lfdata.format.layout import KIND_BASE, KIND_INDEX, KIND_SIDECAR, xxh3
from lfdata.format.meta import FieldMeta
from lfdata.format.reader import ShardFile
from lfdata.format.schema import chunk_frames, field_dtype, field_ndim

Finding = tuple[str, int | None, str]
KEY_BATCH = 65_536
_LARGE = np.uint64(1 << 62)


def check_keys(shard: ShardFile) -> Iterator[Finding]:
    """KOFF, KHSH and KROW against the keys themselves."""
    if shard.identity.kind == KIND_SIDECAR:
        return
    hashes, order = shard.read_section(b"KHSH"), shard.read_section(b"KROW")
    if (hashes[1:] < hashes[:-1]).any():
        yield "KHSH", None, "key hashes are not in ascending order"
    if not np.array_equal(np.sort(order), np.arange(shard.rows, dtype=np.uint64)):
        yield "KROW", None, "rows of the key hashes are not every row once"
        return
    if ((hashes[1:] == hashes[:-1]) & (order[1:] < order[:-1])).any():
        yield "KROW", None, "rows of equal key hashes are not in ascending order"
    if shard.identity.kind != KIND_BASE:
        return
    offsets = shard.read_section(b"KOFF")
    if int(offsets[0]) or int(offsets[-1]) != shard.section(b"KEYS").length or (offsets[1:] < offsets[:-1]).any():
        yield "KOFF", None, "key offsets do not cover the keys in ascending order"
        return
    found = np.empty(shard.rows, np.uint64)
    for start in range(0, shard.rows, KEY_BATCH):
        rows = np.arange(start, min(start + KEY_BATCH, shard.rows))
        found[rows] = [xxh3(key) for key in shard.keys(rows)]
    bad = found[order] != hashes
    if bad.any():
        yield "KHSH", int(order[np.argmax(bad)]), "the key does not have the hash that the index gives it"


def check_field(shard: ShardFile, field: FieldMeta) -> Iterator[Finding]:
    """Every column of a field, and its locators."""
    columns = {role: data for role in layout.ROLES if (data := shard.read_column(field.name, role)) is not None}
    present = columns.pop("present", None)
    if present is not None and (present > 1).any():
        yield "COLM", int(np.argmax(present > 1)), "present is neither 0 nor 1"
        return
    if present is not None and len(present) and present.all():
        yield "COLM", None, "a present column, though every row has the field"
    there = np.ones(shard.rows, bool) if present is None else present.astype(bool)
    if "dims" in columns:
        columns["dims"] = columns["dims"].reshape(shard.rows, field_ndim(shard.name, field))
    yield from _absent(columns, there)
    yield from _first(
        "COLM", there & _bad_sizes(shard, field, columns), "the sizes of the value contradict each other or its kind"
    )
    if shard.identity.kind == KIND_INDEX or field.kind == "scalar":
        return
    yield from _aux(shard, field, columns, there)
    locators = shard.read_section(b"LOCR", shard.ordinal(field.name))
    yield from _first("LOCR", ~there & ((locators["offset"] != 0) | (locators["check"] != 0)), "an absent value has a locator")
    if field.kind == "tokens":
        yield from _token_places(shard, field, columns["tokens"], locators, there)
    else:
        yield from _places(shard, field, columns["bytes"], locators, there)


def _first(section: str, bad: NDArray[np.bool_], reason: str) -> Iterator[Finding]:
    if bad.any():
        yield section, int(np.argmax(bad)), reason


def _absent(columns: dict[str, NDArray[Any]], there: NDArray[np.bool_]) -> Iterator[Finding]:
    for role, data in columns.items():
        if role == "aux" or not len(data):
            continue
        raw = np.ascontiguousarray(data).view(np.uint8).reshape(len(data), -1)
        yield from _first("COLM", ~there & raw.any(axis=1), f"an absent value has {role}")


def _bad_sizes(shard: ShardFile, field: FieldMeta, columns: dict[str, NDArray[Any]]) -> NDArray[np.bool_]:
    match field.kind:
        case "audio":
            return _bad_audio(columns)
        case "image":
            return _bad_image(columns)
        case "array":
            size = field_dtype(shard.name, field).itemsize
            elements, overflow = _product(columns["dims"])
            bad: NDArray[np.bool_] = overflow | (columns["bytes"] % size != 0) | (columns["bytes"] // size != elements)
            return bad
        case "scalar":
            values = columns["value"]
            if values.dtype.kind == "b":
                beyond: NDArray[np.bool_] = values.view(np.uint8) > 1
                return beyond
    return np.zeros(shard.rows, bool)


def _bad_audio(columns: dict[str, NDArray[Any]]) -> NDArray[np.bool_]:
    width = columns["channels"].astype(np.uint64) * np.uint64(2)
    whole = np.maximum(width, np.uint64(2))
    bad = (columns["bytes"] % whole != 0) | (columns["bytes"] // whole != columns["frames"])
    result: NDArray[np.bool_] = bad | (width == 0) | (columns["rate"] == 0)
    return result


def _bad_image(columns: dict[str, NDArray[Any]]) -> NDArray[np.bool_]:
    pixels = columns["width"].astype(np.uint64) * columns["height"].astype(np.uint64)
    size = columns["channels"].astype(np.uint64) * (columns["bits"] // 8)
    safe = np.maximum(size, np.uint64(1))
    raw = (columns["bytes"] % safe != 0) | (columns["bytes"] // safe != pixels)
    channels, bits, codec = columns["channels"], columns["bits"], columns["codec"]
    bad = (pixels == 0) | (channels < 1) | (channels > 4) | ((bits != 8) & (bits != 16)) | (codec < 1) | (codec > 8)
    result: NDArray[np.bool_] = bad | ((codec == 4) & raw)
    return result


def _product(dims: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    """Product of each row, and where it passes 2^62."""
    zero = (dims == 0).any(axis=1)
    total = np.ones(len(dims), np.uint64)
    over = np.zeros(len(dims), bool)
    for axis in range(dims.shape[1]):
        size = np.where(zero, np.uint64(1), dims[:, axis])
        over |= size > _LARGE // total
        total = np.where(over, np.uint64(1), total * np.where(over, np.uint64(1), size))
    return np.where(zero, np.uint64(0), total), over


def _aux(shard: ShardFile, field: FieldMeta, columns: dict[str, NDArray[Any]], there: NDArray[np.bool_]) -> Iterator[Finding]:
    if field.kind not in ("audio", "image"):
        return
    nothing = np.zeros(shard.rows, np.uint64)
    first, count = columns.get("aux_first", nothing), columns.get("aux_count", nothing)
    total = np.uint64(len(columns.get("aux", ())))
    yield from _first(
        "COLM", (count > total) | (first > total - np.minimum(count, total)), "auxiliary elements outside their column"
    )
    if field.kind == "audio":
        step = columns["channels"].astype(np.uint64) * np.uint64(2 * chunk_frames(shard.name, field))
        wanted = -(-columns["bytes"].astype(object) // np.maximum(step, np.uint64(1)).astype(object))
        yield from _first("COLM", there & (count.astype(object) != wanted).astype(bool), "not one check for every audio chunk")


def _places(
    shard: ShardFile, field: FieldMeta, lengths: NDArray[Any], locators: NDArray[Any], there: NDArray[np.bool_]
) -> Iterator[Finding]:
    offsets, checks = locators["offset"], locators["check"]
    empty = there & (lengths == 0)
    yield from _first(
        "LOCR", empty & ((offsets != 0) | (checks != xxh3(b"", shard.identity.seed))), "a locator for a value of length 0"
    )
    filled = there & (lengths > 0)
    if not filled.any():
        return
    starts = np.array([group.offset for group in shard.groups], np.uint64)
    ends = np.array([group.end for group in shard.groups], np.uint64)
    firsts = np.array([group.first for group in shard.groups], np.uint64)
    group = np.searchsorted(starts, offsets, side="right") - 1
    inside = (group >= 0) & (lengths <= ends[group] - np.minimum(offsets, ends[group]))
    yield from _first("LOCR", filled & ~inside, "the payload lies outside the row groups")
    later = firsts[group] > np.arange(shard.rows, dtype=np.uint64)
    yield from _first("LOCR", filled & inside & later, "the payload lies in a row group after its row")
    if field.kind in layout.ALIGNED_KINDS:
        yield from _first("LOCR", filled & (offsets % layout.COLUMN_ALIGN != 0), "the payload is not aligned to 64 bytes")


def _token_places(
    shard: ShardFile, field: FieldMeta, counts: NDArray[Any], locators: NDArray[Any], there: NDArray[np.bool_]
) -> Iterator[Finding]:
    region = shard.section(b"TOKN", shard.ordinal(field.name))
    offsets = locators["offset"]
    if (counts > region.count).any() or int(counts.astype(object).sum()) != region.count:
        yield "TOKN", None, "the token counts do not add up to the region"
        return
    expected = np.where(counts > 0, np.cumsum(counts, dtype=np.uint64) - counts, np.uint64(0))
    yield from _first("LOCR", there & (offsets != expected), "the sequence does not start where the one before ends")
    empty = there & (counts == 0)
    yield from _first(
        "LOCR", empty & (locators["check"] != xxh3(b"", shard.identity.seed)), "the check of an empty sequence is wrong"
    )
