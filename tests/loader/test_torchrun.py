"""Real torchrun processes: digests of keys and of bytes against one process, and states from some ranks on others."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ranks

SCRIPT = Path(ranks.__file__)
pytestmark = pytest.mark.slow


@pytest.fixture
def sources(damaged: Path, numbers: Path, more_numbers: Path) -> dict[str, list[str]]:
    return {
        "pictures": [str(damaged)],
        "numbers": [str(numbers), str(more_numbers)],
        "packed": [str(numbers), str(more_numbers)],
    }


def torchrun(folder: Path, world: int, tasks: list[Any]) -> list[list[dict[str, Any]]]:
    """What each rank wrote, task by task."""
    folder.mkdir(exist_ok=True)
    task = folder / "task.json"
    task.write_text(json.dumps(tasks))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={world}",
        str(SCRIPT),
        str(task),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"task-{rank}-of-{world}.json").read_text()) for rank in range(world)]


def joined(found: list[list[dict[str, Any]]], number: int) -> list[list[str]]:
    """The global batches of a task: rows of all ranks, step by step."""
    steps = zip(*(mine[number]["steps"] for mine in found), strict=True)
    return [[row for part in parts for row in part] for parts in steps]


@pytest.mark.parametrize("world", [2, 4])
def test_the_same_keys_and_bytes_as_one_process(tmp_path: Path, sources: dict[str, list[str]], world: int) -> None:
    names = list(sources)
    found = torchrun(tmp_path, world, [[name, sources[name], -1, None] for name in names])
    for number, name in enumerate(names):
        alone = ranks.run(name, sources[name], -1, None, engine="inline", rank=0, world_size=1)
        assert len(alone["steps"]) > 3
        for engine in (0, len(names)):
            assert joined(found, number + engine) == alone["steps"]
            assert all(mine[number + engine]["state"] == found[0][number]["state"] for mine in found)
        states = found[0][number]["state"], alone["state"]
        assert all({**state, "world_size": 0} == {**states[0], "world_size": 0} for state in states)


def test_from_two_ranks_on_four_and_on_one(tmp_path: Path, sources: dict[str, list[str]]) -> None:
    names, steps = list(sources), 3
    begun = torchrun(tmp_path / "two", 2, [[name, sources[name], steps, None] for name in names])
    states = [mine["state"] for mine in begun[0][: len(names)]]
    assert [mine["state"] for mine in begun[1][: len(names)]] == states
    four = torchrun(tmp_path / "four", 4, [[name, sources[name], -1, state] for name, state in zip(names, states, strict=True)])
    for number, (name, state) in enumerate(zip(names, states, strict=True)):
        whole = ranks.run(name, sources[name], -1, None, engine="inline", rank=0, world_size=1)["steps"]
        assert joined(begun, number) == whole[:steps]
        assert joined(four, number) == joined(four, number + len(names)) == whole[steps:]
        assert ranks.run(name, sources[name], -1, state, engine="inline", rank=0, world_size=1)["steps"] == whole[steps:]
