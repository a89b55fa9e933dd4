"""The trainer is killed, interrupted or just ends: the decoder goes within seconds, nothing stays, and nobody else notices."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from killkit import children, gone, wait_until
from loaderkit import (
    BATCH,
    STEPS,
    Trainer,
    busy,
    census,
    decoders,
    engine_of,
    expected,
    gate,
    loader,
    numbers,
    script,
    shared_files,
    whole,
)
from loaderkit import dataset as make_dataset

Tell = Callable[[str], None]


@pytest.fixture
def dataset(place: Path) -> Path:
    return make_dataset(place)


@pytest.fixture
def door(place: Path, monkeypatch: Any) -> Path:
    return gate(place, monkeypatch)


# -- SIGKILL ----------------------------------------------------------------------------------------------------------------


def kill_trainer(place: Path, body: Callable[[Any, Tell], None], dataset: Path, stop: bool = False, **options: Any) -> None:
    before = shared_files()

    def run(tell: Tell) -> None:
        one = loader(dataset, **options)
        batches = iter(one)
        next(batches)
        tell(" ".join(map(str, decoders(one))))
        body(batches, tell)
        time.sleep(60)

    with Trainer(place, run) as trainer:
        pids = [int(pid) for pid in trainer.line().split()]
        assert trainer.line() == "there"
        if stop:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
        assert pids and not gone(pids)
        trainer.signal(signal.SIGKILL)
        assert trainer.end() == -signal.SIGKILL
        wait_until(lambda: gone(pids), 5)
        assert trainer.noise() == ""
    assert shared_files() == before


def test_killed_between_batches(dataset: Path, place: Path, door: Path) -> None:
    kill_trainer(place, lambda batches, tell: tell("there"), dataset, processes=2)


def test_killed_while_it_waits_and_the_decoder_works(dataset: Path, place: Path, door: Path) -> None:
    door.write_text("wait 30")

    def body(batches: Any, tell: Tell) -> None:
        next(batches)
        next(batches)
        tell("there")
        next(batches)

    kill_trainer(place, body, dataset)


@pytest.mark.fault
def test_killed_while_its_decoder_is_stopped(dataset: Path, place: Path, door: Path) -> None:
    kill_trainer(place, lambda batches, tell: tell("there"), dataset, stop=True)


def test_killed_while_a_child_of_its_lives_on(dataset: Path, place: Path, door: Path) -> None:
    """The child has a copy of the socket: the decoder must not take that for a living trainer."""

    def body(batches: Any, tell: Tell) -> None:
        child = os.fork()
        if not child:
            os.setpgid(0, 0)
            for _ in range(1200):
                if door.exists() or not door.parent.exists():
                    break
                time.sleep(0.05)
            os._exit(0)
        tell("there")

    try:
        kill_trainer(place, body, dataset)
    finally:
        door.touch()


@pytest.mark.fault
def test_killed_again_and_again_then_started_without_cleaning(dataset: Path, place: Path, door: Path) -> None:
    rng = random.Random(1)
    pids: list[int] = []

    def run(tell: Tell) -> None:
        while True:
            one = loader(dataset)
            for number, _ in enumerate(one):
                if not number:
                    tell(str(decoders(one)[0]))

    before = shared_files()
    for _ in range(2):
        with Trainer(place, run) as trainer:
            pids.append(int(trainer.line()))
            time.sleep(rng.random() * 0.3)
            trainer.signal(signal.SIGKILL)
            trainer.end()
            pids += [int(line) for line in trainer.told.read().split()]
    wait_until(lambda: gone(pids), 5)
    assert shared_files() == before
    one = loader(dataset)
    assert whole(one) == expected()
    one.close()


def test_one_rank_of_four_is_killed(place: Path, door: Path) -> None:
    dataset = make_dataset(place, BATCH * STEPS * 4)

    def rank(number: int) -> Callable[[Tell], None]:
        def run(tell: Tell) -> None:
            import lfdata.transforms as T
            from lfdata import Loader

            fields = {"about": [T.Map("loaderkit:slow", shape=(30_000,), dtype="float32")]}
            one = Loader(dataset, 40, fields, rank=number, world_size=4, shuffle="sequential", engine="process")
            seen = []
            for step, batch in enumerate(one):
                seen += numbers(batch)
                if step == 2:
                    tell("at step 2")
            assert seen == [step * 40 + number * 10 + row for step in range(10) for row in range(10)]
            one.close()

        return run

    trainers = [Trainer(place, rank(number)) for number in range(4)]
    try:
        for trainer in trainers:
            assert trainer.line() == "at step 2"
        pids = children(trainers[1].pid)
        assert len(pids) == 1
        trainers[1].signal(signal.SIGKILL)
        assert [trainer.end(30) for trainer in trainers] == [0, -signal.SIGKILL, 0, 0]
        wait_until(lambda: gone(pids), 5)
        assert [trainer.noise() for trainer in trainers] == [""] * 4
    finally:
        for trainer in trainers:
            trainer.__exit__()


# -- SIGINT -----------------------------------------------------------------------------------------------------------------


def interrupt(place: Path, body: Callable[[Tell], None], delay: float = 0.0, finalizers: bool = False) -> None:
    """Ctrl-C at a trainer's process group once it says "there"; then it has nothing that it had not before, and ends.

    Python swallows a KeyboardInterrupt that comes while a ``finalizer`` runs (a generator that is dropped by ``break`` closes in one) and
    says so on stderr; people press again.
    """

    def run(tell: Tell) -> None:
        before, interrupted = census(), False
        try:
            body(tell)
        except KeyboardInterrupt:
            interrupted = True
        tell(f"{time.monotonic()}")
        # Not before: the traceback has the loop's variables.
        after = census()
        assert after == before, (before, after)
        if interrupted:
            raise KeyboardInterrupt

    with Trainer(place, run) as trainer:
        pids = [int(pid) for pid in trainer.line().split()]
        assert trainer.line() == "there"
        time.sleep(delay)
        began = time.monotonic()
        trainer.signal(signal.SIGINT, group=True)
        lost = 0
        while finalizers and lost < 3 and not trainer.ended(3.0):
            lost += 1
            assert trainer.noise().count("Exception ignored in") == lost and "\nKeyboardInterrupt" in trainer.noise(), (
                trainer.noise()
            )
            began = time.monotonic()
            trainer.signal(signal.SIGINT, group=True)
        assert trainer.end(10) == 42, trainer.noise()
        assert lost or trainer.noise() == ""
        assert float(trainer.told.read()) - began < 5
        assert gone(pids)


def rest(seconds: float) -> None:
    """Sleep, in pieces: a signal that comes just before the call sleeps does not cut it short."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(0.1)


