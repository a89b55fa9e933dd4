"""What is measured must be whole epochs of every key; what a check asks for comes back."""

from __future__ import annotations

import errno
import json
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from benchmarks import cli, record
from benchmarks.commands import run_
from benchmarks.harness import child, entries, kept, runner, work
from benchmarks.harness.process import SubjectError
from benchmarks.harness.verify import WrongWorkError, check_keys
from benchmarks.harness.work import WORKLOADS, Batch, image_files, key_faults, limited, signatures
from lfdata.format.durable import Files

SAMPLES, W2, W3 = 40, WORKLOADS["W2"], WORKLOADS["W3"]


def _epochs(order: Callable[[int], list[int]], reused: bool = False) -> Iterator[Iterator[Batch]]:
    """Batches of 8 for ever; with ``reused``, keys lie in one and the same memory."""
    memory, number = np.zeros(8, np.int64), 0
    while True:
        keys = order(number)

        def epoch(keys: list[int] = keys) -> Iterator[Batch]:
            for start in range(0, len(keys), 8):
                mine: Any = keys[start : start + 8]
                if reused:
                    memory[: len(mine)] = mine
                    mine = memory[: len(mine)]
                yield Batch(mine, {"tokens": np.zeros((len(mine), 2048), np.uint16)})

        yield epoch()
        number += 1


def _measured(order: Callable[[int], list[int]], reused: bool = False) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    found = [order(number) if number else rng.permutation(SAMPLES).tolist() for number in range(50)]
    request = {"seconds": 0.1, "samples": SAMPLES, "step": 0.0}
    return child.measure(W3, _epochs(lambda number: found[number % 50], reused), request, 0.0)


def _right(number: int) -> list[int]:
    rows: list[int] = np.random.default_rng(number).permutation(SAMPLES).tolist()
    return rows


@pytest.mark.parametrize("reused", [False, True])
def test_whole_epochs_of_every_key_are_measured(reused: bool) -> None:
    answer = _measured(_right, reused)
    assert answer["wrong_keys"] == "" and answer["measured_samples"] == answer["samples"] - 8 and answer["measured_s"] > 0


@pytest.mark.parametrize(
    ("order", "words"),
    [
        (lambda number: [0, 1, 2, 3, 4, 5, 6, 7] * 5, "32 are missing, 8 come more than once"),
        (lambda number: _right(number)[:-8], "8 are missing"),
        (lambda number: [SAMPLES, *_right(number)[1:]], r"1 are unknown \(first: 40\)"),
        (lambda number: [*_right(number), 3], r"1 come more than once \(first: 3\)"),
    ],
)
def test_an_epoch_that_is_wrong_later_makes_the_run_fail(order: Any, words: str, tmp_path: Path, monkeypatch: Any) -> None:
    answer = _measured(order)
    assert answer["wrong_keys"].startswith("epoch 1 of ")
    monkeypatch.setattr(runner, "run", lambda *_: answer)
    tokens = np.zeros(SAMPLES * 2048, np.uint16)
    np.save(tmp_path / "tokens.npy", tokens)
    entry = entries.Entry("a", "torch_memmap", prepared=tmp_path)
    one = runner.Runner(W3, tmp_path, runner.Options(), print)
    with pytest.raises(SubjectError, match=f"that were measured: .*{words}"):
        one.measure(entry, 1)
    one._guard(entry, lambda entry: one.measure(entry, 1))
    assert entry.status == "failed" and "that were measured" in entry.reason


