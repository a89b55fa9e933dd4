"""YOLO: labels stay numbers, label files are found as usual, and descriptions that lead outside or bomb are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import _kinds
import pytest
from _build import picture
from _kinds import yolo
from _tars import scan, values

import lfdata
from lfdata.errors import SampleError, SourceError
from shard_builder.convert import convert
from shard_builder.fields import parse_field
from shard_builder.options import ConvertOptions
from shard_builder.sources import guess_kind, open_source, source_from_config
from shard_builder.sources.yolo import label_path

YAML = "train: images\nnames: [cat, dog]\n"


def make(folder: Path, labels: dict[str, str | None], yaml: str = YAML) -> Path:
    """Images with label files; ``None``: no label file."""
    for name, text in labels.items():
        image = folder / "images" / f"{name}.png"
        image.parent.mkdir(parents=True, exist_ok=True)
        image.write_bytes(picture(len(name)))
        label = folder / "labels" / f"{name}.txt"
        label.parent.mkdir(parents=True, exist_ok=True)
        if text is not None:
            label.write_text(text)
    (folder / "data.yaml").write_text(yaml)
    return folder


def load(folder: Path, *fields: str, **options: str) -> dict[bytes, dict[str, Any]]:
    return values(_kinds.source("yolo", folder, *fields, **options), folder / "w")


def code(folder: Path, **options: str) -> tuple[str, str]:
    return _kinds.first_fault(_kinds.source("yolo", folder, **options), folder)


def test_a_data_set_comes_back_from_shards(tmp_path: Path) -> None:
    (tmp_path / "y").mkdir()
    made = yolo(tmp_path / "y")
    for location in (made.location, f"{made.location}/data.yaml"):
        assert guess_kind(location) == "yolo"
    opened = made.open()
    assert convert(opened, tmp_path / "out", ConvertOptions(workers=1)).samples == 60
    assert opened.notes() == {
        "class_names": {"0": "cat", "1": "dog", "2": "bird"},
        "without_label_file": {"train": 6, "val": 6},
    }
    for sample in lfdata.open(tmp_path / "out"):
        n = int(Path(sample["__key__"].decode()).stem)
        assert sample["split"] == ("train" if n % 2 else "val")
        wanted = [{"class": k % 3, "values": [0.5, 0.25, 0.125, round(k / 7, 6)]} for k in range(n % 4)] if n % 5 else []
        assert sample["labels"] == wanted
        assert sample["image"].shape == (12, 20, 3)
    assert len(scan(open_source(made.location, split="val"))[0]) == 30


def test_the_label_file_of_an_image() -> None:
    assert label_path("images/train/a.b.jpg") == "labels/train/a.b.txt"
    assert label_path("x/images/images/a.png") == "x/images/labels/a.txt"
    assert label_path("a.png") == "a.txt"
    assert label_path("train/images.png") == "train/images.txt"


def test_boxes_segments_oriented_boxes_and_poses_stay_numbers(tmp_path: Path) -> None:
    pose = "kpt_shape: [2, 3]\n"
    make(tmp_path, {"a": "0 .1 .2 .3 .4 .5 .6 2 .7 .8 0\n\n1 0 0 1 1e-3\n1 0 0 1 0 1 1\n0 0 0 1 0 1 1 0 1\n"}, YAML + pose)
    found = load(tmp_path)[b"images/a.png"]["labels"]
    assert [(one["class"], len(one["values"])) for one in found] == [(0, 10), (1, 4), (1, 6), (0, 8)]
    assert found[0]["values"] == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 2, 0.7, 0.8, 0]


def test_labels_as_an_array(tmp_path: Path) -> None:
    make(tmp_path, {"a": "0 .1 .2 .3 .4\n1 0 0 1 1\n", "b": "", "c": "0 0 0 1 1\n0 0 0 1 0 1 1\n"})
    opened = open_source(str(tmp_path), fields=[parse_field("x:array=labels,dtype=float64,ndim=2")])
    records, _ = scan(opened)
    worker = source_from_config(opened.config(), tmp_path)
    assert worker.load(records[0].locator).values["x"].tolist() == [[0, 0.1, 0.2, 0.3, 0.4], [1, 0, 0, 1, 1]]
    assert worker.load(records[1].locator).values["x"].shape == (0, 5)
    with pytest.raises(SampleError, match="ragged"):
        worker.load(records[2].locator)


def test_an_empty_label_file_has_no_objects_and_a_missing_one_has_a_rule(tmp_path: Path) -> None:
    make(tmp_path, {"a": "", "b": None})
    fields = ["x:json=labels", "p:text=path"]
    assert [sample["x"] for sample in load(tmp_path, *fields).values()] == [[], []]
    absent = load(tmp_path, *fields, missing="absent")
    assert [sample.get("x") for sample in absent.values()] == [[], None]
    assert code(tmp_path, missing="error") == ("missing-file", "images/b.png")


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("2 0 0 1 1", "class"),
        ("-1 0 0 1 1", "class"),
        ("0.5 0 0 1 1", "label"),
        ("cat 0 0 1 1", "label"),
        ("0 0 0 1", "label"),
        ("0 0 0 1 1 1", "label"),
        ("0 0 0 1 1 1 1 1", "label"),
        ("0", "label"),
        ("0 nan 0 1 1", "label"),
        ("inf 0 0 1 1", "label"),
        ("0 0 0 1 1.5", "coordinates"),
        ("0 0 0 1 -0.1", "coordinates"),
    ],
)
def test_lines_that_cannot_be_are_named_with_their_place(tmp_path: Path, line: str, wanted: str) -> None:
    make(tmp_path, {"a": f"0 0 0 1 1\n{line}\n"})
    assert code(tmp_path) == (wanted, "images/a.png: labels/a.txt:2")


def test_coordinates_can_be_accepted_as_they_are(tmp_path: Path) -> None:
    make(tmp_path, {"a": "0 10 20 30 40\n"})
    assert load(tmp_path, coordinates="any")[b"images/a.png"]["labels"] == [{"class": 0, "values": [10, 20, 30, 40]}]


def test_lists_name_images_below_the_root(tmp_path: Path) -> None:
    make(tmp_path, {"a": "", "b": ""}, "train: lists/t.txt\nnames: [x]\n")
    (tmp_path / "lists").mkdir()
    text = f"images/b.png\n\n./../images/a.png\n{tmp_path}/images/a.png\n/etc/passwd.png\n../x.png\nimages/no.png\nreadme\n"
    (tmp_path / "lists" / "t.txt").write_text(text)
    records, bad = scan(open_source(str(tmp_path)))
    assert [record.key for record in records] == [b"images/b.png", b"images/a.png", b"images/a.png"]
    assert [record.code for record in bad] == ["outside-root", "outside-root", "missing-file", "not-a-path"]


def test_paths_of_the_description_stay_below_the_root(tmp_path: Path) -> None:
    make(tmp_path / "d", {"a": ""}, "train: ../images\nval: ../../images\nnames: [x]\n")
    assert len(scan(open_source(str(tmp_path / "d"), split="train"))[0]) == 1
    for yaml, reason in (
        ("path: ../elsewhere\ntrain: images\n", "root=DIR"),
        ("path: /\ntrain: images\n", "root=DIR"),
        ("train: /etc\n", "not a path below"),
        ("train: gone\n", "there is no 'gone'"),
        ("train: data.yaml\n", "neither a directory nor a list"),
        ("names: [x]\n", "no train, val or test"),
        ("train: [1]\n", "path or a list of paths"),
    ):
        (tmp_path / "d" / "data.yaml").write_text(yaml)
        with pytest.raises(SourceError, match=reason):
            open_source(str(tmp_path / "d"))
    (tmp_path / "d" / "data.yaml").write_text("path: ../elsewhere\ntrain: images\nnames: [x]\n")
    assert len(scan(open_source(str(tmp_path / "d"), root=str(tmp_path / "d")))[0]) == 1


@pytest.mark.parametrize(
    ("yaml", "reason"),
    [
        ("a: &a [x]\nnames: *a\ntrain: images\n", "alias"),
        ("!!python/object/apply:os.system ['true']\n", "not YAML"),
        ("train: [\n", "not YAML"),
        ("- 1\n", "found list"),
        ("", "found NoneType"),
        ("[" * 5000, "not YAML"),
        ("train: images\nnc: 3\nnames: [a]\n", "nc is 3"),
        ("train: images\nnc: -1\n", "nc is a number"),
        ("train: images\nnames: {a: 1}\n", "names is a list"),
        ("train: images\nkpt_shape: [0, 3]\n", "kpt_shape"),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
    ],
)
def test_descriptions_that_cannot_be_are_named(tmp_path: Path, yaml: str, reason: str) -> None:
    make(tmp_path, {"a": ""}, yaml)
    with pytest.raises(SourceError, match=reason):
        open_source(str(tmp_path))
    with pytest.raises(SourceError, match=r"no data\.yaml"):
        open_source(str(tmp_path / "images"), kind="yolo")


def test_links_that_lead_outside_are_bad_samples(tmp_path: Path) -> None:
    make(tmp_path / "d", {"a": "", "b": ""})
    (tmp_path / "secret").write_text("x")
    (tmp_path / "d" / "labels" / "a.txt").unlink()
    (tmp_path / "d" / "labels" / "a.txt").symlink_to(tmp_path / "secret")
    assert [record.code for record in scan(open_source(str(tmp_path / "d")))[1]] == ["outside-root"]
