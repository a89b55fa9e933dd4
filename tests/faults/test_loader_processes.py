"""Fork, spawn and forkserver; more ranks and decoders than samples; going on from every step with any of them."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from killkit import gone, in_child
from loaderkit import BATCH, ENGINES, STEPS, decoders, expected, loader, nothing_left, numbers, whole
from loaderkit import dataset as make_dataset

from lfdata import Loader
from lfdata.errors import LfdataError


@pytest.fixture
def dataset(place: Path) -> Path:
    return make_dataset(place)


def use(path: str, engine: str) -> None:
    """In a process of multiprocessing's: a loader of its own."""
    one = loader(Path(path), engine=engine)
    assert whole(one) == expected()
    one.close()


def busy_thread() -> threading.Event:
    """A thread that does something with torch and numpy until told to stop."""
    stop = threading.Event()

    def work() -> None:
        import torch

        while not stop.is_set():
            torch.ones(64, 64) @ torch.ones(64, 64)
            np.sort(np.ones(1000))
            time.sleep(0.001)

    threading.Thread(target=work, daemon=True).start()
    return stop


def started(path: Path, method: str, engine: str) -> None:
    stop = busy_thread()
    one = loader(path, engine=engine)
    batches = iter(one)
    next(batches)
    try:
        process = multiprocessing.get_context(method).Process(target=use, args=(str(path), engine))
        process.start()
        process.join(60)
        assert process.exitcode == 0
    finally:
        stop.set()
    # The one here does not mind.
    assert [numbers(batch) for batch in batches] == expected(1)
    one.close()


@pytest.mark.filterwarnings("ignore:This process")
@pytest.mark.parametrize("engine", ENGINES)
def test_forked_after_threads_exist(dataset: Path, engine: str) -> None:
    started(dataset, "fork", engine)


