"""SIGKILL at random points of writing and syncing, during resume and clean-up too: the end is byte-identical, nothing is redone."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path
from typing import Any

import pytest
from faultkit import SMALL, digests, expected_digests, finish, leftovers, readable, run, synthetic, verified, with_options
from killkit import CountingFiles, KillingFiles, children, gone, in_child, started, wait_until

from shard_builder.journal import read

OPTIONS = with_options(SMALL, segment_rows=25, shard_bytes=9_000, on_error="skip")
BAD = {5: "load", 44: "scan"}


def source(seed: int = 0) -> Any:
    return synthetic(70, seed, BAD)


def committed(target: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of every shard that the journal names and that is there."""
    journal = target / ".work" / "journal"
    if not journal.exists():
        return {}
    names = [line["shard"]["file"] for line in read(journal)[0] if "shard" in line]
    return {
        name: ((target / name).stat().st_ino, (target / name).stat().st_mtime_ns) for name in names if (target / name).exists()
    }


def kill_and_resume(place: Path, rng: random.Random, *, overwrite: bool, operations: int, wanted: dict[str, str]) -> int:
    """One life: killed, killed again up to three times while resuming, then finished. Returns the number of kills."""
    target = place / "target"
    seed = int(overwrite)
    allowed = {wanted["manifest.json"], ""}
    if overwrite:
        run(target, source(0), OPTIONS)
        allowed = {wanted["manifest.json"], digests(target)["manifest.json"]}
    kills = 0
    options = with_options(OPTIONS, overwrite=overwrite)
    for attempt in range(rng.randint(1, 4)):
        before = {} if not attempt else committed(target)
        files = KillingFiles(rng.randrange(operations), rng)
        action = (
            (lambda o=options, f=files: run(target, source(seed), o, f))
            if not attempt
            else (lambda f=files: finish(target, source(seed), OPTIONS, f))
        )
        status = in_child(action)
        assert status in (0, -signal.SIGKILL)
        kills += status != 0
        now = {name: ((target / name).stat().st_ino, (target / name).stat().st_mtime_ns) for name in before}
        assert now == before, "a committed shard was made again"
        if target.exists():
            assert readable(target) in allowed
    before = committed(target)
    finish(target, source(seed), OPTIONS)
    assert {name: ((target / name).stat().st_ino, (target / name).stat().st_mtime_ns) for name in before} == before
    assert digests(target) == wanted
    assert leftovers(target) == []
    verified(target)
    return kills


def _lives(place: Path, seed: int, lives: int, *, overwrite: bool) -> int:
    wanted = expected_digests(source(int(overwrite)), OPTIONS)
    counting = CountingFiles()
    run(place / "counted", source(), OPTIONS, counting)
    rng = random.Random(seed)
    kills = 0
    for life in range(lives):
        folder = place / str(life)
        folder.mkdir()
        kills += kill_and_resume(folder, rng, overwrite=overwrite, operations=counting.count, wanted=wanted)
    return kills


@pytest.mark.parametrize("overwrite", [False, True])
def test_kills_at_some_operations(overwrite: bool, place: Path) -> None:
    assert _lives(place, 1, 6, overwrite=overwrite) >= 6


@pytest.mark.fault
@pytest.mark.parametrize("overwrite", [False, True])
def test_kills_at_many_operations(overwrite: bool, place: Path) -> None:
    assert _lives(place, 2, 70, overwrite=overwrite) >= 60


# -- the real command from outside ------------------------------------------------------------------------------------------


def table(folder: Path, rows: int = 400) -> Path:
    """A real source: a JSONL table and files."""
    folder.mkdir()
    lines = []
    for number in range(rows):
        (folder / f"{number}.bin").write_bytes(bytes([number % 251]) * (300 + number % 50))
        lines.append(
            json.dumps(
                {"key": f"k{number}", "file": f"{number}.bin", "text": f"text {number}", "about": {"n": number, "w": "x" * 50}}
            )
        )
    (folder / "rows.jsonl").write_text("\n".join(lines))
    return folder / "rows.jsonl"


FIELDS = ["--field", "blob:bytes=file@file", "--field", "text:text=text", "--field", "about:json=about"]
SIZES = ["--shard-size", "20K", "--segment-size", "1K", "--workers", "2", "--quiet"]


def _killed_process(rows: Path, target: Path, rng: random.Random, resume: bool) -> None:
    """Start the command, wait until it has gone some way, kill it."""
    progress = rng.randrange(12)
    with started("convert", rows, target, *FIELDS, *SIZES, *(["--resume"] if resume else [])) as process:

        def far_enough() -> bool:
            return process.poll() is not None or len(list(target.glob("*.lfd"))) >= progress

        wait_until(far_enough)
        workers = children(process.pid)
        for _ in range(rng.randrange(40)):
            children(process.pid)  # a little time, not a fixed one
        process.kill()
        process.wait()
        wait_until(lambda: gone(workers), 5.0)


def _real_kills(place: Path, seed: int, lives: int) -> None:
    rows = table(place / "source")
    with started("convert", rows, place / "wanted", *FIELDS, *SIZES) as process:
        assert process.wait() == 0
    wanted = digests(place / "wanted")
    assert len(wanted) > 10
    rng = random.Random(seed)
    for life in range(lives):
        target = place / f"target-{life}"
        for attempt in range(rng.randint(1, 3)):
            _killed_process(rows, target, rng, resume=bool(attempt))
        before = committed(target)
        with started("convert", rows, target, *FIELDS, *SIZES, "--resume") as process:
            errors = process.communicate()[1]
            assert process.returncode == 0, errors
        assert digests(target) == wanted
        assert {name: ((target / name).stat().st_ino, (target / name).stat().st_mtime_ns) for name in before} == before
        assert leftovers(target) == []


def test_the_command_killed_from_outside(place: Path) -> None:
    _real_kills(place, 3, 2)


@pytest.mark.fault
def test_the_command_killed_often_from_outside(place: Path) -> None:
    _real_kills(place, 4, 14)
