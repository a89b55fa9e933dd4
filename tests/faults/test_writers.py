"""Many writers on one target: one winner, typed errors for the rest; what a killed writer leaves blocks nobody."""

from __future__ import annotations

import os
import random
import signal
import threading
from functools import partial
from pathlib import Path

import pytest
from faultkit import (
    SMALL,
    InProcessPool,
    convert_module,
    digests,
    expected_digests,
    finish,
    leftovers,
    run,
    synthetic,
    with_options,
)
from killkit import KillingFiles, in_child

from lfdata.errors import TargetExistsError
from lfdata.format.durable import Files
from shard_builder.convert import convert
from shard_builder.target import Target

OPTIONS = with_options(SMALL, segment_rows=25, shard_bytes=9_000)
PROCESSES = THREADS = 50
WON, LOST, OTHER = 0, 3, 4


def _race(target: Path) -> int:
    try:
        convert(synthetic(60), target, OPTIONS)
    except TargetExistsError:
        return LOST
    except BaseException as error:
        os.write(2, f"{error!r}\n".encode())
        return OTHER
    return WON


def _racing_process(target: Path, gate: int) -> int:
    child = os.fork()
    if child:
        return child
    os.read(gate, 1)
    os._exit(_race(target))


def _all_race(target: Path) -> list[int]:
    gate, release = os.pipe()
    racers = [_racing_process(target, gate) for _ in range(PROCESSES)]
    outcomes: list[int] = []
    threads = [threading.Thread(target=lambda: outcomes.append(_race(target))) for _ in range(THREADS)]
    os.write(release, bytes(PROCESSES))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    outcomes += [os.waitstatus_to_exitcode(os.waitpid(racer, 0)[1]) for racer in racers]
    os.close(gate)
    os.close(release)
    return outcomes


def test_a_hundred_racers(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert_module, "Pool", InProcessPool)
    outcomes = _all_race(place / "target")
    assert sorted(outcomes) == [WON] + [LOST] * (PROCESSES + THREADS - 1)
    assert digests(place / "target") == expected_digests(synthetic(60), OPTIONS)
    assert leftovers(place / "target") == []


def test_without_the_lock_the_race_is_lost(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the lock is what decides."""
    first = Target(place / "target", Files())
    with first, pytest.raises(TargetExistsError, match="another process"), Target(place / "target", Files()):
        pass
    monkeypatch.setattr("shard_builder.target.fcntl.flock", lambda _descriptor, _how: None)
    with Target(place / "target", Files()), Target(place / "target", Files()):
        pass


@pytest.mark.parametrize("options", [{}, {"resume": True}, {"overwrite": True}])
def test_a_second_writer_is_refused_at_once(options: dict[str, bool], place: Path) -> None:
    with Target(place / "target", Files()), pytest.raises(TargetExistsError, match="another process"):
        run(place / "target", synthetic(60), OPTIONS, **options)


def test_a_killed_writer_blocks_nobody(place: Path) -> None:
    """No lock survives its holder, whatever process id the next one gets and whatever the clock says."""
    target = place / "target"
    assert in_child(partial(run, target, synthetic(60), OPTIONS, KillingFiles(200, random.Random(0)))) == -signal.SIGKILL
    (target / ".tmp-stray").write_bytes(b"x")
    (target / ".work" / "plan").write_bytes(b"x")
    (target / ".work" / "staged").mkdir()
    (target / ".work" / "staged" / "inner").mkdir()
    (target / ".work" / "staged" / "inner" / "file").write_bytes(b"x")
    (target / ".work" / "staged" / "link").symlink_to(place)
    with pytest.raises(TargetExistsError, match="--resume"):
        run(target, synthetic(60), OPTIONS)
    finish(target, synthetic(60), OPTIONS)
    assert digests(target) == expected_digests(synthetic(60), OPTIONS)
    assert leftovers(target) == []
    assert place.is_dir()


def test_a_writer_killed_before_its_journal_blocks_nobody(place: Path) -> None:
    target = place / "target"
    for at in range(4):
        assert in_child(partial(run, target, synthetic(60), OPTIONS, KillingFiles(at, random.Random(at)))) == -signal.SIGKILL
    run(target, synthetic(60), OPTIONS)
    assert digests(target) == expected_digests(synthetic(60), OPTIONS)


def test_a_directory_that_holds_something_else_is_left_alone(place: Path) -> None:
    target = place / "target"
    target.mkdir()
    (target / "precious.lfd").write_bytes(b"of somebody")
    for resume in (False, True):
        with pytest.raises(TargetExistsError, match="precious"):
            run(target, synthetic(60), OPTIONS, resume=resume)
    assert (target / "precious.lfd").read_bytes() == b"of somebody"
    assert os.listdir(target) == ["precious.lfd"]


def test_a_file_in_the_place_of_the_target(place: Path) -> None:
    (place / "target").write_bytes(b"x")
    with pytest.raises(TargetExistsError, match="not a directory"):
        run(place / "target", synthetic(60), OPTIONS)
