"""merge, split and filter: the right samples in the right order, values untouched, every result verified, the inputs never changed."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _build import FIELDS, build, flip, rows
from click.testing import CliRunner
from opskit import assert_same, samples, tree

import lfdata
from lfdata.errors import CorruptError, LfdataError, OptionError, SourceError, TargetExistsError
from lfdata.format.meta import read_manifest
from shard_builder.operations.build import BuildOptions
from shard_builder.operations.expression import Expression
from shard_builder.operations.filtering import filter_samples, kept_rows
from shard_builder.operations.inputs import open_input
from shard_builder.operations.merge import merge
from shard_builder.operations.salvage import salvage
from shard_builder.operations.selecting import ShardSizes
from shard_builder.operations.split import SplitOptions, split
from shard_builder.sinks.base import ExportOptions
from shard_builder.sinks.job import export
from shard_builder.verbs.split import command as split_command

ONE = BuildOptions(workers=1)
SMALL = BuildOptions(ShardSizes(shard_bytes=6_000, group_bytes=2_000), workers=1)


def some(count: int, first: int = 0) -> list[tuple[bytes, dict[str, Any]]]:
    """Rows of every kind of field, each field absent somewhere."""
    found = []
    for number, (key, values) in enumerate(rows(count, first)):
        values = dict(values)
        if number % 3 == 2:
            values.pop(list(FIELDS)[(number + first) % len(FIELDS)])
        found.append((key, values))
    return found


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two data sets of one schema; the second has a sidecar that replaces a field."""
    root = tmp_path_factory.mktemp("sets")
    build(root / "a", [some(7), [], some(6, 7)], index=True)
    side = {0: ("caption", ("text", {}), [f"new {number}" for number in range(5)])}
    build(root / "b", [some(5, 100)], sidecars=side)
    return root / "a", root / "b"


# -- merge ----------------------------------------------------------------------------------------------------------------


def test_a_merge_is_both_one_after_the_other_and_its_shards_are_the_same_files(sets: tuple[Path, Path], tmp_path: Path) -> None:
    a, b = sets
    before = tree(a) | tree(b)
    made = merge([a, b], tmp_path / "m", build=ONE)
    assert_same([*samples(a), *samples(b)], samples(tmp_path / "m"))
    assert made.whole == made.shards == 3, "the shard without rows is left out"
    inodes = {item.stat().st_ino for path in sets for item in path.glob("*.lfd")}
    assert all(item.stat().st_ino in inodes for item in (tmp_path / "m").glob("*.lfd"))
    assert tree(a) | tree(b) == before
    data = lfdata.open(tmp_path / "m")
    assert data.index() is not None and data.index_of("key/0101") == 14


def test_copied_shards_share_nothing(sets: tuple[Path, Path], tmp_path: Path) -> None:
    merge(sets, tmp_path / "m", build=BuildOptions(copy=True, workers=2))
    assert all(item.stat().st_nlink == 1 for item in (tmp_path / "m").glob("*.lfd"))
    assert_same([*samples(sets[0]), *samples(sets[1])], samples(tmp_path / "m"))


@pytest.mark.parametrize(("rule", "kept"), [("first", "old"), ("last", "new")])
def test_keys_in_both_are_refused_or_kept_once_by_rule(tmp_path: Path, rule: str, kept: str) -> None:
    fields = {"caption": ("text", {})}
    build(tmp_path / "a", [[(b"%d" % n, {"caption": "old"}) for n in range(6)]], fields)
    build(tmp_path / "b", [[(b"%d" % n, {"caption": "new"}) for n in range(4, 9)]], fields)
    with pytest.raises(SourceError, match=r"key '4' occurs 2 times: .*a, index 4 and .*b, index 0"):
        merge([tmp_path / "a", tmp_path / "b"], tmp_path / "m", build=ONE)
    assert not list((tmp_path / "m").iterdir()), "a refused merge leaves nothing"
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "m", duplicates=rule, build=ONE)
    found = samples(tmp_path / "m")
    assert sorted(item["__key__"] for item in found) == [b"%d" % n for n in range(9)]
    assert {item["caption"] for item in found if item["__key__"] in (b"4", b"5")} == {kept}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"caption": ("text", {})}, "field 'label' is in"),
        ({"caption": ("bytes", {}), "label": ("scalar", {"dtype": "int32"})}, "field 'caption': kind is 'text'"),
        ({"caption": ("text", {}), "label": ("scalar", {"dtype": "int64"})}, "field 'label': dtype is 'int32'"),
    ],
)
def test_other_fields_are_refused_by_name(tmp_path: Path, fields: Any, reason: str) -> None:
    build(tmp_path / "a", [[(b"a", {})]], {"caption": ("text", {}), "label": ("scalar", {"dtype": "int32"})})
    build(tmp_path / "b", [[(b"b", {})]], fields)
    with pytest.raises(OptionError, match=reason):
        merge([tmp_path / "a", tmp_path / "b"], tmp_path / "m", build=ONE)


