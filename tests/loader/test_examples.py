"""The examples of docs/loader.md, as they stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

REPO = Path(__file__).resolve().parents[2]
EXAMPLES = dict(
    re.findall(r"^### (.+?)\n.*?^```python\n(.*?)^```", (REPO / "docs" / "loader.md").read_text(), re.MULTILINE | re.DOTALL)
)
NEEDS = {
    "A GPU": "torch",
    "torchrun": "torch",
    "Lightning": "lightning",
    "Accelerate": "accelerate",
    "Hugging Face Trainer": "transformers",
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from PIL import Image

    folder = tmp_path_factory.mktemp("examples")
    rows = []
    for number in range(12):
        pixels = np.random.default_rng(number).integers(0, 256, (48, 64, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.jpg")
        rows.append(f'{{"key": "{number}", "file": "{number}.jpg", "label": {number % 10}}}\n')
    (folder / "table.jsonl").write_text("".join(rows))
    fields = ["--field", "image:image=file@file,codec=keep", "--field", "label:scalar=label,dtype=int64"]
    command = [sys.executable, "-m", "shard_builder.cli", "convert", folder / "table.jsonl", folder / "set", "--quiet", *fields]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": os.pathsep.join([str(REPO), str(REPO / "tools")])})
    return folder / "set"


def test_every_framework_has_one() -> None:
    assert set(EXAMPLES) == set(NEEDS)


@pytest.mark.slow
@pytest.mark.parametrize("name", NEEDS)
def test_example(name: str, dataset: Path, tmp_path: Path) -> None:
    pytest.importorskip(NEEDS[name])
    script = tmp_path / "train.py"
    script.write_text(f"path = {str(dataset)!r}\n{EXAMPLES[name]}\nprint('end of example')\n")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if name == "torchrun" else []
    done = subprocess.run(
        [sys.executable, *launcher, script],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(REPO), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("end of example") == (2 if name == "torchrun" else 1)
