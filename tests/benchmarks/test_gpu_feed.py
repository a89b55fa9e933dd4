"""The measurement of how a GPU is fed goes through all its parts without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import batchkit
import pytest
import torch

from benchmarks.gpu import activations, feed, ladder, steady
from benchmarks.gpu.arms import LADDER, NAMES, NEEDS, TORCH, Setting, arms, there
from benchmarks.record import RecordError
from lfdata import DeviceLoader, Loader


@pytest.mark.slow
def test_every_part_is_recorded(tmp_path: Path) -> None:
    data = batchkit.write_pictures(tmp_path / "d", 64, size=80)
    output = tmp_path / "record.json"
    arguments = ["--data", str(data), "--output", str(output), "--device", "cpu", "--tiny", "--repeats", "1"]
    assert feed.main(arguments) == 0
    found = json.loads(output.read_text())
    results = found["results"]
    assert set(results) == {"copies", "allocation", "vit", "small", "starved"} and found["options"]["data"] == "d"
    for part in ("vit", "small"):
        assert not results[part]["errors"]
        others = {name for name, module in NEEDS.items() if there(module)}
        assert set(results[part]["summary"]) == {
            "resident",
            "resident uint8",
            "resident beside decoding",
            *LADDER,
            *TORCH,
            *others,
        }
        assert all(len(repeats) == 1 and repeats[0]["rows"] > 0 for repeats in results[part]["repeats"].values())
        assert "idle_against_resident" in results[part]["summary"]["kernel"]
        assert "ms_against_rung_before" in results[part]["summary"]["feedback"]
    assert results["starved"]["rate_against_loader_alone"]["median"] > 0


def test_no_round_is_begun_that_does_not_fit(tmp_path: Path) -> None:
    data = batchkit.write_pictures(tmp_path / "d", 16, size=80)
    output = tmp_path / "record.json"
    arguments = [
        "--data",
        str(data),
        "--output",
        str(output),
        "--device",
        "cpu",
        "--tiny",
        "--budget",
        "0",
        "--only",
        "starved",
    ]
    assert feed.main(arguments) == 1
    assert "the time is over" in json.loads(output.read_text())["results"]["starved"]["stopped"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--only", "copies,nope"], "--only: there is no part 'nope'; there are copies, vit, small, starved"),
        (
            ["--arms", "kernel,nope"],
            "--arms: there is no way 'nope'; there are resident, resident uint8, resident beside decoding, loader,",
        ),
    ],
)
def test_unknown_parts_and_ways_are_refused(
    more: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        feed.main(["--data", str(tmp_path), "--output", str(tmp_path / "r.json"), "--device", "cpu", *more])
    assert exit_.value.code == 2 and said in capsys.readouterr().err


def test_every_way_has_its_name() -> None:
    setting = Setting(Path("d"), "image", torch.device("cpu"), 32, 1)
    assert list(arms(setting, 1, 1)) == [name for name in NAMES if name not in NEEDS or there(NEEDS[name])]


# -- other scripts of the same kind ---------------------------------------------------------------------------------------


def said_by(module: Any, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """With what a script ends: a status, or a line for status 1."""
    monkeypatch.setattr("sys.argv", [module.__name__, *arguments])
    with pytest.raises(SystemExit) as exit_:
        module.main()
    return exit_.value.code


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("module", [feed, steady, ladder])
def test_without_a_gpu_they_say_so(module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--data", str(tmp_path), "--output", str(tmp_path / "r.json")]
    assert "torch sees no GPU: --device cpu" in said_by(module, arguments, monkeypatch)


@pytest.mark.parametrize("option", ["--seen", "--held-out", "--scale"])
def test_shapes_are_one_at_least(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--output", str(tmp_path / "r.json"), "--device", "cpu", option, "0"]
    assert said_by(activations, arguments, monkeypatch) == 2
    assert f"{option} is a whole number from 1 on, not 0" in capsys.readouterr().err


def test_data_of_other_fields_are_told_in_a_line(tmp_path: Path) -> None:
    data, root = batchkit.write_pictures(tmp_path / "d", 8), Path(__file__).resolve().parents[2]
    words = ["--data", str(data), "--output", str(tmp_path / "r.json"), "--device", "cpu", "--batch", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.steady", *words],
        cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root / "tools")])},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "'tokens'" in done.stderr and "Error: " in done.stderr


@pytest.mark.filterwarnings("ignore:the loader has no batches")
def test_steady_state_needs_a_whole_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, device = batchkit.write_pictures(tmp_path / "d", 8), torch.device("cpu")
    monkeypatch.setattr(steady, "loader", lambda _case, path, batch, where: DeviceLoader(Loader(path, batch), where))
    with pytest.raises(RecordError, match="d has no whole batch of 9 rows: take a smaller --batch"):
        steady.within("native", data, 9, device, 1, 1)