@pytest.mark.parametrize("late", [False, True])
def test_rows_of_measured_runs_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool) -> None:
    """A subject whose ids are zeros from the third epoch on has right keys, and passes a check of two epochs."""
    tokens = np.random.default_rng(1).integers(1, 999, (SAMPLES, 2048), dtype=np.uint16)
    np.save(tmp_path / "tokens.npy", tokens.reshape(-1))

    def epochs() -> Iterator[Iterator[Batch]]:
        for number in range(10**6):
            keys = _right(number)
            rows = tokens[keys] * np.uint16(0 if late and number >= 2 else 1)
            yield (Batch(keys[at : at + 8], {"tokens": rows[at : at + 8]}) for at in range(0, SAMPLES, 8))

    monkeypatch.setattr(runner, "HOME", tmp_path)
    monkeypatch.setattr(runner, "run", lambda _, request, *__: child.measure(W3, epochs(), request, 0.0))
    one = runner.Runner(W3, tmp_path, runner.Options(seconds=0.2), print)
    entry = entries.Entry("a", "torch_memmap", prepared=tmp_path)
    one._guard(entry, lambda entry: one.measure(entry, 1))
    assert entry.status == ("other work" if late else "ok"), entry.reason
    assert not late or ("in a measured run" in entry.reason and "2048 of 2048 ids differ" in entry.reason)


def test_the_number_of_workers_that_is_measured_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "tokens.npy", np.zeros(SAMPLES * 2048, np.uint16))
    one = runner.Runner(W3, tmp_path, runner.Options(), print)
    entry = entries.Entry("a", "torch_memmap", prepared=tmp_path)
    entry.result |= {"workers_swept": [0, 1, 2], "versions": {}}
    checked: list[int] = []
    monkeypatch.setattr(one, "_check_with", lambda _, workers: checked.append(workers))
    for rates, chosen in (({0: 9.0, 1: 1.0, 2: 1.0}, [2, 0]), ({0: 1.0, 1: 1.0, 2: 9.0}, [2])):
        monkeypatch.setattr(one, "measure", lambda _, workers, rates=rates: {"samples_s": rates[workers]})
        checked.clear()
        one.check(entry)
        one.sweep(entry)
        assert checked == chosen


def test_rows_that_are_picked_come_from_the_whole_run() -> None:
    picked = kept.Picked(W3, 4)
    for number in range(400):
        picked.offer(Batch([number], {"tokens": np.full((1, 2048), number, np.uint16)}))
    keys = [key for key, _ in picked.rows]
    assert len(keys) == len(set(keys)) == 4 and max(keys) > 20  # by chance in one of 160,000 runs not
    assert all(values[0][0] == key for key, values in picked.rows)


def test_faults_of_keys() -> None:
    assert key_faults([2, 0, 1], 3) == ""
    assert key_faults([], 2).startswith("of 2 keys 2 are missing")
    assert key_faults(np.array([0, 0, -1]), 2) == (
        "of 2 keys 1 are missing, 1 come more than once (first: 0), 1 are unknown (first: -1)"
    )


def test_a_check_keeps_other_samples_of_the_second_epoch_and_a_signature_of_all(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).integers(0, 9, (SAMPLES, 2048), dtype=np.uint16)

    def epochs() -> Iterator[Iterator[Batch]]:
        number = 0
        while True:
            keys = _right(number)
            yield (Batch(keys[at : at + 8], {"tokens": rows[keys[at : at + 8]]}) for at in range(0, SAMPLES, 8))
            number += 1

    request = {"epochs": 2, "later": 16, "samples": SAMPLES, "wanted": [10, 40], "signatures": True}
    request["output"] = str(tmp_path / "kept.npz")
    answer = child.check(W3, epochs(), request)
    assert [len(keys) for keys in answer["keys"]] == [SAMPLES, 16] and answer["cut"]
    check_keys(W3, answer, SAMPLES)
    found = np.load(tmp_path / "kept.npz")
    assert found["signature_keys"].tolist() == [*_right(0), *_right(1)[:16]]
    assert found["signatures"].tolist() == [zlib.crc32(rows[key]) for key in found["signature_keys"]]
    first = [key for key in range(SAMPLES) if kept.chosen(key, SAMPLES, 10)]
    assert set(found["keys"][:-16].tolist()) == set(first) and found["keys"][-16:].tolist() == _right(1)[:16]
    assert first != [key for key in range(SAMPLES) if kept.chosen(key, SAMPLES, 10, 1)]
    assert np.array_equal(found["tokens"], rows[found["keys"]])
    whole = child.check(W3, epochs(), request | {"later": 0})
    assert [len(keys) for keys in whole["keys"]] == [SAMPLES, SAMPLES] and not whole["cut"]
    with pytest.raises(WrongWorkError):
        check_keys(W3, answer | {"cut": False}, SAMPLES)


