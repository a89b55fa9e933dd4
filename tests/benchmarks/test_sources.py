"""``lfbench sources``: every kind of source that it makes converts, and its rates are in the record beside the bare loop's."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from benchmarks.commands import sources_


def test_every_source_is_made_and_measured(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    pytest.importorskip("h5py")
    (tmp_path / "pictures").mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8)
    for number in range(3):
        Image.fromarray(pixels).save(tmp_path / "pictures" / f"{number}.jpg")
    wanted = [name for name in sources_.MAKERS if name != "mds"]
    options = [part for name in wanted for part in ("--source", name)]
    output = tmp_path / "r.json"
    run = CliRunner().invoke(
        sources_.command, ["--data", str(tmp_path / "pictures"), "--repeats", "1", "--output", str(output), *options]
    )
    assert run.exit_code == 0, run.output
    results = json.loads(output.read_text())["results"]
    assert set(results) == {*wanted, "bare", "bare tokens"}
    assert all(found["samples_s"]["median"] > 0 and len(found["cpu_seconds"]) == 1 for found in results.values())
