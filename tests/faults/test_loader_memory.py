"""The loader's memory and descriptors: checked before they are taken, without a name, given back, and never more than before."""

from __future__ import annotations

import gc
import os
import random
import resource
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from killkit import gone, in_child
from loaderkit import (
    BATCH,
    ENGINES,
    STEPS,
    Trainer,
    census,
    decoders,
    descriptors,
    engine_of,
    expected,
    loader,
    nothing_left,
    numbers,
    resident,
    shared_files,
    whole,
)
from loaderkit import dataset as make_dataset
from mounts import in_private_namespace, tmpfs

import lfdata.loader.slots as slots
from lfdata import Loader
from lfdata.errors import LfdataError, LimitError, StorageError

# Starting decoders is left to the long tests where it adds little.
QUICK_ENGINES = ("thread", "inline", pytest.param("process", marks=pytest.mark.fault))
MIB = 1 << 20


@pytest.fixture
def dataset(place: Path) -> Path:
    return make_dataset(place)


# -- too little -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_too_little_memory_is_told_before_anything_starts(dataset: Path, monkeypatch: Any, engine: str) -> None:
    monkeypatch.setattr(slots, "available_memory", lambda: 3 * MIB)
    with nothing_left():
        one = loader(dataset, engine=engine)
        with pytest.raises(
            LimitError, match=r"slots of [\d,]+ bytes do not fit: 3,145,728 .*batch_size, prefetch or processes"
        ):
            next(iter(one))
        assert not one._pipelines
        del one


def test_what_the_control_group_has_left(place: Path, monkeypatch: Any) -> None:
    """Files in the page cache count as free: they make room. Without that a long run in a container would be refused for nothing."""
    own = Path("/proc/self/cgroup").read_text()
    monkeypatch.setattr(slots, "_CGROUPS", place)
    whole_machine = slots.available_memory()
    assert whole_machine > 64 * MIB

    def group(folder: Path, limit: str, used: str, values: tuple[object, object], stat: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / limit).write_text(f"{values[0]}\n")
        (folder / used).write_text(f"{values[1]}\n")
        (folder / "memory.stat").write_text(stat)

    monkeypatch.setattr(slots, "control_groups", lambda: [place / "v2", place / "v1", place / "none"])
    group(
        place / "v2",
        "memory.max",
        "memory.current",
        (40 * MIB, 38 * MIB),
        f"anon {MIB}\ninactive_file {20 * MIB}\nactive_file {MIB}\n",
    )
    assert slots.available_memory() == 23 * MIB
    stat = f"inactive_file 0\ntotal_inactive_file {5 * MIB}\ntotal_active_file 0\n"
    group(place / "v1", "memory.limit_in_bytes", "memory.usage_in_bytes", (40 * MIB, 30 * MIB), stat)
    assert slots.available_memory() == 15 * MIB
    group(place / "v2", "memory.max", "memory.current", ("max", 38 * MIB), "")
    group(place / "v1", "memory.limit_in_bytes", "memory.usage_in_bytes", (1 << 62, MIB), "")
    assert slots.available_memory() > 64 * MIB
    assert own


def test_control_groups_of_this_process() -> None:
    found = list(slots.control_groups())
    assert all(group.is_dir() for group in found)
    assert slots.available_memory() > 0


@pytest.fixture
def without_memfd(monkeypatch: Any) -> None:
    monkeypatch.delattr(os, "memfd_create")


@pytest.mark.parametrize("engine", QUICK_ENGINES)
def test_without_anonymous_memory_shared_memory_does(dataset: Path, without_memfd: None, engine: str) -> None:
    before = shared_files()
    with nothing_left():
        one = loader(dataset, engine=engine)
        batches = iter(one)
        assert numbers(next(batches)) == expected()[0]
        assert shared_files() <= before
        assert [numbers(batch) for batch in batches] == expected(1)
        one.close()
        del one, batches


@pytest.mark.parametrize("kib", [64, 1024, 4096, 64 * 1024])
def test_shared_memory_too_small(dataset: Path, place: Path, without_memfd: None, monkeypatch: Any, kib: int) -> None:
    """Real: a file system of that size. What is missing is told before, with the bytes needed and the options; never a SIGBUS."""
    small = place / "shm"
    small.mkdir()
    monkeypatch.setattr(slots, "SHARED_MEMORY", str(small))

    def inside() -> None:
        tmpfs(small, kib << 10)
        before = census()
        one = loader(dataset, prefetch=4)
        try:
            assert whole(one) == expected()
            assert kib == 64 * 1024
        except LimitError as error:
            assert kib < 64 * 1024
            for part in ("the loader takes", "are free", "batch_size, prefetch or processes", "--shm-size"):
                assert part in str(error), error
        one.close()
        del one
        assert os.listdir(small) == []
        room = os.statvfs(small)
        assert room.f_bfree == room.f_blocks
        assert census() == before

    in_private_namespace(inside)


