"""Runs that are killed at any moment and go on: the same bits, the same samples. Real processes."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
import runkit

STEPS = 24
CHECKPOINT = {"every": 2, "keep": 2}


@pytest.mark.fault
def test_kill_9_at_random_steps_ends_in_the_same_bits(points: Path, tmp_path: Path) -> None:
    (whole,) = runkit.run(tmp_path / "whole", points, steps=STEPS, checkpoint=CHECKPOINT)
    place, kills, chance = tmp_path / "killed", 0, random.Random(11)
    task = runkit.write_task(place, points, steps=STEPS, checkpoint=CHECKPOINT, pause=0.05)
    for _ in range(40):
        process = runkit.start(task)
        log, before = Path(str(place / "run") + "-seen-0.jsonl"), 0
        before = len(log.read_text().splitlines()) if log.exists() else 0
        goal, deadline = before + chance.randint(3, 9), time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            if log.exists() and len(log.read_text().splitlines()) >= goal:
                time.sleep(chance.random() * 0.05)
                process.send_signal(signal.SIGKILL)
                kills += 1
                break
            time.sleep(0.005)
        process.communicate(timeout=60)
        if process.returncode == 0:
            break
    found = json.loads((place / "task-0.json").read_text())
    assert kills >= 2, "it was hardly ever killed"
    assert found["step"] == STEPS and found["bits"] == whole["bits"]


def seen(results: list[dict[str, object]]) -> list[list[int]]:
    """Samples of each step, over all ranks."""
    steps = zip(*(result["seen"] for result in results), strict=True)  # type: ignore[call-overload]
    return [sorted(index for part in parts for index in part) for parts in steps]


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [(1, 2), (2, 1), (2, 2)])
def test_another_number_of_ranks_goes_on_with_the_same_samples(points: Path, tmp_path: Path, first: int, then: int) -> None:
    whole = seen(runkit.run(tmp_path / "whole", points, steps=12))
    begun = runkit.run(tmp_path / "two", points, first, steps=5, checkpoint=CHECKPOINT)
    gone_on = runkit.run(tmp_path / "two", points, then, steps=12, checkpoint=CHECKPOINT)
    assert seen(begun) + seen(gone_on) == whole
    if first == then:
        straight = runkit.run(tmp_path / "straight", points, first, steps=12, checkpoint=CHECKPOINT)
        assert [one["bits"] for one in gone_on] == [one["bits"] for one in straight]


@pytest.mark.slow
@pytest.mark.parametrize("hook", ["allreduce", "powersgd"])
@pytest.mark.parametrize("world", [2, 4])
def test_a_run_of_several_ranks_goes_on_to_the_same_bits(points: Path, tmp_path: Path, world: int, hook: str) -> None:
    """Also where the order in which ranks are added up depends on where a number lies, and with what PowerSGD keeps back."""
    chosen = {"ddp": {"hook": hook, "powersgd_rank": 1, "powersgd_start": 2, "checksum_every": 1}, "checkpoint": CHECKPOINT}
    whole = runkit.run(tmp_path / "whole", points, world, steps=9, **chosen)
    runkit.run(tmp_path / "two", points, world, steps=5, **chosen)
    again = runkit.run(tmp_path / "two", points, world, steps=9, **chosen)
    assert [one["bits"] for one in again] == [one["bits"] for one in whole]
    assert runkit.events(tmp_path / "two", "hook") == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("then", "world", "said"),
    [
        ({}, 4, "of ranks 2, and here are 4"),
        ({"powersgd_rank": 2}, 2, "of ddp.powersgd_rank 1, and here are 2"),
        ({"bucket_mb": 1e-4}, 2, "other buckets"),
        ({"hook": "allreduce"}, 2, "which is not used here"),
    ],
)
def test_powersgd_begins_anew_where_its_state_does_not_fit(
    points: Path, tmp_path: Path, then: dict[str, object], world: int, said: str
) -> None:
    chosen = {"hook": "powersgd", "powersgd_rank": 1, "powersgd_start": 2, "checksum_every": 1}
    runkit.run(tmp_path, points, 2, steps=5, ddp=chosen, checkpoint=CHECKPOINT)
    found = runkit.run(tmp_path, points, world, steps=9, ddp={**chosen, **then}, checkpoint=CHECKPOINT)
    assert {one["step"] for one in found} == {9} and len({one["bits"] for one in found}) == 1
    (event,) = runkit.events(tmp_path, "hook")
    assert said in event["message"]


@pytest.mark.slow
def test_sigterm_ends_the_run_after_the_step_and_it_goes_on(points: Path, tmp_path: Path) -> None:
    (whole,) = runkit.run(tmp_path / "whole", points, steps=STEPS)
    place = tmp_path / "ended"
    task = runkit.write_task(place, points, steps=STEPS, pause=0.1)
    process = runkit.start(task)
    log = Path(str(place / "run") + "-seen-0.jsonl")
    while process.poll() is None and not (log.exists() and len(log.read_text().splitlines()) >= 3):
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    found = json.loads((place / "task-0.json").read_text())
    assert 3 <= found["step"] < STEPS and not found["finished"]
    done = subprocess.run(runkit.command(task), env=runkit.environment(), timeout=120, check=False)
    assert done.returncode == 0
    assert json.loads((place / "task-0.json").read_text())["bits"] == whole["bits"]
