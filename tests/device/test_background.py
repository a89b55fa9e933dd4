"""Batches that a thread takes and copies in the middle of the consumer's steps."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import batchkit
import pytest
import torch
from latedevice import LateBackend

import lfdata.device.background
import lfdata.transforms as T
from lfdata import DeviceLoader, Loader
from lfdata.device.background import Background
from lfdata.errors import OptionError, SampleError

FIELDS: dict[str, Any] = {"image": [T.RandomResizedCrop(64)], "label": None}
Make = Callable[..., LateBackend]


def made(path: Path, backend: LateBackend, **options: Any) -> DeviceLoader:
    inner = Loader(path, 4, FIELDS, seed=3, **{"engine": "thread", "threads": 1, **options.pop("loader", {})})
    return DeviceLoader(inner, background=True, _backend=backend, **options)


def threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "lfdata-device"]


def until(what: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not what() and time.monotonic() < deadline:
        time.sleep(0.01)
    return what()


def taken(batch: dict[str, torch.Tensor], backend: LateBackend) -> str:
    """What is in a batch, once it is copied."""
    backend.copies.finish()
    return batchkit.digest({name: value.clone() for name, value in batch.items()})


def ahead(loader: DeviceLoader) -> int:
    return sum(one.batches for one in (loader._under_way, loader._after) if one is not None)


def test_what_is_ahead_comes_without_being_asked_for(pictures: Path, late: Make) -> None:
    backend = late()
    loader = made(pictures, backend, ahead=3)
    copying: set[str] = set()
    copy = backend.copy

    def noted(*arguments: Any) -> None:
        copying.add(threading.current_thread().name)
        copy(*arguments)

    backend.copy = noted  # type: ignore[method-assign]
    batches = iter(loader)
    next(batches)
    assert until(lambda: ahead(loader) == 3), "nobody takes batches ahead"
    copying.clear()
    for _ in range(6):
        next(batches)
        assert until(lambda: ahead(loader) == 3)
    assert copying == {"lfdata-device"}
    loader.close()
    assert not threads()


def test_the_next_epoch_too(pictures: Path, late: Make) -> None:
    backend = late()
    loader = made(pictures, backend, ahead=3)
    batches = iter(loader)
    for _ in range(len(loader)):
        next(batches)
    assert until(lambda: loader._after is not None and loader._after.batches == 3)
    assert loader.state_dict() == Loader(pictures, 4, FIELDS, seed=3).end_of(0)
    assert next(batches, None) is None
    found = [taken(batch, backend) for batch in loader]
    assert found == batchkit.digests(Loader(pictures, 4, FIELDS, seed=3), 2)[len(loader) :]
    loader.close()


@pytest.mark.parametrize("seed", range(6))
def test_order_and_state_are_the_loaders_whenever_the_thread_comes(pictures: Path, late: Make, seed: int) -> None:
    chance = random.Random(seed)
    backend = late(chance.choice([0.0, 0.003]), 0.0)
    loader = made(pictures, backend, ahead=chance.randrange(4), hold=chance.randrange(1, 3))
    plain = batchkit.digests(Loader(pictures, 4, FIELDS, seed=3), 4)
    found: list[str] = []
    state: dict[str, Any] = {}
    while len(found) < len(plain):
        if chance.random() < 0.3 and state:
            # Somebody else goes on from here.
            loader.load_state_dict(state)
        for batch in loader:
            found.append(taken(batch, backend))
            state = loader.state_dict()
            del batch
            time.sleep(chance.choice([0.0, 0.0, 0.002, 0.01]))
            if chance.random() < 0.1 and len(found) % len(loader):
                loader.forecast(4)
                break
        else:
            continue
        loader.load_state_dict(state)
    assert found == plain
    loader.close()
    assert not threads()


def test_what_goes_wrong_there_is_told_in_its_turn(pictures: Path, late: Make, sets: Path) -> None:
    backend = late()
    loader = made(pictures, backend, ahead=2)
    batches = iter(loader)
    first = taken(next(batches), backend)
    assert until(lambda: ahead(loader) == 2)

    def broken(*_: Any) -> None:
        raise RuntimeError("the device is gone")

    copy, backend.copy = backend.copy, broken  # type: ignore[method-assign]
    next(batches)
    assert until(lambda: bool(loader._under_way and loader._under_way._over))
    next(batches)
    with pytest.raises(RuntimeError, match="the device is gone"):
        next(batches)
    backend.copy = copy  # type: ignore[method-assign]
    assert taken(next(iter(loader)), backend) == first
    loader.close()
    path = batchkit.write_pictures(sets / "background", 24, bad=[15])
    loader = made(path, late(), ahead=2, loader={"shuffle": "sequential"})
    got = []
    with pytest.raises(SampleError):
        for batch in loader:
            got.append(batch["__index__"].tolist())
            time.sleep(0.01)
    assert got == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    loader.close()


def test_it_ends_with_its_loader(pictures: Path, late: Make) -> None:
    loader = made(pictures, late())
    batches = iter(loader)
    next(batches)
    assert until(lambda: len(threads()) == 1)
    del batches, loader
    gc.collect()
    assert until(lambda: not threads())


def test_closed_and_begun_anew(pictures: Path, late: Make) -> None:
    loader = made(pictures, late())
    for _ in range(3):
        assert sum(1 for _ in loader) == len(loader)
        loader.close()
        assert not threads()


class Owner:
    """Something whose work takes as long as it is told to."""

    def __init__(self) -> None:
        self.background = Background(self.work)
        self.begun, self.let_go, self.done = threading.Event(), threading.Event(), 0

    def work(self) -> None:
        self.begun.set()
        assert self.let_go.wait(60)
        self.done += 1


def test_a_thread_that_waits_for_who_closes_ends(pictures: Path, late: Make) -> None:
    """A handler of signals may come while a batch is awaited."""
    loader = made(pictures, late())
    batches = iter(loader)
    next(batches)
    assert loader._background is not None
    with loader._background:
        loader._background.came_by()
        # Until it is time for it, and for it to come as far as the lock.
        time.sleep(0.3)
        (thread,) = threads()
        loader.close()
        assert not thread.is_alive(), "closing waited in vain"
    assert sum(1 for _ in loader) == len(loader)
    loader.close()
    assert not threads()


@pytest.mark.parametrize("engine", ["inline", "thread"])
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("at", ["copy", "memory", "record"])
def test_closed_by_a_handler_while_a_batch_is_taken(pictures: Path, late: Make, engine: str, background: bool, at: str) -> None:
    """The batch that was being taken is the last one, and counts."""
    backend = late()
    inner = Loader(pictures, 4, FIELDS, seed=3, engine=engine, threads=1)
    loader = DeviceLoader(inner, background=background, ahead=0, _backend=backend)
    plain = batchkit.digests(Loader(pictures, 4, FIELDS, seed=3))
    backend_does, left = getattr(backend, at), 0 if at == "memory" else 2

    def interrupted(*arguments: Any) -> Any:
        nonlocal left
        if threading.current_thread() is threading.main_thread():
            left -= 1
            if left == -1:
                loader.close()
        return backend_does(*arguments)

    setattr(backend, at, interrupted)
    found = [taken(batch, backend) for batch in loader]
    assert left < 0 and not threads() and not backend.registered
    assert found == plain[: len(found)] and len(found) == (0 if at == "memory" else 3)
    state = loader.state_dict()
    assert state["samples"] == 4 * len(found) and loader.stats()["slots"] == 0
    # It goes on from there.
    loader.load_state_dict(state)
    assert [taken(batch, backend) for batch in loader] == plain[len(found) :]
    loader.close()


def test_a_thread_that_is_late_to_end_does_not_go_on_beside_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lfdata.device.background, "CLOSE_SECONDS", 0.01)
    owner = Owner()
    owner.background.came_by()
    assert owner.begun.wait(20)
    (first,) = threads()
    owner.background.close()
    assert first.is_alive()
    owner.background.came_by()
    assert len(threads()) == 2
    owner.let_go.set()
    first.join(20)
    assert not first.is_alive() and len(threads()) == 1
    owner.background.came_by()
    assert until(lambda: owner.done > 1), "the next one does not work"
    owner.background.close()
    assert until(lambda: not threads())


def test_without_a_thread_batches_are_taken_where_they_are_asked_for(
    pictures: Path, late: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    backend = late()
    start = threading.Thread.start

    def refused(self: threading.Thread) -> None:
        if self.name == "lfdata-device":
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", refused)
    loader = made(pictures, backend, ahead=2)
    assert [taken(batch, backend) for batch in loader] == batchkit.digests(Loader(pictures, 4, FIELDS, seed=3))
    loader.close()
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        "no thread for batches ahead, which are taken where they are asked for: can't start new thread"
    ]


def test_a_thread_that_died_is_begun_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(Owner):
        def work(self) -> None:
            self.done += 1
            if self.done == 1:
                raise MemoryError

    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    owner = Failing()
    owner.background.came_by()
    assert until(lambda: owner.done == 1) and until(lambda: not threads())
    owner.background.came_by()
    assert until(lambda: owner.done > 1)
    owner.background.close()
    assert not threads()


def test_a_forked_child_waits_for_no_thread() -> None:
    owner = Owner()
    owner.background.came_by()
    assert owner.begun.wait(20)
    # The thread has the lock.
    child = os.fork()
    if not child:
        signal.alarm(20)
        with owner.background:
            owner.background.close()
        os._exit(7)
    try:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    finally:
        owner.let_go.set()
        owner.background.close()
    assert until(lambda: not threads()) and owner.done == 1


PROGRAM = """
import sys
sys.path[:0] = sys.argv[2:]
from latedevice import LateBackend
from lfdata import DeviceLoader, Loader
loader = DeviceLoader(Loader(sys.argv[1], 4, ["image"], engine="thread"), background=True, _backend=LateBackend())
batch = next(iter(loader))
print("begun", flush=True)
"""


def test_a_program_that_closes_nothing_ends(pictures: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(pictures), *sys.path], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0 and done.stdout.split() == ["begun"], done.stderr[-2000:]
    assert "Traceback" not in done.stderr and "Fatal" not in done.stderr


def test_only_yes_or_no(pictures: Path) -> None:
    with pytest.raises(OptionError, match="background"):
        DeviceLoader(Loader(pictures, 4, FIELDS), "cpu", background="sometimes")  # type: ignore[arg-type]
    # There is nothing to copy.
    loader = DeviceLoader(Loader(pictures, 4, FIELDS), "cpu", background=True)
    assert sum(1 for _ in loader) == len(loader) and not threads()
    loader.close()
