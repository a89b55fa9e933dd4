"""Policies of ``convert``: bad samples, limits, quarantine, duplicates, empty sources; the report is as deterministic as the shards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from faultkit import (
    SMALL,
    digests,
    expected_digests,
    finish,
    leftovers,
    reported,
    run,
    synthetic,
    values,
    verified,
    with_options,
)

import lfdata
from lfdata.errors import LfdataError, OptionError, SampleError, SourceError
from shard_builder.options import ConvertOptions
from shard_builder.report import StoppedError, TooManyErrors, lines, quarantine, text

SKIP = with_options(SMALL, on_error="skip")
BAD = {0: "load", 17: "scan", 41: "load", 99: "scan"}


def _keys(target: Path) -> list[bytes]:
    return [sample["__key__"] for sample in values(target)]


# -- bad samples --------------------------------------------------------------------------------------------------------


def test_stop_names_the_sample_and_resume_goes_on(tmp_path: Path) -> None:
    source = synthetic(bad={41: "load"})
    with pytest.raises(StoppedError, match=r"file-41.*sample/00000041.*test-load.*--resume"):
        run(tmp_path / "t", source)
    assert not (tmp_path / "t" / "manifest.json").exists()
    summary = run(tmp_path / "t", source, SKIP, resume=True)
    assert summary.resumed_shards >= 1
    assert digests(tmp_path / "t") == expected_digests(source, SKIP)


def test_stop_at_a_sample_found_bad_by_the_scan(tmp_path: Path) -> None:
    with pytest.raises(StoppedError, match=r"file-17.*found bad while scanning.*test-scan"):
        run(tmp_path / "t", synthetic(bad={17: "scan", 41: "load"}))


def test_skip_stores_the_others_and_reports_in_order(tmp_path: Path) -> None:
    summary = run(tmp_path / "t", synthetic(bad=BAD), SKIP)
    assert (summary.samples, summary.errors) == (96, 4)
    assert _keys(tmp_path / "t") == [b"sample/%08d" % n for n in range(100) if n not in BAD]
    found = reported(tmp_path / "t")
    assert [entry["record"] for entry in found] == sorted(BAD)
    assert {entry["action"] for entry in found} == {"skip"}
    assert [entry["code"] for entry in found] == ["test-load", "test-scan", "test-load", "test-scan"]
    assert [entry["path"] for entry in found] == [f"file-{number}" for number in sorted(BAD)]
    verified(tmp_path / "t")


def test_a_clean_run_leaves_no_report(tmp_path: Path) -> None:
    run(tmp_path / "t", synthetic(bad=BAD), SKIP)
    run(tmp_path / "t", synthetic(), SKIP, overwrite=True)
    assert not (tmp_path / "t" / "errors.jsonl").exists()


@pytest.mark.parametrize(("limit", "stored"), [(0, None), (3, None), (4, 96)])
def test_limit_on_bad_samples(limit: int, stored: int | None, tmp_path: Path) -> None:
    options = with_options(SKIP, max_errors=limit)
    if stored is None:
        with pytest.raises(TooManyErrors, match=f"{limit + 1} bad samples, more than --max-errors {limit}"):
            run(tmp_path / "t", synthetic(bad=BAD), options)
        # The limit counts what an earlier run has journaled, and a higher one lets it go on.
        with pytest.raises(TooManyErrors):
            finish(tmp_path / "t", synthetic(bad=BAD), options)
        finish(tmp_path / "t", synthetic(bad=BAD), SKIP)
        assert digests(tmp_path / "t") == expected_digests(synthetic(bad=BAD), SKIP)
    else:
        assert run(tmp_path / "t", synthetic(bad=BAD), options).samples == stored


def test_quarantine_keeps_what_could_be_loaded(tmp_path: Path) -> None:
    source = synthetic(bad=BAD, keys={"7": "../../etc/passwd"})
    options = with_options(SMALL, on_error="quarantine")
    run(tmp_path / "t", source, options)
    kept = sorted((tmp_path / "t" / "quarantine").iterdir())
    assert [int(folder.name) for folder in kept] == sorted(BAD)
    about = json.loads((kept[0] / "sample.json").read_text())
    assert about["record"] == 0
    assert about["code"] == "test-load"
    assert digests(tmp_path / "t")["manifest.json"] == expected_digests(source, SKIP)["manifest.json"]


def test_quarantined_values_are_the_source_values(tmp_path: Path) -> None:
    """A sample that loads but cannot be encoded keeps all its values, under names that the source does not choose."""
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"key": f"../{n}", "x": 5 if n != 3 else "no number", "blob": "AQID"}) + "\n" for n in range(6))
    )
    from shard_builder.fields import parse_field
    from shard_builder.sources import open_source

    fields = [parse_field("blob:bytes=blob@base64"), parse_field("x:scalar=x,dtype=int32")]
    source: Any = open_source(str(tmp_path / "rows.jsonl"), fields=fields)
    run(tmp_path / "t", source, with_options(SMALL, on_error="quarantine"))
    (folder,) = (tmp_path / "t" / "quarantine").iterdir()
    about = json.loads((folder / "sample.json").read_text())
    assert (about["record"], about["key"], about["field"]) == (3, "../3", "x")
    stored = {name: (folder / file).read_bytes() for name, file in about["files"].items()}
    assert stored == {"blob": b"\x01\x02\x03", "x": b'"no number"'}


def test_quarantine_names_never_come_from_the_source(tmp_path: Path) -> None:
    from lfdata.format.durable import Files

    error = SampleError("code", "re\udcffason", key=b"../../\xff", path="/abs/\udcff", field="../f")
    quarantine(Files(), tmp_path / "q", 12, error, [("../x\udcff", True, b"data"), ("y", False, b"1")])
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")) == [
        "q", "q/000000000012", "q/000000000012/field-000.bin", "q/000000000012/field-001.json", "q/000000000012/sample.json",
    ]  # fmt: skip
    about = json.loads((tmp_path / "q" / "000000000012" / "sample.json").read_text())
    assert about["key"] == "../../\\xff"


def test_all_bad_is_an_error_that_names_the_first(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"all 30 samples of the source are bad.*file-0"):
        run(tmp_path / "scan", synthetic(30, bad=dict.fromkeys(range(30), "scan")), SKIP)
    with pytest.raises(LfdataError, match="none of 30 samples could be stored"):
        run(tmp_path / "load", synthetic(30, bad=dict.fromkeys(range(30), "load")), SKIP)
    for name in ("scan", "load"):
        assert not (tmp_path / name / "manifest.json").exists()


def test_empty_sources(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no samples found"):
        run(tmp_path / "t", synthetic(0))
    assert leftovers(tmp_path / "t") == []
    for name, source in (("none", synthetic(0)), ("bad", synthetic(5, bad=dict.fromkeys(range(5), "load")))):
        summary = run(tmp_path / name, source, SKIP, allow_empty=True)
        assert (summary.samples, summary.shards) == (0, 0)
        assert len(lfdata.open(tmp_path / name)) == 0
        assert leftovers(tmp_path / name) == []
    assert len(reported(tmp_path / "bad")) == 5


# -- duplicates ---------------------------------------------------------------------------------------------------------

TWICE = {"5": "double", "60": "double", "95": "double", "7": "pair", "8": "pair"}


def test_duplicates_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"2 keys occur more than once.*'double' \(file-5, file-60, file-95\)"):
        run(tmp_path / "t", synthetic(keys=TWICE))
    assert leftovers(tmp_path / "t") == []


@pytest.mark.parametrize(("policy", "dropped"), [("first", [8, 60, 95]), ("last", [5, 7, 60])])
def test_duplicates_dropped_across_segments(policy: str, dropped: list[int], tmp_path: Path) -> None:
    summary = run(tmp_path / "t", synthetic(keys=TWICE), duplicates=policy)
    assert (summary.samples, summary.dropped, summary.errors) == (97, 3, 0)
    found = [(entry["record"], entry["action"], entry["code"]) for entry in reported(tmp_path / "t")]
    assert found == [(number, "dropped", "duplicate-key") for number in dropped]
    assert [entry["path"] for entry in reported(tmp_path / "t")] == [f"file-{number}" for number in dropped]
    kept = [sample["about"]["number"] for sample in values(tmp_path / "t")]
    assert kept == [number for number in range(100) if number not in dropped]


def test_normalisation_forms_are_different_keys_with_a_warning(tmp_path: Path) -> None:
    summary = run(tmp_path / "t", synthetic(keys={"3": "caf\u00e9", "70": "cafe\u0301", "71": "na\u00efve"}))
    assert summary.samples == 100
    assert len(summary.warnings) == 1
    assert "normalisation" in summary.warnings[0]
    keys = _keys(tmp_path / "t")
    assert keys[3] == "caf\u00e9".encode()
    assert keys[70] == "cafe\u0301".encode()


def test_keys_that_are_not_text(tmp_path: Path) -> None:
    run(tmp_path / "t", synthetic(20, keys={"3": "\udcff\udcfe", "4": "a\nb", "5": "\x00"}))
    assert _keys(tmp_path / "t")[3:6] == [b"\xff\xfe", b"a\nb", b"\x00"]


def test_a_key_too_long_is_a_bad_sample(tmp_path: Path) -> None:
    run(tmp_path / "t", synthetic(20, keys={"3": "k" * 65_536, "4": "k" * 65_535}), SKIP)
    assert [(entry["record"], entry["code"]) for entry in reported(tmp_path / "t")] == [(3, "key-too-long")]
    assert len(_keys(tmp_path / "t")) == 19


# -- options ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"shard_bytes": 0}, {"shard_rows": 0}, {"segment_bytes": -1}, {"on_error": "ignore"}, {"duplicates": "both"},
        {"workers": -1}, {"max_errors": -1}, {"sample_timeout": 0}, {"resume": True, "overwrite": True},
    ],
)  # fmt: skip
def test_options_that_make_no_sense(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        ConvertOptions(**options)


def test_only_layout_options_change_bytes() -> None:
    base = expected_digests(synthetic(), SMALL)
    same = with_options(SMALL, workers=7, on_error="skip", max_errors=5, sample_timeout=5.0, allow_empty=True)
    assert expected_digests(synthetic(), same) == base
    for changed in (
        {"shard_bytes": 20_000},
        {"shard_rows": 7},
        {"segment_rows": 33},
        {"group_bytes": 900},
        {"duplicates": "first"},
    ):
        assert expected_digests(synthetic(), with_options(SMALL, **changed)) != base


def test_report_text_is_always_json() -> None:
    assert text(b"\xff\x00") == "\\xff\x00"
    assert json.loads(lines([{"key": text(b"\xff")}])) == {"key": "\\xff"}
