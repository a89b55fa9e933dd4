"""The traces and forecasts of a loader: ``lfbench feedback``, ``lfbench forecast``."""

from __future__ import annotations

import json
from pathlib import Path

import batchkit
import pytest
from click.testing import CliRunner

from benchmarks.cli import main


def test_every_step_is_traced_with_and_without_feedback(tmp_path: Path) -> None:
    data = batchkit.write_pictures(tmp_path / "d", 40, size=80)
    output = tmp_path / "record.json"
    words = ["feedback", str(data), "--batch", "8", "--threads", "4", "--paces", "0.02x30,0x8", "--output", str(output)]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    results = json.loads(output.read_text())["results"]
    for name in ("feedback", "none"):
        trace = results[name]["trace"]
        assert len(trace) == 38 and [one["pace"] for one in trace] == [0.02] * 30 + [0.0] * 8
        times = [one["s"] for one in trace]
        assert times == sorted(times) and times[29] >= 29 * 0.02
    assert {one["width"] for one in results["feedback"]["trace"]} <= set(range(1, 5))
    assert {one["verdict"] for one in results["none"]["trace"]} == {None}


def test_paces_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    for text in ("fast", "0.1", "-1x3", "0.1x0"):
        done = CliRunner().invoke(main, ["feedback", str(tmp_path), "--paces", text])
        assert done.exit_code == 2 and text in done.output


def test_the_forecast_is_what_comes(tmp_path: Path) -> None:
    data = batchkit.write_all_kinds(tmp_path / "d", complete=True)
    output = tmp_path / "record.json"
    words = ["forecast", str(data), "--batch", "4", "--epochs", "2", "--device", "cpu", "--output", str(output)]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    results = json.loads(output.read_text())["results"]
    for where in ("host", "device"):
        found = results[where]
        assert found["batches"] == found["foretold"] == 20 and found["error"] == 0
        assert any(one["largest"] * 20 > one["bytes"] > 0 for one in found["fields"].values()), "nothing changes its size"


@pytest.mark.parametrize(
    ("command", "more", "match"),
    [
        ("feedback", ["--batch", "0"], "batch_size"),
        ("feedback", ["--threads", "0"], "threads"),
        ("feedback", ["--field", "nope"], "nope"),
        ("feedback", ["--batch", "1000"], "no whole batch: take a smaller --batch"),
        ("forecast", ["--batch", "0"], "batch_size"),
        ("forecast", ["--batch", "1000"], "no whole batch: take a smaller --batch"),
        ("forecast", ["--epochs", "0"], "--epochs"),
    ],
)
@pytest.mark.filterwarnings("ignore:the loader has no batches")
def test_options_that_do_not_go_with_the_data_are_told_in_a_line(
    command: str, more: list[str], match: str, tmp_path: Path
) -> None:
    data = batchkit.write_pictures(tmp_path / "d", 10)
    done = CliRunner().invoke(main, [command, str(data), *more, "--output", str(tmp_path / "record.json")])
    assert done.exit_code in (1, 2) and isinstance(done.exception, SystemExit), done.exception
    assert "Error: " in done.output and match in done.output
    assert not (tmp_path / "record.json").exists()
