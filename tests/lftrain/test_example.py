"""The example from end to end: data, shards, training; and a control whose labels belong to other samples."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
REACH = ROOT / "examples" / "reach"
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tools")])}


def call(*words: str) -> None:
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=ENVIRONMENT, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def held_out_loss(data: Path, name: str, *more: str) -> float:
    call(
        "-m", "lftrain", "run", str(REACH / "train.toml"),
        "--set", f"run.folder={data / ('run-' + name)}", "--set", f"data.path={data / name}",
        "--set", f"held_out.path={data / 'held_out'}", *more,
    )  # fmt: skip
    lines = [json.loads(line) for line in (data / f"run-{name}" / "metrics.jsonl").read_text().splitlines()]
    return float([line for line in lines if line["kind"] == "held_out"][-1]["loss"])


def converted(folder: Path, samples: int) -> Path:
    call(str(REACH / "data.py"), str(folder), "--samples", str(samples), "--held-out", "128")
    for name in ("train", "control", "held_out"):
        call(
            "-m",
            "shard_builder.cli",
            "convert",
            str(folder / f"{name}.jsonl"),
            str(folder / name),
            "--map",
            str(REACH / "fields.toml"),
        )
    return folder


@pytest.mark.slow
@pytest.mark.skipif("LFTRAIN_EXAMPLE" not in os.environ, reason="some ten minutes on two cores; LFTRAIN_EXAMPLE=1 runs it")
def test_it_learns_what_a_control_cannot(tmp_path: Path) -> None:
    data = converted(tmp_path, 4096)
    steps = ("--set", "run.steps=500", "--set", "held_out.every=0")
    trained, control = (held_out_loss(data, name, *steps) for name in ("train", "control"))
    assert trained < 0.75 * control, (trained, control)
