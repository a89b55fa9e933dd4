"""A conversion on a real Ray cluster of several nodes on this machine: the same bytes, also when a worker or a node is killed."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
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


def test_the_same_bytes_as_here(cluster: Any, rows: Path, wanted: dict[str, str], tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    samples, shards = ray_engine.convert_on_ray(
        _source(rows), tmp_path / "t", OPTIONS, address=cluster.address, tasks=5, progress=lambda *done: told.append(done)
    )
    assert digests(tmp_path / "t") == wanted and samples == ROWS and shards > 10
    assert told[0] == (0, 5) and told[-1] == (5, 5)
    verified(tmp_path / "t")
    assert leftovers(tmp_path / "t") == []


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


def _converted_while(killing: Any, cluster: Any, rows: Path, target: Path) -> None:
    killer = threading.Thread(target=killing)
    killer.start()
    try:
        ray_engine.convert_on_ray(_source(rows), target, OPTIONS, address=cluster.address, tasks=6)
    finally:
        killer.join()


def test_a_worker_that_is_killed_is_replaced(cluster: Any, rows: Path, wanted: dict[str, str], tmp_path: Path) -> None:
    target, killed = tmp_path / "t", []

    def killing() -> None:
        _some_shards(target, 3)
        for pid in _processes("ray::run_task")[:1]:
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)

    _converted_while(killing, cluster, rows, target)
    assert killed and digests(target) == wanted and leftovers(target) == []


def test_a_node_that_is_killed_is_done_without(cluster: Any, rows: Path, wanted: dict[str, str], tmp_path: Path) -> None:
    target = tmp_path / "t"
    node = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()

    def killing() -> None:
        _some_shards(target, 3)
        cluster.remove_node(node, allow_graceful=False)

    _converted_while(killing, cluster, rows, target)
    assert digests(target) == wanted and leftovers(target) == []


def test_a_task_that_fails_says_what_and_where(cluster: Any, tmp_path: Path) -> None:
    bad = tmp_path / "rows.jsonl"
    bad.write_text('{"key": "a", "text": "x", "about": {}}\n{"key": "b", "text": 5, "about": {}}\n')
    with pytest.raises(SourceError, match=r"task \d/2 on .*StoppedError.*'b'"):
        ray_engine.convert_on_ray(_source(bad), tmp_path / "t", OPTIONS, address=cluster.address, tasks=2)
    assert not (tmp_path / "t" / "manifest.json").exists()


def test_no_cluster_and_no_ray(monkeypatch: pytest.MonkeyPatch, rows: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="no overwrite"):
        ray_engine.convert_on_ray(_source(rows), tmp_path / "t", ConvertOptions(overwrite=True))
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(OptionError, match=r"lfdata\[ray\]"):
        ray_engine.convert_on_ray(_source(rows), tmp_path / "t", OPTIONS)
