"""``--resume`` trusts what the journal and the files prove, and nothing else."""

from __future__ import annotations

import os
import random
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from faultkit import SMALL, digests, expected_digests, finish, leftovers, run, synthetic, verified, with_options
from killkit import KillingFiles, in_child

from lfdata.errors import CorruptError, FormatError, LfdataError, TargetExistsError
from lfdata.format.durable import Files, OutputFile
from shard_builder.journal import read
from shard_builder.target import Target

RECORDS = 100


class _Stop(Exception):
    pass


class StopBefore(Files):
    """Stops before the rename of shard number ``shard``, after its line has been announced; ``late``: right after the rename."""

    def __init__(self, shard: int, *, late: bool = False) -> None:
        self.left, self.late = shard, late

    def commit(self, output: OutputFile, final: Path) -> None:
        if final.suffix == ".lfd":
            self.left -= 1
            if self.left < 0 and not self.late:
                raise _Stop
        super().commit(output, final)
        if self.left < 0:
            raise _Stop


def interrupted(target: Path, shard: int = 3, seed: int = 0, *, late: bool = False, **options: Any) -> list[str]:
    """A conversion stopped at a shard; the names of the shards that its journal announces."""
    with pytest.raises(_Stop):
        run(target, synthetic(RECORDS, seed), SMALL, StopBefore(shard, late=late), **options)
    return [line["shard"]["file"] for line in read(target / ".work" / "journal")[0] if "shard" in line]


def test_a_shard_announced_twice_is_stored_once(tmp_path: Path) -> None:
    """Killed between the journal line and the rename, again and again at the same shard, then after it."""
    target = tmp_path / "t"
    interrupted(target, 3)
    interrupted(target, 0, resume=True)
    names = interrupted(target, 0, resume=True, late=True)
    assert len(names) == len(set(names)) + 2
    assert run(target, resume=True).resumed_shards == 4
    assert digests(target) == expected_digests(synthetic(RECORDS))


def test_a_finished_conversion_is_left_as_it_is(tmp_path: Path) -> None:
    target = tmp_path / "t"
    run(target)
    before = {name: os.stat(target / name).st_mtime_ns for name in os.listdir(target)}
    summary = run(target, resume=True)
    assert (summary.resumed_shards, summary.shards, summary.samples) == (5, 5, RECORDS)
    assert {name: os.stat(target / name).st_mtime_ns for name in os.listdir(target)} == before


def test_another_conversion_is_refused_and_says_what_differs(tmp_path: Path) -> None:
    target = tmp_path / "t"
    interrupted(target)
    with pytest.raises(TargetExistsError, match=r"source\.seed: 0, now 1"):
        run(target, synthetic(RECORDS, 1), resume=True)
    with pytest.raises(TargetExistsError, match=r"options\.shard_bytes: 14000, now 9000"):
        run(target, resume=True, shard_bytes=9000)
    with pytest.raises(TargetExistsError, match=r"source\.records: 100, now 99"):
        run(target, synthetic(RECORDS - 1), resume=True)
    finish(target)
    assert digests(target) == expected_digests(synthetic(RECORDS))
    with pytest.raises(TargetExistsError, match="made otherwise"):
        run(target, synthetic(RECORDS, 1), resume=True)


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _spoil_trailer(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-60] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [_truncate, _spoil_trailer])
def test_a_damaged_committed_shard_stops_the_resume(damage: Any, tmp_path: Path) -> None:
    target = tmp_path / "t"
    names = interrupted(target)
    damage(target / names[1])
    with pytest.raises(FormatError, match=names[1]):
        run(target, resume=True)
    run(target, overwrite=True)
    assert digests(target) == expected_digests(synthetic(RECORDS))


@pytest.mark.parametrize("damage", [_truncate, _spoil_trailer])
def test_without_the_check_the_damage_would_stay(damage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: size and trailer are what finds it."""
    target = tmp_path / "t"
    names = interrupted(target)
    damage(target / names[1])
    committed = Target.committed

    def trusting(self: Target, entry: Any, replaced: Any = ()) -> Any:
        try:
            return committed(self, entry, replaced)
        except FormatError:
            monkeypatch.setattr("shard_builder.target.ShardFile", lambda *_args, **_more: None)
            return committed(
                self, {**entry, "shard": {**entry["shard"], "bytes": (self.path / names[1]).stat().st_size}}, replaced
            )

    monkeypatch.setattr(Target, "committed", trusting)
    try:
        run(target, resume=True)
    except LfdataError:
        return  # found later, by the index: as good
    assert digests(target) != expected_digests(synthetic(RECORDS))


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_missing_shard_is_made_again_with_all_that_follow(missing: int, tmp_path: Path) -> None:
    target = tmp_path / "t"
    names = interrupted(target, 4)
    (target / names[missing]).unlink()
    run(target, resume=True)
    assert digests(target) == expected_digests(synthetic(RECORDS))
    verified(target)


def test_a_damaged_old_shard_of_the_same_name_is_not_taken_for_the_new_one(tmp_path: Path) -> None:
    """Overwriting a damaged data set with the same conversion: names, sizes and ids are the same, only the bytes tell."""
    target = tmp_path / "t"
    run(target)
    for path in sorted(target.glob("*.lfd"))[1:4]:
        data = bytearray(path.read_bytes())
        data[5000] ^= 0xFF
        path.write_bytes(data)
    os.truncate(sorted(target.glob("*.lfd"))[4], 100)
    assert len(interrupted(target, 2, overwrite=True)) == 3
    assert run(target, resume=True).resumed_shards == 2
    assert digests(target) == expected_digests(synthetic(RECORDS))
    verified(target)


def test_a_damaged_manifest_is_not_overwritten_by_resume(tmp_path: Path) -> None:
    target = tmp_path / "t"
    run(target)
    (target / "manifest.json").write_bytes(b"{}")
    with pytest.raises(TargetExistsError, match="--overwrite"):
        run(target, resume=True)
    assert len(list(target.glob("*.lfd"))) == 5


def test_a_damaged_journal_stops_the_resume(tmp_path: Path) -> None:
    target = tmp_path / "t"
    interrupted(target)
    journal = target / ".work" / "journal"
    data = bytearray(journal.read_bytes())
    data[100] ^= 1
    journal.write_bytes(data)
    with pytest.raises(CorruptError, match="journal"):
        run(target, resume=True)


def test_workers_and_policies_may_change_on_resume(tmp_path: Path) -> None:
    target = tmp_path / "t"
    interrupted(target)
    run(target, resume=True, on_error="skip", workers=3, max_errors=7)
    assert digests(target) == expected_digests(synthetic(RECORDS))


def test_the_report_is_the_same_after_any_interruption(tmp_path: Path) -> None:
    source = synthetic(
        RECORDS, bad={n: ("load", "scan")[n % 2] for n in range(0, RECORDS, 9)}, keys={"50": "twice", "70": "twice"}
    )
    options = with_options(SMALL, on_error="skip", duplicates="last")
    wanted = expected_digests(source, options)
    assert "errors.jsonl" in wanted
    rng = random.Random(5)
    for number in range(6):
        target = tmp_path / str(number)
        for attempt in range(3):
            files = KillingFiles(rng.randrange(40, 260), rng)
            status = in_child(partial(run, target, source, options, files, resume=attempt > 0))
            assert status in (0, -signal.SIGKILL)
        run(target, source, options, resume=True)
        assert digests(target) == wanted
        assert leftovers(target) == []
        shutil.rmtree(target)
