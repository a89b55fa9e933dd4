"""How long stages and waits take, as histograms of fixed size."""

from __future__ import annotations

import bisect
import itertools
import math
import time
from typing import Any

from lfdata.loader.jobs import Done, Job
from lfdata.loader.spans import STAGES

# Eight buckets an octave, from a microsecond to an hour: a percentile is at most 9 % too large.
AN_OCTAVE, OCTAVES = 8, 32
# The two levels of work in a decoder.
QUEUES = ("decode", "augment")
# Steps in parts that more may come of: those under way are far fewer.
_CUT = 256
_SMALLEST = 1e-6


class Histogram:
    """Seconds."""

    def __init__(self) -> None:
        # A list: adding one to an element of an array takes several times as long.
        self._counts = [0] * (AN_OCTAVE * OCTAVES + 1)
        self.seconds = 0.0

    def add(self, seconds: float, times: int = 1) -> None:
        """The same value some times."""
        self._counts[self._bucket(seconds)] += times
        self.seconds += seconds * times

    def more(self, seconds: float, by: float) -> None:
        """A value that was added is more."""
        self._counts[self._bucket(seconds)] -= 1
        self._counts[self._bucket(seconds + by)] += 1
        self.seconds += by

    def _bucket(self, seconds: float) -> int:
        bucket = 0 if seconds <= _SMALLEST else math.ceil(AN_OCTAVE * math.log2(seconds / _SMALLEST))
        return min(bucket, len(self._counts) - 1)

    def report(self) -> dict[str, float]:
        """Values counted, their sum in seconds, and percentiles in milliseconds (upper ends of buckets)."""
        total, found = sum(self._counts), {}
        reached = list(itertools.accumulate(self._counts))
        for percent in (50, 95, 99):
            bucket = bisect.bisect_left(reached, max(1, -(-total * percent // 100))) if total else 0
            found[f"p{percent}_ms"] = 1000 * _SMALLEST * 2 ** (bucket / AN_OCTAVE) if total else 0.0
        return {"count": total, "seconds": self.seconds, **found}


class Statistics:
    """What a loader's engine and its consumer did since it started. ``lanes``: threads that may work on jobs at a time."""

    def __init__(self, lanes: int) -> None:
        self._lanes, self._began = lanes, time.perf_counter()
        self._stages = [Histogram() for _ in STAGES]
        self._wait, self._busy, self._rows = Histogram(), 0.0, 0
        self._ready: dict[int, int] = {}
        self._queued = {name: [0, 0] for name in QUEUES}
        self._faults: dict[int, tuple[int, int]] = {}
        self._storage: dict[int, dict[str, int]] = {}
        # Steps in parts: by epoch and step the rows with which known parts begin, and what stages took for them.
        self._cut: dict[tuple[int, int], tuple[set[int], list[float]]] = {}

    def worked(self, job: Job, done: Done, rows: int) -> None:
        """An answer: its stages, a step's share of each, or what a part adds to its step; rows that are filled."""
        spent = [0.0] * len(STAGES)
        for stage, _, seconds, _ in done.spans:
            spent[stage] += seconds
        if job.rows is None:
            for stage, seconds in enumerate(spent):
                if seconds:
                    self._stages[stage].add(seconds / max(1, done.steps), max(1, done.steps))
        else:
            self._part(job.epoch, job.first, job.rows[0], spent)
        self._busy += done.seconds
        if done.process in self._faults:
            # Those of the first answer came with faults that are not counted.
            self._rows += rows
        first, _ = self._faults.get(done.process, (done.faults, 0))
        self._faults[done.process] = (first, done.faults)
        if done.storage:
            self._storage[done.process] = done.storage

    def _part(self, epoch: int, step: int, low: int, spent: list[float]) -> None:
        """Stages of a part of a step, in whatever order they come."""
        known, before = self._cut.pop((epoch, step), (set(), [0.0] * len(STAGES)))
        if low in known:
            # The step is made once more.
            known, before = set(), [0.0] * len(STAGES)
        for stage, seconds in enumerate(spent):
            if before[stage] and seconds:
                self._stages[stage].more(before[stage], seconds)
            elif seconds:
                self._stages[stage].add(seconds)
        total = [one + other for one, other in zip(before, spent, strict=True)]
        self._cut[epoch, step] = known | {low}, total
        if len(self._cut) > _CUT:
            del self._cut[next(iter(self._cut))]

    def waited(self, seconds: float, ready: int, queued: tuple[int, int]) -> None:
        """The consumer asked: how long it waited, how many slots were filled then, and how much work waited in each queue."""
        self._wait.add(seconds)
        for name, depth in zip(QUEUES, queued, strict=True):
            total, most = self._queued[name]
            self._queued[name] = [total + depth, max(most, depth)]
        self._ready[ready] = self._ready.get(ready, 0) + 1

    def report(self) -> dict[str, Any]:
        """For :meth:`lfdata.Loader.stats`."""
        elapsed = max(1e-9, time.perf_counter() - self._began)
        asked = max(1, sum(self._ready.values()))
        faults = sum(last - first for first, last in self._faults.values())
        return {
            "stages": {name: found.report() for name, found in zip(STAGES, self._stages, strict=True)},
            "wait": self._wait.report(),
            "waiting": self._wait.seconds / elapsed,
            "ready": dict(sorted(self._ready.items())),
            "queued": {name: {"mean": total / asked, "most": most} for name, (total, most) in self._queued.items()},
            "occupancy": self._busy / (elapsed * self._lanes),
            "faults_per_1000": 1000 * faults / self._rows if self._rows else 0.0,
            "storage": self._of_storage(),
        }

    def _of_storage(self) -> dict[str, int]:
        """Counts of all processes together."""
        total: dict[str, int] = {}
        for counts in self._storage.values():
            for name, count in counts.items():
                total[name] = total.get(name, 0) + count
        return total
