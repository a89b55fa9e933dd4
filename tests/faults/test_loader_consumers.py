"""A consumer that stops for a minute, is stopped, or is killed with batches on their way to a device: nothing overflows, misfires or stays."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import batchkit
import pytest
import torch
from killkit import gone, wait_until
from latedevice import LateBackend, unheld
from loaderkit import (
    BATCH,
    STEPS,
    Trainer,
    busy,
    dataset,
    decoders,
    engine_of,
    expected,
    gate,
    loader,
    numbers,
    resident,
    shared_files,
)

import lfdata.transforms as T
from lfdata import DeviceLoader, Loader
from lfdata.schedule.sensors import Reading

FIELDS: dict[str, Any] = {"image": [T.RandomResizedCrop(128)], "label": None}
MB = 1 << 20
TICK = os.sysconf("SC_CLK_TCK")


class Idle:
    """A GPU that does nothing, as one whose trainer has stopped."""

    name = "idle"

    def read(self) -> Reading:
        return Reading(0.0, time.monotonic())

    def close(self) -> None:
        pass


def spent(pid: int) -> float:
    """Seconds of the processor that a process has had."""
    fields = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def own() -> float:
    """The same of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def settled(pids: list[int]) -> bool:
    """Whether processes have started and done what they were asked for: half a second in which they do nothing."""
    before = [spent(pid) for pid in pids]
    time.sleep(0.5)
    return [spent(pid) for pid in pids] == before


def forever(batches: Any) -> Iterator[Any]:
    while True:
        yield from batches


ARMS: dict[str, dict[str, Any]] = {
    "off": {},
    "waits": {"feedback": "wait"},
    "a sensor": {"feedback": Idle()},
    "far ahead": {"feedback": "wait", "prefetch": 6, "processes": 2},
    "a budget": {"max_bytes": "8MiB"},
}


@pytest.mark.parametrize("seconds", [4, pytest.param(60, marks=pytest.mark.slow)])
def test_a_consumer_that_stops_in_the_middle_of_an_epoch(place: Path, seconds: int) -> None:
    """All in the same minute, on the device path and off it, with feedback and without."""
    path = batchkit.write_pictures(place / "d", 48, size=160)
    plain = batchkit.digests(Loader(path, 8, FIELDS, engine="inline", threads=1), 3)
    backends = {name: LateBackend() for name in ARMS}
    all_of: dict[str, Any] = {}
    for name, options in ARMS.items():
        # Batches come much faster than this; a stop is much longer.
        made = Loader(path, 8, FIELDS, engine="process", threads=2, stall_seconds=2.0, **options)
        all_of[name] = made
        all_of[f"{name}, on a device"] = DeviceLoader(
            Loader(path, 8, FIELDS, engine="process", threads=1, stall_seconds=2.0, **options), _backend=backends[name]
        )
    runs = {name: forever(made) for name, made in all_of.items()}
    inner = {name: made.loader if isinstance(made, DeviceLoader) else made for name, made in all_of.items()}
    found: dict[str, list[str]] = {name: [] for name in all_of}

    def take(name: str, count: int) -> None:
        for _ in range(count):
            batch = next(runs[name])
            if isinstance(all_of[name], DeviceLoader):
                backends[name.partition(",")[0]].copies.finish()
            found[name].append(batchkit.digest(batch))

    try:
        for name in all_of:
            take(name, 9)
        pids = [pid for made in inner.values() for pid in decoders(made)]
        wait_until(lambda: settled(pids), 30)
        before = {pid: (spent(pid), resident(pid)) for pid in pids}
        mine, memory = own(), resident()
        time.sleep(seconds)
        assert own() - mine < 0.02 * seconds * len(all_of), "the trainer's threads did not wait"
        for pid, (cpu, size) in before.items():
            assert spent(pid) - cpu < 0.02 * seconds, "a decoder did not wait"
            assert resident(pid) - size < MB
        assert resident() - memory < MB
        for name, made in inner.items():
            assert not busy(made) and made.stats()["copied"] == 0, name
        for name in all_of:
            take(name, 9)
            assert found[name] == plain, name
            stats = all_of[name].stats()
            assert stats["copied"] == 0 and max(map(int, stats["ready"])) < stats["slots"], name
            if isinstance(all_of[name], DeviceLoader):
                device = stats["device"]
                assert device["extra"] == device["grown"] == 0 and device["batches"] <= 18 + 2
        assert [pid for made in inner.values() for pid in decoders(made)] == pids, "a decoder was started again"
    finally:
        for name, made in all_of.items():
            runs[name].close()  # type: ignore[attr-defined]
            made.close()
        for backend in backends.values():
            assert not backend.registered
            backend.end()
    assert gone(pids)


