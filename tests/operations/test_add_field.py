"""add-field: shards stay as they are to the byte, the new values are exact, a half-done one is never visible and can be finished."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _build import FIELDS, build, rows
from click.testing import CliRunner
from opskit import samples, tree

import lfdata
from lfdata.errors import OptionError, SampleError, SourceError
from lfdata.format.durable import Files
from lfdata.format.meta import INDEX, MANIFEST, read_manifest
from shard_builder.fields import parse_field
from shard_builder.operations.fields import Added, add_field
from shard_builder.sources import open_source
from shard_builder.verbs import verify
from shard_builder.verbs.repair import rebuild_manifest


@pytest.fixture
def data(tmp_path: Path) -> Path:
    some = rows(9)
    some[4] = (some[4][0], {"label": 1})
    build(tmp_path / "data", [some[:4], some[4:], []], index=True)
    return tmp_path / "data"


def add(data: Path, spec: str, **more: Any) -> Added:
    return add_field(data, parse_field(spec), **({"workers": 1} | more))


def from_table(data: Path, spec: str, text: str, **more: Any) -> Added:
    table = data.parent / "table.jsonl"
    table.write_text(text)
    return add(data, spec, table=open_source(str(table), kind="table", fields=[parse_field(spec)]), **more)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_field_computed_from_another_leaves_every_shard_as_it_is(data: Path, workers: int) -> None:
    before, old = tree(data), samples(data)
    made = add(data, "length:scalar=about.number,dtype=int16", workers=workers)
    assert (made.rows, made.present) == (9, 8)
    after = samples(data)
    assert [item["length"] for item in after] == [None if n == 4 else np.int16(n) for n in range(9)]
    for mine, theirs in zip(old, after, strict=True):
        assert repr(mine) == repr({name: theirs[name] for name in mine})
    now = tree(data)
    assert all(now[name] == digest for name, digest in before.items() if name not in (MANIFEST, INDEX))
    assert lfdata.open(data).index() is not None and lfdata.open(data).column("length").tolist() == [0, 1, 2, 3, 0, 5, 6, 7, 8]


@pytest.mark.parametrize(
    ("spec", "value"),
    [
        ("again:text=caption", lambda s: s["caption"]),
        ("again:array=ids,dtype=int64,ndim=1", lambda s: None if s["ids"] is None else s["ids"].astype(np.int64)),
        ("again:json=about", lambda s: s["about"]),
        ("again:tokens=ids,vocab=70000", lambda s: None if s["ids"] is None else s["ids"].astype(np.uint32)),
        ("again:bytes=caption", lambda s: None if s["caption"] is None else s["caption"].encode()),
        ("again:image=image,codec=png", lambda s: s["image"]),
        ("again:audio=sound", lambda s: s["sound"]),
        ("again:scalar=label,dtype=float32", lambda s: np.float32(s["label"])),
    ],
)
def test_every_kind_can_be_computed(data: Path, spec: str, value: Any) -> None:
    add(data, spec)
    for sample in samples(data):
        assert repr(sample["again"]) == repr(value(sample))


def test_values_of_a_table_go_to_the_samples_of_their_keys(data: Path) -> None:
    lines = [
        '{"key": "key/0007", "score": 7.5}',
        '{"key": "nobody", "score": 1}',
        '{"key": "key/0000", "score": 0.5}',
        '{"key": "key/0001", "score": null}',
    ]
    made = from_table(data, "score:scalar=score,dtype=float64", "\n".join(lines))
    assert (made.present, made.unmatched) == (2, 1)
    found = {item["__key__"]: item["score"] for item in samples(data)}
    assert {key: value for key, value in found.items() if value is not None} == {b"key/0000": 0.5, b"key/0007": 7.5}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"key": "key/0001", "v": 1}\n{"key": "key/0001", "v": 2}', "more than one row of key 'key/0001'"),
        ('{"key": "other", "v": 1}', "no row of the table has the key"),
        ('{"key": "key/0001", "v": 1}\n{broken', "bad row"),
    ],
)
def test_a_table_that_does_not_fit_is_refused_and_nothing_changes(data: Path, text: str, reason: str) -> None:
    before = tree(data)
    with pytest.raises(SourceError, match=reason):
        from_table(data, "v:scalar=v,dtype=int8", text)
    assert tree(data) == before


def test_a_bad_value_stops_by_name_or_is_left_absent_and_counted(data: Path) -> None:
    before = read_manifest(data)
    with pytest.raises(SampleError, match=r"key 'key/0002': field 'small'.*9 is not|key 'key/0002'|range"):
        from_table(data, "small:scalar=v,dtype=int8", '{"key": "key/0001", "v": 1}\n{"key": "key/0002", "v": 900}')
    assert read_manifest(data) == before and len(samples(data)) == 9
    made = from_table(
        data, "small:scalar=v,dtype=int8", '{"key": "key/0001", "v": 1}\n{"key": "key/0002", "v": 900}', on_error="absent"
    )
    assert (made.present, made.bad) == (1, 1) and "key/0002" in made.errors[0]
    assert [item["small"] for item in samples(data)][:3] == [None, 1, None]


def test_a_field_that_exists_is_replaced_only_on_request_and_survives_a_lost_manifest(data: Path) -> None:
    with pytest.raises(OptionError, match="--replace"):
        add(data, "caption:text=about.number")
    from_table(data, "caption:text=v", '{"key": "key/0003", "v": "first"}', replace=True)
    from_table(data, "caption:text=v", '{"key": "key/0003", "v": "second"}', replace=True)
    assert [item["caption"] for item in samples(data)] == [None] * 3 + ["second"] + [None] * 5
    rebuilt, warnings = rebuild_manifest(data)
    assert not warnings and rebuilt.shards == read_manifest(data).shards


def test_a_field_replaced_by_one_of_another_kind_is_sound(data: Path) -> None:
    add(data, "w:text=caption")
    add(data, "w:bytes=caption", replace=True)
    assert [type(item["w"]) for item in samples(data) if item["w"] is not None] == [bytes] * 8
    run = CliRunner().invoke(verify.command, [str(data)])
    assert run.exit_code == 0, run.output


@pytest.mark.parametrize("spec", ["x:text=nobody", "x:text=caption.inside", "x:tokens=caption", "x:scalar=label"])
def test_what_makes_no_sense_is_refused_and_nothing_changes(data: Path, spec: str) -> None:
    before = tree(data)
    with pytest.raises(OptionError):
        add(data, spec)
    assert tree(data) == before


class Stopping(Files):
    """Fails at the n-th operation, as a killed process would leave things."""

    def __init__(self, left: int) -> None:
        self.left = left

    def call(self, operation: str, path: Path, function: Any, **detail: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return function()


def test_one_interrupted_anywhere_shows_nothing_and_is_finished_by_the_same_command(tmp_path: Path) -> None:
    fields = {name: FIELDS[name] for name in ("caption", "label")}
    some = [(key, {name: values[name] for name in fields}) for key, values in rows(6)]
    build(tmp_path / "whole", [some[:3], some[3:]], fields, index=True)
    spec = "copy:text=caption"
    steps = 0
    while True:
        path = tmp_path / f"at-{steps}"
        build(path, [some[:3], some[3:]], fields, index=True)
        before = read_manifest(path)
        try:
            add(path, spec, files=Stopping(steps))
        except KeyboardInterrupt:
            if read_manifest(path) == before:
                assert "copy" not in lfdata.open(path)[0] and len(list(lfdata.open(path))) == 6
                if steps % 2 == 0:
                    add(path, "other:bytes=caption")
                    assert len(list(path.glob("*+*.lfd"))) == 2, "what the given-up one left is gone"
                add(path, spec)
            assert [item["copy"] for item in samples(path)] == [item["caption"] for item in samples(path)]
        else:
            break
        steps += 5
    assert steps > 15


def test_no_and_one_sample(tmp_path: Path) -> None:
    for count in (0, 1):
        build(tmp_path / str(count), [rows(count)])
        assert add(tmp_path / str(count), "copy:text=caption").present == count
        assert len(samples(tmp_path / str(count))) == count
