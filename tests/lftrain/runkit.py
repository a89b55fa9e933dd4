"""Runs of train_points.py in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SCRIPT = HERE / "train_points.py"
ROOT = HERE.parent.parent


def environment() -> dict[str, str]:
    """One thread a process; the project and the helpers can be imported."""
    paths = [
        str(ROOT),
        str(HERE),
        str(HERE.parent / "format"),
        *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)),
    ]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def command(task: Path, world: int = 0) -> list[str]:
    """Alone, or with ``world`` ranks under torchrun."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"] if world else []
    return [sys.executable, *launcher, str(SCRIPT), str(task)]


def write_task(place: Path, data: Path, **told: Any) -> Path:
    """A task file; its run's folder is ``place/run`` unless told otherwise."""
    place.mkdir(parents=True, exist_ok=True)
    task = place / "task.json"
    task.write_text(json.dumps({"folder": str(place / "run"), "data": str(data), **told}))
    return task


def start(task: Path, world: int = 0) -> subprocess.Popen[str]:
    """Begin a run."""
    return subprocess.Popen(
        command(task, world), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment()
    )


def run(place: Path, data: Path, world: int = 0, *, fails: bool = False, **told: Any) -> list[dict[str, Any]]:
    """A whole run: what each rank wrote (``{}`` for one that was killed)."""
    task = write_task(place, data, **told)
    done = subprocess.run(command(task, world), capture_output=True, text=True, env=environment(), timeout=200, check=False)
    assert (done.returncode != 0) == fails, done.stdout[-3000:] + done.stderr[:5000] + done.stderr[-3000:]
    files = [place / f"task-{rank}.json" for rank in range(max(world, 1))]
    return [json.loads(path.read_text()) if path.exists() else {} for path in files]


def events(place: Path, name: str) -> list[dict[str, Any]]:
    """Events of a run."""
    lines = [json.loads(line) for line in (place / "run" / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "event" and line["name"] == name]
