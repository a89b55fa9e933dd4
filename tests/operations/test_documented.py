"""The commands of docs/operations.md, run in their order on the sample data set; every result verifies."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from killkit import ROOT
from opskit import assert_same, run, samples

import lfdata

COMMANDS = re.findall(r"^shard-builder .*$", (ROOT / "docs" / "operations.md").read_text(), re.MULTILINE)
DATA_SETS = ("photos", "again", "parts/train", "parts/val", "whole", "wide", "saved")


def test_every_command_of_the_page_works_and_every_result_verifies(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    sample = ROOT / "samples" / "dataset"
    run(tmp_path, "convert", str(sample / "samples.jsonl"), "photos", "--map", str(sample / "fields.toml"), "-q")
    (tmp_path / "scores.csv").write_text("name,score\nphoto/bridge,0.5\nnobody,1\n")
    assert len(COMMANDS) >= 11
    for command in COMMANDS:
        run(tmp_path, *shlex.split(command)[1:])
    for name in DATA_SETS:
        assert samples(tmp_path / name), name
    photos = lfdata.open(tmp_path / "photos")
    assert photos[photos.index_of("photo/bridge")]["score"] == 0.5
    assert photos[photos.index_of("photo/bridge")]["medium"] == "photo"
    for item in lfdata.open(tmp_path / "whole"):
        sample_of = photos[photos.index_of(item["__key__"])]
        assert_same([item], [{name: sample_of[name] for name in item}])
    assert {"__key__", "caption", "label"} == lfdata.open(tmp_path / "again")[0].keys()


def test_verbs_that_take_local_data_say_so_of_urls() -> None:
    for verb in ("verify", "inspect", "merge", "export"):
        done = subprocess.run(
            [sys.executable, "-m", "shard_builder.cli", verb, "s3://user:secret@bucket/x", "out"],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert done.returncode == 2 and "takes local data sets" in done.stderr and "secret" not in done.stderr
