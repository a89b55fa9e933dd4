"""Plots show what the record says. Drawn where matplotlib is installed (the environment with plain pillow)."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from benchmarks.commands import plot_
from benchmarks.harness import plot
from benchmarks.harness.report import REPO
from benchmarks.record import RESULTS, read

DOCS_PLOTS = REPO / "docs" / "plots"
RECORDS = sorted(RESULTS.glob("W*.json"))


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_every_subject_that_ran_has_its_bar(path: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra: plots)")
    record = read(path)
    run = CliRunner().invoke(plot_.command, [str(path), "--output", str(tmp_path)])
    assert run.exit_code == 0, run.output
    text = (tmp_path / f"{path.stem}.svg").read_text()
    ran = [result for result in record["results"].values() if result["status"] == "ok"]
    assert all(title in text for title, *_ in plot.bars(record))
    # A bar is a filled path of four corners from the axis to its value: their lengths are to each other as the medians are.
    found = re.findall(r'<path d="M ([\d.]+) [\d.]+ \nL ([\d.]+) [\d.]+ \nL \2 [\d.]+ \nL \1 [\d.]+ \nz\n" clip-path', text)
    lengths = [abs(float(stop) - float(start)) for start, stop in found]
    medians = [median for _, median, _, _ in plot.bars(record)]
    assert len(lengths) == len(medians) == len(ran)
    scale = lengths[0] / medians[0]
    assert lengths == pytest.approx([median * scale for median in medians], rel=1e-3)
    before = text
    CliRunner().invoke(plot_.command, [str(path), "--output", str(tmp_path)])
    assert (tmp_path / f"{path.stem}.svg").read_text() == before, "the same record, another file"


def test_plots_that_are_not_their_records_are_told(tmp_path: Path) -> None:
    shutil.copytree(DOCS_PLOTS, tmp_path / "plots")
    shutil.copytree(RESULTS, tmp_path / "results")
    records = sorted((tmp_path / "results").glob("W*.json"))
    assert plot.stale(records, tmp_path / "plots") == []
    (tmp_path / "plots" / f"{records[1].stem}.svg").unlink()
    changed = read(records[0])
    metric = changed["options"].get("metric") or "samples_s"
    next(one for one in changed["results"].values() if one["status"] == "ok")[metric]["median"] *= 1.001
    records[0].write_bytes(msgspec.json.encode(changed))
    assert plot.stale(records, tmp_path / "plots") == [f"{record.stem}.svg" for record in records[:2]]


def test_bars_are_medians_and_extremes(tmp_path: Path) -> None:
    figure = {"median": 2.0, "min": 1.0, "max": 4.0}
    results = {
        "a": {"status": "ok", "title": "A", "resume_s": figure},
        "a#2": {"status": "ok", "title": "A", "resume_s": figure},
        "b": {"status": "absent", "title": "B"},
    }
    assert plot.bars({"options": {"metric": "resume_s", "workload": "W8"}, "results": results}) == [
        ("A", 2.0, 1.0, 4.0),
        ("A #2", 2.0, 1.0, 4.0),
    ]
    (tmp_path / "no.json").write_bytes(msgspec.json.encode({"options": 1}))
    assert CliRunner().invoke(plot_.command, [str(tmp_path / "no.json"), "--output", str(tmp_path)]).exit_code == 2
