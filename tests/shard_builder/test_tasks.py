"""Tasks and ``finish``: the same bytes as one process, whatever their number, order, kills; and nothing passes that is not done."""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from faultkit import SMALL, digests, expected_digests, leftovers, run, synthetic, verified, with_options
from killkit import CountingFiles, KillingFiles, in_child

from lfdata.errors import LfdataError, OptionError, TargetExistsError
from lfdata.format.durable import Files
from shard_builder.finish import finish
from shard_builder.options import ConvertOptions, Task
from shard_builder.report import TooManyErrors
from shard_builder.verbs import convert as convert_verb
from shard_builder.verbs import finish as finish_verb

OPTIONS = with_options(SMALL, segment_rows=12, shard_bytes=5_000, on_error="skip")
BAD = {5: "load", 44: "scan", 71: "load"}


def source(seed: int = 0, records: int = 100) -> Any:
    return synthetic(records, seed, BAD)


def task(target: Path, number: int, count: int, files: Files | None = None, seed: int = 0, **more: Any) -> Any:
    return run(target, source(seed), with_options(OPTIONS, task=Task(number, count)), files, **more)


@pytest.mark.parametrize(("count", "order"), [(1, [0]), (3, [2, 0, 1]), (7, [3, 1, 0, 2, 6, 5, 4]), (20, list(range(20)))])
def test_tasks_in_any_order_give_the_bytes_of_one_process(tmp_path: Path, count: int, order: list[int]) -> None:
    for number in order:
        task(tmp_path / "t", number, count)
    rows, shards = finish(tmp_path / "t")
    assert digests(tmp_path / "t") == expected_digests(source(), OPTIONS)
    verified(tmp_path / "t")
    assert leftovers(tmp_path / "t") == [] and rows == 97 and shards > 9
    # Again: nothing to do.
    assert finish(tmp_path / "t") == (rows, shards)
    assert task(tmp_path / "t", 1 % count, count).resumed_shards == shards
    assert digests(tmp_path / "t") == expected_digests(source(), OPTIONS) and leftovers(tmp_path / "t") == []


def test_tasks_without_a_segment_need_not_be_run(tmp_path: Path) -> None:
    for number in range(9):
        task(tmp_path / "t", number, 50)
    finish(tmp_path / "t")
    assert digests(tmp_path / "t") == expected_digests(source(), OPTIONS)


def test_what_is_not_done_is_named(tmp_path: Path) -> None:
    target = tmp_path / "t"
    with pytest.raises(LfdataError, match="no directory"):
        finish(target)
    for number in (0, 2, 5):
        task(target, number, 6)
    with pytest.raises(LfdataError, match="tasks 1/6, 3/6, 4/6 are not done"):
        finish(target)
    assert not (target / "manifest.json").exists()
    (tmp_path / "empty").mkdir()
    with pytest.raises(TargetExistsError, match="no task has been run"):
        finish(tmp_path / "empty")


def test_a_shard_that_went_missing_is_made_again(tmp_path: Path) -> None:
    target = tmp_path / "t"
    for number in range(2):
        task(target, number, 2)
    shard = sorted(target.glob("s00002-*.lfd"))[0]
    shard.unlink()
    with pytest.raises(LfdataError, match="tasks 0/2 are not done"):
        finish(target)
    task(target, 0, 2)
    finish(target)
    assert digests(target) == expected_digests(source(), OPTIONS)


def test_tasks_of_different_conversions_are_refused(tmp_path: Path) -> None:
    target = tmp_path / "t"
    task(target, 0, 2)
    with pytest.raises(TargetExistsError, match=r"task 0/2 belongs to another conversion \(.*seed: 0, now 1"):
        task(target, 1, 2, seed=1)
    task(tmp_path / "other", 1, 2, seed=1)
    assert not (target / ".work" / "task-00001-of-00002").exists()
    (tmp_path / "other" / ".work" / "task-00001-of-00002").rename(target / ".work" / "task-00001-of-00002")
    with pytest.raises(LfdataError, match=r"another conversion than task 0/2 \(.*seed: 0, now 1"):
        finish(target)
    shutil.rmtree(target / ".work" / "task-00001-of-00002")
    with pytest.raises(TargetExistsError, match="begun by 2 tasks, not 3"):
        task(target, 0, 3)
    assert not list(target.glob(".work/task-*-of-00003"))
    for resume in (False, True):
        with pytest.raises(TargetExistsError, match="run those that are not done"):
            run(target, source(), OPTIONS, resume=resume)
    with pytest.raises(TargetExistsError, match="was another one"):
        task(target, 0, 2, seed=3)


def test_a_target_that_holds_something_else_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "t"
    target.mkdir()
    (target / "thesis.txt").write_text("x")
    with pytest.raises(TargetExistsError, match="thesis"):
        task(target, 0, 2)
    assert (target / "thesis.txt").read_text() == "x"
    run(tmp_path / "done", source(1), OPTIONS)
    with pytest.raises(TargetExistsError, match="made otherwise"):
        task(tmp_path / "done", 0, 2)
    with pytest.raises(OptionError, match="cannot overwrite"):
        ConvertOptions(task=Task(0, 2), overwrite=True)
    for number, count in ((2, 2), (-1, 2), (0, 0), (0, 10**11)):
        with pytest.raises(OptionError, match="numbered 0 to|1 to 99999 tasks"):
            Task(number, count)


