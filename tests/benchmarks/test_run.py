"""``lfbench run`` as a user runs it: real processes, real files. It finds a planted slowdown and wrong work, and says who is absent."""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from multimodalkit import write_source
from PIL import Image

from benchmarks.commands import run_
from benchmarks.harness import checks, entries, environments, process, runner, verify
from benchmarks.harness.process import AbsentError, Memory, SubjectError
from benchmarks.harness.work import WORKLOADS


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
    for module in (environments, runner, run_, checks):
        monkeypatch.setattr(module, "HOME", tmp_path)
    return tmp_path


def _run(*arguments: object) -> Any:
    return CliRunner().invoke(run_.command, [str(argument) for argument in arguments])


@pytest.mark.slow
def test_a_planted_slowdown_is_found(pictures: Path, home: Path) -> None:
    pytest.importorskip("simplejpeg")
    output = home / "record.json"
    common = ("--data", pictures, "--seconds", "0.5", "--repeats", "12", "--workers", "1", "--output", output)
    run = _run("W2", "--subjects", "bare_calls,bare_calls", *common, "--slow", "0.6")
    assert run.exit_code == 0, run.output
    record = json.loads(output.read_text())
    first, second = record["results"]["bare_calls"], record["results"]["bare_calls#2"]
    assert second["first_over_this"]["differs"] and second["first_over_this"]["ratio"] > 1.2, second
    # All pictures of the first epoch, and of the second.
    assert second["planted_slowdown"] == 0.6 and len(first["samples_s"]["repeats"]) == 12 and first["check"]["compared"] == 48
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


def _results(home: Path, workload: str, source: Path, subjects: str, *more: object) -> dict[str, Any]:
    options = ("--data", source, "--seconds", "0.01", "--repeats", "1", "--output", home / "r.json", *more)
    run = _run(workload, "--subjects", subjects, *options)
    assert run.exit_code == 0, run.output
    found: dict[str, Any] = json.loads((home / "r.json").read_text())["results"]
    for name, result in found.items():
        assert result["status"] == "ok", (name, result["reason"])
    return found


def test_multimodal_samples(home: Path) -> None:
    for module in ("simplejpeg", "tokenizers", "soxr"):
        pytest.importorskip(module)
    found = _results(home, "W4", write_source(home), "lfdata_reader,torch_pil,bare_calls", "--workers", "1", "--seconds", "0.1")
    for result in found.values():
        assert result["check"]["compared"] == 6 and result["check"]["worst_audio_difference"] < 0.01


def test_building_and_single_reads(pictures: Path, home: Path) -> None:
    pytest.importorskip("simplejpeg")
    for result in _results(home, "W5", pictures, "lfdata_reader,bare_calls", "--workers", "2").values():
        assert result["check"]["compared"] == 24 and result["bytes_sample"] > 1000 and result["samples_s"]["median"] > 1
    assert not list((home / "scratch").iterdir()), "what was built is left over"
    for result in _results(home, "W6", pictures, "lfdata_reader,torch_pil,bare_calls").values():
        assert result["check"]["compared"] == 24
        assert 0 < result["latency_p50_us"]["median"] <= result["latency_p99_us"]["median"]


@pytest.mark.slow
def test_cold_and_paced(pictures: Path, home: Path) -> None:
    pytest.importorskip("simplejpeg")
    for result in _results(home, "W7", pictures, "lfdata_reader,torch_pil", "--workers", "0").values():
        assert result["cold"]["resident"] <= 0.02 and result["cold"]["how"] in ("drop_caches", "fadvise")
    # One batch an epoch, decoded while nobody waits for anything else: the consumer waits for most of each.
    (result,) = _results(home, "W9", pictures, "torch_pil", "--workers", "0", "--step", "0.001", "--seconds", "0.2").values()
    assert result["waiting"]["median"] > 0.3 and result["starved_steps"]["median"] == 1


