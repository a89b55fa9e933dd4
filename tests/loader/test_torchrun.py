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
def sources(damaged: Path, complete: Path, numbers: Path, more_numbers: Path) -> dict[str, list[str]]:
    sets = {
        "pictures": [str(damaged)],
        "kinds": [str(complete)],
        "number": [str(numbers)],
        "numbers": [str(numbers), str(more_numbers)],
    }
    return {name: sets[kind] for name, kind in ranks.SOURCES.items()}


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


def alone(name: str, sources: dict[str, list[str]], batch: int, state: Any = None) -> dict[str, Any]:
    """The case in this process, one rank."""
    return ranks.run(name, sources[name], batch, -1, state, engine="inline", rank=0, world_size=1)


@pytest.mark.parametrize(("world", "batch"), [(2, 8), (4, 12)])
def test_the_same_keys_and_bytes_as_one_process(tmp_path: Path, sources: dict[str, list[str]], world: int, batch: int) -> None:
    names = [name for name in sources if name != "micro" or batch % (2 * world) == 0]
    found = torchrun(tmp_path, world, [[name, sources[name], batch, -1, None] for name in names])
    for number, name in enumerate(names):
        one = alone(name, sources, batch)
        assert len(one["steps"]) > 2
        for engine in (0, len(names)):
            assert joined(found, number + engine) == one["steps"], name
            assert all(mine[number + engine]["state"] == found[0][number]["state"] for mine in found)
        states = found[0][number]["state"], one["state"]
        assert all({**state, "world_size": 0} == {**states[0], "world_size": 0} for state in states)


@pytest.mark.parametrize(("batch", "steps"), [(12, 2)])
def test_from_two_ranks_on_four_three_and_one(tmp_path: Path, sources: dict[str, list[str]], batch: int, steps: int) -> None:
    names = [name for name in sources if name != "micro"]
    begun = torchrun(tmp_path / "2", 2, [[name, sources[name], batch, steps, None] for name in names])
    states = [mine["state"] for mine in begun[0][: len(names)]]
    assert [mine["state"] for mine in begun[1][: len(names)]] == states
    tasks = [[name, sources[name], batch, -1, state] for name, state in zip(names, states, strict=True)]
    on = {world: torchrun(tmp_path / str(world), world, tasks) for world in (3, 4)}
    for number, (name, state) in enumerate(zip(names, states, strict=True)):
        whole = alone(name, sources, batch)["steps"]
        assert joined(begun, number) == whole[:steps], name
        for found in on.values():
            assert joined(found, number) == joined(found, number + len(names)) == whole[steps:], name
        assert alone(name, sources, batch, state)["steps"] == whole[steps:], name