def test_shared_memory_that_is_not_there(dataset: Path, place: Path, without_memfd: None, monkeypatch: Any) -> None:
    monkeypatch.setattr(slots, "SHARED_MEMORY", str(place / "nothing"))
    one = loader(dataset)
    with nothing_left(), pytest.raises(StorageError, match="nothing: reserve failed"):
        next(iter(one))


def test_too_few_descriptors(dataset: Path) -> None:
    """With any number of descriptors left: batches, or an error of ours."""

    def run() -> None:
        worked = refused = 0
        for left in (0, 1, 2, 4, 7, 40):
            one = loader(dataset, prefetch=1)
            fillers = [os.open("/dev/null", os.O_RDONLY)]
            used = max(map(int, os.listdir("/proc/self/fd")))
            while fillers[-1] < used:
                fillers.append(os.open("/dev/null", os.O_RDONLY))
            used = fillers[-1] + 1
            resource.setrlimit(resource.RLIMIT_NOFILE, (used + left, 4096))
            try:
                batches = iter(one)
                assert numbers(next(batches)) == expected()[0]
                worked += 1
            except LfdataError:
                refused += 1
            finally:
                batches = None
                one.close()
                resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
                for filler in fillers:
                    os.close(filler)
        assert worked and refused, (worked, refused)

    assert in_child(run) == 0


@pytest.mark.parametrize("engine", ["process", "inline"])
def test_too_little_address_space(dataset: Path, engine: str) -> None:
    def run() -> None:
        fields = {"about": None, "label": None}
        worked = refused = 0
        for left in (0, 1, 2, 4, 64):
            one = Loader(dataset, 10, fields, engine=engine) if left == 64 else loader(dataset, engine=engine)
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + left * MIB, resource.RLIM_INFINITY))
            try:
                next(iter(one))
                worked += 1
            except (LfdataError, MemoryError):
                refused += 1
            finally:
                resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
                one.close()
        assert refused, (worked, refused)

    assert in_child(run) == 0


# -- what it has ------------------------------------------------------------------------------------------------------------


def test_slots_have_no_name(dataset: Path) -> None:
    before = shared_files()
    one = loader(dataset)
    batches = iter(one)
    next(batches)
    assert "/memfd:lfdata-slots (deleted)" in descriptors()
    assert "/memfd:lfdata-hello (deleted)" not in descriptors()
    assert shared_files() <= before
    theirs = [os.readlink(f"/proc/{decoders(one)[0]}/fd/{name}") for name in os.listdir(f"/proc/{decoders(one)[0]}/fd")]
    assert "/memfd:lfdata-slots (deleted)" in theirs and "/memfd:lfdata-hello (deleted)" not in theirs
    del batches
    one.close()


@pytest.mark.parametrize("engine", QUICK_ENGINES)
def test_tensors_outlive_the_loader(dataset: Path, engine: str) -> None:
    with nothing_left():
        one = loader(dataset, engine=engine)
        kept = list(one)
        one.close()
        del one
        assert whole(kept) == expected()
        del kept


HOW = ("break", "exception", "del", "close", "again", "loader first")
_BROKEN_OFF = [
    pytest.param(engine, how, marks=[pytest.mark.fault] if engine == "process" and how not in HOW[:2] else [])
    for engine in ENGINES
    for how in HOW
]


@pytest.mark.parametrize(("engine", "how"), _BROKEN_OFF)
def test_a_broken_off_iteration_frees_all(dataset: Path, engine: str, how: str) -> None:
    with nothing_left():
        one = loader(dataset, engine=engine)
        pids: list[int] = []
        batches = iter(one)
        batch = next(batches)
        if engine == "process":
            pids = decoders(one)
        if how == "loader first":
            del one
            assert numbers(next(batches)) == expected()[1]
            del batches
        elif how == "del":
            del batches
            assert not one._pipelines
        elif how == "close":
            one.close()
            assert list(batches) == []
            del batches
        elif how == "again":
            # A new iteration ends the one under way, without a new decoder.
            second = iter(one)
            assert numbers(next(second)) == expected()[0]
            assert list(batches) == []
            assert engine != "process" or decoders(one) == pids
            del second, batches
        elif how == "break":
            del batches
            for _ in one:
                pids += decoders(one) if engine == "process" else []
                break
            del _
            gc.collect()
            assert not one._pipelines
        else:
            del batches

            def body() -> None:
                for _ in one:
                    raise ZeroDivisionError

            with pytest.raises(ZeroDivisionError):
                body()
            assert not one._pipelines
        assert gone(pids)
        one = batches = None
        del batch


