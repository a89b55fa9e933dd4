"""Image folders: order, keys, labels, and what is left out or refused."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from _tars import load_all, scan, values

from lfdata.errors import OptionError, SampleError, SourceError
from shard_builder.fields import parse_field
from shard_builder.sources import open_source, source_from_config


def fill(root: Path, *names: str | bytes) -> Path:
    root.mkdir(exist_ok=True)
    for name in names:
        path = os.path.join(os.fsencode(root), os.fsencode(name))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        Path(os.fsdecode(path)).write_bytes(b"bytes of " + os.fsencode(name))
    return root


def test_images_come_in_the_byte_order_of_their_paths_with_labels_of_sorted_classes(tmp_path: Path) -> None:
    names = ["b/1.png", "b-c/2.jpg", "b.d/3.WEBP", "B/x/y/4.jpeg", "é/5.png", "b/x/0.png", "b/x.png", "b/x-.png"]
    source = open_source(str(fill(tmp_path / "r", *names)))
    records, bad = scan(source)
    assert not bad
    assert [r.key for r in records] == sorted(os.fsencode(name) for name in names)
    assert [(f.name, f.kind) for f in source.fields] == [("image", "image"), ("label", "scalar"), ("class", "text")]
    assert source.notes()["classes"] == ["B", "b", "b-c", "b.d", "é"]
    loaded = values(source, tmp_path / "w")
    assert loaded[b"b-c/2.jpg"] == {"image": b"bytes of b-c/2.jpg", "label": 2, "class": b"b-c"}
    assert loaded[b"B/x/y/4.jpeg"]["label"] == 0
    assert all(record.size == len(loaded[record.key]["image"]) for record in records)


def test_a_folder_without_classes_has_no_label_and_a_mixed_one_lacks_it_for_pictures_in_the_root(tmp_path: Path) -> None:
    flat = open_source(str(fill(tmp_path / "flat", "1.png", "2.png")))
    assert [f.name for f in flat.fields] == ["image"]
    assert values(flat, tmp_path / "w") == {b"1.png": {"image": b"bytes of 1.png"}, b"2.png": {"image": b"bytes of 2.png"}}
    mixed = values(open_source(str(fill(tmp_path / "mixed", "1.png", "c/2.png"))), tmp_path / "w")
    assert set(mixed[b"1.png"]) == {"image"}
    assert set(mixed[b"c/2.png"]) == {"image", "label", "class"}


def test_names_that_are_not_utf8_survive_as_keys(tmp_path: Path) -> None:
    names = [b"c/\xff\xfe.png", "c/e\u0301.png".encode(), "c/é.png".encode(), b"c/a\nb\tc,+.png"]
    source = open_source(str(fill(tmp_path / "r", *names)))
    loaded = load_all(source, tmp_path / "w")
    assert set(loaded) == set(names)
    for sample in loaded.values():
        msgspec.msgpack.encode(sample.path)  # lone surrogates could not be sent to the parent


def test_what_is_no_picture_hidden_or_a_link_is_counted_and_left_out(tmp_path: Path) -> None:
    root = fill(tmp_path / "r", "c/1.png", "c/readme.txt", "c/.hidden.png", ".git/2.png", "c/noext")
    (root / "c" / "inside.png").symlink_to("1.png")
    (root / "c" / "outside.png").symlink_to("/etc/passwd")
    (root / "c" / "broken.png").symlink_to("nothing")
    (root / "c" / "loop").symlink_to("..")
    (root / "d").symlink_to("c")
    source = open_source(str(root))
    assert [r.key for r in scan(source)[0]] == [b"c/1.png"]
    assert source.notes()["skipped"] == {"hidden": 2, "links": 5, "other files": 2}
    followed = open_source(str(root), links="follow")
    records, bad = scan(followed)
    assert [r.key for r in records] == [b"c/1.png", b"c/inside.png"]
    assert not bad
    assert followed.notes()["skipped"] == {"hidden": 2, "links": 2, "links broken": 1, "links outside": 1, "other files": 2}
    assert values(followed, tmp_path / "w")[b"c/inside.png"]["image"] == b"bytes of c/1.png"


def test_a_symlink_loop_ends_and_a_fifo_is_a_bad_record_at_its_place(tmp_path: Path) -> None:
    root = fill(tmp_path / "r", "c/1.png", "c/3.png", "c/d.png/4.png")
    os.mkfifo(root / "c" / "2.png")
    (root / "c" / "self.png").symlink_to("self.png")
    found = list(open_source(str(root), links="follow").scan())
    assert [r.key for r in found] == [b"c/1.png", b"c/2.png", b"c/3.png", b"c/d.png/4.png"]
    assert found[1].code == "not-a-file"  # type: ignore[union-attr]


def test_a_picture_replaced_by_a_fifo_or_link_after_the_scan_is_an_error(tmp_path: Path) -> None:
    root = fill(tmp_path / "r", "c/1.png", "c/2.png", "c/3.png")
    source = open_source(str(root))
    records, _ = scan(source)
    for name in ("1.png", "2.png", "3.png"):
        (root / "c" / name).unlink()
    os.mkfifo(root / "c" / "1.png")
    (root / "c" / "2.png").symlink_to("/etc/passwd")
    codes = []
    for record in records:
        with pytest.raises(SampleError) as caught:
            source.load(record.locator)
        codes.append(caught.value.code)
    assert codes == ["not-a-file", "changed", "missing-file"]


def test_very_deep_directories_end_in_a_bad_record(tmp_path: Path) -> None:
    root = fill(tmp_path / "r", "a/1.png", "z/" + "d/" * 300 + "2.png")
    records, bad = scan(open_source(str(root)))
    assert [r.key for r in records] == [b"a/1.png"]
    assert [b.code for b in bad] == ["depth"]


def test_the_scan_and_the_description_are_the_same_wherever_the_folder_lies(tmp_path: Path) -> None:
    names = ["a/1.png", "b/2.png"]
    one = open_source(str(fill(tmp_path / "one", *names)))
    two = open_source(str(fill(tmp_path / "two", *reversed(names))))
    assert list(one.scan()) == list(two.scan())
    assert one.describe() == two.describe()
    assert str(tmp_path) not in str(one.describe()) + str(one.notes())


def test_declared_fields_replace_the_default_ones(tmp_path: Path) -> None:
    root = fill(tmp_path / "r", "c/1.png")
    fields = [parse_field("picture:image=image,codec=png"), parse_field("where:bytes=path")]
    source = open_source(str(root), fields=fields, extensions="png jpg")
    config = msgspec.msgpack.decode(msgspec.msgpack.encode(source.config()))
    worker = source_from_config(config, tmp_path)
    record = scan(source)[0][0]
    assert worker.load(record.locator).values == {"picture": b"bytes of c/1.png", "where": b"c/1.png"}
    with pytest.raises(OptionError, match="image, label, class, path"):
        open_source(str(root), fields=[parse_field("a:text=caption")])
    with pytest.raises(OptionError, match="twice"):
        open_source(str(root), fields=[parse_field("a:text=path"), parse_field("a:text=class")])


def test_options_and_roots_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    root = fill(tmp_path / "r", "c/1.png")
    for options in ({"links": "maybe"}, {"max_file_bytes": "many"}, {"colour": "red"}):
        with pytest.raises(OptionError, match=r"expected|valid"):
            open_source(str(root), **options)
    with pytest.raises(SourceError):
        open_source(str(tmp_path / "none"), kind="image-folder")
    with pytest.raises(SourceError):
        open_source(str(root / "c" / "1.png"), kind="image-folder")
    with pytest.raises(SourceError):
        open_source(str(tmp_path / "none"))
    with pytest.raises(SourceError, match="image"):
        open_source(str(root / "c" / "1.png"))
    with pytest.raises(OptionError, match="webdataset"):
        open_source(str(root), kind="spreadsheet")
    assert scan(open_source(str(fill(tmp_path / "empty")))) == ([], [])
