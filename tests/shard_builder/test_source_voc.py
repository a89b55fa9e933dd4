"""Pascal VOC: objects and masks as the files have them; XML that declares entities is never read."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import _kinds
import numpy as np
import pytest
from _build import picture
from _kinds import voc, voc_annotation, voc_object
from _tars import scan, values
from PIL import Image

import lfdata
from lfdata.errors import OptionError, SourceError
from shard_builder.convert import convert
from shard_builder.fields import parse_field
from shard_builder.options import ConvertOptions
from shard_builder.sources import guess_kind, open_source
from shard_builder.sources.voc_xml import objects_of, parse_xml

BOMB = (
    '<!DOCTYPE a [<!ENTITY a "aaaaaaaaaa">'
    + "".join(f'<!ENTITY {b} "{f"&{a};" * 10}">' for a, b in zip("abcdefgh", "bcdefghi", strict=True))
    + "]>"
)


def make(folder: Path, xml: str | bytes | None, name: str = "a") -> Path:
    for place in ("Annotations", "JPEGImages", "ImageSets/Main"):
        (folder / place).mkdir(parents=True, exist_ok=True)
    (folder / "JPEGImages" / f"{name}.png").write_bytes(picture(1))
    if xml is not None:
        (folder / "Annotations" / f"{name}.xml").write_bytes(xml if isinstance(xml, bytes) else xml.encode())
    return folder


def code(folder: Path, **options: str) -> tuple[str, str]:
    return _kinds.first_fault(_kinds.source("voc", folder, **options), folder)


def test_a_data_set_comes_back_from_shards(tmp_path: Path) -> None:
    made = voc(tmp_path / "v")
    assert guess_kind(made.location) == "voc"
    opened = made.open()
    assert [spec.name for spec in opened.fields] == ["image", "objects", "segmentation"]
    assert convert(opened, tmp_path / "out", ConvertOptions(workers=1)).samples == 60
    stored = list(lfdata.open(tmp_path / "out"))
    assert [sample["__key__"] for sample in stored] == [b"2007_%06d" % n for n in reversed(range(60))]
    for sample in stored:
        name = sample["__key__"].decode()
        tree = ElementTree.parse(tmp_path / "v" / "Annotations" / f"{name}.xml")
        boxes = [[float(box.findtext(c)) for c in ("xmin", "ymin", "xmax", "ymax")] for box in tree.iter("bndbox")]  # type: ignore[arg-type]
        assert [one["bndbox"] for one in sample["objects"]] == boxes
        assert all(one["name"] == "cat" and one["difficult"] == 0 for one in sample["objects"])
        mask = tmp_path / "v" / "SegmentationClass" / f"{name}.png"
        assert (sample.get("segmentation") is not None) == mask.exists()
        if mask.exists():
            assert np.array_equal(np.squeeze(sample["segmentation"]), np.asarray(Image.open(io.BytesIO(mask.read_bytes()))))


def test_parts_other_members_and_the_xml_itself(tmp_path: Path) -> None:
    part = (
        f"<part><name>head</name>{voc_object('x', (1, 1, 2, 2)).partition('</difficult>')[2].removesuffix('</object>')}</part>"
    )
    more = (
        f"{part}<pose>Left</pose><truncated>1</truncated><actions><run>1</run><jump>0</jump></actions><p><x>1</x><x>2</x></p>"
    )
    xml = voc_annotation("a.png", voc_object("cat", (1, 2.5, 3, 4), more))
    fields = [parse_field("o:json=objects"), parse_field("t:text=annotation")]
    found = values(open_source(str(make(tmp_path, xml)), fields=fields), tmp_path / "w")[b"a"]
    assert found["t"] == xml.encode()
    assert found["o"] == [
        {
            "name": "cat",
            "difficult": 0,
            "bndbox": [1, 2.5, 3, 4],
            "pose": "Left",
            "truncated": 1,
            "actions": {"run": "1", "jump": "0"},
            "p": {"x": ["1", "2"]},
            "parts": [{"name": "head", "bndbox": [1, 1, 2, 2]}],
        }
    ]
    with pytest.raises(OptionError, match="segmentation, instances"):
        open_source(str(tmp_path), fields=[parse_field("x:json=boxes")])


def test_the_annotation_may_name_the_image(tmp_path: Path) -> None:
    make(tmp_path, voc_annotation("other.bmp"))
    (tmp_path / "JPEGImages" / "a.png").rename(tmp_path / "JPEGImages" / "other.bmp")
    assert len(scan(open_source(str(tmp_path)))[0]) == 1
    make(tmp_path, voc_annotation("../../secret.png"))
    (tmp_path / "JPEGImages" / "a.png").unlink()
    assert code(tmp_path) == ("outside-root", "Annotations/a.xml")


def test_image_sets(tmp_path: Path) -> None:
    made = voc(tmp_path)
    sets = tmp_path / "ImageSets" / "Main"
    (sets / "cat_train.txt").write_text("2007_000001  1\n")
    with pytest.raises(SourceError, match=r"cat_train\.txt:1.*flag"):
        scan(open_source(made.location, set="cat_train"))
    with pytest.raises(SourceError, match=r"no set 'val'; there is Main/all"):
        open_source(made.location, set="val")
    with pytest.raises(OptionError, match="no name below"):
        open_source(made.location, set="../x")
    assert len(scan(open_source(made.location, set="Main/all"))[0]) == 60
    (sets / "odd.txt").write_text("2007_000001\n\n../x\ngone\n")
    records, bad = scan(open_source(made.location, set="odd"))
    assert [record.key for record in records] == [b"2007_000001"]
    assert [(record.code, record.path) for record in bad] == [
        ("outside-root", "ImageSets/Main/odd.txt:3"),
        ("missing-file", "ImageSets/Main/odd.txt:4"),
    ]


def test_a_name_without_annotation_has_a_rule(tmp_path: Path) -> None:
    make(tmp_path, None)
    (tmp_path / "ImageSets" / "Main" / "test.txt").write_text("a")
    assert code(tmp_path, set="test") == ("missing-file", "ImageSets/Main/test.txt:1")
    found: dict[bytes, Any] = values(open_source(str(tmp_path), set="test", missing="absent"), tmp_path / "w")
    assert list(found[b"a"]) == ["image"]


@pytest.mark.parametrize(
    ("xml", "wanted"),
    [
        (BOMB + "<annotation>&i;</annotation>", "entity"),
        ('<!DOCTYPE a [<!ENTITY x SYSTEM "file:///etc/passwd">]><annotation>&x;</annotation>', "entity"),
        ('<!DOCTYPE a [<!ENTITY % x SYSTEM "file:///etc/passwd"> %x;]><annotation/>', "entity"),
        ("<annotation>&x;</annotation>", "xml"),
        ("<annotation>", "xml"),
        ("", "xml"),
        (b"\xff\xfe\x00", "xml"),
        ('<?xml version="1.0" encoding="no-such"?><annotation/>', "xml"),
        ("<annotation>" + "<a>" * 100 + "</a>" * 100 + "</annotation>", "depth"),
        ("<html/>", "voc"),
        (voc_annotation("a", "<object/>"), "voc"),
        (voc_annotation("a", "<object><name>x</name><bndbox><xmin>1</xmin></bndbox></object>"), "bbox"),
        (voc_annotation("a", voc_object("x", (3, 1, 2, 4))), "bbox"),
        (voc_annotation("a", voc_object("x", (1, 1, float("inf"), 4))), "bbox"),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "lfs-pointer"),
    ],
)
def test_annotations_that_cannot_be_are_named(tmp_path: Path, xml: str | bytes, wanted: str) -> None:
    assert code(make(tmp_path, xml)) == (wanted, "Annotations/a.xml")


def test_a_document_type_without_entities_and_other_encodings_are_read() -> None:
    text = '<?xml version="1.0" encoding="{}"?><!DOCTYPE annotation>' + voc_annotation("a", voc_object("é", (1, 1, 2, 2)))
    for encoding in ("utf-8", "iso-8859-1", "utf-16"):
        assert objects_of(parse_xml(text.format(encoding).encode(encoding)))[0]["name"] == "é"


def test_missing_directories_are_named(tmp_path: Path) -> None:
    (tmp_path / "Annotations").mkdir()
    with pytest.raises(SourceError, match="no directory JPEGImages"):
        open_source(str(tmp_path), kind="voc")