def test_a_trainer_that_is_stopped_while_it_waits(place: Path, monkeypatch: Any) -> None:
    """By SIGSTOP, for longer than a batch may take; meanwhile the decoder is at work. Seconds in which nobody waited are no stall."""
    data, door = dataset(place), gate(place, monkeypatch)

    def run(tell: Callable[[str], None]) -> None:
        one = loader(data, stall_seconds=2.0)
        batches, found = iter(one), []
        for _ in range(3):
            found.append(numbers(next(batches)))
        tell("there")
        found += [numbers(batch) for batch in batches]
        tell("right" if found == expected() else f"wrong: {found}")
        one.close()

    door.write_text(f"wait {3 * BATCH}")
    with Trainer(place, run) as trainer:
        assert trainer.line() == "there"
        time.sleep(0.3)
        trainer.signal(signal.SIGSTOP)
        time.sleep(4)
        trainer.signal(signal.SIGCONT)
        time.sleep(0.3)
        door.unlink()
        assert trainer.line() == "right", trainer.noise()
        assert trainer.end() == 0


# -- SIGKILL ----------------------------------------------------------------------------------------------------------------


def holders(inode: int) -> list[int]:
    """Processes that have an anonymous file mapped or open."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            lines = Path("/proc", name, "maps").read_text().splitlines()
            mapped = any("lfdata-slots" in line and line.split()[4] == str(inode) for line in lines)
            files = [f"/proc/{name}/fd/{one}" for one in os.listdir(f"/proc/{name}/fd")]
            opened = any("lfdata-slots" in os.readlink(file) and os.stat(file).st_ino == inode for file in files)
        except OSError:
            continue
        if mapped or opened:
            found.append(int(name))
    return found


@pytest.mark.parametrize("feedback", [False, "wait"])
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("budget", [None, "64MiB"])
def test_killed_with_batches_on_their_way(place: Path, monkeypatch: Any, on_device: bool, feedback: Any, budget: Any) -> None:
    """No decoder stays, and nobody has the slots; a trainer that is started next needs no cleaning."""
    data, door = dataset(place), gate(place, monkeypatch)
    before = shared_files()

    def run(tell: Callable[[str], None]) -> None:
        # Torch's pool of threads does not survive a fork.
        torch.set_num_threads(1)
        one = loader(data, processes=2, feedback=feedback, max_bytes=budget)
        # Copies are late: some are under way whenever it is killed.
        made: Any = DeviceLoader(one, _backend=LateBackend(0.05, 0.05)) if on_device else one
        for number, batch in enumerate(forever(made)):
            if on_device:
                made._transfer._backend.consumer_stream.late(unheld(batch["about"]))
            if number == STEPS + 3:
                tell(" ".join(map(str, [os.fstat(engine_of(one).slots.descriptor).st_ino, *decoders(one)])))

    with Trainer(place, run) as trainer:
        inode, *pids = map(int, trainer.line().split())
        assert set(holders(inode)) == {trainer.pid, *pids} and len(pids) == 2
        trainer.signal(signal.SIGKILL)
        assert trainer.end() == -signal.SIGKILL
        wait_until(lambda: gone(pids), 5)
        assert trainer.noise() == ""
    wait_until(lambda: not holders(inode), 5)
    assert shared_files() <= before
    again = loader(data)
    assert [numbers(batch) for batch in again] == expected()
    again.close()
    assert not door.exists()
