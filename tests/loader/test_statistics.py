"""Time by stage, waits, and the trace: what they say is what happened."""

from __future__ import annotations

import itertools
import json
import os
import time
from pathlib import Path
from typing import Any

import batchkit
import numpy as np
import pytest

import lfdata.transforms as T
from lfdata import Loader
from lfdata.loader.jobs import Done, Job
from lfdata.loader.spans import DECODE, READ, STAGES
from lfdata.loader.statistics import Histogram, Statistics

FIELDS: dict[str, Any] = {"image": [T.RandomResizedCrop(16), T.ColorJitter(0.4)], "label": None}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return batchkit.write_pictures(tmp_path_factory.mktemp("pictures") / "d", 48)


def test_percentiles_are_of_the_values() -> None:
    found = Histogram()
    assert found.report() == {"count": 0, "seconds": 0.0, "p50_ms": 0.0, "p95_ms": 0.0, "p99_ms": 0.0}
    values = np.exp(np.random.default_rng(0).normal(-6, 2, 5000))
    for value in values.tolist():
        found.add(value)
    report = found.report()
    assert report["count"] == 5000 and abs(report["seconds"] - values.sum()) < 1e-6
    for percent in (50, 95, 99):
        true = 1000 * float(np.quantile(values, percent / 100, method="inverted_cdf"))
        assert true <= report[f"p{percent}_ms"] * (1 + 1e-9) <= true * 1.0905 * (1 + 1e-9)
    found.add(0.0)
    found.add(1e9)
    assert found.report()["count"] == 5002


@pytest.mark.parametrize("engine", ["inline", "thread", "process"])
def test_stages_and_waits(pictures: Path, engine: str) -> None:
    loader = Loader(pictures, 8, FIELDS, engine=engine, threads=1)
    assert loader.stats()["stages"]["decode"]["count"] == 0 and loader.stats()["faults_per_1000"] == 0
    for _ in range(3):
        for _ in loader:
            pass
    stats = loader.stats()
    stages = stats["stages"]
    assert list(stages) == list(STAGES)
    # Steps that were delivered, and those of the slots that were made ahead.
    most = 18 + stats["slots"] * min(6, stats["steps_a_slot"])
    for name in ("plan", "read", "decode", "augment"):
        assert 18 <= stages[name]["count"] <= most
        assert 0 < stages[name]["p50_ms"] <= stages[name]["p95_ms"] <= stages[name]["p99_ms"]
    assert stages["mix"]["count"] == 0
    waits = 18 // stats["steps_a_slot"] + (18 % stats["steps_a_slot"] > 0)
    assert stats["wait"]["count"] == sum(stats["ready"].values()) >= waits
    assert 0 < stats["waiting"] <= 1 and 0 < stats["occupancy"] <= 1
    loader.close()


def test_a_value_that_is_more_is_moved() -> None:
    found, expected = Histogram(), Histogram()
    for value in (0.001, 0.01):
        found.add(value)
    found.more(0.001, 0.003)
    for value in (0.004, 0.01):
        expected.add(value)
    assert found.report() == pytest.approx(expected.report())


@pytest.mark.parametrize("engine", ["inline", "thread", "process"])
def test_parts_of_a_step_are_a_step(tmp_path: Path, engine: str) -> None:
    path = batchkit.write_numbers(tmp_path / "d", 60, lengths=np.random.default_rng(0).integers(0, 3000, 60).tolist())
    loader = Loader(path, 10, engine=engine, threads=1, max_bytes="96KiB", over="split", isolate=engine == "process")
    parts = rows = 0
    for _ in range(2):
        for batch in loader:
            parts, rows = parts + 1, rows + len(batch["label"])
    assert rows == 120 and parts > 30, "steps are not cut"
    stats, statistics = loader.stats(), loader._pipelines[0].statistics
    # With those that were made ahead, of the epoch after.
    assert 12 <= stats["stages"]["read"]["count"] <= 12 + stats["slots"]
    assert 12 <= stats["stages"]["plan"]["count"] <= 12 + stats["slots"]
    # All rows but those of the first answer, and those that were made ahead.
    assert 120 - 10 <= statistics._rows <= 120 + 10 * stats["slots"]
    loader.close()


