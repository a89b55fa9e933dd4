"""The plan: deterministic, in bounded memory, with keys unique over the whole set."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lfdata.errors import SourceError
from lfdata.format.durable import Files
from shard_builder import plan as plan_module
from shard_builder.plan import Plan, Planner
from shard_builder.sources.base import BadRecord, Record


class Listed:
    """A source that is a list of records."""

    def __init__(self, items: list[Record | BadRecord]) -> None:
        self.items = items

    def scan(self) -> Iterator[Record | BadRecord]:
        yield from self.items

    def place(self, locator: bytes) -> str:
        return f"at {locator.decode()}"


def plan(
    folder: Path, items: list[Record | BadRecord], *, rows: int = 1000, size: int = 1 << 40, duplicates: str = "error"
) -> Plan:
    source: Any = Listed(items)
    planner = Planner(Files(), folder, size, rows, duplicates)
    try:
        return planner.run(source)
    except BaseException:
        planner.close()
        raise


def records(count: int, **changes: Any) -> list[Record | BadRecord]:
    return [
        Record(changes.get("key", b"k%d") % n, b"locator %d" % n, changes.get("size", 10), n // changes.get("unit", 1 << 40))
        for n in range(count)
    ]


def test_what_was_scanned_comes_back(tmp_path: Path) -> None:
    items: list[Record | BadRecord] = [
        *records(5),
        BadRecord(b"bad", "pa\udcffth", "code", "reason"),
        Record(b"\xff\x00", bytes(3 << 20), 7),
    ]
    made = plan(tmp_path, items, rows=3)
    back = [item for segment in made.segments for item in made.items(segment, segment.first)]
    assert back == list(enumerate(items))
    assert (made.records, made.bad, made.bytes) == (7, 1, 57)
    assert list(made.items(made.segments[1], 5)) == [(5, items[5])]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("rows", "size", "unit", "cuts"),
    [
        (4, 1 << 40, 1 << 40, [4, 8, 10]),
        (1000, 25, 1 << 40, [3, 6, 9, 10]),
        (1000, 1 << 40, 5, [5, 10]),
        (3, 1 << 40, 5, [3, 5, 8, 10]),
        (1, 1, 1, list(range(1, 11))),
    ],
)
def test_segments_are_cut_by_rows_bytes_and_units(rows: int, size: int, unit: int, cuts: list[int], tmp_path: Path) -> None:
    made = plan(tmp_path, records(10, unit=unit), rows=rows, size=size)
    assert [segment.stop for segment in made.segments] == cuts
    assert [segment.first for segment in made.segments] == [0, *cuts[:-1]]


def test_an_empty_source_has_no_segments(tmp_path: Path) -> None:
    made = plan(tmp_path, [])
    assert (made.records, made.segments, made.warnings, made.sample) == (0, [], [], [])


def test_the_same_source_gives_the_same_plan_whatever_the_buffers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    items = records(6000)
    first = plan(tmp_path, items)
    monkeypatch.setattr(plan_module, "_BUFFERED", 777)
    second = plan(tmp_path, items)
    assert (first.fingerprint, first.segments, first.sample) == (second.fingerprint, second.segments, second.sample)
    assert len(first.sample) == plan_module.DICTIONARY_RECORDS
    for changed in (items[:-1], [*items[:-1], Record(b"other", b"locator 5999", 10)], [items[1], items[0], *items[2:]]):
        assert plan(tmp_path, changed).fingerprint != first.fingerprint


def test_the_dictionary_sample_depends_on_the_keys_alone(tmp_path: Path) -> None:
    items = records(5000)
    shuffled = items.copy()
    random.Random(1).shuffle(shuffled)
    chosen = [{items[ordinal] for ordinal, _, _ in plan(tmp_path, items).sample}, set()]
    chosen[1] = {shuffled[ordinal] for ordinal, _, _ in plan(tmp_path, shuffled).sample}
    assert chosen[0] == chosen[1]


@pytest.mark.parametrize("spilled", [False, True])
@pytest.mark.parametrize("policy", ["first", "last", "error"])
def test_duplicates_among_a_hundred_thousand_keys(
    policy: str, spilled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if spilled:
        monkeypatch.setattr(plan_module, "_BUFFERED", 5000)
    items = records(100_000)
    rng = random.Random(2)
    places = rng.sample(range(100_000), 3000)
    wanted: set[int] = set()
    for group in (places[n : n + 3] for n in range(0, 3000, 3)):
        for place in group:
            items[place] = Record(b"double %d" % group[0], b"l", 1)
        kept = min(group) if policy == "first" else max(group)
        wanted |= set(group) - {kept}
    if policy == "error":
        with pytest.raises(
            SourceError,
            match=r"1000 keys occur more than once: 'double \d+' \(at l, at l, at l\); .*and 990 more",
        ):
            plan(tmp_path, items, duplicates=policy)
    else:
        made = plan(tmp_path, items, duplicates=policy)
        assert made.dropped.tolist() == sorted(wanted)
        assert all(made.is_dropped(n) == (n in wanted) for n in range(0, 100_000, 997))
    assert list(tmp_path.iterdir()) == []


def test_equal_hashes_are_not_equal_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "xxh3", lambda key, seed=0: len(key) + seed)
    made = plan(tmp_path, records(50), duplicates="error")
    assert made.dropped.tolist() == []


@pytest.mark.parametrize("spilled", [False, True])
def test_normalisation_collisions(spilled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if spilled:
        monkeypatch.setattr(plan_module, "_BUFFERED", 3)
    keys = ["é", "e\u0301", "x", "Å", "\u212b", "A\u030a", "ü", "日本", "\u1e9b\u0323"]
    made = plan(tmp_path, [Record(key.encode(), b"", 1) for key in keys] + [Record(b"\xc3\x28", b"", 1)])
    assert len(made.warnings) == 2
    assert made.warnings == sorted(made.warnings)
    assert any(warning.count("'") == 6 for warning in made.warnings)


def test_a_bad_record_takes_no_key(tmp_path: Path) -> None:
    made = plan(tmp_path, [BadRecord(b"k", "p", "c", "r"), Record(b"k", b"", 1), BadRecord(b"k", "p", "c", "r")])
    assert (made.bad, made.dropped.tolist()) == (2, [])


def test_a_source_that_fails_leaves_nothing(tmp_path: Path) -> None:
    class Failing:
        def scan(self) -> Iterator[Record]:
            yield Record(b"a", b"", 1)
            raise SourceError("unreadable")

    planner = Planner(Files(), tmp_path, 1, 1, "error")
    source: Any = Failing()
    with pytest.raises(SourceError):
        planner.run(source)
    planner.close()
    assert list(tmp_path.iterdir()) == []
