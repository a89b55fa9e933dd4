"""Worker processes that die, hang, lie or are killed: one sample is lost, named; order, bytes and the parent are not."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from faultkit import (
    SMALL,
    digests,
    expected_digests,
    leftovers,
    reported,
    run_processes,
    synthetic,
    values,
    with_options,
    worker_command,
)
from killkit import children, command, environment, gone, started, wait_until

from lfdata.dataset import ShardDataset
from lfdata.errors import LfdataError
from shard_builder import pool as pool_module
from shard_builder.pool import Pool, Result

OPTIONS = with_options(SMALL, segment_rows=50, workers=2, on_error="skip", sample_timeout=60.0)
RECORDS = 130
DEATHS = {"SIGSEGV": "SIGSEGV", "SIGKILL": "SIGKILL", "SIGABRT": "SIGABRT", "exit": "exit status 7", "error": "exit status 1"}


def _shards(found: dict[str, str]) -> dict[str, str]:
    return {name: digest for name, digest in found.items() if name != "errors.jsonl"}


def test_every_kind_of_death_costs_one_named_sample(tmp_path: Path) -> None:
    bad = dict(zip((3, 40, 70, 101, 129), DEATHS, strict=True))
    summary = run_processes(tmp_path / "target", synthetic(RECORDS, bad=bad), OPTIONS)
    assert (summary.samples, summary.errors) == (RECORDS - len(bad), len(bad))
    found = reported(tmp_path / "target")
    assert [(entry["record"], entry["code"]) for entry in found] == [(number, "crash") for number in bad]
    for entry, how in zip(found, bad.values(), strict=True):
        assert DEATHS[how] in entry["reason"]
        assert entry["key"] == f"sample/{entry['record']:08d}"
    wanted = expected_digests(synthetic(RECORDS, bad=dict.fromkeys(bad, "load")), OPTIONS)
    assert _shards(digests(tmp_path / "target")) == _shards(wanted)
    keys = [sample["__key__"] for sample in values(tmp_path / "target")]
    assert keys == [b"sample/%08d" % number for number in range(RECORDS) if number not in bad]


@pytest.mark.parametrize("how", ["hang", pytest.param("SIGSTOP", marks=pytest.mark.fault)])
def test_a_sample_that_hangs_is_isolated_by_the_time_limit(how: str, tmp_path: Path) -> None:
    began = time.monotonic()
    source = synthetic(20, bad={7: how})
    summary = run_processes(tmp_path / "target", source, with_options(OPTIONS, sample_timeout=1.5))
    assert summary.samples == 19
    assert [(entry["record"], entry["code"]) for entry in reported(tmp_path / "target")] == [(7, "timeout")]
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("how", ["SIGKILL", "exit"])
def test_a_death_that_does_not_repeat_costs_nothing(how: str, tmp_path: Path) -> None:
    bad = {number: f"{how}:{tmp_path}/mark-{number}" for number in (10, 80)}
    run_processes(tmp_path / "target", synthetic(RECORDS, bad=bad), with_options(OPTIONS, on_error="stop"))
    assert len(list(tmp_path.glob("mark-*"))) == 2
    assert digests(tmp_path / "target") == expected_digests(synthetic(RECORDS), OPTIONS)


def test_workers_killed_from_outside_cost_nothing(tmp_path: Path) -> None:
    killed: list[int] = []

    def progress(done: int, total: int) -> None:
        del total
        if len(killed) < 2 and done >= 40 * (len(killed) + 1):
            victims = [pid for pid in children(os.getpid()) if b"faultkit" in Path(f"/proc/{pid}/cmdline").read_bytes()]
            os.kill(victims[0], signal.SIGKILL)
            killed.append(victims[0])

    run_processes(tmp_path / "target", synthetic(RECORDS), with_options(OPTIONS, on_error="stop"), progress=progress)
    assert len(killed) == 2
    assert digests(tmp_path / "target") == expected_digests(synthetic(RECORDS), OPTIONS)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_any_number_of_workers_gives_the_same_bytes(workers: int, tmp_path: Path) -> None:
    bad = {5: "load", 60: "scan", 99: "load"}
    run_processes(tmp_path / "target", synthetic(RECORDS, bad=bad), with_options(OPTIONS, workers=workers))
    assert digests(tmp_path / "target") == expected_digests(synthetic(RECORDS, bad=bad), OPTIONS)


def test_no_worker_is_left_behind(tmp_path: Path) -> None:
    before = set(children(os.getpid()))
    run_processes(tmp_path / "target", synthetic(20), OPTIONS)
    with pytest.raises(LfdataError):
        run_processes(tmp_path / "other", synthetic(20, bad={3: "load"}), with_options(OPTIONS, on_error="stop"))
    assert set(children(os.getpid())) <= before


def _hanging_converter(target: Path, how: str, mark: Path) -> int:
    child = os.fork()
    if not child:
        try:
            run_processes(target, synthetic(20, bad={7: f"{how}:{mark}"}), with_options(OPTIONS, sample_timeout=600.0))
        finally:
            os._exit(1)
    return child


@pytest.mark.parametrize("how", ["hang", "SIGSTOP"])
def test_workers_end_with_a_killed_parent_even_while_they_hang(how: str, tmp_path: Path) -> None:
    child = _hanging_converter(tmp_path / "target", how, tmp_path / "mark")
    try:
        wait_until((tmp_path / "mark").exists)
        workers = children(child)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert len(workers) == 2
    wait_until(partial(gone, workers), 5.0)


# -- the pool alone -----------------------------------------------------------------------------------------------------


def _setup() -> dict[str, object]:
    source = synthetic(10)
    fields = [{name: getattr(spec, name) for name in spec.__struct_fields__} for spec in source.fields]
    return {"source": source.config(), "stage": "/nonexistent", "fields": fields, "dictionaries": {}, "keep_bad": False}


def _answers(pool: Pool, count: int) -> list[Result]:
    def chunks() -> Iterator[list[tuple[int, bytes]]]:
        for number in range(count):
            yield [(number, b"%d" % number)]

    return list(pool.run(chunks()))


def test_results_come_in_order_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "worker_command", worker_command)
    with Pool(2, _setup(), 60.0) as pool:
        for count in (40, 0, 3):
            assert [result.heads[0][0] for result in _answers(pool, count)] == list(range(count))


def test_workers_are_set_up_anew_between_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "worker_command", worker_command)
    other = _setup() | {"source": synthetic(10, seed=5).config()}
    with Pool(2, _setup(), 60.0) as pool:
        first = [bytes(result.payloads) for result in _answers(pool, 6)]
        pool.set_up(other)
        second = [bytes(result.payloads) for result in _answers(pool, 6)]
        pool.set_up(_setup())
        assert [bytes(result.payloads) for result in _answers(pool, 6)] == first
    assert all(a != b for a, b in zip(first, second, strict=True))
    with pytest.raises(LfdataError, match="codec"), Pool(1, _setup(), 60.0) as pool:
        pool.set_up(_setup() | {"fields": [{"name": "x", "kind": "image", "column": "x", "options": {"codec": "none"}}]})
        _answers(pool, 1)


def _scripted(script: str) -> object:
    head = "import sys; sys.path += sys.argv[2:]; import socket; from shard_builder import wire\n"
    head += "connection = socket.socket(fileno=int(sys.argv[1])); wire.receive(connection)\n"

    def scripted(descriptor: int) -> list[str]:
        return [sys.executable, "-c", head + script, *worker_command(descriptor)[3:]]

    return scripted


@pytest.mark.parametrize(
    "script",
    [
        "connection.sendall(b'\\xff' * 64)",
        "connection.sendall((2**62).to_bytes(8, 'little') * 2)",
        "connection.sendall((5).to_bytes(8, 'little') + bytes(8) + b'\\xc1' * 5)",
        "connection.sendall(b'12345')",
        "pass",
    ],
)
def test_a_worker_that_talks_nonsense_is_a_crash(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        pool_module,
        "worker_command",
        _scripted(f"wire.send(connection, {{'ready': True}}); wire.receive(connection); {script}"),
    )
    with Pool(1, _setup(), 60.0) as pool:
        for result in _answers(pool, 1):
            assert result.heads[0][0] == 0
            assert result.heads[0][1]["error"][0] == "crash"


@pytest.mark.parametrize(
    "script", ["sys.exit(3)", "connection.sendall(b'x' * 100)", "wire.send(connection, {'fatal': 'no such codec'})"]
)
def test_a_worker_that_cannot_start_is_a_typed_error(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(children(os.getpid()))
    monkeypatch.setattr(pool_module, "worker_command", _scripted(script))
    with pytest.raises(LfdataError, match=r"did not start|no such codec"), Pool(2, _setup(), 60.0) as pool:
        _answers(pool, 1)
    left = set(children(os.getpid())) - before
    assert not [pid for pid in left if b"shard_builder" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_a_worker_killed_while_it_starts_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = tmp_path / "killed"
    head = f"import os, signal; mark = {str(mark)!r}\n"
    once = "if not os.path.exists(mark): open(mark, 'w').close(); os.kill(os.getpid(), signal.SIGKILL)\n"

    def command(descriptor: int) -> list[str]:
        arguments = worker_command(descriptor)
        script = arguments.index("-c") + 1
        return [*arguments[:script], f"{head}{once}{arguments[script]}", *arguments[script + 1 :]]

    monkeypatch.setattr(pool_module, "worker_command", command)
    with Pool(2, _setup(), 60.0) as pool:
        assert [result.heads[0][0] for result in _answers(pool, 3)] == [0, 1, 2]
    assert mark.exists()
    # Killed every time, it is an error and no endless loop.
    monkeypatch.setattr(pool_module, "worker_command", _scripted("import os, signal; os.kill(os.getpid(), signal.SIGKILL)"))
    with pytest.raises(LfdataError, match=r"did not start \(exit status -9\)"), Pool(2, _setup(), 60.0) as pool:
        _answers(pool, 1)


# -- Ctrl-C -------------------------------------------------------------------------------------------------------------


ROWS = 3000


def _table(folder: Path) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(f'{{"key": "{number}", "text": "{"words " * 60}{number}"}}' for number in range(ROWS)))
    return path


ARGUMENTS = ["--field", "t:text=text", "--shard-size", "60K", "--segment-size", "100K", "--workers", "2"]


def _commands(pid: int) -> bytes:
    """Command lines of a process's children."""
    found = b""
    for child in children(pid):
        with contextlib.suppress(OSError):
            found += Path(f"/proc/{child}/cmdline").read_bytes()
    return found


