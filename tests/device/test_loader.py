"""Batches that come by way of a device are the loader's own, in every order of events; nothing is reused too early."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import batchkit
import pytest
import torch
from latedevice import LateBackend, unheld

import lfdata.transforms as T
from lfdata import DeviceLoader, Loader
from lfdata.device import RegistrationWarning
from lfdata.errors import DecoderError, DeviceError, LfdataError, LimitError, OptionError, SampleError

# A megabyte a batch, so that each has a slot of its own.
PICTURES: dict[str, Any] = {"image": [T.RandomResizedCrop(224)], "label": None}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "pictures": ("pictures", {"fields": PICTURES}),
    "pictures in a process": ("pictures", {"fields": PICTURES, "engine": "process", "threads": 2}),
    "pictures in threads": ("pictures", {"fields": PICTURES, "engine": "thread", "threads": 2}),
    "every kind": ("complete", {"fields": ["ids", "sound", "box", "points", "label", "caption", "blob"], "engine": "inline"}),
    "micro-batches": ("numbers", {"accumulate": 2}),
    "parts": (
        "complete",
        {"fields": ["ids", "sound", "picture", "label"], "max_bytes": 26_000, "over": "split", "engine": "thread"},
    ),
    "packed": ("numbers", {"fields": ["ids"], "packing": {"field": "ids", "window": 32, "capacity": 9}}),
}
Make = Callable[..., LateBackend]


def on(loader: Loader, backend: LateBackend, **options: Any) -> DeviceLoader:
    return DeviceLoader(loader, _backend=backend, **options)


def consumed(loader: DeviceLoader, backend: LateBackend, found: list[str], hold: int = 1, most: int = 1 << 30) -> None:
    """An epoch, as a device consumes it: batches are looked at later, when the host has long gone on and holds others."""
    kept: list[dict[str, torch.Tensor]] = []
    for number, batch in enumerate(loader):
        readers = {name: unheld(value) for name, value in batch.items()}
        backend.consumer_stream.late(
            lambda readers=readers: found.append(batchkit.digest({name: read() for name, read in readers.items()}))  # type: ignore[misc]
        )
        kept = [*kept, batch][-hold:]
        del batch
        if number + 1 == most:
            break


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("copies", "consumer"), [(0.0, 0.0), (0.01, 0.0), (0.0, 0.02), (0.01, 0.02)])
def test_every_byte_is_the_loaders(
    kind: str, copies: float, consumer: float, request: pytest.FixtureRequest, late: Make
) -> None:
    """Over two epochs, whoever is slow. A slot or a place that came back too early would have other bytes by the time they are looked at."""
    name, options = KINDS[kind]
    path, backend = request.getfixturevalue(name), late(copies, consumer)
    plain = batchkit.digests(Loader(path, 8, seed=5, **options), 2)
    found: list[str] = []
    with_device = on(Loader(path, 8, seed=5, **options), backend)
    for _ in range(2):
        consumed(with_device, backend, found)
    backend.consumer_stream.finish()
    assert found == plain
    stats = with_device.stats()["device"]
    assert stats["grown"] == 0 and 0 <= stats["batches"] - len(plain) <= 2 and stats["copied_bytes"] > 0
    assert with_device.stats()["copied"] == 0, "a batch was copied out of its slot on the host"
    with_device.close()
    assert not backend.registered


def test_memory_is_reserved_once(pictures: Path, late: Make) -> None:
    backend = late(0.002, 0.002)
    loader = on(Loader(pictures, 8, PICTURES), backend, ahead=3)
    found: list[str] = []
    consumed(loader, backend, found)
    after_one, places = backend.allocations, loader.stats()["device"]["places"]
    for _ in range(6):
        consumed(loader, backend, found)
    assert backend.allocations == after_one and places == 5
    assert backend.registrations == 1
    assert loader.stats()["device"]["extra"] == 0
    loader.close()


@pytest.mark.parametrize("hold", [1, 3])
def test_a_consumer_that_holds_some_batches_has_places_for_them(pictures: Path, late: Make, hold: int) -> None:
    backend = late()
    loader = on(Loader(pictures, 4, PICTURES), backend, hold=hold)
    found: list[str] = []
    consumed(loader, backend, found, hold=hold)
    assert loader.stats()["device"]["extra"] == 0 and loader.stats()["device"]["places"] == 3 + hold
    loader.close()


def test_batches_that_are_kept_never_change(pictures: Path, late: Make) -> None:
    backend = late(0.001)
    plain = batchkit.digests(Loader(pictures, 4, PICTURES), 2)
    loader = on(Loader(pictures, 4, PICTURES), backend)
    kept = [batch for _ in range(2) for batch in loader]
    loader.close()
    backend.consumer_stream.finish()
    assert [batchkit.digest(batch) for batch in kept] == plain
    assert loader.stats()["device"]["extra"] == 24 - 4
    del loader
    gc.collect()
    assert [batchkit.digest(batch) for batch in kept] == plain


def test_a_view_alone_keeps_its_place(pictures: Path, late: Make) -> None:
    backend = late()
    loader = on(Loader(pictures, 8, PICTURES), backend, ahead=1)
    batches = iter(loader)
    row = next(batches)["image"][3, 2:]
    backend.copies.finish()
    before = row.clone()
    for _ in batches:
        backend.copies.finish()
    assert torch.equal(row, before)
    loader.close()


def test_copies_are_ahead_but_not_further_than_asked(pictures: Path, late: Make) -> None:
    backend = late()
    loader = on(Loader(pictures, 4, PICTURES, engine="inline"), backend, ahead=2)
    batches = iter(loader)
    for taken in range(1, 6):
        next(batches)
        backend.copies.finish()
        assert loader.stats()["device"]["batches"] <= taken + 2
    assert loader.stats()["device"]["batches"] > 5
    loader.close()


def test_a_bound_in_bytes(pictures: Path, late: Make) -> None:
    backend = late()
    loader = on(Loader(pictures, 8, PICTURES), backend)
    found: list[str] = []
    consumed(loader, backend, found)
    size = int(loader.forecast(1).place[0])
    loader.close()
    bounded = on(Loader(pictures, 8, PICTURES), backend, ahead=4, max_bytes=2 * size)
    again: list[str] = []
    consumed(bounded, backend, again)
    backend.consumer_stream.finish()
    assert again == found and bounded.stats()["device"]["places"] == 2 and bounded.stats()["device"]["bytes"] <= 2 * size
    bounded.close()
    small = on(Loader(pictures, 8, PICTURES), backend, max_bytes=2 * size - 1)
    with pytest.raises(LimitError, match="do not hold 2 batches"):
        next(iter(small))
    small.close()


def test_a_later_epoch_beyond_the_bound_is_told_after_the_batches_before_it(sets: Path, late: Make) -> None:
    """Though room for it is reserved while some of those are still ahead: a long row that the first epoch leaves out."""
    options: dict[str, Any] = {"fields": ["ids"], "seed": 1, "engine": "inline"}
    order = Loader(batchkit.write_numbers(sets / "short", 38), 8, **options)
    epochs = [{index for batch in order for index in batch["__index__"].tolist()} for _ in range(2)]
    large = min(epochs[1] - epochs[0])
    path = batchkit.write_numbers(sets / "one-long", 38, lengths=[5000 if number == large else 5 for number in range(38)])
    plain = batchkit.digests(Loader(path, 8, **options))
    backend, found = late(), list[str]()
    bounded = on(Loader(path, 8, **options), backend, ahead=4, max_bytes=8192)
    consumed(bounded, backend, found)
    backend.consumer_stream.finish()
    assert found == plain and len(found) == 4 and bounded.state_dict()["epoch"] == 1
    assert bounded.stats()["device"]["places"] > 3
    with pytest.raises(LimitError, match="do not hold 2 batches"):
        next(iter(bounded))
    bounded.close()


def test_a_batch_beyond_what_was_looked_at_makes_the_ring_grow(
    numbers: Path, late: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lfdata.device.forecast.ROWS_LOOKED_AT", 8)
    monkeypatch.setattr("lfdata.device.forecast.ALIGN", 8)
    backend, options = late(0.001, 0.002), {"fields": ["ids"], "shuffle": "sequential", "where": None}
    lengths = [1 + row // 4 for row in range(64)]
    path = batchkit.write_numbers(numbers.parent / "longer", 64, lengths=lengths)
    plain = batchkit.digests(Loader(path, 4, **options), 2)
    loader = on(Loader(path, 4, **options), backend)
    found: list[str] = []
    for _ in range(2):
        consumed(loader, backend, found)
    backend.consumer_stream.finish()
    assert found == plain and 0 < loader.stats()["device"]["grown"] < 16
    loader.close()


# -- state ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["pictures", "pictures in a process", "micro-batches", "packed"])
def test_states_are_those_of_the_plain_loader(kind: str, request: pytest.FixtureRequest, late: Make) -> None:
    name, options = KINDS[kind]
    path, backend = request.getfixturevalue(name), late(0.001)
    plain = Loader(path, 8, seed=5, **options)
    loader = on(Loader(path, 8, seed=5, **options), backend, ahead=3)
    for _ in range(2):
        pairs = zip(plain, loader, strict=True)
        for ours, theirs in pairs:
            assert (loader.state_dict(), loader.epoch) == (plain.state_dict(), plain.epoch)
            assert torch.equal(loader.rows["__index__"], ours["__index__"]) and theirs.keys() == ours.keys()
        assert loader.state_dict() == plain.state_dict()
    plain.close()
    loader.close()


@pytest.mark.parametrize("kind", ["pictures", "micro-batches", "packed"])
def test_the_rest_is_what_the_uninterrupted_run_gives(kind: str, request: pytest.FixtureRequest, late: Make) -> None:
    """Left after any number of batches, and gone on with from the state, by the same loader or another one, on a device or not."""
    name, options = KINDS[kind]
    path, backend, draw = request.getfixturevalue(name), late(), random.Random(kind)
    options = {"engine": "inline", **options}
    whole = batchkit.digests(Loader(path, 8, seed=5, **options), 3)
    found: list[str] = []
    loader, state = on(Loader(path, 8, seed=5, **options), backend), None
    while len(found) < len(whole):
        if draw.random() < 0.5:
            loader.close()
            loader = on(Loader(path, 8, seed=5, **options), backend, ahead=draw.choice([0, 1, 4]))
        if state is not None:
            loader.load_state_dict(state)
        for _ in range(draw.randint(1, 2)):
            iter(loader)
        left = min(draw.randint(1, 5), len(whole) - len(found))
        consumed(loader, backend, found, most=left)
        backend.consumer_stream.finish()
        state = loader.state_dict()
        assert found == whole[: len(found)]
    loader.close()


@pytest.mark.parametrize("taken", [0, 1, 5, 6])
def test_what_comes_after_leaving_is_what_the_plain_loader_gives(pictures: Path, late: Make, taken: int) -> None:
    """The same epoch anew, or the next one if all batches were taken."""

    def left(loader: Any, then: str, finish: Callable[[], None]) -> list[str]:
        batches = iter(loader)
        for _ in range(taken):
            next(batches)
        if then == "close":
            batches.close()
        elif then == "epoch":
            loader.set_epoch(1)
        state = loader.state_dict()
        found = []
        for batch in loader:
            finish()
            found.append(batchkit.digest(batch))
        loader.close()
        return [repr(state), *found]

    for then in ("close", "again", "epoch"):
        options: dict[str, Any] = {"fields": PICTURES, "seed": 3}
        plain = left(Loader(pictures, 8, **options), then, lambda: None)
        backend = late()
        assert left(on(Loader(pictures, 8, **options), backend), then, backend.copies.finish) == plain, then


def test_a_second_iteration_ends_the_first(pictures: Path, late: Make) -> None:
    loader = on(Loader(pictures, 8, PICTURES), late())
    first = iter(loader)
    next(first)
    second = iter(loader)
    next(second)
    assert next(first, None) is None
    assert len(list(second)) == 5
    loader.close()


# -- ends and faults ------------------------------------------------------------------------------------------------------


def test_an_error_comes_in_its_turn(sets: Path, late: Make) -> None:
    """Batches were taken ahead; the bad one stops the run after those before it."""
    path = batchkit.write_pictures(sets / "one-bad", 32, bad=[19])
    options: dict[str, Any] = {"fields": {"image": [T.RandomResizedCrop(330)]}, "shuffle": "sequential"}
    for engine in ("inline", "thread", "process"):
        backend, found = late(), list[int]()
        loader = on(Loader(path, 4, engine=engine, **options), backend, ahead=3)
        with pytest.raises(SampleError, match="p19"):
            for _ in loader:
                found += loader.rows["__index__"].tolist()
        assert found == list(range(16))
        assert loader.state_dict()["samples"] == 16
        assert not backend.registered, "something stayed"
        loader.close()


def test_a_decoder_that_is_killed_is_told_and_the_loader_can_begin_again(pictures: Path, late: Make) -> None:
    backend = late()
    plain = batchkit.digests(Loader(pictures, 8, PICTURES))
    loader = on(Loader(pictures, 8, PICTURES, engine="process", isolate=True, threads=1), backend, ahead=1)
    batches = iter(loader)
    next(batches)
    engine = loader.loader._pipelines[0]._engine
    for decoder in engine._decoders:  # type: ignore[attr-defined]
        decoder.process.kill()
        decoder.process.wait()
    with pytest.raises(DecoderError, match="SIGKILL"):
        for _ in batches:
            pass
    assert not backend.registered
    found: list[str] = []
    consumed(loader, backend, found)
    backend.consumer_stream.finish()
    assert found == plain and backend.registrations == 2
    loader.close()


def test_a_consumer_that_fails_leaves_nothing(pictures: Path, late: Make) -> None:
    backend = late(0.005)
    loader = on(Loader(pictures, 8, PICTURES, engine="process"), backend)
    with pytest.raises(ZeroDivisionError):
        for _ in loader:
            raise ZeroDivisionError
    gc.collect()
    assert not backend.registered and not loader.loader._pipelines
    loader.close()


def test_a_consumer_that_stops_for_long_goes_on(pictures: Path, late: Make) -> None:
    """Longer than a decoder may be silent, and than one is taken for stopped."""
    backend = late()
    plain = batchkit.digests(Loader(pictures, 8, PICTURES))
    loader = on(Loader(pictures, 8, PICTURES, engine="process", stall_seconds=1.0), backend)
    found = []
    for number, batch in enumerate(loader):
        backend.copies.finish()
        found.append(batchkit.digest(batch))
        if number == 1:
            time.sleep(3.5)
    assert found == plain
    loader.close()


def test_a_refused_registration_is_told_and_changes_nothing_else(pictures: Path, late: Make) -> None:
    plain = batchkit.digests(Loader(pictures, 8, PICTURES))
    backend = late(0.002, refuse="no more locked memory")
    loader, found = on(Loader(pictures, 8, PICTURES), backend), list[str]()
    with pytest.warns(RegistrationWarning, match=r"no more locked memory.*ulimit -l.*raise it.*memlock"):
        consumed(loader, backend, found)
    backend.consumer_stream.finish()
    stats = loader.stats()["device"]
    assert found == plain
    assert (stats["registered"], stats["refused"]) == (0, "no more locked memory")
    assert stats["pageable"] == stats["batches"] >= 6
    loader.close()


def test_memory_stays_mapped_until_it_is_unregistered(pictures: Path, late: Make) -> None:
    """The loader is closed by somebody else, and its slots have gone by then."""
    backend = late(0.01)
    inner = Loader(pictures, 8, PICTURES, engine="process")
    loader = on(inner, backend)
    batches = iter(loader)
    batch = next(batches)
    inner.close()
    gc.collect()
    assert backend.registered
    loader.close()
    assert not backend.registered
    assert batch["image"].shape == (8, 224, 224, 3)


def test_waits_for_copies_are_told_to_the_feedback(pictures: Path, late: Make) -> None:
    """Copies of 50 ms: the device waits for them, and that is whose fault it is."""
    backend = late(copies=0.05)
    loader = on(Loader(pictures, 8, PICTURES, engine="process", threads=1, feedback="wait"), backend)
    for _ in range(4):
        for _ in loader:
            backend.consumer_stream.finish()
    found = loader.stats()
    assert found["device"]["waited"] > 0.2
    assert found["feedback"]["verdict"] == "copy", found["feedback"]
    loader.close()


def test_feedback_looks_at_the_gpu_that_the_batches_go_to(pictures: Path, late: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int | None] = []
    monkeypatch.setattr("lfdata.loader.feedback.current_gpu", asked.append)
    plain = Loader(pictures, 8, PICTURES, engine="process", threads=1, feedback=True)
    next(iter(plain))
    plain.close()
    assert set(asked) == {None}
    asked.clear()
    backend = late()
    backend.device = torch.device("cuda", 3)
    loader = on(Loader(pictures, 8, PICTURES, engine="process", threads=1, feedback=True), backend)
    for _ in loader:
        backend.consumer_stream.finish()
    loader.close()
    assert set(asked) == {3}


# -- options --------------------------------------------------------------------------------------------------------------


def test_on_the_cpu_these_are_the_loaders_batches(pictures: Path) -> None:
    plain = batchkit.digests(Loader(pictures, 8, PICTURES), 2)
    loader = DeviceLoader(Loader(pictures, 8, PICTURES), "cpu")
    found, states = [], []
    for _ in range(2):
        for batch in loader:
            found.append(batchkit.digest(batch))
            states.append(loader.state_dict()["samples"])
            assert loader.rows["__index__"] is batch["__index__"]
    assert found == plain and states == [8, 16, 24, 32, 40, 48] * 2
    assert loader.stats()["device"] is None and len(loader) == 6
    batches = iter(loader)
    next(batches)
    del batches
    assert not loader.loader._pipelines, "the decoder stayed"
    loader.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_an_error_only_if_it_is_asked_for(pictures: Path) -> None:
    with pytest.raises(
        DeviceError, match=r"device 'cuda' was asked for.*finds no GPU\. Use device='cpu', or look with nvidia-smi"
    ):
        DeviceLoader(Loader(pictures, 8, PICTURES))
    DeviceLoader(Loader(pictures, 8, PICTURES), "cpu").close()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"device": "mps"}, "there are cpu and cuda"),
        ({"device": "gpu7"}, "device 'gpu7'"),
        ({"ahead": -1}, "ahead"),
        ({"hold": 0}, "hold"),
        ({"ahead": 1.5}, "whole number"),
        ({"max_bytes": 0}, "max_bytes"),
        ({"max_bytes": "much"}, "max_bytes is a number of bytes"),
        ({"device": None}, "device None: the name of a device is wanted"),
        ({"device": True}, "device True"),
        ({"loader": "path"}, "loader is an lfdata.Loader.*not 'path'"),
    ],
)
def test_options_that_make_no_sense(pictures: Path, options: dict[str, Any], match: str) -> None:
    with pytest.raises(OptionError, match=match):
        DeviceLoader(**{"loader": Loader(pictures, 8, PICTURES), "device": "cpu", **options})


def test_a_bound_may_be_written_with_its_unit(pictures: Path, late: Make) -> None:
    loader = on(Loader(pictures, 8, PICTURES), late(), max_bytes="4KB")
    with pytest.raises(LimitError, match=r"4,000"):
        loader.forecast(1)
    loader.close()


# -- threads --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["cpu", "late"])
def test_a_batch_that_another_thread_awaits_is_not_taken(pictures: Path, where: str, late: Make) -> None:
    inner = Loader(pictures, 8, PICTURES, engine="inline")
    backend = late()
    loader = DeviceLoader(inner, "cpu") if where == "cpu" else on(inner, backend)
    batches, inside, go = iter(loader), threading.Event(), threading.Event()
    plain = inner._producer

    class Slow:
        def __getattr__(self, name: str) -> Any:
            if threading.current_thread() is other:
                inside.set()
                assert go.wait(60)
            return getattr(plain, name)

    found: list[Any] = []
    other = threading.Thread(target=lambda: found.append(next(batches)))
    inner._producer = Slow()  # type: ignore[assignment]
    other.start()
    assert inside.wait(60)
    for use in (lambda: next(batches), lambda: iter(loader), lambda: loader.set_epoch(0), batches.close):  # type: ignore[attr-defined]
        with pytest.raises(LfdataError, match="another thread is taking a batch of this DeviceLoader: one thread uses"):
            use()
    go.set()
    other.join(60)
    inner._producer = plain
    backend.copies.finish()
    assert [batchkit.digest(one) for one in found] == batchkit.digests(Loader(pictures, 8, PICTURES))[:1]
    loader.close()


@pytest.mark.parametrize("where", ["cpu", "late"])
def test_closed_while_a_batch_is_awaited(numbers: Path, where: str, late: Make) -> None:
    inner = Loader(
        numbers, 4, {"label": [T.Map("mapkit:slow", (1,), "int64")]}, shuffle="sequential", isolate=True, engine="thread"
    )
    inner._producer.steps = 1
    loader = DeviceLoader(inner, "cpu") if where == "cpu" else on(inner, late())
    asked = threading.Event()

    def close() -> None:
        assert asked.wait(60)
        time.sleep(0.3)
        loader.close()

    closing = threading.Thread(target=close)
    closing.start()
    with pytest.raises(LfdataError, match="was closed, or another iteration of it begun, by another thread"):
        for _ in iter_after(asked, loader):
            pass
    closing.join(60)
    assert not closing.is_alive() and not inner._pipelines
    assert next(iter(loader))["__index__"].tolist() == [0, 1, 2, 3]
    loader.close()


def copied(batch: dict[str, torch.Tensor], backend: LateBackend) -> str:
    """What is in a batch, once it is copied."""
    backend.copies.finish()
    return batchkit.digest({name: value.clone() for name, value in batch.items()})


@pytest.mark.parametrize("engine", ["inline", "thread"])
@pytest.mark.parametrize("at", ["copy", "memory", "record"])
def test_closed_by_a_handler_while_a_batch_is_taken(pictures: Path, late: Make, engine: str, at: str) -> None:
    """The batch that was being taken is the last one, and counts."""
    backend = late()
    loader = on(Loader(pictures, 4, PICTURES, seed=3, engine=engine, threads=1), backend, ahead=0)
    plain = batchkit.digests(Loader(pictures, 4, PICTURES, seed=3))
    backend_does, left = getattr(backend, at), 0 if at == "memory" else 2

    def interrupted(*arguments: Any) -> Any:
        nonlocal left
        if threading.current_thread() is threading.main_thread():
            left -= 1
            if left == -1:
                loader.close()
        return backend_does(*arguments)

    setattr(backend, at, interrupted)
    found = [copied(batch, backend) for batch in loader]
    assert left < 0 and not backend.registered
    assert found == plain[: len(found)] and len(found) == (0 if at == "memory" else 3)
    state = loader.state_dict()
    assert state["samples"] == 4 * len(found) and loader.stats()["slots"] == 0
    # It goes on from there.
    loader.load_state_dict(state)
    assert [copied(batch, backend) for batch in loader] == plain[len(found) :]
    loader.close()


def iter_after(event: threading.Event, loader: DeviceLoader) -> Any:
    """An iteration that is told about."""
    batches = iter(loader)
    event.set()
    return batches


@pytest.mark.parametrize("end", ["close", "iter", "set_epoch"])
def test_an_iteration_that_another_thread_ends_is_told(pictures: Path, end: str, late: Make) -> None:
    loader = on(Loader(pictures, 8, PICTURES, engine="inline"), late())
    batches = iter(loader)
    next(batches)
    ways = {"close": loader.close, "iter": lambda: iter(loader), "set_epoch": lambda: loader.set_epoch(1)}
    other = threading.Thread(target=ways[end])
    other.start()
    other.join(60)
    with pytest.raises(LfdataError, match="this DeviceLoader was closed, or another iteration of it begun, by another thread"):
        next(batches)
    loader.close()


def test_importing_lfdata_imports_neither_torch_nor_the_device_path() -> None:
    import subprocess
    import sys

    script = "import sys, lfdata; sys.exit(bool({'torch', 'lfdata.device'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=60).returncode == 0