def test_one_task_is_done_by_one_process_and_nobody_finishes_meanwhile(tmp_path: Path) -> None:
    target = tmp_path / "t"
    task(target, 0, 2)
    held = os.open(target / ".work" / "task-00000-of-00002", os.O_RDONLY)
    whole = os.open(target, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    fcntl.flock(whole, fcntl.LOCK_SH)
    with pytest.raises(TargetExistsError, match="another process"):
        task(target, 0, 2)
    task(target, 1, 2)
    with pytest.raises(TargetExistsError, match="another process"):
        finish(target)
    os.close(whole)
    os.close(held)
    finish(target)
    assert digests(target) == expected_digests(source(), OPTIONS)


def test_a_task_leaves_what_others_are_writing(tmp_path: Path) -> None:
    target = tmp_path / "t"
    task(target, 0, 3)
    theirs, ours = target / ".tmp-s00001-0000-00000000.lfd", target / ".tmp-s00003-0000-00000000.lfd"
    theirs.write_bytes(b"being written by task 1")
    ours.write_bytes(b"left by a killed run of this task")
    task(target, 0, 3)
    assert theirs.exists() and not ours.exists()
    theirs.unlink()


def test_errors_of_all_tasks_count_together(tmp_path: Path) -> None:
    target = tmp_path / "t"
    for number in range(3):
        task(target, number, 3)
    with pytest.raises(TooManyErrors, match="3 bad samples in all tasks"):
        finish(target, max_errors=2)
    finish(target, max_errors=3)
    assert digests(target) == expected_digests(source(), OPTIONS)


def test_nothing_at_all(tmp_path: Path) -> None:
    empty = with_options(OPTIONS, task=Task(0, 2), allow_empty=True)
    run(tmp_path / "t", synthetic(0), empty)
    with pytest.raises(LfdataError, match="none of 0 samples"):
        finish(tmp_path / "t")
    assert finish(tmp_path / "t", allow_empty=True) == (0, 0)
    assert digests(tmp_path / "t") == expected_digests(synthetic(0), with_options(OPTIONS, allow_empty=True))


def _killed_tasks(place: Path, rng: random.Random, operations: int) -> int:
    """Tasks killed at random operations and run again, some of them twice; then a ``finish`` that is killed too."""
    target, kills = place / "t", 0
    for number in rng.sample(range(3), 3):
        for _ in range(rng.randint(0, 2)):
            files = KillingFiles(rng.randrange(operations), rng)
            status = in_child(lambda n=number, f=files: task(target, n, 3, f))
            assert status in (0, -signal.SIGKILL)
            kills += status != 0
        task(target, number, 3)
    copy = place / "copy"
    shutil.copytree(target, copy)
    counting = CountingFiles()
    finish(copy, files=counting)
    for _ in range(2):
        files = KillingFiles(rng.randrange(counting.count), rng)
        status = in_child(lambda f=files: finish(target, files=f))
        assert status in (0, -signal.SIGKILL)
        kills += status != 0
    finish(target)
    assert digests(target) == digests(copy) == expected_digests(source(), OPTIONS)
    assert leftovers(target) == []
    return kills


@pytest.mark.parametrize("lives", [3, pytest.param(12, marks=pytest.mark.fault)])
def test_killed_tasks_and_finishes_end_the_same(tmp_path: Path, lives: int) -> None:
    counting = CountingFiles()
    task(tmp_path / "counted", 0, 3, counting)
    rng, kills = random.Random(lives), 0
    for life in range(lives):
        (tmp_path / str(life)).mkdir()
        kills += _killed_tasks(tmp_path / str(life), rng, counting.count)
    assert kills >= lives


def test_the_commands(tmp_path: Path) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text("key,text\n" + "".join(f"k{n},text {n}\n" for n in range(50)))
    common = [str(rows), "--field", "text:text=text", "-s", "key=key", "--segment-size", "200", "-q"]

    def convert(target: Path, *more: str) -> Any:
        return CliRunner().invoke(convert_verb.command, [*common[:1], str(target), *common[1:], *more], catch_exceptions=True)

    assert convert(tmp_path / "whole").exit_code == 0
    for number in (1, 0):
        assert convert(tmp_path / "parts", "--task", f"{number}/2").exit_code == 0
    run_ = CliRunner().invoke(finish_verb.command, [str(tmp_path / "parts")])
    assert run_.exit_code == 0 and "50 samples" in run_.output, run_.output
    assert digests(tmp_path / "parts") == digests(tmp_path / "whole")
    for text in ("3", "a/2", "1/", "-1/2"):
        assert isinstance(convert(tmp_path / "other", "--task", text).exception, OptionError)
