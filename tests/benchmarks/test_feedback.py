"""The trace of the controller under a consumer that changes its pace."""

from __future__ import annotations

import json
from pathlib import Path

import batchkit
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
    # Eight steps that need less bring one thread less.
    assert results["feedback"]["trace"][29]["width"] < 4
    assert {one["verdict"] for one in results["none"]["trace"]} == {None}


def test_paces_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    for text in ("fast", "0.1", "-1x3", "0.1x0"):
        done = CliRunner().invoke(main, ["feedback", str(tmp_path), "--paces", text])
        assert done.exit_code == 2 and text in done.output
