"""WebDataset tars: key rules, split samples, patterns, staging, guessed fields."""

from __future__ import annotations

import gzip
import os
import tarfile
from pathlib import Path

import pytest
from _tars import scan, tar_bytes, values, write

from lfdata.errors import OptionError, SampleError, SourceError
from shard_builder.fields import parse_field
from shard_builder.sources import open_source, source_from_config
from shard_builder.sources.base import FieldSpec
from shard_builder.sources.grouping import expand
from shard_builder.sources.guess import guess_fields

PAIR = [parse_field("image:image=jpg;png"), parse_field("text:text=txt")]


@pytest.mark.parametrize(
    ("rule", "keys"),
    [
        ("first", {b"a.b/x": ["seg.png"], b"./y": ["JPG".lower()], b"Track 2": ["0.mp3"]}),
        ("last", {b"a.b/x.seg": ["png"], b"./y": ["jpg"], b"Track 2.0": ["mp3"]}),
        ("mapped", {b"a.b/x.seg": ["png"], b"./y": ["jpg"], b"Track 2.0": ["mp3"]}),
    ],
)
def test_dotted_names_split_by_the_rule(tmp_path: Path, rule: str, keys: dict[bytes, list[str]]) -> None:
    path = write(tmp_path, tar_bytes([("a.b/x.seg.png", b"1"), ("./y.JPG", b"2"), ("Track 2.0.mp3", b"3")]))
    fields = [FieldSpec("f", "bytes", ";".join(sorted({e for extensions in keys.values() for e in extensions})))]
    assert set(values(open_source(path, fields=fields, key_split=rule), tmp_path / "w")) == set(keys)


def test_the_mapped_rule_takes_the_longest_declared_extension_and_ignores_the_rest(tmp_path: Path) -> None:
    entries = [
        ("T 2.0.mp3", b"1"),
        ("T 2.0.cover.png", b"2"),
        ("T 2.0.lrc", b"no"),
        ("T 2.1.mp3", b"3"),
        ("T 2.1.lrc", b"no"),
        (".mp3", b"no"),
    ]
    fields = [parse_field("audio:audio=mp3"), parse_field("cover:image=cover.png"), parse_field("other:image=png")]
    source = open_source(write(tmp_path, tar_bytes(entries)), fields=fields[:2], key_split="mapped")
    assert values(source, tmp_path / "w") == {b"T 2.0": {"audio": b"1", "cover": b"2"}, b"T 2.1": {"audio": b"3"}}
    assert source.notes()["skipped"] == {"hidden": 1, "unmapped": 2}
    both = open_source(write(tmp_path, tar_bytes(entries[:2])), fields=fields, key_split="mapped")
    with pytest.raises(SourceError, match="other"):
        scan(both)  # cover.png is the longer match, so nothing is left for png


def test_keys_are_bytes_in_every_format_of_header(tmp_path: Path) -> None:
    names = ["é", "e\u0301", "日本語/画像", "n" * 200, "a\nb"]
    for number, format_ in enumerate((tarfile.PAX_FORMAT, tarfile.GNU_FORMAT)):
        entries: list[tuple[str | bytes, bytes]] = [(f"{name}.txt", name.encode()) for name in names]
        entries.append((b"\xff\xfe.txt", b"\xff\xfe"))
        path = write(tmp_path, tar_bytes(entries, format_), f"{number}.tar")
        found = values(open_source(path), tmp_path / "w")
        assert {key: sample["text"] for key, sample in found.items()} == {n.encode(): n.encode() for n in names} | {
            b"\xff\xfe": b"\xff\xfe"
        }


@pytest.mark.parametrize(
    ("order", "apart", "whole"),
    [
        (["a.jpg", "b.jpg", "a.txt", "b.txt"], {b"a", b"b"}, []),
        (["a.jpg", "b.jpg", "a.txt", "c.jpg"], {b"a"}, [b"b", b"c"]),
        (["a.jpg", "a.txt", "b.jpg", "a.jpg", "a.txt"], {b"a"}, [b"b"]),
        (["a.jpg", "b.jpg", "a.undeclared", "c.jpg"], set(), [b"a", b"b", b"c"]),
    ],
)
def test_a_key_that_comes_back_spoils_all_its_parts_and_no_half_sample_is_stored(
    tmp_path: Path, order: list[str], apart: set[bytes], whole: list[bytes]
) -> None:
    entries = [(name, b"x") for name in [*order, "z.txt"]]
    records, bad = scan(open_source(write(tmp_path, tar_bytes(entries)), fields=PAIR))
    assert {b.key for b in bad} == apart
    assert len(bad) == 2 * len(apart)
    assert all(b.code == "interleaved" for b in bad)
    assert [r.key for r in records] == [*whole, b"z"]
    assert all("at bytes 0, " in b.reason for b in bad if b.key == b"a")


def test_lists_patterns_and_directories_of_tars_keep_their_order(tmp_path: Path) -> None:
    for number in (0, 1, 10):
        write(tmp_path, tar_bytes([(f"{number}.txt", b"x")]), f"s-{number:03d}.tar")
    (tmp_path / "notes.md").touch()
    one = open_source(str(tmp_path))
    assert [r.key for r in scan(one)[0]] == [b"0", b"1", b"10"]
    some = open_source(f"{tmp_path}/s-{{000..001}}.tar")
    assert [r.key for r in scan(some)[0]] == [b"0", b"1"]
    listed = open_source(f"{tmp_path}/s-010.tar::{tmp_path}/s-{{001,000}}.tar")
    assert [r.key for r in scan(listed)[0]] == [b"10", b"1", b"0"]
    assert str(tmp_path) not in str(listed.describe())
    assert values(listed, tmp_path / "w").keys() == {b"10", b"1", b"0"}
    with pytest.raises(SourceError, match=r"s-002\.tar and 7 more"):
        open_source(f"{tmp_path}/s-{{000..010}}.tar")


