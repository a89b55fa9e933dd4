"""``lfbench run`` as a user runs it: real processes, real files. It finds a planted slowdown and wrong work, and says who is absent."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from benchmarks.commands import run_
from benchmarks.harness import environments, process, runner
from benchmarks.harness.process import AbsentError, Memory, SubjectError


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    for number in range(24):
        small = rng.integers(0, 256, (20, 30, 3), dtype=np.uint8)
        size = (300 + number, 280) if number % 2 else (260, 400)
        Image.fromarray(small).resize(size, Image.Resampling.BICUBIC).save(folder / f"{number:02d}.jpg", quality=90)
    return folder


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for module in (environments, runner):
        monkeypatch.setattr(module, "HOME", tmp_path)
    return tmp_path


def _run(*arguments: object) -> Any:
    return CliRunner().invoke(run_.command, [str(argument) for argument in arguments])


@pytest.mark.slow
def test_a_planted_slowdown_is_found(pictures: Path, home: Path) -> None:
    output = home / "record.json"
    common = ("--data", pictures, "--seconds", "0.05", "--workers", "0", "--output", output)
    # 20 ms a sample on top of a few: nothing else on a busy machine is like it.
    run = _run("W2", "--subjects", "torch_pil,torch_pil", *common, "--slow", "0.02")
    assert run.exit_code == 0, run.output
    record = json.loads(output.read_text())
    first, second = record["results"]["torch_pil"], record["results"]["torch_pil#2"]
    assert second["first_over_this"]["differs"] and second["first_over_this"]["ratio"] > 1.5
    assert len(first["samples_s"]["repeats"]) == 5 and first["check"]["compared"] == 24
    assert first["memory_mib"]["anonymous_shared"] > 20 and first["cpu_s_1000"]["median"] > 0
    assert record["options"]["samples"] == 24 and record["machine"]["cores"] >= 1


def test_the_package_does_the_work(pictures: Path, home: Path) -> None:
    pytest.importorskip("simplejpeg")
    options = ("--data", pictures, "--seconds", "0.01", "--workers", "1", "--repeats", "1", "--output", home / "r.json")
    run = _run("W1", "--subjects", "lfdata_reader,webdataset", *options)
    assert run.exit_code == 0, run.output
    for name, found in json.loads((home / "r.json").read_text())["results"].items():
        assert found["status"] == "ok", (name, found["reason"])
        assert found["check"]["crops"] == 1024 and found["bytes_sample"] > 1000 and set(found["sweep"]) == {"1"}


def test_usage(tmp_path: Path, pictures: Path) -> None:
    assert _run("W2", "--data", tmp_path).exit_code == 2
    assert _run("W2", "--data", pictures, "--subjects", "nobody").exit_code == 2
    assert _run("W99", "--data", pictures).exit_code == 2


def _request(pictures: Path, **more: Any) -> dict[str, Any]:
    base = {
        "workload": "W2",
        "mode": "measure",
        "source": str(pictures),
        "prepared": "/nonexistent",
        "cores": 1,
        "seed": 0,
        "workers": 0,
    }
    return base | {"seconds": 0.01, "delay": 0.0} | more


def test_failures_are_named(pictures: Path, tmp_path: Path) -> None:
    with pytest.raises(AbsentError, match="nobody"):
        process.run("nobody", _request(pictures), 60)
    with pytest.raises(SubjectError, match="no answer within"):
        process.run("torch_pil", _request(pictures, seconds=1e9), 4)
    (tmp_path / "bad.jpg").write_bytes(b"no picture")
    with pytest.raises(SubjectError, match="UnidentifiedImageError"):
        process.run("torch_pil", _request(tmp_path), 60)


def test_memory_counts_children_and_leaves_none(pictures: Path) -> None:
    alone, many = Memory(), Memory()
    process.run("torch_pil", _request(pictures, seconds=0.5), 60, alone)
    process.run("torch_pil", _request(pictures, seconds=0.5, workers=2), 60, many)
    assert many.anonymous_shared > alone.anonymous_shared > 0
    deadline = time.monotonic() + 5
    while _children() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _children()


def _children() -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes()
        except OSError:
            continue
        if b"benchmarks.harness.child" in command:
            found.append(command.decode(errors="replace"))
    return found
