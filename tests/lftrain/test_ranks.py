"""Two ranks under torchrun: the same as one, and what happens when one of them fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import runkit
import torch

pytestmark = pytest.mark.slow


def close(one: list[list[float]], other: list[list[float]]) -> None:
    for first, second in zip(one, other, strict=True):
        torch.testing.assert_close(torch.tensor(first), torch.tensor(second), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_two_ranks_train_what_one_does(points: Path, tmp_path: Path, accumulate: int) -> None:
    (alone,) = runkit.run(tmp_path / "one", points, steps=6, dropout=0.0)
    both = runkit.run(tmp_path / "two", points, 2, steps=6, dropout=0.0, accumulate=accumulate, ddp={"checksum_every": 1})
    assert both[0]["bits"] == both[1]["bits"]
    close(both[0]["parameters"], alone["parameters"])


def test_inf_on_one_rank_makes_all_skip_the_same_step(points: Path, tmp_path: Path) -> None:
    found = runkit.run(tmp_path, points, 2, steps=6, harm=("inf", 1, 2), ddp={"checksum_every": 1})
    assert [one["skipped"] for one in found] == [1, 1]
    assert found[0]["bits"] == found[1]["bits"]
    (event,) = runkit.events(tmp_path, "skipped step")
    assert event["step"] == 3 and [cause[0] for cause in event["bad"]] == [1]
    assert "rank 1" in event["message"] and "'0.weight'" in event["message"]
    keys = [f"point-{index}" for index in found[1]["seen"][2]]
    assert event["keys"] == [[], keys]


def test_a_skipped_step_is_told_once(points: Path, tmp_path: Path) -> None:
    process = runkit.start(runkit.write_task(tmp_path, points, steps=4, harm=("inf", 1, 1)), 2)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    (line,) = [line for line in output.splitlines() if "skipped step" in line]
    seen = json.loads((tmp_path / "task-1.json").read_text())["seen"][1]
    assert "rank 1" in line and "'0.weight'" in line and all(f"point-{index}" in line for index in seen)


def test_weights_below_one_train_what_whole_ones_do(points: Path, tmp_path: Path) -> None:
    whole = runkit.run(tmp_path / "whole", points, 2, steps=4, dropout=0.0)
    parts = runkit.run(tmp_path / "parts", points, 2, steps=4, dropout=0.0, unit=2.0**-10)
    assert [one["bits"] for one in parts] == [one["bits"] for one in whole]
    assert parts[0]["loss"] == whole[0]["loss"]


def test_a_rank_in_which_nothing_counts_leaves_the_step_to_the_others(points: Path, tmp_path: Path) -> None:
    found = runkit.run(tmp_path, points, 2, steps=4, harm=("nothing", 1, 2), ddp={"checksum_every": 1})
    assert [one["skipped"] for one in found] == [0, 0] and found[0]["bits"] == found[1]["bits"]


def test_a_step_in_which_nothing_counts_is_skipped_by_all(points: Path, tmp_path: Path) -> None:
    before, after = (
        runkit.run(tmp_path / f"{steps}", points, 2, steps=steps, harm=("nothing", "all", 2), ddp={"checksum_every": 1})
        for steps in (2, 3)
    )
    assert [one["skipped"] for one in after] == [1, 1]
    assert {one["bits"] for one in after} == {before[0]["bits"]}


def test_a_count_that_cannot_be_stops_all_ranks_and_is_named(points: Path, tmp_path: Path) -> None:
    found = runkit.run(tmp_path, points, 2, fails=True, steps=6, harm=("odd", 1, 2))
    assert {one["error"] for one in found} == {"LossError"}
    assert all("step 3: the loss gives a count of -4 in micro-batch 0 of rank 1" in one["message"] for one in found)


def test_inf_with_a_scale_halves_it_on_all_ranks(points: Path, tmp_path: Path) -> None:
    found = runkit.run(
        tmp_path,
        points,
        2,
        steps=5,
        harm=("inf", 1, 1),
        precision={"mode": "fp16", "scale_init": 16.0},
        ddp={"checksum_every": 1},
    )
    assert [one["skipped"] for one in found] == [1, 1] and found[0]["bits"] == found[1]["bits"]


def test_powersgd_trains_and_recovers_from_inf(points: Path, tmp_path: Path) -> None:
    chosen = {"hook": "powersgd", "powersgd_rank": 1, "powersgd_start": 2, "checksum_every": 1}
    found = runkit.run(tmp_path, points, 2, steps=8, harm=("inf", 1, 4), ddp=chosen)
    assert [one["skipped"] for one in found] == [1, 1] and found[0]["bits"] == found[1]["bits"]


def test_powersgd_with_several_buckets_sends_them_in_order(points: Path, tmp_path: Path) -> None:
    chosen = {"hook": "powersgd", "powersgd_rank": 1, "powersgd_start": 2, "bucket_mb": 1e-4, "checksum_every": 1}
    found = runkit.run(tmp_path, points, 2, steps=60, ddp=chosen)
    assert [one["step"] for one in found] == [60, 60] and found[0]["bits"] == found[1]["bits"]


def test_experts_without_tokens_have_zeros_on_every_rank(points: Path, tmp_path: Path) -> None:
    found = runkit.run(tmp_path, points, 2, steps=4, experts=True, ddp={"checksum_every": 1})
    assert found[0]["none"] == found[1]["none"] == []
    assert found[0]["bits"] == found[1]["bits"]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("hook", ["allreduce", "powersgd"])
def test_a_parameter_that_the_last_micro_batch_does_not_use_is_named(
    points: Path, tmp_path: Path, hook: str, accumulate: int
) -> None:
    told = {"unused": [0, 1], "ddp": {"hook": hook, "checksum_every": 1}, "steps": 4, "accumulate": accumulate}
    found = runkit.run(tmp_path, points, 2, fails=True, **told)
    assert {one["error"] for one in found} == {"ConfigError"}
    for rank, one in enumerate(found):
        assert f"'spare.weight' (and 1 more) took no part in the last micro-batch of a step on rank {rank}" in one["message"]
        assert "find_unused = true" in one["message"]
        assert len(one["seen"]) == accumulate
    untouched = runkit.run(tmp_path / "none", points, 2, **{**told, "unused": [], "steps": 0})
    assert {one["bits"] for one in found} == {untouched[0]["bits"]}


def test_a_parameter_that_one_rank_does_not_use_is_named_by_it_and_quoted(points: Path, tmp_path: Path) -> None:
    found = runkit.run(tmp_path, points, 2, fails=True, steps=4, unused=[1], accumulate=2)
    assert [one["error"] for one in found] == ["PeerError", "ConfigError"]
    assert all("'spare.weight'" in one["message"] and "rank 1" in one["message"] for one in found)
    assert found[0]["bits"] == found[1]["bits"]


def test_find_unused_trains_what_the_last_micro_batch_does_not_use(points: Path, tmp_path: Path) -> None:
    told = {"steps": 4, "accumulate": 2, "ddp": {"find_unused": True, "checksum_every": 1}}
    for unused in ([0, 1], [1]):
        found = runkit.run(tmp_path / f"{len(unused)}", points, 2, unused=unused, **told)
        assert found[0]["bits"] == found[1]["bits"]


def test_a_loss_that_goes_past_ddp_is_told(points: Path, tmp_path: Path) -> None:
    found = runkit.run(tmp_path, points, 2, fails=True, steps=4, past=True)
    assert {one["error"] for one in found} == {"ConfigError"}
    assert all("4 of 4 parameters were not sent between ranks: the loss must call the model" in one["message"] for one in found)


def test_a_rank_that_drifts_is_named(points: Path, tmp_path: Path) -> None:
    found = runkit.run(tmp_path, points, 2, fails=True, steps=6, harm=("drift", 1, 2), ddp={"checksum_every": 2})
    for one in found:
        assert one["error"] == "DivergenceError"
        assert "step 4: rank 1" in one["message"] and "'0.weight'" in one["message"]


@pytest.mark.fault
@pytest.mark.parametrize("gone", [0, 1])
def test_a_rank_that_is_killed_is_named_by_the_others(points: Path, tmp_path: Path, gone: int) -> None:
    found = runkit.run(tmp_path, points, 2, fails=True, steps=50, harm=("kill", gone, 3))
    assert found[gone] == {}
    assert found[1 - gone]["error"] == "PeerError"
    assert f"rank {gone} is gone" in found[1 - gone]["message"] and "step 3" in found[1 - gone]["message"]


@pytest.mark.fault
def test_a_rank_that_hangs_is_named_within_the_timeout(points: Path, tmp_path: Path) -> None:
    task = runkit.write_task(tmp_path, points, steps=50, harm=("stop", 1, 3))
    process = runkit.start(task, 2)
    output, _ = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "rank 1 is gone" in output


@pytest.mark.fault
def test_a_rank_that_raises_is_quoted_by_the_others(points: Path, tmp_path: Path) -> None:
    found = runkit.run(tmp_path, points, 2, fails=True, steps=50, harm=("raise", 1, 3))
    assert "rank 1 failed: RuntimeError: this rank's own trouble" in found[0]["message"]
