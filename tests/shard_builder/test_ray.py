"""A conversion on a real Ray cluster of several nodes on this machine: the same bytes, also when a worker or a node is killed."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from faultkit import digests, leftovers, verified

from lfdata.errors import OptionError, SourceError
from shard_builder.convert import convert
from shard_builder.engines import ray_engine
from shard_builder.options import ConvertOptions
from shard_builder.sources import open_source
from shard_builder.sources.base import FieldSpec

pytestmark = pytest.mark.service
OPTIONS = ConvertOptions(segment_bytes=2_000, shard_bytes=4_000, workers=1)
ROWS = 400


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    pytest.importorskip("ray", reason="ray is not installed (extra: ray)")
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(3):
        made.add_node(num_cpus=1)
    made.wait_for_nodes()
    yield made
    import ray

    ray.shutdown()
    made.shutdown()


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    lines = [
        json.dumps({"key": f"k{n}", "text": f"text {n} " * 9, "about": {"n": n, "w": "x" * (n % 50)}}) for n in range(ROWS)
    ]
    (folder / "rows.jsonl").write_text("\n".join(lines))
    return folder / "rows.jsonl"


@pytest.fixture(scope="module")
def wanted(rows: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    target = tmp_path_factory.mktemp("wanted") / "t"
    convert(_source(rows), target, OPTIONS)
    return digests(target)


def _source(rows: Path) -> Any:
    fields = [FieldSpec("text", "text", "text"), FieldSpec("about", "json", "about")]
    return open_source(str(rows), kind="table", fields=fields, key="key")


def _drive(answer: Any, rows: Path, target: Path, address: str, tasks: int) -> None:
    """In a process of its own: Ray ends the driver's process where its node is lost, as on a machine that is too busy to answer in time."""
    told: list[tuple[int, int]] = []
    try:
        samples, shards = ray_engine.convert_on_ray(
            _source(rows), target, OPTIONS, address=address, tasks=tasks, progress=lambda *done: told.append(done)
        )
    except SourceError as error:
        answer.send(str(error))
    else:
        answer.send((samples, shards, told))


def _on_ray(rows: Path, target: Path, address: str, tasks: int) -> Any:
    """(samples, shards, progress), or the message of a SourceError; ``None`` if the driver was ended."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_drive, args=(there, rows, target, address, tasks))
    process.start()
    there.close()
    try:
        return here.recv()
    except EOFError:
        return None
    finally:
        process.join(60)
        process.kill()


def _twice(once: Callable[[Path], Any], folder: Path) -> tuple[Any, Path]:
    """Again, elsewhere, where Ray has ended the driver."""
    for name in ("t", "again"):
        found = once(folder / name)
        if found is not None:
            return found, folder / name
    raise AssertionError("Ray has ended the driver twice")


def test_the_same_bytes_as_here(cluster: Any, rows: Path, wanted: dict[str, str], tmp_path: Path) -> None:
    (samples, shards, told), target = _twice(lambda target: _on_ray(rows, target, cluster.address, 5), tmp_path)
    assert digests(target) == wanted and samples == ROWS and shards > 10
    assert told[0] == (0, 5) and told[-1] == (5, 5)
    verified(target)
    assert leftovers(target) == []


def _processes(of: str) -> list[int]:
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            try:
                command = Path(entry.path, "cmdline").read_bytes()
            except OSError:
                continue
            if of.encode() in command:
                found.append(int(entry.name))
    return found


def _some_shards(target: Path, count: int) -> None:
    deadline = time.monotonic() + 120
    while len(list(target.glob("s*.lfd"))) < count and time.monotonic() < deadline:
        time.sleep(0.005)


def _converted_while(killing: Callable[[Path], None], cluster: Any, rows: Path, folder: Path) -> Path:
    def once(target: Path) -> Any:
        killer = threading.Thread(target=killing, args=(target,))
        killer.start()
        try:
            return _on_ray(rows, target, cluster.address, 6)
        finally:
            killer.join()

    (samples, _, _), target = _twice(once, folder)
    assert samples == ROWS
    return target


def test_a_worker_that_is_killed_is_replaced(cluster: Any, rows: Path, wanted: dict[str, str], tmp_path: Path) -> None:
    killed: list[int] = []

    def killing(target: Path) -> None:
        _some_shards(target, 3)
        for pid in _processes("ray::run_task")[:1]:
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)

    target = _converted_while(killing, cluster, rows, tmp_path)
    assert killed and digests(target) == wanted and leftovers(target) == []


def test_a_node_that_is_killed_is_done_without(cluster: Any, rows: Path, wanted: dict[str, str], tmp_path: Path) -> None:
    def killing(target: Path) -> None:
        _some_shards(target, 3)
        cluster.remove_node(nodes.pop(), allow_graceful=False)

    # The second is for a second try.
    nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
    cluster.wait_for_nodes()
    target = _converted_while(killing, cluster, rows, tmp_path)
    assert digests(target) == wanted and leftovers(target) == []


def test_a_task_that_fails_says_what_and_where(cluster: Any, tmp_path: Path) -> None:
    bad = tmp_path / "rows.jsonl"
    bad.write_text('{"key": "a", "text": "x", "about": {}}\n{"key": "b", "text": 5, "about": {}}\n')
    found, target = _twice(lambda target: _on_ray(bad, target, cluster.address, 2), tmp_path)
    assert re.search(r"task \d/2 on .*StoppedError.*'b'", found, re.DOTALL), found
    assert not (target / "manifest.json").exists()


def test_no_cluster_and_no_ray(monkeypatch: pytest.MonkeyPatch, rows: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="no overwrite"):
        ray_engine.convert_on_ray(_source(rows), tmp_path / "t", ConvertOptions(overwrite=True))
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(OptionError, match=r"lfdata\[ray\]"):
        ray_engine.convert_on_ray(_source(rows), tmp_path / "t", OPTIONS)
