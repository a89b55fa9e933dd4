"""``split``: a data set into parts, whole samples each, every sample in exactly one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfdata.dataset import ShardDataset
from lfdata.errors import OptionError
from lfdata.format.durable import Files
from shard_builder.operations.build import Build, BuildOptions, Built, Progress
from shard_builder.operations.inputs import open_input, place_of, refuse_overlap
from shard_builder.operations.selecting import starts_of

BY = ("key-hash", "exact", "order")
MAX_PARTS = 1000
Parts = NDArray[np.int32]
"""The part of every sample, int32, (n,)."""


@dataclass(frozen=True)
class SplitOptions:
    """How samples are dealt out.

    ratio: shares of the parts; they add up to 1 (or to 100). by: ``key-hash``: a sample's part depends on its key and the seed
    alone, so it stays where it is when the data grow; shares are met on average. ``exact``: the shares exactly, by rank of the same hash.
    ``order``: the first samples, then the next. column: instead of a ratio, one part for every value of a scalar field.
    names: of the parts; ``part-0`` and so on (or the column's values) by default. seed: another dealing.
    """

    ratio: tuple[str, ...] = ()
    by: str = "key-hash"
    column: str = ""
    names: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        if bool(self.ratio) == bool(self.column):
            raise OptionError("give exactly one of --ratio and --column")
        if self.by not in BY:
            raise OptionError(f"by is {self.by!r}; valid: {', '.join(BY)}")
        if not 0 <= self.seed < 1 << 64:
            raise OptionError("seed is a number from 0 to 2^64 - 1")
        if self.ratio:
            self.shares()

    def shares(self) -> list[Fraction]:
        """The shares as exact fractions of 1. Raises :class:`OptionError`."""
        try:
            found = [Fraction(text) for text in self.ratio]
        except (ValueError, ZeroDivisionError):
            raise OptionError(f"ratio {','.join(self.ratio)!r}: write shares such as 0.9,0.1 or 98,1,1") from None
        total = sum(found)
        if min(found) <= 0 or len(found) < 2 or total not in (1, 100):
            raise OptionError(f"ratio {','.join(self.ratio)!r}: two shares or more, each above 0, that add up to 1 or 100")
        return [share / total for share in found]


def split(
    source: str | Path,
    target: str | Path,
    options: SplitOptions,
    *,
    build: BuildOptions | None = None,
    progress: Progress | None = None,
    files: Files | None = None,
) -> list[Built]:
    """Write every part as a data set of its own, ``target/NAME``. An interrupted split is gone on with by running it again.

    Raises:
        OptionError: options that make no sense for this data set. TargetExistsError: a part's directory holds something else.
    """
    data = open_input(source)
    files = files or Files()
    dealt, names = deal(data, options)
    build = build or BuildOptions(allow_empty=True)
    for name in names:
        refuse_overlap(Path(target) / name, [place_of(data)])
    made = []
    for number, name in enumerate(names):
        about: dict[str, Any] = {
            "ratio": [str(share) for share in options.shares()] if options.ratio else [],
            "by": "column" if options.column else options.by,
            "column": options.column,
            "seed": options.seed,
            "part": name,
        }
        job = Build("split", about, [data], data.manifest.fields, build, files)
        mask = dealt == number
        made.append(job.run(Path(target) / name, _constant([mask]), progress))
    return made


def _constant(masks: Sequence[NDArray[np.bool_]]) -> Callable[[Path], Sequence[NDArray[np.bool_]]]:
    return lambda _scratch: masks


def deal(data: ShardDataset, options: SplitOptions) -> tuple[Parts, list[str]]:
    """The part of every sample, and the names of the parts."""
    if options.column:
        parts, names = _by_column(data, options.column)
    else:
        shares = options.shares()
        names = [f"part-{number}" for number in range(len(shares))]
        if options.by == "order":
            parts = _by_rank(np.arange(len(data)), shares)
        else:
            hashes = key_hashes(data, options.seed)
            parts = _by_hash(hashes, shares) if options.by == "key-hash" else _by_rank(_ranks(data, hashes), shares)
    if options.names:
        if len(options.names) != len(names):
            raise OptionError(f"{len(options.names)} names for {len(names)} parts: {', '.join(names[:20])}")
        names = list(options.names)
    _check_names(names)
    return parts, names


def _check_names(names: Sequence[str]) -> None:
    bad = [name for name in names if not name or name.startswith(".") or set(name) & set("/\0") or len(name.encode()) > 200]
    if bad or len(set(names)) != len(names):
        raise OptionError(
            f"names of parts are directory names, each used once: {', '.join(bad or names)[:200]!r}; give --names"
        )


def key_hashes(data: ShardDataset, seed: int) -> NDArray[np.uint64]:
    """A hash of every sample's key under a seed: uint64, (n,). No key is read: the index has their XXH3."""
    found = np.empty(len(data), np.uint64)
    starts = starts_of(data)
    for ordinal in range(len(data.manifest.shards)):
        hashes, rows = data.shard(ordinal).base.key_hashes()
        found[rows.astype(np.int64) + starts[ordinal]] = hashes
    return _mixed(found ^ _mixed(np.array([seed], np.uint64))[0])


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64: every bit of the result depends on every bit of the value."""
    with np.errstate(over="ignore"):
        values = values + np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(31))


def _by_hash(hashes: NDArray[np.uint64], shares: Sequence[Fraction]) -> Parts:
    bounds, total = [], Fraction(0)
    for share in shares[:-1]:
        total += share
        bounds.append(math.ceil(total * (1 << 64)))
    return np.searchsorted(np.array(bounds, np.uint64), hashes, side="right").astype(np.int32)


def _ranks(data: ShardDataset, hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Rank of every sample by hash; equal hashes by key, so that the order of the data set does not matter."""
    order = np.argsort(hashes, kind="stable")
    ordered = hashes[order]
    same = np.flatnonzero(ordered[1:] == ordered[:-1])
    for at in same.tolist():
        stop = at + 1
        while stop < len(ordered) and ordered[stop] == ordered[at]:
            stop += 1
        order[at:stop] = sorted(order[at:stop].tolist(), key=lambda index: data.keys([index])[0])
    ranks = np.empty(len(hashes), np.int64)
    ranks[order] = np.arange(len(hashes))
    return ranks


def _by_rank(ranks: NDArray[np.int64], shares: Sequence[Fraction]) -> Parts:
    bounds, total = [], Fraction(0)
    for share in shares[:-1]:
        total += share
        bounds.append(round(total * len(ranks)))
    return np.searchsorted(np.array(bounds, np.int64), ranks, side="right").astype(np.int32)


def _by_column(data: ShardDataset, column: str) -> tuple[Parts, list[str]]:
    field = data.schema.get(column)
    if field is None or field.kind != "scalar":
        scalars = [name for name, item in data.schema.items() if item.kind == "scalar"]
        raise OptionError(f"no scalar field {column!r} to split by; there are {', '.join(scalars) or 'none'}")
    values = data.column(column)
    present = data.present(column)
    if values.dtype.kind == "f":
        raise OptionError(f"field {column!r} holds fractions; split by integers or booleans")
    if not len(data):
        raise OptionError(f"{data.path}: no samples, so field {column!r} has no values to split by")
    distinct = np.unique(values[present])
    if len(distinct) > MAX_PARTS:
        raise OptionError(f"field {column!r} has {len(distinct)} values; at most {MAX_PARTS} parts are made")
    parts = np.searchsorted(distinct, values).astype(np.int32)
    names = [f"{column}-{value}" for value in distinct.tolist()]
    if not present.all():
        parts[~present] = len(names)
        names.append(f"{column}-absent")
    return parts, names
