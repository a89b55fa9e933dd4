"""dedupe: exactly the repeated values and samples, whatever spills to disk; a damaged payload is named."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from _build import build, flip, picture, rows
from faultkit import run as convert_synthetic

from lfdata.errors import CorruptError, OptionError
from shard_builder.operations import dedupe as module
from shard_builder.operations.dedupe import SAMPLE, bucket_bits, dedupe
from shard_builder.verb_options import written


def repeated(count: int) -> list[tuple[bytes, dict[str, Any]]]:
    """Rows of which many values, and some whole samples, are the same."""
    found = []
    for number, (key, values) in enumerate(rows(count)):
        values = dict(values) | {"image": picture(number % 5), "caption": f"caption {number % 7}", "about": {"n": number % 3}}
        if number % 4 == 0:
            values = {"image": picture(0), "caption": "same", "label": 1}
        if number % 11 == 3:
            values.pop("caption", None)
        found.append((key, values))
    return found


def wanted(samples: list[dict[str, Any]]) -> dict[str, set[tuple[int, ...]]]:
    """Groups by field, by comparing decoded values."""
    by_value: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    names = [name for name in samples[0] if name != "__key__"]
    for number, item in enumerate(samples):
        texts = {
            name: repr(np.asarray(item[name]).tolist() if isinstance(item[name], np.ndarray) else item[name]) for name in names
        }
        for name in names:
            if item[name] is not None:
                by_value[name][texts[name]].append(number)
        by_value[SAMPLE][repr(texts)].append(number)
    return {name: {tuple(group) for group in values.values() if len(group) > 1} for name, values in by_value.items()}


@pytest.mark.parametrize("spilled", [False, True])
def test_the_groups_are_those_of_equal_values(tmp_path: Path, spilled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if spilled:
        monkeypatch.setattr(module, "_BUFFERED", 5)
        monkeypatch.setattr(module, "bucket_bits", lambda rows, tables: 3)
    some = repeated(40)
    build(tmp_path / "data", [some[:13], some[13:14], some[14:]])
    with written(tmp_path / "groups.jsonl") as output:
        report = dedupe(tmp_path / "data", output=output)
    groups = [msgspec.json.decode(line) for line in (tmp_path / "groups.jsonl").read_bytes().splitlines()]
    import lfdata

    samples = list(lfdata.open(tmp_path / "data"))
    right = wanted(samples)
    for name, found in report.fields.items():
        mine = [group for group in groups if group["field"] == name]
        assert {tuple(group["indices"]) for group in mine} == right[name], name
        assert (found.groups, found.repeats) == (len(mine), sum(group["count"] - 1 for group in mine))
        assert all(group["keys"] == [samples[i]["__key__"].decode() for i in group["indices"]] for group in mine)
    assert "label" not in report.fields and report.fields[SAMPLE].groups == 1
    assert report.largest["image"][0].count == max(len(group) for group in right["image"])


def test_json_is_compared_across_dictionaries(tmp_path: Path) -> None:
    fields: dict[str, tuple[str, dict[str, str]]] = {"about": ("json", {"level": "1"})}
    build(tmp_path / "one", [[(b"a", {"about": {"x": "y" * 500}})]], fields)
    build(tmp_path / "two", [[(b"b", {"about": {"x": "y" * 500}})]], {"about": ("json", {"level": "19"})})
    from shard_builder.operations.build import BuildOptions
    from shard_builder.operations.merge import merge

    merge([tmp_path / "one", tmp_path / "two"], tmp_path / "both", build=BuildOptions(workers=1))
    assert dedupe(tmp_path / "both").fields["about"].repeats == 1


def test_arrays_of_the_same_bytes_and_other_shapes_are_not_the_same(tmp_path: Path) -> None:
    fields: dict[str, tuple[str, dict[str, str]]] = {"a": ("array", {"dtype": "int8", "ndim": "2"})}
    values = [np.zeros((2, 3), np.int8), np.zeros((3, 2), np.int8), np.zeros((2, 3), np.int8)]
    build(tmp_path / "data", [[(b"%d" % n, {"a": value}) for n, value in enumerate(values)]], fields)
    assert [group.indices for group in dedupe(tmp_path / "data").largest["a"]] == [[0, 2]]


def test_no_and_one_sample_and_fields_that_are_not_there(tmp_path: Path) -> None:
    for count in (0, 1):
        build(tmp_path / str(count), [rows(count)])
        assert all(found.repeats == 0 for found in dedupe(tmp_path / str(count)).fields.values())
    with pytest.raises(OptionError, match="no field 'nobody'"):
        dedupe(tmp_path / "1", fields=["nobody"])


def test_a_damaged_payload_is_named_and_no_output_is_left(tmp_path: Path) -> None:
    manifest = build(tmp_path / "data", [rows(4)])
    flip(tmp_path / "data" / manifest.shards[0].file, 4096 + 10)
    with pytest.raises(CorruptError, match="field 'image', row"), written(tmp_path / "out.jsonl") as output:
        dedupe(tmp_path / "data", output=output)
    assert sorted(item.name for item in tmp_path.iterdir()) == ["data"]


def test_buckets_stay_small_and_descriptors_few() -> None:
    assert bucket_bits(1000, 3) == 0
    for rows_, tables in ((10**6, 1), (10**8, 9), (10**10, 200), (10**10, 5000)):
        assert 1 << bucket_bits(rows_, tables) <= max(1, 256 // tables)


def test_a_converted_set_without_repeats_has_none(tmp_path: Path) -> None:
    convert_synthetic(tmp_path / "t")
    assert dedupe(tmp_path / "t").fields[SAMPLE].repeats == 0