def batches_of(dataset: Path, tell: Tell, count: int, **options: Any) -> Any:
    """An iterator after some batches."""
    one = loader(dataset, **options)
    batches = iter(one)
    for _ in range(count):
        next(batches)
    tell(" ".join(map(str, decoders(one))) if options.get("engine") != "thread" else "")
    return batches


@pytest.mark.parametrize("engine", ["process", pytest.param("thread", marks=pytest.mark.fault)])
def test_interrupted_between_batches(dataset: Path, place: Path, door: Path, engine: str) -> None:
    def body(tell: Tell) -> None:
        batches = batches_of(dataset, tell, 2, engine=engine)
        for _ in batches:
            tell("there")
            rest(30)

    interrupt(place, body)


@pytest.mark.parametrize("engine", ["process", pytest.param("thread", marks=pytest.mark.fault)])
def test_interrupted_while_it_waits(dataset: Path, place: Path, door: Path, engine: str) -> None:
    door.write_text("wait 20")

    def body(tell: Tell) -> None:
        batches = batches_of(dataset, tell, 2, engine=engine)
        tell("there")
        if engine == "thread":
            # Two threads hang in the function: they are let go once the trainer has noticed.
            signal.signal(signal.SIGINT, lambda *_: (door.unlink(), signal.default_int_handler(signal.SIGINT, None)))
        next(batches)

    interrupt(place, body, delay=0.3)


@pytest.mark.parametrize("delay", [0.0, *(pytest.param(delay, marks=pytest.mark.fault) for delay in (0.02, 0.1))])
def test_interrupted_before_the_first_batch(dataset: Path, place: Path, door: Path, delay: float) -> None:
    door.write_text("wait 0")

    def body(tell: Tell) -> None:
        one = loader(dataset)
        tell("")
        tell("there")
        whole(one)

    interrupt(place, body, delay)