def test_values_stored_otherwise_may_be_merged(tmp_path: Path) -> None:
    for name, level in (("a", "1"), ("b", "9")):
        build(
            tmp_path / name,
            [[(name.encode() + b"%d" % n, {"about": {"n": n}}) for n in range(4)]],
            {"about": ("json", {"level": level})},
        )
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "m", build=ONE)
    made = filter_samples(tmp_path / "m", tmp_path / "f", "not key endswith '0'", build=ONE)
    assert made.shards == 2, "rows that are stored otherwise do not share a shard"
    assert [item["about"]["n"] for item in samples(tmp_path / "f")] == [1, 2, 3, 1, 2, 3]


# -- split ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["key-hash", "exact", "order"])
def test_every_sample_is_whole_in_exactly_one_part(sets: tuple[Path, Path], tmp_path: Path, by: str) -> None:
    parts = split(sets[0], tmp_path / "s", SplitOptions(("0.7", "0.3"), by, names=("train", "val")), build=ONE)
    found = {item["__key__"]: item for name in ("train", "val") for item in samples(tmp_path / "s" / name)}
    assert sum(part.rows for part in parts) == 13 == len(found)
    for item in samples(sets[0]):
        assert_same([item], [found[item["__key__"]]])
    if by != "key-hash":
        assert [part.rows for part in parts] == [9, 4]
    if by == "order":
        assert [item["__key__"] for item in samples(tmp_path / "s" / "val")] == [b"key/%04d" % n for n in range(9, 13)]


def test_a_key_stays_in_its_part_when_the_data_grow_and_shares_are_met(tmp_path: Path) -> None:
    fields = {"label": ("scalar", {"dtype": "int32"})}
    both = [[(b"%d" % n, {"label": n}) for n in range(4000)], [(b"%d" % n, {"label": n}) for n in range(4000, 8000)]]
    build(tmp_path / "small", both[:1], fields)
    build(tmp_path / "large", both[::-1], fields)
    for name in ("small", "large"):
        split(tmp_path / name, tmp_path / f"{name}-parts", SplitOptions(("90", "10")), build=ONE)
    part = {name: {s["__key__"] for s in lfdata.open(tmp_path / f"{name}-parts" / "part-1")} for name in ("small", "large")}
    assert part["small"] == {key for key in part["large"] if int(key) < 4000}
    assert 700 < len(part["large"]) < 900
    split(tmp_path / "large", tmp_path / "other", SplitOptions(("90", "10"), seed=1), build=ONE)
    assert {s["__key__"] for s in lfdata.open(tmp_path / "other" / "part-1")} != part["large"]


def test_a_column_makes_a_part_for_every_value(sets: tuple[Path, Path], tmp_path: Path) -> None:
    split(sets[0], tmp_path / "s", SplitOptions(column="label"), build=ONE)
    names = sorted(item.name for item in (tmp_path / "s").iterdir())
    wanted = Counter("absent" if item["label"] is None else str(item["label"]) for item in samples(sets[0]))
    assert {name.removeprefix("label-"): len(samples(tmp_path / "s" / name)) for name in names} == dict(wanted)


@pytest.mark.parametrize(
    "bad",
    [
        {"ratio": ("1",)},
        {"ratio": ("0.5", "0.6")},
        {"ratio": ("1.5", "-0.5")},
        {"ratio": ("a", "b")},
        {"ratio": ()},
        {"column": "x", "ratio": ("50", "50")},
    ],
)
def test_shares_that_make_no_sense_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        SplitOptions(**bad)


def test_parts_need_names_of_directories(sets: tuple[Path, Path], tmp_path: Path) -> None:
    for names in (("a",), ("a", "a"), ("a", "../b"), ("", ".x")):
        with pytest.raises(OptionError, match="names"):
            split(sets[0], tmp_path / "s", SplitOptions(("0.5", "0.5"), names=names), build=ONE)
    with pytest.raises(OptionError, match="no scalar field"):
        split(sets[0], tmp_path / "s", SplitOptions(column="caption"), build=ONE)


# -- filter ---------------------------------------------------------------------------------------------------------------

