"""WebDataset tars become samples: grouping, keys, extensions, fields, and what is left out."""

from __future__ import annotations

import gzip
import tarfile
import unicodedata
from pathlib import Path

import msgspec
import pytest
from tarkit import BYTES, everything, header, pairs, source, write

from lfdata.errors import OptionError, SampleError, SourceError
from shard_builder.sources import guess_kind
from shard_builder.sources.base import FieldSpec, Record


def fields(*columns: str) -> list[FieldSpec]:
    return [FieldSpec(column.strip("*").replace(".", "_").replace(";", "_"), "bytes", column) for column in columns]


def test_members_of_one_key_are_a_sample_in_the_order_of_the_tar(tmp_path: Path) -> None:
    path = write(tmp_path / "t.tar", [("z.a", b"1"), ("z.b", b"2"), ("y.b", b"4"), ("y.a", b"3"), ("x.a", b"5")])
    samples, bad = everything(source(path, BYTES), tmp_path)
    assert list(samples.items()) == [(b"z", {"a": b"1", "b": b"2"}), (b"y", {"a": b"3", "b": b"4"}), (b"x", {"a": b"5"})]
    assert not bad


def test_record_sizes_count_the_members_that_become_fields(tmp_path: Path) -> None:
    path = write(tmp_path / "t.tar", [("k.a", b"123"), ("k.b", b"45"), ("k.other", b"6789")])
    opened = source(path, BYTES)
    assert [record.size for record in opened.scan() if isinstance(record, Record)] == [5]
    assert opened.notes()["unmapped_extensions"] == {"other": 1}
    assert opened.notes()["present"] == {"a": 1, "b": 1}


@pytest.mark.parametrize(
    ("split", "name", "column", "key"),
    [
        ("first", "dir.x/k.tar/a.b.jpg", "b.jpg", b"dir.x/k.tar/a"),
        ("last", "dir.x/a.b.jpg", "jpg", b"dir.x/a.b"),
        ("mapped", "Track 2.0.mp3", "mp3", b"Track 2.0"),
        ("mapped", "d/v1.2.seg.png", "seg.png;png", b"d/v1.2"),
        ("mapped", "v1.2.x.png", "seg.png;png", b"v1.2.x"),
        ("first", "./a.jpg", "jpg", b"./a"),
        ("first", "A.JPG", "jpg", b"A"),
        ("first", "A.jpg", ".JPG", b"A"),
        ("mapped", "A.SEG.Png", "seg.png", b"A"),
    ],
)
def test_key_and_extension(tmp_path: Path, split: str, name: str, column: str, key: bytes) -> None:
    path = write(tmp_path / "t.tar", [(name, b"data")])
    samples, bad = everything(source(path, [FieldSpec("f", "bytes", column)], key_split=split), tmp_path)
    assert samples == {key: {"f": b"data"}}
    assert not bad


def test_the_first_alternative_that_is_there_is_taken(tmp_path: Path) -> None:
    members = [("1.png", b"p1"), ("1.jpg", b"j1"), ("2.png", b"p2"), ("3.jpeg", b"j3")]
    samples, _ = everything(source(write(tmp_path / "t.tar", members), [FieldSpec("i", "bytes", "jpg; jpeg;.png")]), tmp_path)
    assert samples == {b"1": {"i": b"j1"}, b"2": {"i": b"p2"}, b"3": {"i": b"j3"}}


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_unicode_keys_stay_as_they_are(tmp_path: Path, form: int) -> None:
    composed, apart = unicodedata.normalize("NFC", "Käse"), unicodedata.normalize("NFD", "Käse")
    names = [composed, apart, "日本" * 60, "not-utf8-\udcff\udcfe", "emoji \U0001f9c0"]
    path = write(tmp_path / "t.tar", [(name + ".a", str(n).encode()) for n, name in enumerate(names)], form=form)
    samples, bad = everything(source(path, BYTES[:1]), tmp_path)
    assert [*samples] == [name.encode("utf-8", "surrogateescape") for name in names]
    assert [value["a"] for value in samples.values()] == [b"0", b"1", b"2", b"3", b"4"]
    assert not bad
    assert len({*samples}) == 5


