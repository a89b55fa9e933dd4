"""Tables and comparisons come from records, and the documents agree with the records."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from benchmarks.commands import compare_, report_
from benchmarks.harness import plot, report
from benchmarks.record import RecordError, command_line, read, summary


def _figure(values: list[float]) -> dict[str, Any]:
    return summary(values) | {"repeats": values}


def _record(**rates: list[float]) -> dict[str, Any]:
    results = {
        name: {
            "subject": name, "title": name.upper(), "status": "ok", "reason": "", "workers": 2, "bytes_sample": 1234.0,
            "samples_s": _figure(values), "cpu_s_1000": _figure([1.5] * 5), "first_batch_s": _figure([0.2] * 5),
            "memory_mib": {"anonymous_shared": 321.0, "file": 9.0, "samples": 3},
        }
        for name, values in rates.items()
    }  # fmt: skip
    return {
        "options": {
            "workload": "W2",
            "title": "t",
            "samples": 10,
            "data": "d",
            "data_digest": "x",
            "repeats": 5,
            "seconds": 4,
            "cores": 2,
            "floor_memcpy_samples_s": {"median": 5.0},
        },
        "machine": {"cpu": "c", "cores": 2},
        "date": "2026-11-29T00:00:00",
        "results": results,
    }


BASE = [100.0, 101.0, 99.0, 102.0, 98.0]


def test_compare_flags_what_is_outside_the_spread() -> None:
    before = _record(same=BASE, slow=BASE, fast=BASE, gone=BASE)
    after = _record(same=[x + 0.5 for x in BASE], slow=[x * 0.9 for x in BASE], fast=[x * 1.3 for x in BASE])
    after["results"]["gone"] = {"title": "", "status": "absent", "reason": "no module"}
    lines, slower = report.compare(before, after)
    assert [line.rsplit(": ", 1)[1] for line in lines[:3]] == ["no difference shown", "SLOWER", "FASTER"]
    assert "was ok, is absent (no module)" in lines[3]
    assert slower == ["slow", "gone"]


def test_compare_tells_too_few_repeats_and_planted_slowdowns() -> None:
    before, after = _record(a=BASE[:3]), _record(a=[x / 10 for x in BASE[:3]])
    (line,), slower = report.compare(before, after)
    assert "0.100 of the speed" in line and line.endswith("too few repeats to tell (3 and 3)") and slower == []
    before, after = _record(a=BASE, b=BASE), _record(a=BASE, b=BASE)
    after["results"]["a"]["planted_slowdown"] = 0.1
    del after["results"]["b"]["samples_s"]
    first, second = report.compare(before, after)[0]
    assert (
        first.endswith("no difference shown; the second was kept stopped")
        and second == "b: a record lacks repeats of samples_s"
    )


def test_a_table_in_which_nothing_ran_is_a_table() -> None:
    record = _record(a=BASE)
    record["results"]["a"] |= {"status": "failed", "reason": "no"}
    lines = report.table(record).splitlines()
    assert {line.count("|") for line in lines[:3]} == {3}


def test_compare_refuses_what_cannot_be_compared() -> None:
    before, after = _record(a=BASE), _record(a=BASE)
    after["machine"]["cpu"] = "another"
    with pytest.raises(RecordError, match="differ in cpu"):
        report.compare(before, after)
    assert report.compare(before, after, any_machine=True)
    after["options"]["workload"] = "W1"
    with pytest.raises(RecordError, match="workload"):
        report.compare(before, after, any_machine=True)
    with pytest.raises(RecordError, match="no subject"):
        report.compare(before, _record(b=BASE))


def test_ratios_to_a_subject_of_both_do_not_mind_a_slower_machine() -> None:
    before = _record(bare=BASE, same=[2 * x for x in BASE], slow=BASE)
    after = _record(bare=[x / 2 for x in BASE], same=BASE, slow=[x * 0.4 for x in BASE])
    assert report.compare(before, after)[1] == ["bare", "same", "slow"]
    lines, slower = report.compare(before, after, beside="bare")
    assert len(lines) == 2 and slower == ["slow"]
    with pytest.raises(RecordError, match="nobody did not run in both"):
        report.compare(before, after, beside="nobody")


def test_compare_tells_what_else_differs() -> None:
    before, after = _record(same=BASE, gone=BASE), _record(same=BASE, gone=BASE)
    before["results"]["gone"] = {"title": "", "status": "absent", "reason": "no module named x"}
    before["results"]["same"]["versions"] = {"torch": "2.1", "old": "1"}
    after["results"]["same"] |= {"versions": {"torch": "2.2"}, "workers": 1}
    after["options"]["seed"] = 7
    lines, slower = report.compare(before, after)
    assert lines[0] == "the seeds differ: None and 7" and not slower
    assert lines[1].endswith("no difference shown; workers 2 then 1; torch 2.1 then 2.2; old 1 then none")
    assert lines[2] == "gone: was absent (no module named x), is ok"


def test_tables_warn_of_few_samples_and_a_busy_machine() -> None:
    record = _record(a=BASE, b=BASE, c=BASE)
    assert "**" not in report.table(record)
    record["machine"]["load_before"] = 4.0
    record["results"]["a"]["measured"] = {"samples": 64, "s": 3.0}
    record["results"]["b"]["measured"] = {"samples": 5000, "s": 0.5}
    record["results"]["c"] |= {"measured": {"samples": 5000, "s": 3.0}, "reencodes": "JPEG of quality 90"}
    text = report.table(record)
    assert "**Rates that rest on few samples a repeat**: A (64 samples in 3 s), B (5,000 samples in 0.5 s)." in text
    assert "**The load was high before the run**: 4.0 on 2 cores." in text
    assert "Pictures encoded anew by the format, checked with wider limits: C (JPEG of quality 90)." in text


def test_imports_are_told_where_resuming_is_measured() -> None:
    record = _record(a=BASE)
    record["options"]["metric"] = "resume_s"
    record["results"]["a"] |= {"resume_s": _figure(BASE), "import_s": 1.234}
    assert "| imports before that, s |" in report.table(record) and "| 1.23 |" in report.table(record)
    assert "imports" not in report.table(_record(a=BASE))


def _checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: dict[str, Any]) -> str:
    """What ``report --check`` says of one record that has a table and a plot."""
    for folder in ("results", "docs/plots"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    (tmp_path / "results" / "W2-x.json").write_bytes(msgspec.json.encode(record))
    document = tmp_path / "docs" / "a.md"
    for module in (report, report_):
        monkeypatch.setattr(module, "RESULTS", tmp_path / "results")
        monkeypatch.setattr(module, "REPO", tmp_path)
    monkeypatch.setattr(report_, "DOCUMENTS", (document,))
    if not document.exists():
        document.write_text("<!-- record: W2-x -->\n<!-- end -->\n")
        CliRunner().invoke(report_.command, [])
    (tmp_path / "docs" / "plots" / "W2-x.svg").write_text(plot.digest_of(record))
    return CliRunner().invoke(report_.command, ["--check"]).output


def test_figures_that_the_repeats_do_not_give_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = _record(a=BASE, b=[x / 2 for x in BASE])
    record["results"]["b"]["first_over_this"] = {"of": "a", "ratio": 2.0, "p": 0.008, "differs": True}
    assert _checked(tmp_path, monkeypatch, record).startswith("all tables are as the records say")
    for change, words in [
        (
            lambda results: results["a"]["samples_s"]["repeats"].__setitem__(0, 150.0),
            "a: the median of samples_s is 100; its repeats give 101",
        ),
        (
            lambda results: results["b"]["cpu_s_1000"].__setitem__("max", 9.0),
            "b: the max of cpu_s_1000 is 9; its repeats give 1.5",
        ),
        (lambda results: results["b"]["first_over_this"].__setitem__("ratio", 3.0), "b: its ratio is 3; the repeats give 2"),
    ]:
        edited = copy.deepcopy(record)
        change(edited["results"])
        assert words in _checked(tmp_path, monkeypatch, edited)


def test_records_without_a_table_and_plots_of_no_record_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = _record(a=BASE)
    assert _checked(tmp_path, monkeypatch, record).startswith("all tables")
    (tmp_path / "results" / "W2-y.json").write_bytes(msgspec.json.encode(record))
    (tmp_path / "docs" / "plots" / "W2-y.svg").write_text(plot.digest_of(record))
    (tmp_path / "docs" / "plots" / "W2-z.svg").write_text("")
    said = _checked(tmp_path, monkeypatch, record)
    assert (
        "W2-y.json (no document has a table of it)" in said
        and "W2-z.svg (a plot of no record)" in said
        and "W2-y.svg" not in said
    )


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ({}, "the result of a is empty or has no status"),
        ({"status": "ok", "title": "A"}, "the result of a lacks samples_s"),
        ({"status": "failed"}, "lacks reason"),
    ],
)
def test_a_record_with_an_empty_result_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, result: dict[str, Any], words: str
) -> None:
    assert _checked(tmp_path, monkeypatch, _record(a=BASE)).startswith("all tables")
    record = _record(a=BASE)
    record["results"]["a"] = result
    (tmp_path / "results" / "W2-x.json").write_bytes(msgspec.json.encode(record))
    for arguments in ([], ["--check"]):
        run = CliRunner().invoke(report_.command, arguments)
        assert run.exit_code == 1 and "W2-x.json: " in run.output and words in run.output


def test_ratios_by_hand_stand_beside_those_of_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    record = _record(torch_simplejpeg=[100.0] * 5, torch_pil=[88.4] * 5, torch_pillow=[46.0] * 5, ffcv_=[112.6] * 5)
    (tmp_path / "W2-x.json").write_bytes(msgspec.json.encode(record))
    text = report.updated("<!-- by hand: W2-x -->\n<!-- end -->\n")
    lines = text.splitlines()
    assert "| TORCH_PIL | 0.88 | 0.88 |" in lines and "| torch DataLoader + plain pillow | | 0.46 |" in lines
    assert "| FFCV_ | 1.79 | 1.13 |" in lines and "| grain | 0.89 |  |" in lines
    assert report.updated(text) == text


def test_captions_tell_how_it_was_measured() -> None:
    record = _record(a=BASE)
    record["options"] |= {"not_run": ["DALI"], "interrupted": True}
    del record["results"]["a"]["memory_mib"]
    record["results"]["a"]["cold"] = {"how": "larger than memory", "resident": 0.25, "limit_mib": 64, "files_mib": 99}
    text = report.table(record)
    assert "(interrupted)" in text and "Not run: DALI." in text and "anonymous" not in text
    assert "Page cache before each run: larger than memory (limit 64 MiB); at most 25.0% of the files stayed in it." in text


def test_the_command_compares(tmp_path: Path) -> None:
    for name, record in {"a": _record(x=BASE), "b": _record(x=[x / 2 for x in BASE]), "c": {"options": 1}}.items():
        (tmp_path / name).write_bytes(msgspec.json.encode(record))
    (tmp_path / "d").write_text("{")
    run = CliRunner().invoke(compare_.command, [str(tmp_path / "a"), str(tmp_path / "b"), "--fail"])
    assert run.exit_code == 1 and "x: 0.500 of the speed before" in run.output and "SLOWER" in run.output
    assert CliRunner().invoke(compare_.command, [str(tmp_path / "a"), str(tmp_path / "a"), "--fail"]).exit_code == 0
    for bad in ("c", "d"):
        run = CliRunner().invoke(compare_.command, [str(tmp_path / "a"), str(tmp_path / bad)])
        assert run.exit_code == 2 and f"{tmp_path / bad}:" in run.output


def test_a_table_says_who_did_not_run() -> None:
    record = _record(a=BASE, b=[x / 2 for x in BASE])
    record["results"]["b"]["first_over_this"] = {"of": "a", "ratio": 2.0, "p": 0.008, "differs": True}
    record["results"]["c"] = {"title": "C", "status": "absent", "reason": "trace\nModuleNotFoundError: No module named 'c'"}
    lines = report.table(record).splitlines()
    assert lines[2].startswith("| A | 1 | 100 [98, 102] | 1.5 [1.5, 1.5] | 321 | 0.2 [0.2, 0.2] | 1.2 | 2 |")
    assert lines[3].startswith("| B | 2.00 | 50 [49, 51] |")
    assert lines[4].startswith("| C | absent: ModuleNotFoundError: No module named 'c' |")
    record["results"]["b"]["first_over_this"]["differs"] = False
    assert "2.00 (no difference shown)" in report.table(record)


def test_markers_are_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = _record(a=BASE)
    (tmp_path / "W2-x.json").write_bytes(msgspec.json.encode(record))
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    text = "before\n<!-- record: W2-x -->\n<!-- end -->\nafter\n"
    filled = report.updated(text)
    assert filled == f"before\n<!-- record: W2-x -->\n{report.table(record)}\n<!-- end -->\nafter\n"
    assert report.updated(filled) == filled
    changed = copy.deepcopy(record)
    changed["results"]["a"]["samples_s"]["median"] = 7
    (tmp_path / "W2-x.json").write_bytes(msgspec.json.encode(changed))
    assert report.updated(filled) != filled


def test_the_documents_are_as_the_records_say() -> None:
    run = CliRunner().invoke(report_.command, ["--check"])
    assert run.exit_code == 0, run.output


def test_every_committed_run_is_a_record() -> None:
    for path in report.RESULTS.glob("W*.json"):
        assert report.table(read(path)).count("\n") >= 3


def test_a_record_names_no_machines_paths() -> None:
    arguments = [
        "run",
        "W2",
        "--data",
        "/somewhere/data/tiles",
        "--output",
        "/else/r.json",
        "--subjects",
        "a,b",
        "--case",
        "two words",
    ]
    assert command_line(arguments) == "lfbench run W2 --data data/tiles --subjects a,b --case 'two words'"
    for path in report.RESULTS.glob("*.json"):
        assert " /" not in read(path)["command"], path.name


def test_a_marker_without_a_table_does_not_eat_the_next_section() -> None:
    name = next(path.stem for path in sorted(report.RESULTS.glob("W*.json")))
    empty = f"a\n<!-- record: {name} -->\n<!-- end -->\n\n### between\n\n<!-- record: {name} brief -->\n<!-- end -->\nz\n"
    once = report.updated(empty)
    assert "### between" in once and once.count("<!-- end -->") == 2 and once.startswith("a\n") and once.endswith("z\n")
    assert report.updated(once) == once