def test_a_step_takes_what_its_parts_take_together() -> None:
    statistics, number = Statistics(1), itertools.count()

    def part(epoch: int, step: int, low: int, seconds: float) -> None:
        job = Job(next(number), epoch, step, 1, 0, rows=(low, low + 4), part=(low // 4, 3))
        spans = ((READ, 0.0, seconds, 0), (DECODE, 0.0, 2 * seconds, 0), (DECODE, 0.0, seconds, 0))
        statistics.worked(job, Done(job.number, 1, spans=spans, process=7, faults=100 * job.number), 4)

    # In any order, and in between those of another step.
    for low, step, seconds in ((4, 0, 0.001), (0, 1, 0.01), (0, 0, 0.002), (4, 1, 0.02), (8, 0, 0.003), (8, 1, 0.03)):
        part(0, step, low, seconds)
    stages = statistics.report()["stages"]
    expected = Histogram()
    for seconds in (0.006, 0.06):
        expected.add(seconds)
    assert stages["read"] == pytest.approx(expected.report())
    assert stages["decode"]["count"] == 2 and stages["decode"]["seconds"] == pytest.approx(0.198)
    # Made once more.
    part(0, 1, 0, 0.001)
    assert statistics.report()["stages"]["read"]["count"] == 3
    assert statistics.report()["faults_per_1000"] == pytest.approx(1000 * 600 / (6 * 4))


def test_a_slow_consumer_finds_slots_ready_and_a_fast_one_waits(pictures: Path) -> None:
    slow = Loader(pictures, 8, {"image": [T.RandomResizedCrop(300)]}, engine="thread", threads=1)
    batches = iter(slow)
    for _ in range(2):
        next(batches)
    before = slow.stats()["ready"]
    for _ in range(4):
        time.sleep(0.3)
        next(batches)
    ready = {slots: times - before.get(slots, 0) for slots, times in slow.stats()["ready"].items()}
    assert sum(times for slots, times in ready.items() if slots >= 1) >= 3
    slow.close()
    fast = Loader(pictures, 8, {"image": [T.RandomResizedCrop(300)]}, engine="inline", threads=1)
    for _ in fast:
        pass
    stats = fast.stats()
    assert set(stats["ready"]) == {0} and stats["wait"]["seconds"] > 0.5 * stats["stages"]["decode"]["seconds"]


def _events(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())
    return found


@pytest.mark.parametrize("engine", ["thread", "process"])
def test_the_trace_has_every_stage_of_every_step(pictures: Path, tmp_path: Path, engine: str) -> None:
    began = time.perf_counter()
    loader = Loader(pictures, 8, FIELDS, engine=engine, threads=1, trace=tmp_path / "trace.json", isolate=True)
    for _ in loader:
        pass
    half = _events(tmp_path / "trace.json")
    loader.close()
    ended = time.perf_counter()
    events = _events(tmp_path / "trace.json")
    assert events == half
    spans = [event for event in events if event["ph"] == "X"]
    assert all(began * 1e6 <= event["ts"] <= event["ts"] + event["dur"] <= ended * 1e6 for event in spans)
    steps = {event["args"]["step"] for event in spans if event["name"] == "decode" and event["args"]["epoch"] == 0}
    assert steps == set(range(0, 6, loader.stats()["steps_a_slot"]))
    processes = {event["pid"] for event in spans if event["name"] == "decode"}
    assert (processes == {os.getpid()}) == (engine == "thread") and len(processes) == 1
    # Nothing overlaps within a lane.
    for _, group in itertools.groupby(
        sorted(spans, key=lambda e: (e["pid"], e["tid"], e["ts"])), lambda e: (e["pid"], e["tid"])
    ):
        for one, other in itertools.pairwise(group):
            assert one["ts"] + one["dur"] <= other["ts"] + 1
    assert sum(event["name"] == "wait" for event in spans) >= 1
    # Closed, it goes on without a trace.
    assert sum(1 for _ in loader) == 6
    assert _events(tmp_path / "trace.json") == events
    loader.close()


def test_statistics_of_an_iteration_that_was_left_stay(tmp_path: Path) -> None:
    path = batchkit.write_numbers(tmp_path / "d", 64)
    loader = Loader(path, 4, ["label"], engine="inline")
    for number, _ in enumerate(loader):
        if number == 5:
            break
    found = loader.stats()
    assert found["wait"]["count"] > 0 and found["slots"] == 0
    loader.close()
    assert loader.stats()["wait"] == found["wait"]
