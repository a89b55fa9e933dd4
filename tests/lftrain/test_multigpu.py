"""Two ranks on two GPUs under NCCL: what test_ranks.py shows with gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
import runkit
import torch

COUNT = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [pytest.mark.multigpu, pytest.mark.skipif(COUNT < 2, reason=f"needs two GPUs, there are {COUNT}")]


def test_two_gpus_train_what_one_does(points: Path, tmp_path: Path) -> None:
    (one,) = runkit.run(tmp_path / "one", points, device="cuda", steps=8, dropout=0.0)
    two = runkit.run(tmp_path / "two", points, 2, device="cuda", steps=8, dropout=0.0, ddp={"checksum_every": 2})
    assert two[0]["bits"] == two[1]["bits"]
    for found, wanted in zip(two[0]["parameters"], one["parameters"], strict=True):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=1e-3, atol=1e-4)
    seen = [sorted([*left, *right]) for left, right in zip(two[0]["seen"], two[1]["seen"], strict=True)]
    assert seen == [sorted(step) for step in one["seen"]]


def test_micro_batches_on_two_gpus(points: Path, tmp_path: Path) -> None:
    whole = runkit.run(tmp_path / "whole", points, 2, device="cuda", steps=6, dropout=0.0)
    parts = runkit.run(tmp_path / "parts", points, 2, device="cuda", steps=6, dropout=0.0, accumulate=2)
    assert parts[0]["bits"] == parts[1]["bits"]
    for found, wanted in zip(parts[0]["parameters"], whole[0]["parameters"], strict=True):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=1e-3, atol=1e-4)


def test_inf_on_one_gpu_is_skipped_on_both_and_named(points: Path, tmp_path: Path) -> None:
    found = runkit.run(tmp_path, points, 2, device="cuda", steps=6, harm=("inf", 1, 2), ddp={"checksum_every": 1})
    assert [one["skipped"] for one in found] == [1, 1] and found[0]["bits"] == found[1]["bits"]
    (event,) = runkit.events(tmp_path, "skipped step")
    assert event["step"] == 3 and [cause[0] for cause in event["bad"]] == [1]


def test_fp16_on_two_gpus_has_one_scale(points: Path, tmp_path: Path) -> None:
    precision = {"mode": "fp16", "scale_init": 16.0}
    found = runkit.run(tmp_path, points, 2, device="cuda", steps=5, harm=("inf", 0, 1), precision=precision)
    assert [one["skipped"] for one in found] == [1, 1] and found[0]["bits"] == found[1]["bits"]


def test_powersgd_on_two_gpus(points: Path, tmp_path: Path) -> None:
    chosen = {"hook": "powersgd", "powersgd_rank": 1, "powersgd_start": 2, "checksum_every": 1}
    found = runkit.run(tmp_path, points, 2, device="cuda", steps=8, harm=("inf", 1, 4), ddp=chosen)
    assert [one["skipped"] for one in found] == [1, 1] and found[0]["bits"] == found[1]["bits"]


def test_a_gpu_that_drifts_is_named(points: Path, tmp_path: Path) -> None:
    told = {"device": "cuda", "steps": 6, "harm": ("drift", 1, 2), "ddp": {"checksum_every": 2}}
    for one in runkit.run(tmp_path, points, 2, fails=True, **told):
        assert one["error"] == "DivergenceError" and "step 4: rank 1" in one["message"]


def test_a_checkpoint_of_two_gpus_goes_on_with_one(points: Path, tmp_path: Path) -> None:
    runkit.run(tmp_path / "two", points, 2, device="cuda", steps=4, dropout=0.0)
    (on,) = runkit.run(tmp_path / "two", points, device="cuda", steps=8, dropout=0.0)
    (whole,) = runkit.run(tmp_path / "whole", points, device="cuda", steps=8, dropout=0.0)
    for found, wanted in zip(on["parameters"], whole["parameters"], strict=True):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("harm", ["kill", "stop"])
def test_a_gpu_rank_that_is_gone_is_named(points: Path, tmp_path: Path, harm: str) -> None:
    task = runkit.write_task(tmp_path, points, device="cuda", steps=5000, harm=(harm, 1, 3))
    process = runkit.start(task, 2)
    output, _ = process.communicate(timeout=180)
    assert process.returncode != 0
    assert "rank 1" in output and ("is gone" in output or "failed" in output)
