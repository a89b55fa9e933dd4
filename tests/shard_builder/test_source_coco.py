"""COCO: documents are merged by image, masks keep their areas as pycocotools measures them, and contradictions are named."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _build import picture
from _kinds import coco_documents
from _tars import scan, values
from hypothesis import given
from hypothesis import strategies as st
from pycocotools import mask as masks
from pycocotools.coco import COCO

import lfdata
from lfdata.errors import OptionError, SampleError, SourceError
from shard_builder.convert import convert
from shard_builder.fields import parse_field
from shard_builder.options import ConvertOptions
from shard_builder.sources import guess_kind, open_source, source_from_config
from shard_builder.sources.coco_shapes import check_rle


def document(folder: Path, ids: list[Any], about: list[Any], name: str = "a.json", **more: Any) -> str:
    """A document beside its images; entries of images are ids."""
    for image in ids:
        if isinstance(image, int):
            (folder / f"{image}.png").write_bytes(picture(image))
    entries = [{"id": i, "file_name": f"{i}.png", "height": 12, "width": 20} if isinstance(i, int) else i for i in ids]
    found = {"info": {}, "images": entries, "annotations": about, "categories": [{"id": 1, "name": "cat"}]} | more
    (folder / name).write_text(json.dumps(found))
    return str(folder / name)


def codes(location: str, **options: str) -> list[tuple[str, bytes]]:
    return [(record.code, record.key) for record in scan(open_source(location, **options))[1]]


def area(segmentation: Any, height: int, width: int) -> float:
    """Area by pycocotools."""
    if isinstance(segmentation, list):
        return float(masks.area(masks.merge(masks.frPyObjects(segmentation, height, width))))
    if isinstance(segmentation["counts"], list):
        return float(masks.area(masks.frPyObjects(segmentation, height, width)))
    return float(masks.area(segmentation | {"counts": segmentation["counts"].encode()}))


def test_a_whole_data_set_comes_back_as_pycocotools_reads_it(tmp_path: Path) -> None:
    coco_documents(tmp_path / "coco", 12)
    location = str(tmp_path / "coco")
    assert guess_kind(location) == "coco"
    opened = open_source(location)
    assert [spec.name for spec in opened.fields] == ["image", "annotations", "captions"]
    summary = convert(opened, tmp_path / "out", ConvertOptions(workers=1))
    assert (summary.samples, summary.errors) == (12, 0)
    with contextlib.redirect_stdout(io.StringIO()):
        wanted = {
            name: COCO(str(tmp_path / "coco" / "annotations" / f"{name}_val.json"))
            for name in ("instances", "captions", "person_keypoints")
        }
    stored = {sample["__key__"].decode(): sample for sample in lfdata.open(tmp_path / "out")}
    kinds = set()
    for image in wanted["instances"].imgs.values():
        sample = stored[image["file_name"]]
        assert sample["image"].shape == (12, 20, 3)
        found = {one["id"]: one for one in sample["annotations"]}
        expected = wanted["instances"].imgToAnns[image["id"]]
        assert [one["id"] for one in sample["annotations"]] == [one["id"] for one in expected]
        points = {one["id"]: one for one in wanted["person_keypoints"].imgToAnns[image["id"]]}
        assert sample["captions"] == wanted["captions"].imgToAnns[image["id"]]
        for one in expected:
            assert found[one["id"]] == one | points.get(one["id"], {})
            kinds.add(type(one["segmentation"]["counts"]) if isinstance(one["segmentation"], dict) else list[Any])
            assert area(found[one["id"]]["segmentation"], 12, 20) == wanted["instances"].annToMask(one).sum()
    assert len(kinds) == 3
    assert [category["name"] for category in opened.notes()["categories"]] == ["person", "thing"]


def test_numbers_keep_their_spelling_and_columns_can_be_chosen(tmp_path: Path) -> None:
    about = [
        {"id": 5, "image_id": 1, "bbox": [1, 2.0, 0.1, 1e-7]},
        {"image_id": 1, "caption": "one"},
        {"image_id": 1, "caption": "two"},
    ]
    location = document(tmp_path, [1], about)
    chosen = ["a:json=annotations", "c:json=captions", "t:text=caption", "i:json=info", "n:text=file_name", "id:scalar=id"]
    found = values(open_source(location, fields=[parse_field(text) for text in chosen], key="id"), tmp_path / "w")
    assert json.loads(found[b"1"]["a"]) == about[:1]
    assert b"2.0" in found[b"1"]["a"]
    assert json.loads(found[b"1"]["c"]) == about[1:]
    assert (found[b"1"]["t"], found[b"1"]["n"], found[b"1"]["id"]) == ("one", "1.png", 1)
    assert json.loads(found[b"1"]["i"])["height"] == 12
    with pytest.raises(OptionError, match="annotations, captions"):
        open_source(location, fields=[parse_field("x:json=boxes")])


def test_images_are_looked_for_in_the_usual_places(tmp_path: Path) -> None:
    for place in ("val", "images/val", "images", "annotations"):
        home = tmp_path / place.replace("/", "-")
        (home / "annotations").mkdir(parents=True)
        (home / place).mkdir(parents=True, exist_ok=True)
        location = document(home / "annotations", [], [], "instances_val.json", images=[{"id": 1, "file_name": "1.png"}])
        with pytest.raises(SourceError, match="images=DIR"):
            open_source(location)
        (home / place / "1.png").write_bytes(picture(1))
        assert len(scan(open_source(location))[0]) == 1
        assert len(scan(open_source(location, images=str(home / place)))[0]) == 1


def test_a_directory_of_several_splits_needs_one_named(tmp_path: Path) -> None:
    (tmp_path / "annotations").mkdir()
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
        document(tmp_path / "annotations", [], [], f"instances_{split}.json", images=[{"id": 1, "file_name": "1.png"}])
        (tmp_path / split / "1.png").write_bytes(picture(1))
    with pytest.raises(SourceError, match="split=NAME; there is train, val"):
        open_source(str(tmp_path))
    assert len(scan(open_source(str(tmp_path), split="val"))[0]) == 1
    with pytest.raises(SourceError, match="no document of the split"):
        open_source(str(tmp_path), split="test")


# -- what is wrong ------------------------------------------------------------------------------------------------------


def test_dangling_and_duplicate_ids_spoil_what_they_touch(tmp_path: Path) -> None:
    location = document(
        tmp_path,
        [1, 2, 3, 4, 3, 5],
        [
            {"id": 1, "image_id": 1, "category_id": 1},
            {"id": 2, "image_id": 99, "category_id": 1},
            {"id": 3, "image_id": 2, "category_id": 7},
            {"id": 1, "image_id": 4, "category_id": 1},
            {"id": 9},
            {"id": 10, "image_id": 5, "category_id": 1},
        ],
    )
    records, bad = scan(open_source(location))
    assert [record.key for record in records] == [b"1.png", b"5.png"]
    assert [(record.code, record.key) for record in bad] == [
        ("dangling", b"2.png"),
        ("duplicate-id", b"3.png"),
        ("duplicate-id", b"4.png"),
        ("dangling", b""),
        ("json", b""),
    ]
    assert "annotation 1 (from 0)" in bad[3].path


def test_missing_images_are_bad_samples(tmp_path: Path) -> None:
    more = [{"id": 2, "file_name": "gone.png"}, {"id": 3, "file_name": "../x.png"}, {"id": 4, "file_name": ""}, {"id": 5}]
    location = document(tmp_path, [1, *more], [])
    assert codes(location) == [("missing-file", b"gone.png"), ("outside-root", b"../x.png"), ("no-key", b""), ("json", b"")]


@pytest.mark.parametrize(
    ("annotation", "code"),
    [
        ({"segmentation": {"size": [12, 20], "counts": [100, 100]}}, "rle"),
        ({"segmentation": {"size": [12, 20], "counts": [-1, 241]}}, "rle"),
        ({"segmentation": {"size": [12, 20], "counts": "\x7f"}}, "rle"),
        ({"segmentation": {"size": [12, 20], "counts": "PP"}}, "rle"),
        ({"segmentation": {"size": [12, 20], "counts": "oooooooooooo0"}}, "rle"),
        ({"segmentation": {"size": [12], "counts": [240]}}, "rle"),
        ({"segmentation": {"size": [1 << 40, 1 << 40], "counts": [1 << 80]}}, "rle"),
        ({"segmentation": {"counts": [240]}}, "rle"),
        ({"segmentation": [[1, 2, 3, 4]]}, "polygon"),
        ({"segmentation": [[1, 2, 3, 4, 5, 6, 7]]}, "polygon"),
        ({"segmentation": [["1", 2, 3, 4, 5, 6]]}, "polygon"),
        ({"segmentation": 5}, "polygon"),
        ({"bbox": [1, 2, 3]}, "bbox"),
        ({"bbox": [1, 2, 3, None]}, "bbox"),
        ({"keypoints": [1, 2]}, "keypoints"),
    ],
)
def test_malformed_shapes_are_bad_samples_unless_kept(tmp_path: Path, annotation: dict[str, Any], code: str) -> None:
    location = document(tmp_path, [1, 2], [{"id": 1, "image_id": 1} | annotation, {"id": 2, "image_id": 2}])
    opened = open_source(location)
    records, bad = scan(opened)
    assert (len(records), bad) == (2, [])
    worker = source_from_config(opened.config(), tmp_path)
    worker.load(records[1].locator)
    with pytest.raises(SampleError) as caught:
        worker.load(records[0].locator)
    assert (caught.value.code, caught.value.path) == (code, "1.png")
    kept = open_source(location, shapes="keep")
    assert source_from_config(kept.config(), tmp_path).load(scan(kept)[0][0].locator).values


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 2**32), st.sampled_from([0.01, 0.1, 0.5, 0.99]))
def test_every_mask_that_pycocotools_writes_is_accepted_and_any_cut_refused(
    height: int, width: int, seed: int, share: float
) -> None:
    mask = (np.random.default_rng(seed).random((height, width)) < share).astype(np.uint8, order="F")
    written = masks.encode(np.asfortranarray(mask))
    text = written["counts"].decode()
    check_rle({"size": [height, width], "counts": text})
    with pytest.raises(SampleError):
        check_rle({"size": [height, width], "counts": text[:-1]})
    with pytest.raises(SampleError):
        check_rle({"size": [height + 1, width], "counts": text})


def test_documents_that_contradict_each_other_are_named(tmp_path: Path) -> None:
    first = document(tmp_path, [1], [{"id": 1, "image_id": 1, "category_id": 1, "bbox": [0, 0, 1, 1]}])
    second = document(tmp_path, [1], [{"id": 1, "image_id": 1, "category_id": 1, "bbox": [0, 0, 1, 2]}], "b.json")
    opened = open_source(f"{first}::{second}")
    records, _ = scan(opened)
    with pytest.raises(SampleError, match="conflict"):
        source_from_config(opened.config(), tmp_path).load(records[0].locator)
    document(tmp_path, [1], [], "b.json", images=[{"id": 1, "file_name": "other.png"}])
    with pytest.raises(SourceError, match="do not belong together"):
        scan(open_source(f"{first}::{second}"))
    document(tmp_path, [1], [], "b.json", categories=[{"id": 1, "name": "dog"}])
    with pytest.raises(SourceError, match="category 1 has another 'name'"):
        scan(open_source(f"{first}::{second}"))
    document(tmp_path, [1], [], "b.json", categories=[{"id": 1, "name": "cat"}] * 2)
    with pytest.raises(SourceError, match="two categories"):
        open_source(f"{first}::{second}", images=str(tmp_path)).scan().__next__()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty file"),
        (b'{"images": [', "not a COCO document"),
        (b'{"images": [{"id": NaN}]}', "not a COCO document"),
        (b'{"annotations": []}', "not a COCO document"),
        (b"[1]", "not a COCO document"),
        (b"[" * 100_000, "not a COCO document"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
    ],
)
def test_documents_that_are_none_are_named_and_nothing_is_written(tmp_path: Path, data: bytes, reason: str) -> None:
    (tmp_path / "a.json").write_bytes(data)
    with pytest.raises(SourceError, match=reason):
        convert(open_source(str(tmp_path / "a.json"), kind="coco"), tmp_path / "out", ConvertOptions(workers=1))
    assert not (tmp_path / "out").exists()


def test_the_memory_of_a_document_is_bounded_by_an_option(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"max_json_bytes.*200 bytes"):
        open_source(document(tmp_path, [1], []), max_json_bytes="10")


def test_a_document_that_changes_after_the_scan_is_no_sample(tmp_path: Path) -> None:
    location = document(tmp_path, [1], [{"id": 1, "image_id": 1}])
    opened = open_source(location)
    records, _ = scan(opened)
    Path(location).write_bytes(Path(location).read_bytes().replace(b'"id": 1', b'"id": 2'))
    with pytest.raises(SampleError) as caught:
        source_from_config(opened.config(), tmp_path).load(records[0].locator)
    assert caught.value.code == "changed"