def cycles(dataset: Path, count: int, often: int) -> None:
    """Open, iterate a little or to the end, break off, kill: what the process has stays as it was."""
    rng = random.Random(count)

    def cycle(number: int) -> None:
        engine = "process" if number % often == 0 else ENGINES[1 + number % 2]
        one = loader(dataset, "wide", engine=engine, processes=1 + (number % 10 == 0), prefetch=1 + number % 3)
        batches = iter(one)
        for _ in range(rng.choice((0, 1, 3, STEPS))):
            next(batches, None)
        if number % (2 * often) == 0 and one._pipelines and engine == "process":
            os.kill(decoders(one)[0], signal.SIGKILL)
        if number % 2:
            one.close()

    for number in range(2 * often):
        cycle(number)
    gc.collect()
    before, memory = census(), resident()
    for number in range(count):
        cycle(number)
    assert census() == before
    assert resident() - memory < 24 * MIB + count * 4096


def test_many_cycles_leave_nothing(dataset: Path) -> None:
    cycles(dataset, 30, 10)


@pytest.mark.fault
def test_a_thousand_cycles_leave_nothing(dataset: Path) -> None:
    cycles(dataset, 1000, 5)


def flat(dataset: Path, batches: int, engine: str) -> None:
    """Memory of trainer, decoder and slots over many batches."""
    one = loader(dataset, "wide", engine=engine)
    seen, after_first = 0, (0, 0, 0)
    while seen < batches:
        for _ in one:
            seen += 1
            pid = decoders(one)[0] if engine == "process" else "self"
            now = (resident(), resident(pid), os.fstat(engine_of(one).slots.descriptor).st_blocks * 512)
            if seen == 50:
                after_first = now
    assert now[2] == after_first[2] <= engine_of(one).slots.count * engine_of(one).slots.size + 4096
    assert now[0] - after_first[0] < 16 * MIB
    assert now[1] - after_first[1] < 16 * MIB
    assert one.stats()["copied"] == 0
    one.close()


def test_memory_is_flat(dataset: Path) -> None:
    flat(dataset, 150, "process")


@pytest.mark.fault
@pytest.mark.parametrize("engine", ENGINES)
def test_memory_is_flat_over_many_batches(dataset: Path, engine: str) -> None:
    flat(dataset, 2000, engine)


@pytest.mark.parametrize("engine", QUICK_ENGINES)
def test_a_slow_and_a_greedy_consumer_get_the_same(dataset: Path, engine: str) -> None:
    one = loader(dataset, engine=engine)
    slow = []
    for batch in one:
        time.sleep(0.01)
        slow.append(numbers(batch))
        del batch
    greedy = list(loader(dataset, engine=engine))
    assert slow == whole(greedy) == expected()
    one.close()


def test_closing_takes_no_time(dataset: Path) -> None:
    one = loader(dataset)
    times = []
    for count in (1, STEPS):
        batches = iter(one)
        for _ in range(count):
            next(batches)
        began = time.monotonic()
        one.close()
        times.append(time.monotonic() - began)
    assert min(times) < 0.5 and max(times) < 2


# -- other processes --------------------------------------------------------------------------------------------------------


@pytest.mark.fault
def test_two_jobs_do_not_know_of_each_other(dataset: Path, place: Path) -> None:
    def run(tell: Any) -> None:
        one = loader(dataset, "slow")
        for batch in one:
            tell(str(numbers(batch)[0]))
        one.close()

    with Trainer(place, run) as first, Trainer(place, run) as second:
        first.line()
        assert second.line() == "0"
        first.signal(signal.SIGKILL)
        assert first.end() == -signal.SIGKILL
        assert [int(second.line()) for _ in range(STEPS - 1)] == list(range(BATCH, BATCH * STEPS, BATCH))
        assert second.end() == 0
        assert second.noise() == ""