def test_a_key_that_comes_back_spoils_all_its_parts_and_nothing_else(tmp_path: Path) -> None:
    path = write(tmp_path / "t.tar", [("k.a", b"1"), ("x.a", b"2"), ("k.b", b"3"), ("y.a", b"4"), ("x.a", b"5")])
    opened = source(path, BYTES)
    samples, bad = everything(opened, tmp_path)
    assert samples == {b"y": {"a": b"4"}}
    assert [(record.key, record.code) for record in bad] == [(key, "interleaved") for key in (b"k", b"x", b"k", b"x")]
    assert all("t.tar" in record.path for record in bad)


def test_members_that_no_field_takes_between_them_still_part_a_sample(tmp_path: Path) -> None:
    path = write(tmp_path / "t.tar", [("k.a", b"1"), ("other.txt", b"2"), ("k.b", b"3")])
    samples, bad = everything(source(path, BYTES), tmp_path)
    assert not samples
    assert {record.code for record in bad} == {"interleaved"}


def test_directories_and_skipped_members_do_not_part_a_sample(tmp_path: Path) -> None:
    members = [("d/k.a", b"1"), header("d/", tarfile.DIRTYPE), header("l.a", tarfile.SYMTYPE, "/etc/passwd"), ("d/k.b", b"3")]
    samples, bad = everything(source(write(tmp_path / "t.tar", members), BYTES), tmp_path)
    assert samples == {b"d/k": {"a": b"1", "b": b"3"}}
    assert not bad


def test_duplicate_members(tmp_path: Path) -> None:
    path = write(tmp_path / "t.tar", [("k.a", b"1"), ("k.A", b"2"), ("x.b", b"3")])
    samples, bad = everything(source(path, BYTES), tmp_path)
    assert samples == {b"x": {"b": b"3"}}
    assert [(record.key, record.code) for record in bad] == [(b"k", "duplicate-member")]
    for choice, value in (("first", b"1"), ("last", b"2")):
        samples, bad = everything(source(path, BYTES, members=choice), tmp_path)
        assert samples == {b"k": {"a": value}, b"x": {"b": b"3"}}
        assert not bad


HOSTILE = {
    "link": header("k.a", tarfile.SYMTYPE, "/etc/passwd"),
    "hard link": header("k.a", tarfile.LNKTYPE, "0000.a"),
    "character device": header("k.a", tarfile.CHRTYPE),
    "block device": header("k.a", tarfile.BLKTYPE),
    "pipe": header("k.a", tarfile.FIFOTYPE),
    "directory": header("k.a", tarfile.DIRTYPE),
    "unknown": header("k.a", b"Z"),
}
UNSAFE = ["../k.a", "d/../../k.a", "/abs/k.a", "..", "d/..", "", "/"]


@pytest.mark.parametrize("what", HOSTILE)
def test_links_and_devices_are_never_samples(tmp_path: Path, what: str) -> None:
    opened = source(write(tmp_path / "t.tar", [*pairs(1), HOSTILE[what], ("z.a", b"z")]), BYTES)
    samples, bad = everything(opened, tmp_path / "stage")
    assert [*samples] == [b"0000", b"z"]
    assert not bad
    skipped = opened.notes()["skipped"]
    assert sum(skipped.values()) == (0 if what == "directory" else 1), skipped
    assert [path.name for path in tmp_path.iterdir()] == ["t.tar"]


@pytest.mark.parametrize("type_", [tarfile.SYMTYPE, tarfile.LNKTYPE])
@pytest.mark.parametrize("first", [True, False])
def test_a_sample_that_needs_a_link_is_bad_and_one_that_does_not_is_whole(tmp_path: Path, type_: bytes, first: bool) -> None:
    linked = [header("k.a", type_, "0000.a"), ("k.b", b"2")]
    members = [*pairs(1), *(linked if first else linked[::-1]), ("z.a", b"z"), header("z.other", type_, "0000.a")]
    opened = source(write(tmp_path / "t.tar", members), BYTES)
    samples, bad = everything(opened, tmp_path / "stage")
    assert [*samples] == [b"0000", b"z"]
    assert [(record.key, record.code) for record in bad] == [(b"k", "link")] and "--hard-dereference" in bad[0].reason
    assert opened.notes()["skipped"] == {"link": 2}


