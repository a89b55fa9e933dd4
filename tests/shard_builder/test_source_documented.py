"""Every command in docs/sources.md runs as it stands there, on small data of the names that it uses. (Those with URLs: tests/storage.)"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import _kinds
import h5py
import numpy as np
import pyarrow.parquet as pq
import pytest
from _build import picture
from _kinds import FIXTURES, coco_documents, mds_directory, mds_entry, mds_shard
from _tars import tar_bytes
from click.testing import CliRunner
from faultkit import InProcessPool

import lfdata
from shard_builder import convert as convert_module
from shard_builder.cli import cli

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "sources.md").read_text(encoding="utf-8")
COMMANDS = [
    line
    for block in re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
    for line in block.replace("\\\n", "").splitlines()
    if line and "://" not in line
]


def photos(folder: Path) -> None:
    for name in ("cat/1.png", "dog/2.png"):
        (folder / "photos" / name).parent.mkdir(parents=True)
        (folder / "photos" / name).write_bytes(picture(len(name)))


def pairs(folder: Path) -> None:
    (folder / "1.png").write_bytes(picture(1))
    (folder / "pairs.jsonl").write_text(json.dumps({"name": "a", "file": "1.png", "caption": "one"}))


def tars(folder: Path) -> None:
    for n in range(2):
        (folder / f"train-{n:03d}.tar").write_bytes(tar_bytes([(f"{n}.png", picture(n)), (f"{n}.txt", b"text")]))


def parquet(folder: Path) -> None:
    rows = pq.read_table(FIXTURES / "hugging_face" / "parquet" / "data" / "test-00000-of-00001.parquet")
    pq.write_table(rows, folder / "captions.parquet")


def saved(folder: Path) -> None:
    shutil.copytree(FIXTURES / "hugging_face" / "saved", folder / "saved_dataset")


def coco(folder: Path) -> None:
    coco_documents(folder / "coco", 3)
    (folder / "coco" / "val").rename(folder / "coco" / "val2017")
    for path in (folder / "coco" / "annotations").iterdir():
        path.rename(path.with_name(path.name.replace("_val", "_val2017")))


def coco_pair(folder: Path) -> None:
    coco(folder)
    for path in [*(folder / "coco" / "annotations").iterdir(), folder / "coco" / "val2017"]:
        path.rename(folder / path.name)


def mds(folder: Path) -> None:
    columns = {"photo": ("png", None), "class": ("int64", 8)}
    data = mds_shard([[picture(n), bytes([n]) + bytes(7)] for n in range(3)], [False, True])
    mds_directory(folder / "mds" / "train", [mds_entry("shard.00000.mds", data, 3, columns)])
    (folder / "mds" / "train" / "shard.00000.mds").write_bytes(data)


def features(folder: Path) -> None:
    with h5py.File(folder / "features.h5", "w") as file:
        file["images"] = np.zeros((3, 8, 8, 3), np.uint8)
        file["x"] = np.zeros((3, 4), np.float32)
        file["names"] = ["a", "b", "c"]


def episodes(folder: Path) -> None:
    with h5py.File(folder / "episodes.hdf5", "w") as file:
        for n in range(3):
            file[f"data/demo_{n}/actions"] = np.ones((n + 1, 7), np.float32)


def yolo(folder: Path) -> None:
    (folder / "yolo").mkdir()
    _kinds.yolo(folder / "yolo")


def voc(folder: Path) -> None:
    _kinds.voc(folder / "VOC2012")
    sets = folder / "VOC2012" / "ImageSets" / "Main"
    (sets / "all.txt").rename(sets / "trainval.txt")


def megatron(folder: Path) -> None:
    _kinds.megatron(folder)
    for ending in ("idx", "bin"):
        (folder / f"t.{ending}").rename(folder / f"corpus_text_document.{ending}")


def pusht(folder: Path) -> None:
    pytest.importorskip("av")
    shutil.copytree(Path(__file__).parent / "fixtures" / "lerobot" / "v3.0", folder / "pusht")


MAKERS: dict[str, Callable[[Path], None]] = {
    "photos": photos,
    "pairs.jsonl": pairs,
    "train-{000..001}.tar": tars,
    "captions.parquet": parquet,
    "saved_dataset": saved,
    "coco": coco,
    "mds": mds,
    "features.h5": features,
    "episodes.hdf5": episodes,
    "yolo/data.yaml": yolo,
    "VOC2012": voc,
    "corpus_text_document": megatron,
    "mds/train": mds,
    "pusht": pusht,
    "instances_val2017.json::captions_val2017.json": coco_pair,
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_documented_command_runs(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, verb, source, *rest = shlex.split(command)
    assert (program, verb) == ("shard-builder", "convert")
    assert not re.search(r"[;|&<>*?{}$]", re.sub(r"'[^']*'", "", command)), "a shell would not take it as it stands"
    MAKERS[source](tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(convert_module, "Pool", InProcessPool)
    result = CliRunner().invoke(cli, [verb, source, *rest], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert len(lfdata.open(tmp_path / "out")) > 0


def test_every_kind_has_a_command() -> None:
    sections = re.findall(r"^## (.*?)$(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL)
    without = [title for title, text in sections if "| option | default |" in text and "```sh" not in text]
    assert without == []
    assert {shlex.split(command)[2] for command in COMMANDS} == set(MAKERS)