def _interrupt(rows: Path, target: Path, number: signal.Signals, rng: random.Random) -> None:
    """Interrupt the command, with its group as a terminal does, after some shards; check what it says and leaves."""
    wanted = rng.randrange(25)
    with started("convert", rows, target, *ARGUMENTS, "--resume", start_new_session=True) as process:

        def far_enough() -> bool:
            # Once it has workers, its signal handlers are there; before, a signal ends it as it ends any process.
            begun = b"shard_builder.worker" in _commands(process.pid) and len(list(target.glob("*.lfd"))) >= wanted
            return process.poll() is not None or begun

        wait_until(far_enough)
        workers = children(process.pid)
        with contextlib.suppress(ProcessLookupError):  # it has finished meanwhile
            os.killpg(process.pid, number)
        errors = process.communicate()[1].decode()
    if process.returncode != 0:
        assert process.returncode == 130, errors
        assert "interrupted" in errors
        if (target / "manifest.json").exists() and not (target / ".work").exists():
            # The signal came when all was done, while the command ended.
            assert len(ShardDataset(target)) == ROWS
    assert "Traceback" not in errors
    assert not [name for name in os.listdir(target) if name.startswith(".tmp-")]
    wait_until(partial(gone, workers), 5.0)


def _interruptions(folder: Path, seed: int, count: int) -> None:
    rng = random.Random(seed)
    rows = _table(folder)
    subprocess.run(command("convert", rows, folder / "wanted", *ARGUMENTS, "--quiet"), env=environment(), check=True)
    for number in range(count):
        target = folder / f"target-{number}"
        _interrupt(rows, target, signal.SIGINT, rng)
        _interrupt(rows, target, signal.SIGTERM, rng)
        subprocess.run(command("convert", rows, target, *ARGUMENTS, "--resume", "--quiet"), env=environment(), check=True)
        assert digests(target) == digests(folder / "wanted")
        assert leftovers(target) == []


def test_interruption(tmp_path: Path) -> None:
    _interruptions(tmp_path, 1, 1)


@pytest.mark.fault
def test_many_interruptions(tmp_path: Path) -> None:
    _interruptions(tmp_path, 2, 8)