@pytest.mark.parametrize("name", UNSAFE)
def test_names_that_lead_outside_are_left_out_and_counted(tmp_path: Path, name: str) -> None:
    opened = source(write(tmp_path / "t.tar", [*pairs(1), (name, b"evil"), ("z.a", b"z")]), BYTES)
    samples, bad = everything(opened, tmp_path / "stage")
    assert [*samples] == [b"0000", b"z"]
    assert not bad
    assert sum(opened.notes()["skipped"].values()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["t.tar"]


def test_a_pax_name_with_nul_is_left_out(tmp_path: Path) -> None:
    info = tarfile.TarInfo("k.a")
    info.pax_headers = {"path": "k\0.a"}
    opened = source(write(tmp_path / "t.tar", [("z.a", b"z"), info]), BYTES[:1])
    samples, bad = everything(opened, tmp_path)
    assert [*samples] == [b"z"]
    assert bad or sum(opened.notes()["skipped"].values()) == 1


def test_samples_without_any_field_are_counted_not_stored(tmp_path: Path) -> None:
    opened = source(write(tmp_path / "t.tar", [("x.a", b"1"), ("y.other", b"2"), ("noext", b"3"), (".hid", b"4")]), BYTES[:1])
    samples, bad = everything(opened, tmp_path)
    assert [*samples] == [b"x"]
    assert not bad
    assert opened.notes()["skipped_samples_without_fields"] == 1
    assert opened.notes()["skipped"] == {"hidden": 1, "no-extension": 1}


def test_a_declared_extension_that_is_nowhere_is_an_error_that_lists_what_there_is(tmp_path: Path) -> None:
    opened = source(write(tmp_path / "t.tar", pairs(3)), fields("a", "jpg"))
    with pytest.raises(SourceError, match=r"jpg.*extensions: a, b"):
        list(opened.scan())


def test_many_tars_in_order_by_pattern_list_and_directory(tmp_path: Path) -> None:
    for n in (9, 10, 8):
        write(tmp_path / f"t-{n:03d}.tar", [(f"{n}.a", str(n).encode())])
    (tmp_path / "notes.txt").write_text("no tar")
    expected = [b"8", b"9", b"10"]
    for location in (
        f"{tmp_path}/t-{{008..010}}.tar",
        f"{tmp_path}/t-{{008,009,010}}.tar",
        f"{tmp_path}/t-008.tar::{tmp_path}/t-0{{09..10}}.tar",
        str(tmp_path),
    ):
        samples, _ = everything(source(location, BYTES[:1]), tmp_path / "stage")
        assert [*samples] == expected, location
        assert guess_kind(location) == "webdataset"
    with pytest.raises(SourceError, match=r"t-011.tar"):
        source(f"{tmp_path}/t-{{008..011}}.tar", BYTES)
    for bad in ("{5..1}", "{1", "{{1,2}}", "{0..99999999999}"):
        with pytest.raises(SourceError):
            source(f"{tmp_path}/t-{bad}.tar", BYTES)


def test_a_folder_whose_name_holds_pattern_characters_is_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "a,b {1..2}"
    folder.mkdir()
    assert guess_kind(str(folder)) == "image-folder"
    write(folder / "t{0..1}.tar", pairs(2))
    assert len(everything(source(folder, BYTES), tmp_path / "s")[0]) == 2
    assert len(everything(source(folder / "t{0..1}.tar", BYTES), tmp_path / "s")[0]) == 2


def test_shards_may_span_plain_tars_but_not_compressed_ones(tmp_path: Path) -> None:
    for n in range(3):
        write(tmp_path / f"{n}.tar", [(f"{n}.a", b"x")])
    assert [record.unit for record in source(tmp_path, BYTES[:1]).scan()] == [0, 0, 0]
    data = gzip.compress((tmp_path / "1.tar").read_bytes())
    (tmp_path / "1.tar").write_bytes(data)  # told by content, not by name
    opened = source(tmp_path, BYTES[:1])
    assert [record.unit for record in opened.scan()] == [0, 1, 2]
    stage = tmp_path / "stage"
    stage.mkdir()
    samples, bad = everything(opened, stage)
    assert [*samples] == [b"0", b"1", b"2"]
    assert not bad
    opened.stage(1, stage)
    opened.unstage(1, stage)
    opened.unstage(1, stage)
    assert not list(stage.iterdir())


def test_what_determines_the_samples_holds_no_directory_and_repeats(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
        write(folder / "t.tar", [*pairs(3), header("l.a", tarfile.SYMTYPE, "x")], end=False)
    first, second = source(one, BYTES), source(two, BYTES)
    assert list(first.scan()) == list(second.scan()) == list(first.scan())
    assert first.notes() == second.notes()
    assert first.describe() == second.describe()
    assert str(tmp_path) not in msgspec.json.encode([first.describe(), first.notes()]).decode()


def test_options_and_fields_that_make_no_sense(tmp_path: Path) -> None:
    path = write(tmp_path / "t.tar", pairs(1))
    for options in ({"key_split": "middle"}, {"members": "both"}, {"nonsense": "1"}, {"max_member_bytes": "-1"}):
        with pytest.raises(OptionError):
            source(path, BYTES, **options)
    for spec in (FieldSpec("x", "json", "*"), FieldSpec("x", "bytes", "a;;b"), FieldSpec("x", "bytes", "a", "base64")):
        with pytest.raises(OptionError, match="'x'"):
            source(path, [spec])
    with pytest.raises(OptionError):
        source(path, [])


def test_member_limit(tmp_path: Path) -> None:
    path = write(tmp_path / "t.tar", [("x.a", b"12345"), ("y.a", b"1234")])
    samples, bad = everything(source(path, BYTES[:1], max_member_bytes="4"), tmp_path)
    assert [*samples] == [b"y"]
    assert [(record.key, record.code) for record in bad] == [(b"x", "too-large")]


def test_gzip_members_are_decompressed_only_when_asked(tmp_path: Path) -> None:
    packed = gzip.compress(b"hello") + gzip.compress(b" world")
    path = write(tmp_path / "t.tar", [("x.txt.gz", packed), ("y.txt.gz", b"plain, in spite of its name")])
    asked = [FieldSpec("t", "bytes", "txt.gz")]
    samples, _ = everything(source(path, asked), tmp_path)
    assert samples[b"x"] == {"t": packed}
    samples, _ = everything(source(path, asked, gunzip="yes"), tmp_path)
    assert samples == {b"x": {"t": b"hello world"}, b"y": {"t": b"plain, in spite of its name"}}
    samples, _ = everything(source(path, [FieldSpec("t", "bytes", "txt")], gunzip="yes"), tmp_path)
    assert samples[b"x"] == {"t": b"hello world"}
    samples, _ = everything(
        source(write(tmp_path / "p.tar", [("x.txt", packed)]), [FieldSpec("t", "bytes", "txt")], gunzip="yes"), tmp_path
    )
    assert samples[b"x"] == {"t": packed}  # its name does not say gzip
    broken = [packed[:-3], packed[:-8] + bytes(4) + packed[-4:], packed + b"tail", gzip.compress(bytes(1 << 24))]
    members = [(f"{n}.txt.gz", data) for n, data in enumerate(broken)]
    opened = source(write(tmp_path / "b.tar", members), asked, gunzip="yes", max_member_bytes="1M")
    codes = []
    for record in opened.scan():
        assert isinstance(record, Record)
        with pytest.raises(SampleError) as found:
            opened.load(record.locator)
        codes.append(found.value.code)
        assert found.value.field == "t"
    assert codes == ["truncated", "gzip", "gzip", "too-large"]


def test_a_member_that_is_a_git_lfs_pointer(tmp_path: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
    opened = source(write(tmp_path / "t.tar", [("k.a", pointer)]), BYTES[:1])
    (record,) = opened.scan()
    assert isinstance(record, Record)
    with pytest.raises(SampleError, match="run git lfs pull"):
        opened.load(record.locator)


def test_a_tar_that_shrinks_after_the_scan(tmp_path: Path) -> None:
    path = write(tmp_path / "t.tar", pairs(2))
    opened = source(path, BYTES)
    records = [record for record in opened.scan() if isinstance(record, Record)]
    path.write_bytes(path.read_bytes()[:1024])
    with pytest.raises(SampleError, match="shorter"):
        opened.load(records[1].locator)