@pytest.mark.slow
def test_resuming_gives_the_rest_of_the_epoch(home: Path, tmp_path: Path) -> None:
    pytest.importorskip("torchdata")
    pytest.importorskip("simplejpeg")
    pictures = tmp_path / "many"
    pictures.mkdir()
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8))
    for number in range(12 * 64 + 7):
        picture.save(pictures / f"{number:04d}.jpg")
    found = _results(home, "W8", pictures, "lfdata_reader,torch_pil,bare_calls,webdataset", "--workers", "1")
    for name, result in found.items():
        # webdataset shuffles anew in every process, and has no state: what its user loses is told.
        assert result["epoch"]["missing"] == result["epoch"]["again"] and result["resume_s"]["median"] > 0
        assert name.startswith("webdataset") or result["epoch"]["missing"] == 0
        assert result["check"]["real_crops"] == 0 and result["check"]["too_small"] > 0
    assert [result["loads_state"] for result in found.values()] == [True, True, True, False]


@pytest.mark.slow
def test_native_crops(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("simplejpeg")
    if shutil.which("jpegtran") is None:
        pytest.skip("jpegtran (libjpeg-turbo-progs) is not installed")
    for name, value in {"PHOTO_WIDTH": 900, "PHOTO_HEIGHT": 700, "PHOTOS": 64}.items():
        monkeypatch.setattr(verify, name, value)
    photos = tmp_path / "photos"
    photos.mkdir()
    monkeypatch.setattr(run_, "LARGE_PHOTO", 800 * 600)
    small = np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8)
    for number in range(9):
        Image.fromarray(small).resize((800, 600)).save(photos / f"{number}.jpg")
    for result in _results(home, "W10", photos, "lfdata_reader,torch_pil", "--workers", "1").values():
        assert result["check"]["crops"] == 512


@pytest.mark.slow
def test_pictures_that_are_stored_turned_are_the_same_for_all(pictures: Path, home: Path, tmp_path: Path) -> None:
    pytest.importorskip("simplejpeg")
    source = tmp_path / "turned"
    shutil.copytree(pictures, source)
    for path in sorted(source.iterdir())[::3]:
        exif = Image.Exif()
        exif[0x0112] = 6
        Image.open(path).save(path, quality=95, exif=exif)
    found = _results(home, "W2", source, "lfdata_reader,torch_simplejpeg,torch_pil", "--workers", "1")
    assert [result["check"]["compared"] for result in found.values()] == [48, 48, 48]
    assert len(list((home / "upright").iterdir())) == 1


def test_usage(tmp_path: Path, pictures: Path, home: Path) -> None:
    assert "photos of 6,000,000 pixels" in _run("W10", "--data", pictures).output
    assert "ends a run before" in _run("W2", "--data", pictures, "--seconds", "900").output
    blocked = _run("W2", "--data", pictures, "--output", pictures / "00.jpg" / "record.json")
    assert blocked.exit_code == 2 and "--output" in blocked.output
    assert not list(home.glob("records/*.json"))
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
        "samples": 24,
    }
    return base | {"seconds": 0.01, "step": 0.0} | more


def test_failures_are_named(pictures: Path, tmp_path: Path) -> None:
    with pytest.raises(AbsentError, match="nobody"):
        process.run("nobody", _request(pictures), 60)
    with pytest.raises(SubjectError, match="no answer within"):
        process.run("torch_pil", _request(pictures, seconds=1e9), 4)
    (tmp_path / "bad.jpg").write_bytes(b"no picture")
    with pytest.raises(SubjectError, match="UnidentifiedImageError"):
        process.run("torch_pil", _request(tmp_path), 60)


