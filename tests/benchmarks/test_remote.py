"""``lfbench remote``: the rules it simulates, its server, and a whole small run."""

from __future__ import annotations

import itertools
import urllib.request
from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.commands.remote_ import command
from benchmarks.harness.cache_rules import least_recently_used, offline_optimum
from benchmarks.harness.slow_server import SlowServer


def best(accesses: list[int], room: int) -> int:
    """Misses of the best of all ways to give blocks up, found by trying all."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for block in accesses:
        after: dict[frozenset[int], int] = {}
        for held, misses in states.items():
            if block in held:
                choices = [(held, misses)]
            elif len(held) < room:
                choices = [(held | {block}, misses + 1)]
            else:
                choices = [(frozenset(kept) | {block}, misses + 1) for kept in itertools.combinations(held, room - 1)]
            for state, count in choices:
                after[state] = min(count, after.get(state, count))
        states = after
    return min(states.values())


@settings(deadline=None)
@given(st.lists(st.integers(0, 5), max_size=14), st.integers(1, 4))
def test_the_offline_optimum_is_the_best_of_all_ways(accesses: list[int], room: int) -> None:
    sizes = np.full(6, 10)
    found = offline_optimum(accesses, sizes, 10 * room)
    assert found == 10 * best(accesses, room)
    assert found <= least_recently_used(accesses, sizes, 10 * room)


def test_the_slow_server_answers_ranges_and_counts(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(range(256)))
    with SlowServer(tmp_path, 0.0, 1e9) as server:
        asked = urllib.request.Request(f"{server.url}/file", headers={"Range": "bytes=10-19"})
        with urllib.request.urlopen(asked) as answer:
            assert answer.status == 206 and answer.read() == bytes(range(10, 20))
            assert answer.headers["Content-Range"] == "bytes 10-19/256"
        assert (server.requests, server.bytes) == (1, 10)


@pytest.mark.slow
def test_a_small_run_checks_every_sample_and_writes_a_record(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    line = [
        "--samples",
        "240",
        "--size",
        "40000",
        "--batch",
        "8",
        "--latency",
        "0.001",
        "--rate",
        "500",
        "--repeats",
        "1",
        "--epochs",
        "2",
    ]
    result = CliRunner().invoke(
        command, [*line, "--workers", "1", "--peer", "webdataset", "--scratch", str(tmp_path), "--output", str(record)]
    )
    assert result.exit_code == 0, result.output + repr(result.exception)
    found = msgspec.json.decode(record.read_bytes())["results"]
    assert found["epoch"]["lfdata full"]["runs"][0]["repeated"] == [0, 0]
    for name in ("full", "block"):
        counts = found["half"][name]["bytes"]
        assert 0 < counts["optimum"] <= counts["lru"] and counts["ours"] > 0
