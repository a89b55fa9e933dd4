"""Two ranks whose batches come in parts, or whose micro-batches are cut: the same training, and the same end of all ranks."""

from __future__ import annotations

import itertools
import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import runkit
import torch
import trainkit

from lfdata.loader.budget import FEWEST_SLOTS
from lfdata.loader.slots import PAGE

pytestmark = pytest.mark.slow

# A share of a page: 1024 numbers, less what is known of the rows.
SPLIT = {"max_bytes": 16384, "over": "split"}
STEPS = 10


@pytest.fixture(scope="module")
def lengths() -> Iterator[Path]:
    """64 rows of 1 to 700 numbers: of the four rows that a rank has in a step some fit, others need up to four parts."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        chance = random.Random(1)
        yield trainkit.write_lengths(Path(folder) / "rows", [chance.choice([1, 30, 400, 700]) for _ in range(64)])


def batches(found: dict[str, Any]) -> list[list[list[int]]]:
    """Samples of each batch, part by part."""
    whole: list[list[list[int]]] = [[]]
    for indices, ends in zip(found["seen"], found["ends"], strict=True):
        whole[-1].append(indices)
        if ends:
            whole.append([])
    assert whole.pop() == []
    return whole


def samples(found: dict[str, Any]) -> list[list[int]]:
    return [list(itertools.chain(*parts)) for parts in batches(found)]


def close(one: list[list[float]], other: list[list[float]]) -> None:
    for first, second in zip(one, other, strict=True):
        torch.testing.assert_close(torch.tensor(first), torch.tensor(second), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_parts_train_what_whole_batches_do(lengths: Path, tmp_path: Path, accumulate: int) -> None:
    told: dict[str, Any] = {
        "ragged": True,
        "steps": STEPS,
        "dropout": 0.0,
        "accumulate": accumulate,
        "ddp": {"checksum_every": 1},
    }
    whole = runkit.run(tmp_path / "whole", lengths, 2, **told)
    parts = runkit.run(tmp_path / "parts", lengths, 2, **told, loader=SPLIT)
    assert parts[0]["bits"] == parts[1]["bits"]
    close(parts[0]["parameters"], whole[0]["parameters"])
    assert parts[0]["loss"] == pytest.approx(whole[0]["loss"], rel=1e-5)
    for one, other in zip(whole, parts, strict=True):
        assert samples(other) == one["seen"] and len(one["seen"]) == STEPS * accumulate
    counts = [[len(batch) for batch in batches(found)] for found in parts]
    assert counts[0] == counts[1] and min(counts[0]) == 1 and max(counts[0]) >= (3 if accumulate == 1 else 2)


@pytest.mark.fault
@pytest.mark.parametrize("accumulate", [1, 2])
def test_kill_9_between_parts_ends_in_the_same_bits(lengths: Path, tmp_path: Path, accumulate: int) -> None:
    told: dict[str, Any] = {"ragged": True, "steps": STEPS, "accumulate": accumulate, "loader": SPLIT}
    told["checkpoint"] = {"every": 2, "keep": 2}
    whole = runkit.run(tmp_path / "whole", lengths, 2, **told)
    assert whole[0]["bits"] == whole[1]["bits"]
    for rank, found in enumerate(whole):
        # A part that is not the last of its batch, in the middle of the run.
        at = next(place for place, ends in enumerate(found["ends"]) if not ends and place >= len(found["ends"]) // 2)
        killed = runkit.run(tmp_path / str(rank), lengths, 2, fails=True, **told, harm=("kill", rank, at))
        assert killed[rank] == {} and killed[1 - rank]["error"] == "PeerError"
        again = runkit.run(tmp_path / str(rank), lengths, 2, **told)
        assert len(again[rank]["seen"]) < len(found["seen"]), "it began anew"
        assert [one["bits"] for one in again] == [one["bits"] for one in whole]
        assert samples(again[rank]) == samples(found)[-len(samples(again[rank])) :]


def test_an_epoch_beyond_the_budget_ends_all_ranks_after_a_checkpoint(tmp_path: Path) -> None:
    """And they go on from it with a larger budget, sample by sample."""

    chance = random.Random(4)
    data = trainkit.write_lengths(tmp_path / "rows", [chance.randrange(20, 3000) for _ in range(64)])

    def least(epoch: int) -> int:
        # What the largest rank needs: that of the error.
        loader = trainkit.make_loader(data, max_bytes="1GiB", rank=0, world_size=2)
        other = trainkit.make_loader(data, max_bytes="1GiB", rank=1, world_size=2)
        size = max(one._budget.epoch(epoch).slot(1) for one in (loader, other))  # type: ignore[union-attr]
        return PAGE + FEWEST_SLOTS * -(-size // PAGE) * PAGE

    needed = [least(epoch) for epoch in range(30)]
    worse = next(epoch for epoch, need in enumerate(needed) if need > needed[0])
    told: dict[str, Any] = {"ragged": True, "steps": 8 * worse + 5}
    whole = runkit.run(tmp_path / "whole", data, 2, **told)
    small, large = {"max_bytes": max(needed[:worse])}, {"max_bytes": max(needed[: worse + 1])}
    ended = runkit.run(tmp_path / "run", data, 2, fails=True, **told, loader=small)
    assert [one["error"] for one in ended] == ["BudgetError"] * 2
    assert [one["seen"] for one in ended] == [one["seen"][: 8 * worse] for one in whole]
    rest = runkit.run(tmp_path / "run", data, 2, **told, loader=large)
    assert [one["seen"] for one in rest] == [one["seen"][8 * worse :] for one in whole]
    assert [one["bits"] for one in rest] == [one["bits"] for one in whole]


def test_inf_in_one_part_makes_all_skip_the_step_and_names_the_samples_of_the_part(lengths: Path, tmp_path: Path) -> None:
    told: dict[str, Any] = {"ragged": True, "steps": 6, "loader": SPLIT, "ddp": {"checksum_every": 1}}
    plain = runkit.run(tmp_path / "plain", lengths, 2, **told)[1]
    step, parts = next((step, parts) for step, parts in enumerate(batches(plain)) if len(parts) > 2)
    at = sum(map(len, batches(plain)[:step])) + 1
    found = runkit.run(tmp_path / "inf", lengths, 2, **told, harm=("inf", 1, at))
    assert [one["skipped"] for one in found] == [1, 1]
    assert found[0]["bits"] == found[1]["bits"] != plain["bits"]
    (event,) = runkit.events(tmp_path / "inf", "skipped step")
    assert event["step"] == step + 1 and [cause[0] for cause in event["bad"]] == [1]
    assert event["keys"] == [[], [f"point-{index}" for index in parts[1]]]


# -- admission ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def uneven() -> Iterator[Path]:
    """In stored order rank 0 has small rows and rank 1 large ones."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        yield trainkit.write_lengths(Path(folder) / "rows", [(900 if number % 8 >= 4 else 20) + number for number in range(64)])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_micro_batches_that_are_cut_on_one_rank_alone(uneven: Path, tmp_path: Path, accumulate: int) -> None:
    told: dict[str, Any] = {"ragged": True, "dropout": 0.0, "accumulate": accumulate, "loader": {"shuffle": "sequential"}}
    told |= {"steps": 16, "ddp": {"checksum_every": 1}}
    whole = runkit.run(tmp_path / "whole", uneven, 2, **told)
    cut = runkit.run(tmp_path / "cut", uneven, 2, **told, activations={"admit_mb": 0.15 / accumulate})
    assert cut[0]["bits"] == cut[1]["bits"]
    close(cut[0]["parameters"], whole[0]["parameters"])
    assert cut[0]["loss"] == pytest.approx(whole[0]["loss"], rel=1e-5)
    assert cut[0]["admission"]["split"] == 0 and cut[1]["admission"]["split"] > 4
    assert cut[0]["seen"] == whole[0]["seen"] and len(cut[1]["seen"]) > len(whole[1]["seen"])
    assert list(itertools.chain(*cut[1]["seen"])) == list(itertools.chain(*whole[1]["seen"]))


