"""``shard-builder stats``: distributions equal numpy's, suspicious values are found once each, and everything is
deterministic."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import _build
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from lfdata.codecs.base import Encoded
from lfdata.errors import OptionError
from shard_builder.examine import quantiles
from shard_builder.examine.duplicates import Buckets, record
from shard_builder.verbs.stats import WHOLE_SAMPLE, command, stats


def found(result: dict[str, Any]) -> set[tuple[str, str, int]]:
    """(check, field, index) of every listed finding."""
    return {(f["check"], f["field"], e["index"]) for f in result["content"]["findings"] for e in f["examples"]}


# -- percentiles ------------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(
    arrays.arrays(
        st.sampled_from(["u1", "<u4", "<u8", "<i4", "<i8", "<f4", "<f8", "?"]).map(np.dtype),
        st.integers(1, 60),
    ),
    st.integers(1, 5),
)
def test_counting_bits_finds_the_same_values_as_sorting(values: Any, pieces: int) -> None:
    def chunks() -> Any:
        return iter(np.array_split(values, pieces))

    finite = np.sort(values[np.isfinite(values)] if values.dtype.kind == "f" else values)
    if not len(finite):
        return
    ranks = [0, len(finite) // 2, len(finite) - 1]
    by_sorting = quantiles.select(chunks, len(finite), ranks)
    by_counting = _without_sorting(chunks, len(finite), ranks)
    assert by_sorting == by_counting
    summary = quantiles.summarise(chunks)
    assert summary["min"] == finite[0] and summary["max"] == finite[-1]
    for p in quantiles.PERCENTILES:
        assert summary[f"p{p}"] == finite[max(0, math.ceil(p / 100 * len(finite)) - 1)]


def _without_sorting(chunks: Any, count: int, ranks: list[int]) -> list[int]:
    kept = quantiles.SORT_VALUES
    quantiles.SORT_VALUES = 0
    try:
        return quantiles.select(chunks, count, ranks)
    finally:
        quantiles.SORT_VALUES = kept


def test_equal_digests_are_grouped_by_field_in_order() -> None:
    with Buckets() as buckets:
        for index in (9, 1, 5):
            buckets.add(
                record(0, b"A" * 16, index) + record(1, b"A" * 16, index + 100) + record(0, index.to_bytes(16, "big"), index)
            )
        buckets.add(b"")
        groups = [(field, indices.tolist()) for field, indices in buckets.groups()]
    assert sorted(groups) == [(0, [1, 5, 9]), (1, [101, 105, 109])]


# -- columns ----------------------------------------------------------------------------------------------------------------


def test_distributions_match_the_values_and_no_payload_is_read(tmp_path: Path) -> None:
    rows = [_build.rows(7), _build.rows(6, 7), []]
    rows[0].append((b"empty", {}))
    manifest = _build.build(tmp_path, rows)
    for shard in manifest.shards[:2]:
        _build.flip(tmp_path / shard.file, 4100)  # payload damage: must not matter here
    result = stats(tmp_path, workers=1, content=False)
    assert (result["rows"], result["content"], result["errors"]) == (14, None, [])
    fields = result["fields"]
    assert all((field["present"], field["absent"]) == (13, 1) for field in fields.values())
    frames = np.array([200 + number for number in range(13)])
    assert fields["sound"]["columns"]["frames"] == {
        "count": 13, "min": 200, "p1": 200, "p5": 200, "p50": 206, "p95": 212, "p99": 212, "max": 212, "mean": frames.mean(),
    }  # fmt: skip
    assert fields["sound"]["columns"]["seconds"]["max"] == pytest.approx(212 / 8000)
    assert fields["sound"]["counts"]["rate"] == {"distinct": 1, "top": [[8000, 13]]}
    assert fields["image"]["counts"]["codec"]["top"] == [["png", 13]]
    assert fields["image"]["columns"]["aspect"]["p50"] == pytest.approx(20 / 12)
    assert fields["image"]["columns"]["megapixels"]["max"] == pytest.approx(240 / 1e6)
    assert fields["label"]["counts"]["value"]["top"] == [[0, 5], [1, 4], [2, 4]]
    assert fields["vector"]["columns"]["dims[0]"]["max"] == 3
    assert fields["ids"]["columns"]["tokens"]["p50"] == 3


@pytest.mark.parametrize("shards", [[], [[]], [[(b"only", {})]]], ids=["no shards", "no rows", "absent everywhere"])
def test_nothing_to_count(tmp_path: Path, shards: list[list[_build.Row]]) -> None:
    _build.build(tmp_path, shards)
    result = stats(tmp_path, workers=1)
    assert result["errors"] == [] and result["content"]["findings"] == [] and result["content"]["duplicates"] == []
    assert all(
        field["present"] == 0 and not any(c["count"] for c in field["columns"].values()) for field in result["fields"].values()
    )
    run = CliRunner().invoke(command, [str(tmp_path), "--workers", "1"])
    assert run.exit_code == 0 and "nothing black" in run.output


# -- content ----------------------------------------------------------------------------------------------------------------


def odd_rows() -> list[_build.Row]:
    flat = np.zeros((4, 5, 3), np.uint8)
    clear = np.full((4, 5, 4), 90, np.uint8)
    clear[..., 3] = 0
    quiet, loud = np.zeros((50, 1), np.int16), np.full((50, 2), 32767, np.int16)
    loud[::2] = -32768
    return [
        (b"black", {"image": _build.png(flat)}),
        (b"white", {"image": _build.png(flat + 255)}),
        (b"grey", {"image": _build.png(flat + 9)}),
        (b"clear", {"image": _build.png(clear)}),
        (b"silent", {"sound": (quiet, 8000)}),
        (b"clipped", {"sound": (loud, 8000)}),
        (b"offset", {"sound": (quiet + 5, 8000)}),
        (b"no frames", {"sound": (quiet[:0], 8000)}),
        (b"empty", {"caption": "", "about": {}, "blob": b"", "ids": []}),
        (b"blank", {"caption": " \n\t", "about": None}),
        (b"nan", {"vector": np.array([1, np.nan], np.float32)}),
        (b"no elements", {"vector": np.empty(0, np.float32)}),
        (b"undecodable", {"caption": Encoded(b"\xff\xff")}),
    ]


def test_every_kind_of_odd_value_is_found_once(tmp_path: Path) -> None:
    _build.build(tmp_path, [_build.rows(3), odd_rows()])
    result = stats(tmp_path, workers=2)
    keys = [key.decode() for key, _ in odd_rows()]
    expected = {
        ("black", "image", "black"), ("white", "image", "white"), ("constant", "image", "grey"), ("transparent", "image",
        "clear"),
        ("constant", "image", "clear"), ("silent", "sound", "silent"), ("clipped", "sound", "clipped"), ("constant", "sound",
        "offset"),
        ("empty", "sound", "no frames"), ("empty", "caption", "empty"), ("empty", "about", "empty"), ("empty", "blob", "empty"),
        ("empty", "ids", "empty"), ("blank", "caption", "blank"), ("empty", "about", "blank"), ("nan", "vector", "nan"),
        ("empty", "vector", "no elements"), ("undecodable", "caption", "undecodable"),
    }  # fmt: skip
    assert found(result) == {(check, field, 3 + keys.index(key)) for check, field, key in expected}
    examples = [e for f in result["content"]["findings"] for e in f["examples"]]
    assert all(e["key"] == keys[e["row"]] and e["shard"] == 1 and e["file"] for e in examples)
    assert result["content"]["samples"] == 3 + len(keys)


def test_duplicates_over_shards_are_listed_with_index_shard_and_key(tmp_path: Path) -> None:
    same = _build.row(1)
    rows = [_build.rows(2), [(b"twin\x1b[0m", same), (b"other", _build.row(7))], [(b"third", {"caption": same["caption"]})]]
    manifest = _build.build(tmp_path, rows)
    result = stats(tmp_path, workers=2)
    by_field = {entry["field"]: entry for entry in result["content"]["duplicates"]}
    assert {"image", "sound", WHOLE_SAMPLE} <= by_field.keys() and "label" not in by_field
    (group,) = by_field["caption"]["examples"]
    assert (by_field["caption"]["groups"], by_field["caption"]["redundant"], group["count"]) == (1, 2, 3)
    assert [sample["index"] for sample in group["samples"]] == [1, 2, 4]
    assert group["samples"][1]["key"] == "twin\\x1b[0m" and group["samples"][1]["file"] == manifest.shards[1].file
    (whole,) = by_field[WHOLE_SAMPLE]["examples"]
    assert [sample["index"] for sample in whole["samples"]] == [1, 2]
    assert result["content"]["texts"]["caption"]["top"][0] == ["picture number 1", 3]


def test_equal_bytes_of_another_shape_are_no_duplicate(tmp_path: Path) -> None:
    fields = {"grid": ("array", {"dtype": "uint8", "ndim": "2"})}
    rows = [(str(shape).encode(), {"grid": np.zeros(shape, np.uint8)}) for shape in ((2, 3), (3, 2), (6, 1))]
    _build.build(tmp_path, [rows], fields)
    assert stats(tmp_path, workers=1)["content"]["duplicates"] == []


def test_a_limited_look_takes_the_same_samples_whatever_their_order(tmp_path: Path) -> None:
    rows = [(f"k{number}".encode(), {"caption": " "}) for number in range(40)]
    fields = {"caption": ("text", {})}
    _build.build(tmp_path / "a", [rows[:10], rows[10:]], fields)
    _build.build(tmp_path / "b", [rows[::-1]], fields)
    looks = [stats(tmp_path / name, workers=2, limit=7) for name in "ab"]
    keys = [{e["key"] for e in look["content"]["findings"][0]["examples"]} for look in looks]
    assert keys[0] == keys[1] and len(keys[0]) == 7
    assert all(look["content"]["samples"] == 7 for look in looks)


def test_examples_are_limited_and_everything_is_counted(tmp_path: Path) -> None:
    rows = [(f"{number:03d}".encode(), {"caption": ""}) for number in range(30)]
    _build.build(tmp_path, [rows], {"caption": ("text", {})})
    (finding,) = stats(tmp_path, workers=1, listed=4)["content"]["findings"]
    assert finding["count"] == 30 and [e["index"] for e in finding["examples"]] == [0, 1, 2, 3]


def test_a_shard_that_cannot_be_read_is_an_error_and_the_rest_is_counted(tmp_path: Path) -> None:
    manifest = _build.build(tmp_path, [_build.rows(2), _build.rows(2, 2)])
    (tmp_path / manifest.shards[0].file).unlink()
    run = CliRunner().invoke(command, [str(tmp_path), "--json", "--workers", "1"])
    result = json.loads(run.output)
    assert run.exit_code == 1 and result["fields"]["image"]["present"] == 2
    assert any("shard 0" in error and manifest.shards[0].file in error for error in result["errors"])


def test_a_decoder_that_dies_is_a_finding(tmp_path: Path) -> None:
    rows = [(b"a", {"caption": "fine"}), (b"b", {"caption": "CRASH"}), (b"c", {"caption": " "})]
    _build.build(tmp_path, [rows], {"caption": ("text", {})})
    result = stats(tmp_path, workers=1, worker_module="_hostile_worker")
    assert found(result) == {("undecodable", "caption", 1), ("blank", "caption", 2)}


def test_an_undecodable_value_is_a_status(tmp_path: Path) -> None:
    _build.build(tmp_path, [[(b"a", {"caption": Encoded(b"\xff\xff")})]], {"caption": ("text", {})})
    assert CliRunner().invoke(command, [str(tmp_path), "--workers", "1"]).exit_code == 1
    assert CliRunner().invoke(command, [str(tmp_path), "--workers", "1", "--no-content"]).exit_code == 0


def test_a_single_file_is_refused(tmp_path: Path) -> None:
    manifest = _build.build(tmp_path, [_build.rows(1)])
    with pytest.raises(OptionError, match="directory"):
        stats(tmp_path / manifest.shards[0].file)