def test_a_broken_source_file_is_named(pictures: Path, home: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(pictures, source)
    (source / "05.jpg").write_bytes(b"no picture")
    run = _run(
        "W2", "--data", source, "--subjects", "torch_pil", "--workers", "0", "--repeats", "1", "--output", home / "r.json"
    )
    assert run.exit_code == 1 and f"source: {source / '05.jpg'}" in run.output and "mend it" in run.output


def test_an_interruption_keeps_whole_rounds(pictures: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    measure = runner.Runner.measure

    def interrupted(self: Any, entry: Any, *arguments: Any, **more: Any) -> Any:
        calls.append(entry.label)
        if len(calls) == 6:  # two sweeps, one round and half of another
            raise KeyboardInterrupt
        return measure(self, entry, *arguments, **more)

    monkeypatch.setattr(runner.Runner, "measure", interrupted)
    options = ("--seconds", "0.01", "--workers", "0", "--output", home / "r.json")
    run = _run("W2", "--data", pictures, "--subjects", "torch_pil,torch_pil", *options)
    assert run.exit_code == 130 and "interrupted" in run.output
    record = json.loads((home / "r.json").read_text())
    assert record["options"]["repeats"] == 1 and record["options"]["interrupted"]
    assert [len(found["samples_s"]["repeats"]) for found in record["results"].values()] == [1, 1]


def test_a_count_that_fails_does_not_cost_the_others(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(self: Any, entry: Any, workers: int) -> dict[str, float]:
        if workers in failing:
            raise SubjectError(f"no way with {workers}")
        return {"samples_s": 5.0}

    monkeypatch.setattr(runner.Runner, "measure", measure)
    monkeypatch.setattr(runner.Runner, "_check_with", lambda *_: None)
    entry = entries.Entry("a", "torch_pil", result={"workers_swept": [1, 2]})
    sweep = runner.Runner(WORKLOADS["W2"], pictures, runner.Options(), print).sweep
    failing = {2}
    assert sweep(entry) == 1 and entry.result["sweep"] == {"1": 5.0, "2": "no way with 2"}
    failing = {1, 2}
    with pytest.raises(SubjectError, match="no way with 1"):
        sweep(entry)


@pytest.mark.parametrize(("unlucky", "status"), [(1, "ok"), (2, "other work")])
def test_what_chance_does_gets_a_second_try(
    pictures: Path, home: Path, monkeypatch: pytest.MonkeyPatch, unlucky: int, status: str
) -> None:
    tries: list[Path] = []
    check = verify.check_crops

    def unlikely(kept: Path) -> dict[str, float]:
        tries.append(kept)
        if len(tries) <= unlucky:
            raise verify.UnlikelyError("flips")
        return check(kept)

    monkeypatch.setattr(verify, "check_crops", unlikely)
    run = runner.Runner(WORKLOADS["W1"], pictures, runner.Options(workers=(0,)), print)
    entry = entries.Entry("a", "torch_pil")
    run._guard(entry, run.prepare)
    run._guard(entry, run.check)
    assert (entry.status, len(tries)) == (status, 2)


def test_worker_counts_are_those_a_subject_has() -> None:
    assert entries.counts_of([0, 1, 2], [2, 8]) == [2, 8]
    assert entries.counts_of([1, 2], [0, 2]) == [2] and entries.counts_of([1, 2], [0]) == [1, 2]
    assert entries.counts_of([0], [2]) == [0] and entries.counts_of([1, 2], []) == [1, 2]


def test_a_failure_late_in_the_run_keeps_what_was_measured(pictures: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    measure = runner.Runner.measure

    def failing(self: Any, entry: Any, *arguments: Any, **more: Any) -> Any:
        calls.append(entry.label)
        if entry.label == "torch_pil" and calls.count("torch_pil") == 3:  # a sweep, a round, another
            raise SubjectError("out of luck")
        return measure(self, entry, *arguments, **more)

    monkeypatch.setattr(runner.Runner, "measure", failing)
    options = ("--seconds", "0.01", "--workers", "0", "--repeats", "2", "--output", home / "r.json")
    run = _run("W2", "--data", pictures, "--subjects", "torch_pil,torch_pil", *options)
    assert run.exit_code == 0 and "interrupted" not in run.output
    first, second = json.loads((home / "r.json").read_text())["results"].values()
    assert not json.loads((home / "r.json").read_text())["options"].get("interrupted")
    assert (first["status"], first["reason"]) == ("failed", "out of luck") and len(first["samples_s"]["repeats"]) == 1
    assert second["status"] == "ok" and len(second["samples_s"]["repeats"]) == 2


def test_the_default_record_overwrites_none(tmp_path: Path) -> None:
    assert run_.unused(tmp_path, "W1-x").name == "W1-x.json"
    for name in ("W1-x.json", "W1-x-2.json"):
        (tmp_path / name).write_text("")
    assert run_.unused(tmp_path, "W1-x").name == "W1-x-3.json"


def test_a_process_that_is_gone_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Its worker holds the pipe open.
    text = "import os, sys, time\nif os.fork() == 0:\n    time.sleep(60)\nsys.stderr.write('killed here')\nos._exit(7)\n"
    (tmp_path / "python").write_text(f"#!{sys.executable}\n{text}")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(process, "interpreter", lambda subject: str(tmp_path / "python"))
    began = time.monotonic()
    with pytest.raises(SubjectError, match="exit status 7: killed here"):
        process.run("torch_pil", {}, 50)
    assert time.monotonic() - began < 30


def test_counts_that_are_near_are_tried_again(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The first try flatters 2 workers; the median of three does not.
    rates = {0: iter([10.0]), 1: iter([90.0, 95.0, 96.0]), 2: iter([100.0, 80.0, 81.0])}
    tried: list[int] = []

    def measure(self: Any, entry: Any, workers: int) -> dict[str, float]:
        tried.append(workers)
        return {"samples_s": next(rates[workers])}

    monkeypatch.setattr(runner.Runner, "measure", measure)
    monkeypatch.setattr(runner.Runner, "_check_with", lambda *_: None)
    entry = entries.Entry("a", "torch_pil", result={"workers_swept": [0, 1, 2]})
    sweep = runner.Runner(WORKLOADS["W2"], pictures, runner.Options(), print).sweep
    assert sweep(entry) == 1 and entry.result["sweep"] == {"0": 10.0, "1": 95.0, "2": 81.0}
    assert tried == [0, 1, 2, 1, 2, 1, 2]


def test_memory_counts_children_and_leaves_none(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LFBENCH_TEST_MARK", str(pictures))
    alone, many = Memory(), Memory()
    process.run("torch_pil", _request(pictures, seconds=0.5), 60, alone)
    process.run("torch_pil", _request(pictures, seconds=0.5, workers=2), 60, many)
    assert many.anonymous_shared > alone.anonymous_shared > 0
    deadline = time.monotonic() + 5
    while _children(str(pictures)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _children(str(pictures))


def _children(mark: str) -> list[str]:
    """Processes of this test, found by their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            environment = path.read_bytes()
        except OSError:
            continue
        if f"LFBENCH_TEST_MARK={mark}\0".encode() in environment:
            found.append(path.parent.name)
    return found


def test_the_harness_does_not_measure_its_own_pictures(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_, "HOME", pictures / "bench-data")
    run = _run("W2", "--data", pictures, "--subjects", "torch_pil")
    assert run.exit_code == 2 and "the folder of the samples alone" in run.output


def test_a_file_of_another_kind_is_named(tmp_path: Path) -> None:
    from benchmarks.harness.sources import SourceError, opened

    Image.new("RGB", (8, 8)).save(tmp_path / "a.jpg", "PNG")
    assert opened(tmp_path / "a.jpg").size == (8, 8)
    with pytest.raises(SourceError, match=r"a\.jpg: a PNG file"):
        opened(tmp_path / "a.jpg", jpeg=True)