CASES: list[tuple[str, Any]] = [
    ("label == 1", lambda s: s["label"] == 1),
    ("label != 1", lambda s: s["label"] is not None and s["label"] != 1),
    ("not label == 1", lambda s: s["label"] is not None and s["label"] != 1),
    ("label in (0, 2)", lambda s: s["label"] in (0, 2)),
    ("label not in (0, 2)", lambda s: s["label"] == 1),
    ("has(caption) and not has(image)", lambda s: s["caption"] is not None and s["image"] is None),
    ("has(caption) or label > 0", lambda s: s["caption"] is not None or (s["label"] or 0) > 0),
    ("image.width * image.height == 240", lambda s: s["image"] is not None),
    ("sound.frames / sound.rate > 0.0255", lambda s: s["sound"] is not None and len(s["sound"].samples) > 204),
    ("key startswith 'key/000'", lambda s: s["__key__"].startswith(b"key/000")),
    ("key >= 'key/0005' and key < \"key/0008\"", lambda s: b"key/0005" <= s["__key__"] < b"key/0008"),
    ("key contains '1' and not (key endswith '1')", lambda s: b"1" in s["__key__"] and not s["__key__"].endswith(b"1")),
    (
        "caption.bytes % 2 == 0 and -label <= -1",
        lambda s: s["caption"] is not None and len(s["caption"]) % 2 == 0 and (s["label"] or 0) >= 1,
    ),
    ("(ids.tokens + 1) * 2 == 8", lambda s: s["ids"] is not None),
    (" or ".join(["label == 1"] * 700), lambda s: s["label"] == 1),
    ("+".join(["1"] * 4000) + " == 4000 + label * 0", lambda s: s["label"] is not None),
    ("`blob.bytes` >= 5.0", lambda s: s["blob"] is not None),
]


@pytest.mark.parametrize(("where", "wanted"), CASES, ids=[case[0][:60] for case in CASES])
def test_an_expression_keeps_what_it_says(sets: tuple[Path, Path], where: str, wanted: Any) -> None:
    data = open_input(sets[0])
    found = np.flatnonzero(kept_rows(data, Expression(where))).tolist()
    assert found == [number for number, sample in enumerate(data) if wanted(sample)]


@pytest.mark.parametrize(
    "where",
    [
        "", "label", "label ==", "label == 1 1", "(label == 1", "label = 1", "__import__('os')", "label.__class__ == 1", "nobody > 1",
        "label == 'a'", "key == 1", "key + 1 == 2", "caption startswith 'a'", "label startswith 'a'", "label / 0 == 1", "label in ()",
        "has(nobody)", "vector.dims == 1", "label == 1 and", "label ; 1", "9223372036854775807 + label > 0", "label not 1",
        "(" * 60 + "label == 1" + ")" * 60,
    ],
)  # fmt: skip
def test_anything_else_is_refused_and_never_run(sets: tuple[Path, Path], where: str) -> None:
    with pytest.raises(OptionError, match="--where"):
        kept_rows(open_input(sets[0]), Expression(where))


def test_whole_columns_of_64_bits_are_compared_exactly(tmp_path: Path) -> None:
    values = [2**63 - 1, 2**63, 2**64 - 1, 2**53 + 1]
    build(tmp_path / "d", [[(b"%d" % n, {"n": v}) for n, v in enumerate(values)]], {"n": ("scalar", {"dtype": "uint64"})})
    data = open_input(tmp_path / "d")
    assert kept_rows(data, Expression("n == 9223372036854775808")).tolist() == [False, True, False, False]
    assert kept_rows(data, Expression("n > 9007199254740992 and n < 9007199254740994")).tolist() == [False, False, False, True]
    with pytest.raises(OptionError, match=r"2\^63"):
        kept_rows(data, Expression("n + 1 > 0"))


def test_a_filter_copies_values_as_they_are_and_takes_whole_shards_over(sets: tuple[Path, Path], tmp_path: Path) -> None:
    made = filter_samples(sets[0], tmp_path / "f", "key >= 'key/0005'", build=ONE)
    assert (made.shards, made.whole) == (2, 1)
    assert_same(samples(sets[0])[5:], samples(tmp_path / "f"))
    made = filter_samples(sets[1], tmp_path / "g", "key != 'key/0102'", build=ONE)
    assert_same([s for s in samples(sets[1]) if s["__key__"] != b"key/0102"], samples(tmp_path / "g"))
    assert not read_manifest(tmp_path / "g").shards[0].sidecars and samples(tmp_path / "g")[0]["caption"] == "new 0"


