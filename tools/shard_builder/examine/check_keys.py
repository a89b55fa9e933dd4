"""Keys are unique over the data set: the sorted hashes of all shards, range by range, and the real keys where hashes are
equal."""

from __future__ import annotations

import bisect
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from lfdata.errors import LfdataError
from shard_builder.examine.damage import Damage, DamageList, code_of, place, reason_of
from shard_builder.examine.opened import DataSet, Member
from shard_builder.examine.worker import Progress

RANGE_ROWS = 1_000_000
# Where one hash alone has more rows than this, the data set is damaged or hostile; comparing these is enough to say so.
MAX_ROWS = 4_000_000
_TOP = (1 << 64) - 1


def ranges(rows: int) -> list[tuple[int, int]]:
    """Ranges of hash values, both ends included, each with about :data:`RANGE_ROWS` keys."""
    count = max(1, -(-rows // RANGE_ROWS))
    step = -(-(1 << 64) // count)
    return [(number * step, min((number + 1) * step - 1, _TOP)) for number in range(count)]


def keys(data: DataSet, task: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Operation ``keys``: ``low``, ``high`` (hash values), ``index`` (compare with the consolidated index too)."""
    found = DamageList()
    _compare(data, task["low"], task["high"], bool(task.get("index")), found, progress)
    return {"damage": msgspec.to_builtins(found.listed), "unlisted": found.unlisted}


def _compare(data: DataSet, low: int, high: int, with_index: bool, found: DamageList, progress: Progress) -> None:
    slices = _slices(data, low, high, progress)
    total = sum(len(hashes) for _, hashes, _ in slices)
    if total > MAX_ROWS and low < high:
        middle = (low + high) // 2
        _compare(data, low, middle, with_index, found, progress)
        _compare(data, middle + 1, high, with_index, found, progress)
        return
    if not total:
        return
    hashes = np.concatenate([part for _, part, _ in slices])[:MAX_ROWS]
    places = np.concatenate([rows.astype(np.int64) + data.starts[number] for number, _, rows in slices])[:MAX_ROWS]
    order = np.argsort(hashes, kind="stable")
    hashes, places = hashes[order], places[order]
    # Without every shard's keys there is nothing to compare with: the index may well be the intact one.
    if with_index and total <= MAX_ROWS and len(slices) == len(data.manifest.shards):
        _against_index(data, low, high, hashes, places, found)
    equal = hashes[1:] == hashes[:-1]
    if equal.any():
        _equal_hashes(data, hashes, places, equal, found, progress)


def _slices(data: DataSet, low: int, high: int, progress: Progress) -> list[tuple[int, NDArray[Any], NDArray[Any]]]:
    """Shard number, hashes and rows of the hashes in range; a shard that cannot be read is left to the operation ``file``."""
    slices = []
    for number, base in enumerate(data.manifest.shards):
        progress.beat()
        try:
            khsh, krow = data.file(Member(number, base)).key_hashes()
        except LfdataError:
            continue
        start, stop = np.searchsorted(khsh, np.uint64(low), "left"), np.searchsorted(khsh, np.uint64(high), "right")
        inside = krow[start:stop] < np.uint64(base.rows)
        slices.append((number, khsh[start:stop][inside], krow[start:stop][inside]))
    return slices


def _equal_hashes(
    data: DataSet, hashes: NDArray[Any], places: NDArray[Any], equal: NDArray[np.bool_], found: DamageList, progress: Progress
) -> None:
    firsts: dict[bytes, int] = {}
    current = None
    suspects = np.flatnonzero(np.concatenate([equal, [False]]) | np.concatenate([[False], equal]))
    for at in suspects.tolist():
        progress.beat()
        if hashes[at] != current:
            firsts, current = {}, hashes[at]
        index = int(places[at])
        member = member_of(data, index)
        key = data.key_of(member, index - data.starts[member.number])
        if key is None:
            continue  # the key section is damaged: reported by the operation "file"
        first = firsts.setdefault(key, index)
        if first != index:
            row = index - data.starts[member.number]
            other = member_of(data, first)
            reason = f"the same key as index {first} ({other.file}, row {first - data.starts[other.number]})"
            found.add(
                Damage(member.file, "duplicate-key", reason, section="KEYS", shard=member.number, **place(data, member, row))
            )


def member_of(data: DataSet, index: int) -> Member:
    """The base shard that holds a sample."""
    number = bisect.bisect_right(data.starts, index) - 1
    return Member(number, data.manifest.shards[number])


def _against_index(data: DataSet, low: int, high: int, hashes: NDArray[Any], places: NDArray[Any], found: DamageList) -> None:
    name = data.index_path.name
    try:
        khsh, krow = data.open_index().key_hashes()
    except LfdataError as error:
        found.add(Damage(name, code_of(error), reason_of(error)))
        return
    start, stop = np.searchsorted(khsh, np.uint64(low), "left"), np.searchsorted(khsh, np.uint64(high), "right")
    if not (np.array_equal(khsh[start:stop], hashes) and np.array_equal(krow[start:stop].astype(np.int64), places)):
        reason = (
            f"its keys with hashes from {low:#x} to {high:#x} are not those of the shards; `shard-builder index` rebuilds it"
        )
        found.add(Damage(name, "index", reason, section="KHSH"))
