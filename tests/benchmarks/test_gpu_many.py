"""The benchmark of several GPUs, as far as ranks on a CPU go: what it concludes, and all its parts from end to end."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.many import faults, node, order, overlap, rates
from benchmarks.gpu.many.launch import launch

ROOT = Path(__file__).resolve().parent.parent.parent


def record_of(folder: Path, *more: str) -> tuple[int, dict[str, Any], str]:
    """A run of the script: status, record, what it printed."""
    words = ["-m", "benchmarks.gpu.many", "--tiny", "--device", "cpu", "--output", str(folder / "record.json"), *more]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tools")])}
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=900, check=False, cwd=ROOT, env=environment
    )
    assert (folder / "record.json").exists(), done.stdout[-3000:] + done.stderr[-3000:]
    return done.returncode, json.loads((folder / "record.json").read_text()), done.stdout + done.stderr


# -- what is concluded ------------------------------------------------------------------------------------------------


def ranks_of(rows: list[list[tuple[str, str]]], world: int, name: str = "image whole") -> list[dict[str, Any]]:
    """Steps of so many rows each, given out to ranks."""
    share = len(rows[0]) // world
    found = []
    for rank in range(world):
        steps = [step[rank * share : (rank + 1) * share] for step in rows]
        found.append({"runs": {name: {"steps": steps, "whole": len(rows), "per_epoch": 3}}})
    return found


ROWS = [[(f"key {step} {row}", f"bytes {step} {row}") for row in range(4)] for step in range(5)]


def test_the_same_rows_on_any_number_of_ranks_are_the_same() -> None:
    found = order.compared("image", {world: ranks_of(ROWS, world) for world in (2, 1, 4)})
    assert found["same"] is True and not found["differences"] and len(found["digests"]["4"]) == 5
    assert order.compared("image", {2: ranks_of(ROWS, 2)})["same"] is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda rows: rows[3].reverse(), "2 ranks: other keys and contents from step 3 on"),
        (lambda rows: rows[1].__setitem__(2, ("key 1 2", "other pixels")), "2 ranks: other contents from step 1 on"),
        (lambda rows: rows[4].__setitem__(0, ("another key", "bytes 4 0")), "2 ranks: other keys from step 4 on"),
        (lambda rows: rows.pop(), "2 ranks: 4 steps, not 5"),
    ],
)
def test_another_sequence_is_found_and_placed(change: Any, said: str) -> None:
    rows = copy.deepcopy(ROWS)
    change(rows)
    found = order.compared("image", {1: ranks_of(ROWS, 1), 2: ranks_of(rows, 2)})
    assert found["same"] is False and found["differences"] == [said]


def test_a_rank_that_lost_a_step_is_found() -> None:
    short = ranks_of(ROWS, 2)
    short[1]["runs"]["image whole"]["steps"].pop()
    found = order.compared("image", {1: ranks_of(ROWS, 1), 2: short})
    assert found["differences"] == ["2 ranks: other keys and contents from step 4 on"]


def test_a_run_that_goes_on_elsewhere_is_found() -> None:
    def groups(rest: list[list[tuple[str, str]]]) -> dict[int, list[dict[str, Any]]]:
        two = ranks_of(ROWS, 2)
        for rank, half in zip(two, ranks_of(ROWS[:2], 2), strict=True):
            rank["runs"]["image half"] = half["runs"]["image whole"]
        return {2: two, 4: ranks_of(rest, 4, "image resumed")}

    good, late = order.resumed("image", groups(ROWS[2:]), 2), order.resumed("image", groups(ROWS[1:4]), 2)
    assert good["same"] is True and (good["after"], good["of"]) == (2, 5)
    assert late["same"] is False and late["differences"] == ["2 ranks, gone on with 4: other keys and contents from step 2 on"]


def test_a_whole_run_goes_beyond_its_first_epoch_if_it_may() -> None:
    assert order.extent(12, 24) == (15, 6)
    assert order.extent(100, 24) == (24, 23) and order.extent(1, 24) == (3, 1)


def test_communication_is_exposed_where_no_other_kernel_runs() -> None:
    assert overlap.exposed([(0, 10)], []) == 10
    assert overlap.exposed([(0, 10), (5, 12)], [(2, 4), (3, 6), (11, 20)]) == 2 + 5
    assert overlap.exposed([(3, 4)], [(0, 10)]) == 0 and overlap.exposed([], [(0, 1)]) == 0
    events = [("ncclDevKernel_AllReduce_Sum_f32", 0, 4), ("gemm", 2, 3), ("Memcpy HtoD", 0, 4), ("Memset", 0, 4)]
    assert overlap.classified(events) == ([(0, 4)], [(2, 3)])
    assert overlap.exposed(*overlap.classified(events)) == 3


def test_more_threads_than_cores_are_found() -> None:
    ranks = [{"cores": 8}] * 4
    assert not rates.divided(ranks, [2, 2, 2, 2])["oversubscribed"]
    assert rates.divided(ranks, [2, 2, 2, 3])["oversubscribed"]
    # Fewer cores than ranks: a thread each is the least.
    assert not rates.divided([{"cores": 2}] * 4, [1, 1, 1, 1])["oversubscribed"]


def test_ranks_that_look_at_one_gpu_are_found() -> None:
    def rank(uuid: str | None, sensed: str | None) -> dict[str, Any]:
        return {"uuid": uuid, "subjects": {"feedback": {"feedback": {"width": 1, "gpu": sensed}}}}

    assert rates.watched([rank("GPU-a", "GPU-a"), rank("GPU-b", "GPU-b")])["one_sensor_a_gpu"] is True
    assert rates.watched([rank("GPU-a", "GPU-a"), rank("GPU-b", "GPU-a")])["one_sensor_a_gpu"] is False
    assert rates.watched([rank(None, None)])["one_sensor_a_gpu"] is None


def test_efficiency_is_against_one_gpu_without_a_loader() -> None:
    found = {"batch": 32, "batch_of_a_rank": 16, "loader": {"samples_per_s": {"median": 150.0}}}
    assert rates.efficiency(found, 100.0) == {"loader": 0.75}
    assert "why" in rates.efficiency(found, None)


def test_a_skipped_step_that_names_another_rank_or_other_samples_is_found() -> None:
    event = {"step": faults.BEFORE + 1, "bad": [[1, "w", -1]], "keys": [[], ["a", "b"]], "message": "..."}
    rank = {"skipped": 1, "bits": "x", "parameter": "w", "keys": ["a", "b"], "events": [event]}
    assert faults.not_finite([rank, rank])["ok"]
    changes: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {"bits": "y"}),
        ({}, {"skipped": 0}),
        ({"events": []}, {}),
        ({"events": [event, event]}, {}),
        ({"events": [{**event, "bad": [[0, "w", -1]]}]}, {}),
        ({"events": [{**event, "bad": [[1, "v", -1]]}]}, {}),
        ({"events": [{**event, "keys": [["a", "b"], []]}]}, {}),
    ]
    for one, other in changes:
        assert not faults.not_finite([{**rank, **one}, {**rank, **other}])["ok"], (one, other)


def test_a_survivor_that_is_late_or_names_nobody_is_found() -> None:
    told = {"error": "PeerError: rank 1 is gone (last in step of step 2)"}
    assert faults.killed([told, {}], ["", ""], 5.0, 20.0)["ok"]
    assert faults.killed([{}, {}], ["x\nlftrain: rank 1 is gone: nothing heard of it\n", ""], 5.0, 20.0)["ok"]
    assert not faults.killed([told, {}], ["", ""], 25.0, 20.0)["ok"]
    assert not faults.killed([{}, {}], ["", ""], 5.0, 20.0)["ok"]
    assert not faults.killed([told, {"step": 5}], ["", ""], 5.0, 20.0)["ok"]


# -- processes --------------------------------------------------------------------------------------------------------


def test_a_family_has_all_descendants_and_their_memory_and_time() -> None:
    below = "import time; x = bytearray(30 << 20)\nwhile time.process_time() < 0.3: pass\ninput()"
    script = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {below!r}])"
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and (len(node.family(process.pid)) < 2 or node.cpu_seconds(process.pid) < 0.2):
            time.sleep(0.05)
        family, memory = node.family(process.pid), node.memory(process.pid)
        assert len(family) == 2 and process.pid in family and os.getpid() not in family
        assert node.cpu_seconds(process.pid) >= 0.2
        assert memory["processes"] == 2 and memory["own"] > 30 and memory["all"] <= memory["resident"] + 0.5
        assert list(node.threads(process.pid).values()) == [1]
    finally:
        process.communicate(b"\n")
    assert node.family(process.pid) == [] and "why" in node.memory(process.pid)


@pytest.mark.fault
def test_ranks_that_hang_are_ended_and_said_to_be(tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text(
        "import os, pathlib, subprocess, sys, time\n"
        "below = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        "pathlib.Path(sys.argv[1]).with_name('pid').write_text(f'{os.getpid()} {below.pid}')\n"
        "time.sleep(600)\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        found = launch(tmp_path, "task", 1, 15.0, {}, module="hangs")
    finally:
        sys.path.remove(str(tmp_path))
    assert found.error.startswith("not done after 15 s, ended") and found.ranks == [{}]
    for process in (tmp_path / "pid").read_text().split():
        assert not Path(f"/proc/{process}").exists() or "Z" in node._stat(int(process))[0]


# -- end to end -------------------------------------------------------------------------------------------------------


def test_two_ranks_consume_what_one_does_and_one_goes_on_from_two(tmp_path: Path) -> None:
    status, found, output = record_of(tmp_path, "--worlds", "1,2", "--only", "order")
    assert status == 0, output[-3000:]
    results = found["results"]
    assert results["worlds"]["run"] == [1, 2]
    for kind in ("image", "tokens", "multimodal"):
        whole, on = results["order"][kind], results["resume"][kind]
        assert whole["same"] is True and set(whole["digests"]) == {"1", "2"}, kind
        assert whole["steps"] > whole["steps_an_epoch"], "the end of an epoch was not crossed"
        steps = whole["digests"]["2"]
        assert len({keys for keys, _ in steps}) == len(steps) == len({contents for _, contents in steps}), kind
        assert on["same"] is True and on["digests"]["1"] == steps[on["after"] :], kind
    # The same samples, of which one has more than the pictures.
    image, multimodal = results["order"]["image"]["digests"]["1"], results["order"]["multimodal"]["digests"]["1"]
    assert [step[0] for step in image] == [step[0] for step in multimodal]
    assert all(one[1] != other[1] for one, other in zip(image, multimodal, strict=True))
    assert results["resume"]["not_run"] == {"4": "not asked for"}


@pytest.mark.slow
def test_all_parts_run_and_are_recorded(tmp_path: Path) -> None:
    status, found, output = record_of(tmp_path, "--worlds", "1,2,4", "--limit", "200")
    assert status == 0, output[-3000:]
    results = found["results"]
    assert all(results[part][kind]["same"] for part in ("order", "resume") for kind in ("image", "tokens", "multimodal"))
    assert set(results["resume"]["image"]["digests"]) == {"1", "4"} and not results["resume"]["not_run"]
    for world in ("1", "2", "4"):
        training, feeding = results["training"][world], results["feeding"][world]
        assert set(training["efficiency"]) == {"resident", "loader", "feedback"}
        assert len(training["loader"]["data_wait_ms"]) == int(world) == len(feeding["data_wait_ms"])
        assert training["loader"]["cpu_s_per_1000"]["median"] > 0 and feeding["cpu_s_per_1000"]["median"] > 0
        # torchrun, and of each rank itself and its decoder.
        assert training["memory_mib"]["processes"] == feeding["memory_mib"]["processes"] == 1 + 2 * int(world)
        assert not feeding["cache"]["multiplied"]
        division = results["division"][world]
        assert not division["oversubscribed"] and len(division["feedback"]) == int(world)
        assert all(one["verdict"] and one["width"] >= 1 for one in division["feedback"])
    assert results["training"]["1"]["efficiency"]["resident"] == 1.0
    assert set(results["overlap"]) >= {"2", "4"} and "1" not in results["overlap"]
    for one in results["overlap"]["4"].values():
        assert one["exposed_ms"] is None and "CUDA" in one["why"] and one["ms"]["median"] > 0
    for world in ("2", "4"):
        assert results["faults"][world]["not_finite"]["ok"] and results["faults"][world]["killed"]["ok"]
        assert len(results["faults"][world]["killed"]["said"]) == int(world) - 1
