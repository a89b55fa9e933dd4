"""A Loader is one thread's: others that close it, or take batches too, get or cause an error that says so."""

from __future__ import annotations

import gc
import itertools
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from batchkit import digest, digests

from lfdata import Loader
from lfdata import transforms as T
from lfdata.errors import LfdataError
from lfdata.loader import pipeline

SLOW = {"label": [T.Map("mapkit:slow", (1,), "int64")]}
FORKING = {"label": [T.Map("mapkit:forks_and_is_slow", (1,), "int64")]}
ENDED = "this Loader was closed, or another iteration of it begun, by another thread"


def loader_of(path: Path, fields: Any = SLOW, **options: Any) -> Loader:
    """One step a slot, so that a batch is awaited for about a second."""
    loader = Loader(path, 4, fields, shuffle="sequential", isolate=True, **options)
    loader._producer.steps = 1
    return loader


def soon(what: Callable[[], Any]) -> threading.Thread:
    """Do something in another thread while this one awaits a batch."""

    def run() -> None:
        time.sleep(0.5)
        what()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("engine", "fields"), [("process", SLOW), ("process", FORKING), ("thread", SLOW), ("inline", SLOW)], ids=str
)
def test_closed_while_a_batch_is_awaited(numbers: Path, engine: str, fields: Any) -> None:
    loader = loader_of(numbers, fields, engine=engine)
    closing = soon(loader.close)
    with pytest.raises(LfdataError, match=ENDED):
        for _ in loader:
            pass
    closing.join()
    assert not loader._pipelines
    assert [batch["__index__"].tolist() for batch, _ in zip(loader, range(1), strict=False)] == [[0, 1, 2, 3]]
    loader.close()


def test_one_that_does_not_come_back_ends_it_all_itself(numbers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "CLOSE_SECONDS", 0.0)
    loader = loader_of(numbers, engine="inline")
    closing = soon(loader.close)
    with pytest.raises(LfdataError, match=ENDED):
        next(iter(loader))
    closing.join()
    assert not loader._pipelines


@pytest.mark.parametrize("engine", ["process", "thread", "inline"])
def test_closed_by_a_handler_of_signals(numbers: Path, engine: str) -> None:
    loader = loader_of(numbers, engine=engine)
    before = signal.signal(signal.SIGALRM, lambda *_: loader.close())
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(LfdataError, match=ENDED):
            for _ in loader:
                pass
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not loader._pipelines
    loader.close()


def test_closed_between_two_batches(numbers: Path) -> None:
    loader = Loader(numbers, 4, ["label"])
    batches = iter(loader)
    next(batches)
    closing = threading.Thread(target=loader.close)
    closing.start()
    closing.join()
    with pytest.raises(LfdataError, match=ENDED):
        next(batches)
    # In the same thread it is meant.
    batches = iter(loader)
    next(batches)
    loader.close()
    assert next(batches, None) is None


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("engine", ["process", "thread", "inline"])
def test_several_threads_that_iterate(numbers: Path, engine: str, shared: bool) -> None:
    loader = loader_of(numbers, engine=engine)
    batches, start, errors = iter(loader), threading.Barrier(3), []

    def run() -> None:
        start.wait()
        try:
            for _ in batches if shared else loader:
                pass
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(1)
    loader.close()
    for thread in threads:
        thread.join()
    assert len(errors) == 3 and all(type(error) is LfdataError for error in errors)


def test_an_iteration_may_go_from_thread_to_thread(numbers: Path) -> None:
    whole, loader, found = digests(Loader(numbers, 8, ["label"])), Loader(numbers, 8, ["label"]), []
    batches = iter(loader)
    while len(found) < len(whole):
        thread = threading.Thread(target=lambda: found.append(next(batches)))
        thread.start()
        thread.join()
    assert [digest(batch) for batch in found] == whole and next(batches, None) is None


def mappings() -> int:
    """Of slots, in this process."""
    return sum("memfd:lfdata-slots" in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.parametrize("engine", ["thread", "process", "inline"])
def test_slots_go_with_their_loader_without_the_garbage_collector(numbers: Path, engine: str) -> None:
    gc.collect()
    before = mappings()
    gc.disable()
    try:
        for _ in range(3):
            one = Loader(numbers, 4, engine=engine)
            assert len(list(itertools.islice(one, 2))) == 2
            # Leaving an iteration ends what was under way; another one begins anew.
            for _ in one:
                break
            one.close()
            del one, _
            assert mappings() == before
    finally:
        gc.enable()
