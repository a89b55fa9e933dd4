"""The measurement of how a GPU is fed goes through all its parts without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import batchkit
import pytest

from benchmarks.gpu import feed
from benchmarks.gpu.arms import LADDER, NEEDS, TORCH, there


@pytest.mark.slow
def test_every_part_is_recorded(tmp_path: Path) -> None:
    data = batchkit.write_pictures(tmp_path / "d", 64, size=80)
    output = tmp_path / "record.json"
    arguments = ["--data", str(data), "--output", str(output), "--device", "cpu", "--tiny", "--repeats", "1"]
    assert feed.main(arguments) == 0
    found = json.loads(output.read_text())
    results = found["results"]
    assert set(results) == {"copies", "allocation", "vit", "small", "starved"} and found["options"]["data"] == "d"
    for part in ("vit", "small"):
        assert not results[part]["errors"]
        others = {name for name, module in NEEDS.items() if there(module)}
        assert set(results[part]["summary"]) == {"resident", "resident uint8", *LADDER, *TORCH, *others}
        assert all(len(repeats) == 1 and repeats[0]["rows"] > 0 for repeats in results[part]["repeats"].values())
        assert "idle_against_resident" in results[part]["summary"]["kernel"]
        assert "ms_against_rung_before" in results[part]["summary"]["feedback"]
    assert results["starved"]["rate_against_loader_alone"]["median"] > 0


def test_no_round_is_begun_that_does_not_fit(tmp_path: Path) -> None:
    data = batchkit.write_pictures(tmp_path / "d", 16, size=80)
    output = tmp_path / "record.json"
    arguments = [
        "--data",
        str(data),
        "--output",
        str(output),
        "--device",
        "cpu",
        "--tiny",
        "--budget",
        "0",
        "--only",
        "starved",
    ]
    assert feed.main(arguments) == 1
    assert "the time is over" in json.loads(output.read_text())["results"]["starved"]["stopped"]