@pytest.mark.fault
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("engine", ENGINES)
def test_spawned_after_threads_exist(dataset: Path, method: str, engine: str) -> None:
    started(dataset, method, engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_forked_child_may_not_use_its_parents_loader(dataset: Path, engine: str) -> None:
    with nothing_left():
        one = loader(dataset, engine=engine)
        batches = iter(one)
        next(batches)

        def body() -> None:
            for attempt in (lambda: next(batches), lambda: next(iter(one))):
                with pytest.raises(LfdataError, match="forked"):
                    attempt()
            one.close()

        # Whether it is refused, closes it, or just ends: the parent's goes on, with the same decoder.
        pids = decoders(one) if engine == "process" else []
        assert in_child(body) == 0
        child = os.fork()
        if not child:
            try:
                one = batches = None
                import gc

                gc.collect()
            finally:
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert not gone(pids) or not pids
        assert [numbers(batch) for batch in batches] == expected(1)
        one.close()
        one = batches = None


def test_closing_while_a_forked_child_lives(dataset: Path) -> None:
    """The child has a copy of the socket, which keeps nothing alive."""
    one = loader(dataset)
    batches = iter(one)
    next(batches)
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    pids = decoders(one)
    began = time.monotonic()
    one.close()
    assert time.monotonic() - began < 1
    assert gone(pids)
    os.close(writer)
    os.waitpid(child, 0)
    os.close(reader)


@pytest.mark.parametrize("tail", ["pad", pytest.param("drop_last", marks=pytest.mark.fault)])
@pytest.mark.parametrize("count", [0, 1, 7])
def test_fewer_samples_than_ranks_and_decoders(dataset: Path, count: int, tail: str) -> None:
    chosen = np.zeros(BATCH * STEPS, bool)
    chosen[[3, 14, 15, 92, 65, 35, 89][:count]] = True
    seen: list[int] = []
    lengths = set()
    with nothing_left():
        for rank in range(4):
            one = Loader(
                dataset, 4, ["label", "blob"], where=chosen, rank=rank, world_size=4, tail=tail, engine="process", processes=3
            )
            found = [batch for _ in range(2) for batch in one]
            lengths.add((len(one), len(found)))
            seen += [int(row) for batch in found for row in batch["label"][batch["__mask__"]] + 50]
            one.close()
            one = found = None
    whole_batches = -(-count // 4) if tail == "pad" else count // 4
    assert lengths == {(whole_batches, 2 * whole_batches)}
    if tail == "pad":
        assert sorted(seen) == sorted(2 * np.flatnonzero(chosen).tolist())
    else:
        assert len(seen) == 2 * 4 * (count // 4) and set(seen) <= set(np.flatnonzero(chosen).tolist())


# -- going on ---------------------------------------------------------------------------------------------------------------

SAMPLES, GLOBAL = 100, 12
FIELDS = ["about", "ids", "label"]


def make(path: Path, rank: int, world: int, engine: str, processes: int, prefetch: int) -> Loader:
    return Loader(
        path,
        GLOBAL,
        FIELDS,
        seed=5,
        tail="pad",
        rank=rank,
        world_size=world,
        engine=engine,
        processes=processes,
        prefetch=prefetch,
    )


def content(batch: Any) -> dict[str, bytes]:
    """All bytes of a batch."""
    return {name: tensor.numpy().tobytes() for name, tensor in batch.items()}


def rows(batches: list[Any]) -> list[int]:
    """The samples of a step, rank after rank."""
    return [int(index) for batch in batches for index in batch["__index__"]]


def resumed(path: Path, combinations: list[tuple[int, str, int, int]]) -> None:
    """At every step of two epochs another world, engine, number of decoders and depth goes on: order and bytes as if nothing were."""
    straight = make(path, 0, 1, "inline", 1, 1)
    whole_run = [{name: tensor.clone() for name, tensor in batch.items()} for _ in range(2) for batch in straight]
    per_rank: dict[tuple[int, int], list[dict[str, bytes]]] = {}
    for world in {one[0] for one in combinations}:
        for rank in range(world):
            reference = make(path, rank, world, "inline", 1, 1)
            per_rank[world, rank] = [content(batch) for _ in range(2) for batch in reference]
    state, choices = straight_state(path), cycle(combinations)
    for step in range(len(whole_run)):
        world, engine, processes, prefetch = next(choices)
        states, batches = [], []
        for rank in range(world):
            one = make(path, rank, world, engine, processes, prefetch)
            one.load_state_dict(state)
            batch = next(iter_over(one))
            assert content(batch) == per_rank[world, rank][step]
            batches.append({name: tensor.clone() for name, tensor in batch.items()})
            states.append(one.state_dict())
            one.close()
        assert all(found == states[0] for found in states)
        assert rows(batches) == rows([whole_run[step]])
        state = states[0]


def straight_state(path: Path) -> dict[str, Any]:
    """The state before anything."""
    return make(path, 0, 1, "inline", 1, 1).state_dict()


def iter_over(one: Loader) -> Any:
    """Batches over the ends of epochs."""
    while True:
        yield from one


def test_going_on_at_every_step_with_another_world(dataset: Path) -> None:
    worlds = (1, 2, 3, 4, 6, 12)
    resumed(dataset, [(world, engine, 1, prefetch) for world in worlds for engine, prefetch in (("inline", 1), ("thread", 3))])


def test_going_on_with_decoder_processes(dataset: Path) -> None:
    resumed(dataset, [(1, "process", 3, 2), (1, "inline", 1, 1), (1, "thread", 1, 1), (1, "inline", 1, 1)])


@pytest.mark.fault
def test_going_on_with_decoder_processes_of_any_number(dataset: Path) -> None:
    choices = [(w, "process", p, f) for w in (1, 2, 4) for p in (1, 2, 3) for f in (1, 2, 5)]
    for start in range(0, len(choices), 9):
        resumed(dataset, choices[start : start + 9])


def test_processes_threads_and_depth_change_nothing(dataset: Path) -> None:
    reference = [content(batch) for batch in make(dataset, 1, 2, "inline", 1, 1)]
    for processes, prefetch in ((1, 1), (3, 4)):
        one = make(dataset, 1, 2, "process", processes, prefetch)
        assert [content(batch) for batch in one] == reference
        one.close()


def test_the_decoder_never_imports_torch(dataset: Path) -> None:
    code = "import sys, lfdata.loader.serve; sys.exit('torch' in sys.modules)"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=env, check=False).returncode == 0
    one = loader(dataset)
    batches = iter(one)
    next(batches)
    assert "libtorch" not in Path(f"/proc/{decoders(one)[0]}/maps").read_text()
    del batches
    one.close()


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="the system has no such policy")
def test_a_decoder_that_wakes_does_not_take_the_trainers_processor(dataset: Path) -> None:
    own = os.sched_getscheduler(0)
    one = loader(dataset)
    batches = iter(one)
    next(batches)
    threads = Path(f"/proc/{decoders(one)[0]}/task").iterdir()
    policies = {os.sched_getscheduler(int(thread.name)) for thread in threads}
    assert policies == {os.SCHED_BATCH} and os.sched_getscheduler(0) == own
    del batches
    one.close()
