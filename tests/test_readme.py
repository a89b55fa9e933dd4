"""The Python of the README, as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_each_block_of_the_readme_runs_alone(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (REPO / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 3
    (on_a_device,) = [number for number, block in enumerate(blocks) if "DeviceLoader" in block]
    blocks[on_a_device] += "assert images.shape == (4, 3, 224, 224) and images.dtype == torch.bfloat16, images\n"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(REPO), str(REPO / "tools"), os.environ.get("PYTHONPATH", "")])
    }
    source, fields = REPO / "samples" / "dataset" / "samples.jsonl", REPO / "samples" / "dataset" / "fields.toml"
    words = [sys.executable, "-m", "shard_builder.cli", "convert", source, tmp_path / "out" / "dataset", "--map", fields]
    subprocess.run([*words, "--quiet"], env=environment, check=True, timeout=300)
    for block in blocks:
        done = subprocess.run(
            [sys.executable, "-c", block],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, block + done.stderr[-3000:]