def test_inf_in_what_one_rank_cut(uneven: Path, tmp_path: Path) -> None:
    told: dict[str, Any] = {"ragged": True, "loader": {"shuffle": "sequential"}, "steps": 14, "ddp": {"checksum_every": 1}}
    told["activations"] = {"admit_mb": 0.15}
    plain = runkit.run(tmp_path / "plain", uneven, 2, **told)
    at = next(place for place, rows in enumerate(plain[1]["seen"]) if len(rows) < 4) + 1
    found = runkit.run(tmp_path / "inf", uneven, 2, **told, harm=("inf", 1, at))
    assert [one["skipped"] for one in found] == [1, 1] and found[0]["bits"] == found[1]["bits"]
    (event,) = runkit.events(tmp_path / "inf", "skipped step")
    assert event["keys"] == [[], [f"point-{index}" for index in plain[1]["seen"][at]]]


def test_parts_that_are_cut_again(lengths: Path, tmp_path: Path) -> None:
    told: dict[str, Any] = {"ragged": True, "steps": STEPS, "dropout": 0.0, "ddp": {"checksum_every": 1}}
    whole = runkit.run(tmp_path / "whole", lengths, 2, **told)
    cut = runkit.run(tmp_path / "cut", lengths, 2, **told, loader=SPLIT, activations={"admit_mb": 0.05})
    assert cut[0]["bits"] == cut[1]["bits"]
    close(cut[0]["parameters"], whole[0]["parameters"])
    assert max(found["admission"]["split"] for found in cut) > 0
    for one, other in zip(whole, cut, strict=True):
        assert list(itertools.chain(*other["seen"])) == list(itertools.chain(*one["seen"]))


@pytest.mark.fault
def test_a_run_whose_micro_batches_are_cut_is_killed_and_goes_on(uneven: Path, tmp_path: Path) -> None:
    """It learns anew what they take, so only rounding differs."""
    told: dict[str, Any] = {"ragged": True, "dropout": 0.0, "loader": {"shuffle": "sequential"}, "steps": 16}
    told |= {"ddp": {"checksum_every": 1}, "activations": {"admit_mb": 0.15}, "checkpoint": {"every": 2, "keep": 2}}
    whole = runkit.run(tmp_path / "whole", uneven, 2, **told)
    at = len(whole[1]["seen"]) - 3
    assert whole[1]["admission"]["split"] > 4 and len(whole[1]["seen"][at]) < 4
    killed = runkit.run(tmp_path / "killed", uneven, 2, fails=True, **told, harm=("kill", 1, at))
    assert killed[1] == {} and killed[0]["error"] == "PeerError"
    again = runkit.run(tmp_path / "killed", uneven, 2, **told)
    assert again[0]["bits"] == again[1]["bits"] and again[0]["step"] == 16
    close(again[0]["parameters"], whole[0]["parameters"])