def test_signatures_are_means_of_cells() -> None:
    images = np.zeros((2, 224, 224, 3), np.uint8)
    images[1, :28, 28:56, 2] = 100
    found = signatures(images)
    assert found.shape == (2, 8, 8, 3) and found[1, 0, 1, 2] == 100 and found.sum() == 100


class _Full(Files):
    """A disk without room."""

    def call(self, operation: str, path: Path, function: Any, **detail: object) -> Any:
        if operation == "write":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().call(operation, path, function, **detail)


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number in range(3):
        Image.new("RGB", (300, 300), (number, 9, 9)).save(folder / f"{number}.jpg")
    return folder


def test_a_record_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.json"
    record.save("x", {}, {"a": 1}, path)
    before = path.read_bytes()
    monkeypatch.setattr(record, "Files", _Full)
    with pytest.raises(record.RecordError, match=r"r\.json: No space left on device; the earlier record stays"):
        record.save("x", {}, {"a": 2}, path)
    assert path.read_bytes() == before and [one.name for one in tmp_path.iterdir()] == ["r.json"]

    def fails(*_: Any, **__: Any) -> None:
        raise record.RecordError("no room at all")

    monkeypatch.setattr(run_, "unusable", fails)
    run = CliRunner().invoke(cli.main, ["run", "W10", "--data", str(tmp_path)])
    assert run.exit_code == 1 and run.output == "Error: no room at all\n"


def test_a_full_disk_after_measuring_costs_no_figures(pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = {"samples_s": 5.0, "cpu_s_1000": 1.0, "first_batch_s": 0.1, "measured_samples": 99, "measured_s": 0.5}

    def everything(self: Any, made: Any) -> None:
        for entry in made:
            entry.title, entry.repeats = "A title", [figure] * 5
            entry.result |= {"prepare": {"seconds": 0.0, "bytes": 300}, "workers": 1}
        self.rounds = 5

    monkeypatch.setattr(runner.Runner, "all", everything)
    arguments = ["W2", "--data", str(pictures), "--subjects", "torch_pil", "--output", str(tmp_path / "r.json")]
    assert CliRunner().invoke(run_.command, arguments).exit_code == 0
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["results"]["torch_pil"]["measured"] == {"samples": 99, "s": 0.5}
    before = (tmp_path / "r.json").read_bytes()
    monkeypatch.setattr(record, "Files", _Full)
    run = CliRunner().invoke(run_.command, arguments)
    assert run.exit_code == 1 and "| A title | 1 | 5 [5, 5]" in run.output
    assert run.output.strip().splitlines()[-1].endswith("No space left on device; the earlier record stays")
    assert (tmp_path / "r.json").read_bytes() == before


def test_a_full_disk_while_a_part_is_made_is_one_line_and_leaves_nothing(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, done = work.put, []

    def full(file: Path, target: Path) -> None:
        done.append(target)
        if len(done) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        put(file, target)

    monkeypatch.setattr(run_, "HOME", tmp_path / "home")
    monkeypatch.setattr(work, "put", full)
    run = CliRunner().invoke(run_.command, ["W2", "--data", str(pictures), "--limit", "3"])
    assert (
        run.exit_code == 1
        and run.output.count("\n") == 1
        and "No space left on device; make room, or set LFBENCH_HOME" in run.output
    )
    assert not list((tmp_path / "home" / "limited").iterdir())
    assert len(image_files(limited(W2, pictures, 3, tmp_path / "home" / "limited"))) == 3
