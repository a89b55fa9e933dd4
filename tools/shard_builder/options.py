"""What a conversion is asked to do."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any

from lfdata.errors import OptionError
from lfdata.format.writer import GROUP_BYTES

ON_ERROR = ("stop", "skip", "quarantine")
DUPLICATES = ("error", "first", "last")
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


# Each has a directory, a journal and a scan of the source of its own.
MOST_TASKS = 99_999


@dataclass(frozen=True, slots=True)
class Task:
    """Part ``number`` of ``count`` of a conversion, from 0 on: it makes every count-th segment."""

    number: int
    count: int

    def __post_init__(self) -> None:
        if not 1 <= self.count <= MOST_TASKS:
            raise OptionError(f"task {self.number}/{self.count}: 1 to {MOST_TASKS} tasks")
        if not 0 <= self.number < self.count:
            raise OptionError(f"task {self.number}/{self.count}: tasks of {self.count} are numbered 0 to {self.count - 1}")

    def makes(self, segment: int) -> bool:
        """Whether a segment is this task's."""
        return segment % self.count == self.number


@dataclass(frozen=True)
class ConvertOptions:
    """Options of ``convert``. Those in :attr:`LAYOUT` determine bytes; the others never do.

    shard_bytes: size of a shard. 1 GiB: large enough for sequential disks and object stores, small enough to copy and re-make.
    shard_rows: rows of a shard. A million bounds the index that is held in memory while a shard is written.
    segment_bytes, segment_rows: how much source makes a segment, which shards do not cross: four shards' worth, so that cutting wastes little.
    group_bytes: payload of a row group. 8 MiB: one read of a block-shuffled reader, worth its latency on disks and object stores.
    duplicates: what to do with keys that occur more than once.
    workers: encoder processes; the cores this process may use, by default.
    on_error, max_errors: policy for bad samples, and how many are accepted (``None``: any number).
    task: make only this part, beside others that may run elsewhere; ``finish`` makes one data set of all. Goes on with what is there.
    sample_timeout: seconds a chunk may take before its samples are run one by one, and a single sample before it is bad.
    """

    shard_bytes: int = 1 << 30
    shard_rows: int = 1_000_000
    segment_bytes: int = 4 << 30
    segment_rows: int = 4_000_000
    group_bytes: int = GROUP_BYTES
    duplicates: str = "error"
    workers: int = 0
    on_error: str = "stop"
    max_errors: int | None = None
    sample_timeout: float = 300.0
    resume: bool = False
    overwrite: bool = False
    allow_empty: bool = False
    task: Task | None = None

    LAYOUT = ("shard_bytes", "shard_rows", "segment_bytes", "segment_rows", "group_bytes", "duplicates")

    def __post_init__(self) -> None:
        for name in ("shard_bytes", "shard_rows", "segment_bytes", "segment_rows", "group_bytes"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.on_error not in ON_ERROR:
            raise OptionError(f"on_error is {self.on_error!r}; valid: {', '.join(ON_ERROR)}")
        if self.duplicates not in DUPLICATES:
            raise OptionError(f"duplicates is {self.duplicates!r}; valid: {', '.join(DUPLICATES)}")
        if (
            self.workers < 0
            or not 0 < self.sample_timeout < float("inf")
            or (self.max_errors is not None and self.max_errors < 0)
        ):
            raise OptionError(
                "workers and max_errors must not be negative, sample_timeout must be a positive number of seconds"
            )
        if self.resume and self.overwrite:
            raise OptionError("resume and overwrite exclude each other")
        if self.task is not None and self.overwrite:
            raise OptionError("a task cannot overwrite: others may be at work on the same target. Choose a new one")

    @property
    def worker_count(self) -> int:
        """Number of worker processes."""
        return self.workers or len(os.sched_getaffinity(0))

    def layout(self) -> dict[str, Any]:
        """The options that determine bytes."""
        return {name: value for name, value in asdict(self).items() if name in self.LAYOUT}


def parse_size(text: str) -> int:
    """``"512M"``, ``"1GiB"`` or a number of bytes."""
    short = text.strip().lower().removesuffix("ib").removesuffix("b")
    unit = short[-1:] if short[-1:] in _UNITS else ""
    try:
        return int(float(short.removesuffix(unit)) * _UNITS[unit])
    except ValueError:
        raise OptionError(f"{text!r} is not a size; write for example 512M or 1G") from None


def pairs(given: tuple[str, ...]) -> dict[str, str]:
    """``NAME=VALUE`` options by name. Raises :class:`OptionError`."""
    options = {}
    for pair in given:
        name, equals, value = pair.partition("=")
        if not equals:
            raise OptionError(f"--source-option {pair!r}: write NAME=VALUE")
        options[name.replace("-", "_")] = value
    return options