def test_nothing_kept_is_refused_unless_allowed(sets: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(LfdataError, match="--allow-empty"):
        filter_samples(sets[0], tmp_path / "f", "label > 5", build=ONE)
    filter_samples(sets[0], tmp_path / "f", "label > 5", build=BuildOptions(workers=1, allow_empty=True))
    assert samples(tmp_path / "f") == [] and len(lfdata.open(tmp_path / "f")) == 0


def test_one_and_two_processes_give_the_same_bytes(sets: tuple[Path, Path], tmp_path: Path) -> None:
    sizes = ShardSizes(shard_bytes=6_000, group_bytes=2_000)
    for workers in (1, 2):
        made = filter_samples(sets[0], tmp_path / str(workers), "label != 1", build=BuildOptions(sizes, workers=workers))
    assert made.shards > 2 and tree(tmp_path / "1") == tree(tmp_path / "2")


def test_a_second_run_changes_nothing_and_another_operation_is_refused(sets: tuple[Path, Path], tmp_path: Path) -> None:
    for _ in range(2):
        filter_samples(sets[0], tmp_path / "f", "label != 1", build=ONE)
    before = tree(tmp_path / "f")
    with pytest.raises(TargetExistsError):
        filter_samples(sets[0], tmp_path / "f", "label != 2", build=ONE)
    with pytest.raises(OptionError, match="over its input"):
        filter_samples(sets[0], sets[0], "label != 2", build=ONE)
    assert tree(tmp_path / "f") == before


def test_a_damaged_value_stops_the_copy_by_name_and_the_rest_is_gone_on_with(tmp_path: Path) -> None:
    manifest = build(tmp_path / "d", [some(6), some(6, 6)])
    path = tmp_path / "d" / manifest.shards[1].file
    flip(path, 4096 + 20)
    with pytest.raises(CorruptError, match="field 'image', row") as caught:
        filter_samples(tmp_path / "d", tmp_path / "f", "label != 1", build=SMALL)
    assert caught.value.file == os.fspath(path)
    flip(path, 4096 + 20)
    filter_samples(tmp_path / "d", tmp_path / "f", "label != 1", build=SMALL)
    filter_samples(tmp_path / "d", tmp_path / "g", "label != 1", build=SMALL)
    assert tree(tmp_path / "f") == tree(tmp_path / "g")


def test_a_copied_shard_that_is_damaged_is_found_while_it_is_copied(tmp_path: Path) -> None:
    manifest = build(tmp_path / "d", [some(6)])
    flip(tmp_path / "d" / manifest.shards[0].file, 4096 + 20)
    with pytest.raises(CorruptError, match="SHA-256"):
        merge([tmp_path / "d"], tmp_path / "m", build=BuildOptions(copy=True, workers=1))
    assert not list((tmp_path / "m").iterdir())


@pytest.mark.parametrize("place", ["a", "a/inside", "a/deep/er", "."])
def test_a_result_inside_its_input_or_around_it_is_refused_before_anything_is_written(tmp_path: Path, place: str) -> None:
    for name in ("a", "b"):
        build(tmp_path / "in" / name, [rows(3, 3 * (name == "b"))])
    (tmp_path / "link").symlink_to(tmp_path / "in")
    first, second, was = tmp_path / "in" / "a", tmp_path / "in" / "b", tree(tmp_path / "in")
    names = ("a", "x") if place == "." else ("x", "y")
    calls: list[Callable[[Path], object]] = [
        lambda target: merge([first, second], target),
        lambda target: filter_samples(first, target, "has(caption)"),
        lambda target: salvage(first, target),
        lambda target: export(first, target, ExportOptions(format="webdataset")),
        lambda target: split(first, target, SplitOptions(("0.5", "0.5"), names=names)),
    ]
    for top in ("in", "link"):
        for call in calls:
            with pytest.raises(OptionError, match=r"inside|over its input"):
                call(tmp_path / top / place)
    assert tree(tmp_path / "in") == was and not (tmp_path / "in" / ".work").exists()


def test_a_part_without_samples_is_made_and_said(tmp_path: Path) -> None:
    build(tmp_path / "one", [rows(1)])
    answer = CliRunner().invoke(split_command, [str(tmp_path / "one"), "-o", str(tmp_path / "parts"), "--ratio", "0.5,0.5"])
    assert answer.exit_code == 0 and answer.output.count("has no samples") == 1
    sizes = [len(lfdata.open(tmp_path / "parts" / name)) for name in ("part-0", "part-1")]
    assert sorted(sizes) == [0, 1]
    build(tmp_path / "none", [rows(0)])
    with pytest.raises(OptionError, match="no samples"):
        split(tmp_path / "none", tmp_path / "columns", SplitOptions(column="label"))
