"""The GPU benchmarks, as far as a CPU goes: the same samples both ways, the tests of quality, and all parts from end to end."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import data, quality
from benchmarks.gpu.baseline import Files, TorchLoader, random_part
from benchmarks.gpu.rungs import rungs, waiting
from lfdata import Loader
from lfdata import transforms as T
from lfdata.errors import OptionError

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpu") / "data"
    data.make(None, folder, samples=40, vocab=100, state=3, horizon=4, action=2)
    return folder


def test_files_and_shards_hold_the_same_samples(made: Path) -> None:
    files = Files(made, 32)
    fields = {"image": [T.Resize((32, 32))], "tokens": [T.Tokens(data.LENGTH)], "state": None, "action": None}
    loader = Loader(made / data.SHARDS, 40, fields, seed=0, shuffle="sequential", engine="inline", threads=1)
    batch = next(iter(loader))
    assert len(files) == data.read(made).samples == 40
    for name in ("tokens", "state", "action"):
        plain = torch.stack([files[number][name] for number in range(40)])
        assert torch.equal(batch[name].to(plain.dtype), plain), name
    assert batch["image"].shape == (40, 32, 32, 3) and files[0]["image"].shape == (32, 32, 3)
    # Samples share pictures when there are more of them.
    assert torch.equal(batch["image"][0], batch["image"][24]) and not torch.equal(batch["image"][0], batch["image"][1])


def test_data_that_is_there_is_not_made_again_and_what_is_no_data_is_named(made: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="there already"):
        data.make(None, made, samples=1, vocab=10)
    with pytest.raises(OptionError, match=r"benchmarks\.gpu\.data"):
        data.read(tmp_path)


def test_batches_of_the_plain_loader_are_what_the_model_takes(made: Path) -> None:
    loader = TorchLoader(made, 32, 8, 0, False)
    found = list(loader)
    assert len(found) == 5 and found[0]["image"].dtype == torch.uint8 and found[0]["action"].shape == (8, 4, 2)
    loader.close()


def test_random_parts_lie_in_the_picture_and_differ() -> None:
    torch.manual_seed(0)
    found = [random_part(512, 384) for _ in range(200)]
    assert all(0 <= left < right <= 512 and 0 <= top < bottom <= 384 for left, top, right, bottom in found)
    areas = [(right - left) * (bottom - top) / (512 * 384) for left, top, right, bottom in found]
    assert min(areas) < 0.15 and max(areas) > 0.8 and len(set(found)) > 190


def test_a_rung_changes_one_thing() -> None:
    order = ["a", "b", "c", "d", "e32", "e", "f"]
    found = rungs(4)
    changed = []
    for one, other in itertools.pairwise(order):
        before, after = found[one], found[other]
        changed.append({name for name in vars(before) if getattr(before, name) != getattr(after, name)} - {"workers"})
    assert changed == [{"loader"}, {"fused"}, {"compiled"}, {"graph"}, {"weights"}, {"frozen"}]


def test_waiting_is_the_share_of_data_and_copies() -> None:
    assert waiting([{"data": 1.0, "copy": 1.0, "forward": 2.0}, {"forward": 4.0}]) == 0.25
    assert waiting([{}]) is None


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ([1.0, 2.0, 3.0], 1 / 8),
        ([-1.0, -2.0, -3.0], 1.0),
        # Of the eight sums 6, 4, 2, 0, 0, -2, -4, -6 five are at least 0.
        ([-3.0, 1.0, 2.0], 5 / 8),
        ([0.0, 0.0], 1.0),
    ],
)
def test_the_share_of_signs_is_exact(values: list[float], wanted: float) -> None:
    assert quality.sign_flips(values) == wanted


def pairs(plain: list[float], stack: list[float]) -> list[dict[str, dict[str, float]]]:
    return [{"plain": {"held_out": one}, "stack": {"held_out": other}} for one, other in zip(plain, stack, strict=True)]


def test_a_worse_stack_is_seen_and_an_equal_one_is_not_worse() -> None:
    plain = [1.0 + 0.01 * number for number in range(10)]
    worse = quality.verdict(pairs(plain, [1.2 * one for one in plain]))
    assert worse["worse_p"] < 0.01 and worse["not_worse_p"] > 0.9 and worse["difference_share"] == pytest.approx(0.2)
    equal = quality.verdict(pairs(plain, [one + 0.005 * (-1) ** place for place, one in enumerate(plain)]))
    assert equal["worse_p"] > 0.3 and equal["not_worse_p"] < 0.01


@pytest.mark.slow
def test_all_parts_run_and_are_recorded(tmp_path: Path) -> None:
    words = ["-m", "benchmarks.gpu.ladder", "--tiny", "--device", "cpu", "--output", str(tmp_path / "record.json")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tools")])}
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=600, check=False, cwd=ROOT, env=environment
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads((tmp_path / "record.json").read_text())["results"]
    ladder = found["ladder-4"]["rungs"]
    assert set(ladder) == {"a0", "loop", "a", "b", "c", "d", "graph", "e32", "e", "f"}
    assert all(len(one["rounds_ms"]) == 2 and one["loss"] > 0 for one in ladder.values())
    assert any("there is no GPU" in line for line in ladder["e"]["events"])
    assert ladder["d"]["compile"]["compilations"] >= 4
    assert any("19 of 19 frozen linear layers" in line for line in ladder["f"]["events"])
    assert ladder["f"]["compile"]["fallbacks"] == 0
    assert set(found["checkpointing-4"]["curve"]) == {"none", "all", "budget 75%", "budget 50%", "budget 25%"}
    assert set(found["torch-budget-4"]["curve"]) == {"100%", "50%"}
    assert len(found["costs-4"]["settings"]) == 6 and len(found["deterministic-4"]["settings"]) == 2
    # Numbers of fp8 are others.
    assert all(pair["plain"]["held_out"] != pair["stack"]["held_out"] for pair in found["quality-fp8"]["pairs"])
    for part in ("quality", "quality-fp8"):
        assert 0 <= found[part]["worse_p"] <= 1 and len(found[part]["pairs"]) == 3