@pytest.mark.parametrize(
    "pattern", ["x-{3..1}.tar", "x-{0..99999999}.tar", "x-{a.tar", "{0..999}{0..999}{0..999}.tar", "{a{b}}"]
)
def test_patterns_that_cannot_be_expanded_are_refused_at_once(pattern: str) -> None:
    with pytest.raises(SourceError, match="pattern"):
        open_source(pattern, kind="webdataset")


def test_patterns_keep_the_width_that_is_written() -> None:
    assert list(expand("a{08..11}b{x,y}")) == [f"a{n}b{c}" for n in ("08", "09", "10", "11") for c in "xy"]
    assert list(expand("{8..10}")) == ["8", "9", "10"]
    assert list(expand("plain")) == ["plain"]


def test_missing_special_and_empty_sources_are_source_errors(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.tar")
    (tmp_path / "dir.tar").mkdir()
    (tmp_path / "none").mkdir()
    for location in ("fifo.tar", "dir.tar", "missing.tar", "none"):
        with pytest.raises(SourceError, match=location):
            open_source(str(tmp_path / location), kind="webdataset", fields=PAIR)
    with pytest.raises(SourceError, match="no sample"):
        open_source(write(tmp_path, bytes(10240)))
    assert scan(open_source(write(tmp_path, bytes(10240)), fields=PAIR)) == ([], [])


def test_a_compressed_tar_is_told_by_its_content_and_staged_for_workers(tmp_path: Path) -> None:
    data = gzip.compress(tar_bytes([("a.jpg", b"1" * 5000), ("a.txt", b"2"), ("b.txt", b"3")]))
    source = open_source(write(tmp_path, data), fields=PAIR)  # named .tar
    work = tmp_path / "w"
    work.mkdir()
    records, _ = scan(source)
    with pytest.raises(SampleError):
        source.load(records[0].locator)
    source.stage(0, work)
    source.stage(0, work)
    assert [path.name for path in work.iterdir()] == ["unit-000000.tar"]
    worker = source_from_config(source.config(), work)
    assert worker.load(records[0].locator).values == {"image": b"1" * 5000, "text": b"2"}
    assert source.load(records[1].locator).values == {"text": b"3"}
    source.unstage(0, work)
    source.unstage(0, work)
    assert not list(work.iterdir())


def test_tars_mixed_with_compressed_ones_have_a_unit_each(tmp_path: Path) -> None:
    entries = [("a.txt", b"1"), ("b.txt", b"2")]
    write(tmp_path, tar_bytes(entries[:1]), "0.tar")
    write(tmp_path, gzip.compress(tar_bytes(entries[1:])), "1.tar.gz")
    source = open_source(str(tmp_path))
    assert [r.unit for r in scan(source)[0]] == [0, 1]
    assert {key: sample["text"] for key, sample in values(source, tmp_path / "w").items()} == {b"a": b"1", b"b": b"2"}


def test_a_compressed_tar_of_several_gzip_members_is_one_stream(tmp_path: Path) -> None:
    data = tar_bytes([(f"{n}.txt", bytes([n]) * 3000) for n in range(5)])
    parts = b"".join(gzip.compress(data[at : at + 700]) for at in range(0, len(data), 700))
    loaded = values(open_source(write(tmp_path, parts + bytes(512))), tmp_path / "w")
    assert [sample["text"] for sample in loaded.values()] == [bytes([n]) * 3000 for n in range(5)]


def test_gz_members_are_decompressed_only_on_demand_and_within_the_limit(tmp_path: Path) -> None:
    bomb, cut = gzip.compress(bytes(1 << 20)), gzip.compress(b"text" * 99)[:-9]
    double = gzip.compress(b"one ") + gzip.compress(b"two")
    entries = [("a.txt.gz", double), ("b.txt.gz", bomb), ("c.txt.gz", cut), ("d.txt.gz", b"plain")]
    path = write(tmp_path, tar_bytes(entries))
    fields = [parse_field("t:bytes=txt.gz")]
    assert values(open_source(path, fields=fields), tmp_path / "w")[b"a"] == {"t": double}
    source = open_source(path, fields=fields, gunzip="yes", max_member_bytes="64k")
    outcomes = []
    for record in scan(source)[0]:
        try:
            outcomes.append(source.load(record.locator).values["t"])
        except SampleError as error:
            outcomes.append((error.code, error.field))
    assert outcomes == [b"one two", ("too-large", "t"), ("truncated", "t"), b"plain"]


def test_guessed_fields_depend_on_extensions_alone() -> None:
    kinds = [(f.name, f.kind, f.column) for f in guess_fields([["jpg", "txt", "json", "cls"], ["png", "cls", "wav"], ["xyz"]])]
    assert kinds == [
        ("image", "image", "jpg;png"),
        ("audio", "audio", "wav"),
        ("cls", "scalar", "cls"),
        ("json", "json", "json"),
        ("text", "text", "txt"),
        ("xyz", "bytes", "xyz"),
    ]
    apart = {f.name: f.column for f in guess_fields([["jpg", "png"], ["seg.png"]])}
    assert apart == {"jpg": "jpg", "png": "png", "seg_png": "seg.png"}
    with pytest.raises(OptionError, match="declare"):
        guess_fields([])
    with pytest.raises(OptionError, match="both"):
        guess_fields([["a.b", "a_b"]])
