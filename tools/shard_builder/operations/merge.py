"""``merge``: data sets one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lfdata.dataset import ShardDataset
from lfdata.errors import OptionError, SourceError
from lfdata.format.durable import Files
from shard_builder.hashes import HashGroups
from shard_builder.operations.build import Build, BuildOptions, Built, Progress
from shard_builder.operations.inputs import open_input
from shard_builder.operations.schema import common_schema
from shard_builder.operations.selecting import Mask, starts_of

DUPLICATES = ("error", "first", "last")


def merge(
    sources: Sequence[str | Path],
    target: str | Path,
    *,
    duplicates: str = "error",
    build: BuildOptions | None = None,
    progress: Progress | None = None,
    files: Files | None = None,
) -> Built:
    """Make one data set of several, in the order given.

    Args:
        duplicates: what happens to keys that occur more than once: ``error``, or keep the ``first`` or ``last`` sample.

    Raises:
        OptionError: fields that differ. SourceError: a key twice, under ``error``: both places are named.
    """
    if duplicates not in DUPLICATES:
        raise OptionError(f"duplicates is {duplicates!r}; valid: {', '.join(DUPLICATES)}")
    if not sources:
        raise OptionError("name at least one data set")
    inputs = [open_input(path) for path in sources]
    fields = common_schema(inputs)
    files = files or Files()
    job = Build("merge", {"duplicates": duplicates}, inputs, fields, build or BuildOptions(allow_empty=True), files)
    return job.run(Path(target), lambda scratch: kept_rows(inputs, duplicates, scratch, files), progress)


def kept_rows(inputs: Sequence[ShardDataset], duplicates: str, scratch: Path, files: Files) -> list[Mask]:
    """Which samples of every data set stay. Hashes decide which keys to compare, the keys themselves which are the same."""
    bounds = np.cumsum([0, *(len(data) for data in inputs)])
    masks = [np.ones(len(data), bool) for data in inputs]
    groups = HashGroups(files, scratch, "keys")
    try:
        for number, data in enumerate(inputs):
            starts = starts_of(data)
            for ordinal in range(len(data.manifest.shards)):
                hashes, rows = data.shard(ordinal).base.key_hashes()
                groups.extend(hashes, rows.astype(np.uint64) + np.uint64(int(bounds[number]) + int(starts[ordinal])))
        first: list[int] = []
        for group in groups.groups():
            for same in _same_keys(inputs, bounds, sorted(group)):
                if not first or same < first:
                    first = same
                for place in same[1:] if duplicates == "first" else same[:-1]:
                    number = int(np.searchsorted(bounds, place, side="right")) - 1
                    masks[number][place - int(bounds[number])] = False
    finally:
        groups.close()
    if first and duplicates == "error":
        raise SourceError(_twice(inputs, bounds, first))
    return masks


def _locate(inputs: Sequence[ShardDataset], bounds: NDArray[np.int64], place: int) -> tuple[ShardDataset, int]:
    number = int(np.searchsorted(bounds, place, side="right")) - 1
    return inputs[number], place - int(bounds[number])


def _same_keys(inputs: Sequence[ShardDataset], bounds: NDArray[np.int64], places: list[int]) -> Iterator[list[int]]:
    by_key: dict[bytes, list[int]] = {}
    for place in places:
        data, index = _locate(inputs, bounds, place)
        by_key.setdefault(data.keys([index])[0], []).append(place)
    yield from (same for same in by_key.values() if len(same) > 1)


def _twice(inputs: Sequence[ShardDataset], bounds: NDArray[np.int64], same: list[int]) -> str:
    data, index = _locate(inputs, bounds, same[0])
    key = data.keys([index])[0].decode("utf-8", "backslashreplace")
    where = " and ".join(f"{found.path}, index {row}" for found, row in (_locate(inputs, bounds, place) for place in same[:2]))
    return f"key {key!r} occurs {len(same)} times: {where}. --duplicates first or last keeps one of them"