def test_interrupted_during_close(dataset: Path, place: Path, door: Path, monkeypatch: Any) -> None:
    from lfdata.loader import decoder

    wait, told = decoder.Decoder.wait, []

    def body(tell: Tell) -> None:
        batches = batches_of(dataset, tell, 2, processes=2)

        def waits(self: Any, seconds: float) -> Any:
            if not told:
                told.append(1)
                tell("there")
                rest(10)
            return wait(self, seconds)

        monkeypatch.setattr(decoder.Decoder, "wait", waits)
        batches.close()

    interrupt(place, body)


def random_interrupts(dataset: Path, place: Path, count: int, seed: int) -> None:
    """At any moment of opening, iterating, breaking off and closing, again and again."""
    rng = random.Random(seed)

    def body(tell: Tell) -> None:
        tell("")
        tell("there")
        for number in range(10_000):
            one = loader(dataset, prefetch=1 + number % 3, processes=1 + number % 2)
            for step, _ in enumerate(one):
                if step == number % 4:
                    break
            one.close()
            del one, _

    for _ in range(count):
        interrupt(place, body, rng.random(), finalizers=True)


def test_interrupted_at_random(dataset: Path, place: Path, door: Path) -> None:
    random_interrupts(dataset, place, 2, 1)


@pytest.mark.fault
def test_interrupted_at_random_often(dataset: Path, place: Path, door: Path) -> None:
    random_interrupts(dataset, place, 24, 2)


@pytest.mark.fault
def test_interrupted_as_it_starts_nothing_stays_in_a_process_that_goes_on(dataset: Path) -> None:
    """As in a notebook: Ctrl-C in the first milliseconds, caught, and on."""
    rng, threads, others = random.Random(3), threading.active_count(), set(children(os.getpid()))
    handler = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    came = 0
    try:
        for number in range(40):
            one = loader(dataset, prefetch=1 + number % 3)
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.0005, 0.03))
                while True:
                    whole(one)
            except KeyboardInterrupt:
                came += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            one.close()
            del one
    finally:
        signal.signal(signal.SIGALRM, handler)
    # Those of other tests (a fork server, say) are none of its.
    assert came == 40 and set(children(os.getpid())) <= others
    assert threading.active_count() == threads
    assert "memfd:lfdata-slots" not in Path("/proc/self/maps").read_text()


# -- the end of the program -------------------------------------------------------------------------------------------------

_ENDS = """
import os, sys, loaderkit
ones = [loaderkit.loader(sys.argv[1], "slow", engine=engine, prefetch=4) for engine in ("process", "thread")]
iterators = [iter(one) for one in ones]
kept = [next(one) for one in iterators]
print(*loaderkit.decoders(ones[0]))
"""


_LONG = [
    pytest.param(end, marks=pytest.mark.fault) for end in ("sys.exit(3)", "raise KeyboardInterrupt", "ones[0].me = iterators")
]


@pytest.mark.parametrize("end", ["", *_LONG])
def test_a_program_that_ends_while_it_iterates(dataset: Path, end: str) -> None:
    began = time.monotonic()
    ended = script(_ENDS + end, dataset)
    assert time.monotonic() - began < 60
    assert ended.returncode == {"sys.exit(3)": 3, "raise KeyboardInterrupt": -signal.SIGINT}.get(end, 0)
    lines = ended.stderr.splitlines()
    assert lines == [] if not end.startswith("raise") else lines[-1] == "KeyboardInterrupt" and len(lines) < 5, ended.stderr
    assert gone([int(ended.stdout)])


@pytest.mark.fault
def test_the_trainers_that_wait_are_really_waiting(dataset: Path, place: Path, door: Path) -> None:
    """The tests above rest on it: samples behind the gate are in work in the decoder."""
    door.write_text("wait 20")
    one = loader(dataset)
    batches = iter(one)
    assert [numbers(next(batches)) for _ in range(2)] == expected()[:2]
    wait_until(lambda: busy(one))
    assert engine_of(one)._in_work(engine_of(one)._decoders[0]).count("step") >= 1
    one.close()
