"""What the next batches take on the host and on the device is said before they are made, to the byte."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import batchkit
import numpy as np
import pytest
import torch
from latedevice import LateBackend

import lfdata.transforms as T
from lfdata import DeviceLoader, Loader
from lfdata.device import Images, ring
from lfdata.device.forecast import aligned
from lfdata.errors import LimitError
from lfdata.loader.slots import PAGE

Make = Callable[..., LateBackend]
# Pictures of their own size, recordings and tokens; pictures of one size that become bfloat16.
RAGGED: dict[str, Any] = {"picture": None, "sound": None, "ids": None, "image": [T.RandomResizedCrop(16)], "label": None}
OPS = {"image": Images(dtype="bfloat16")}
EPOCHS = 3
HOW: dict[str, dict[str, Any]] = {
    "full": {},
    "process": {"engine": "process"},
    "inline": {"engine": "inline"},
    "pad": {"tail": "pad"},
    "micro-batches": {"accumulate": 3},
    "a budget": {"max_bytes": 130_000},
    "parts": {"max_bytes": 32_000, "over": "split"},
    "parts with draws": {"max_bytes": 32_000, "over": "split", "ops": {"image": Images(dtype="bfloat16", crop=15, flip=0.5)}},
    "parts of micro-batches": {"max_bytes": 28_000, "over": "split", "accumulate": 2, "engine": "process"},
}


def make(path: Path, backend: LateBackend, ops: Any = OPS, **options: Any) -> DeviceLoader:
    loader = Loader(path, 6, RAGGED, **{"seed": 3, "engine": "thread", "threads": 1} | options)
    return DeviceLoader(loader, ops=ops, _backend=backend)


def without_end(loader: DeviceLoader) -> Iterator[dict[str, torch.Tensor]]:
    while True:
        yield from loader


class Seen:
    """What a loader's batches really take, in their order."""

    def __init__(self, loader: DeviceLoader, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device: list[dict[str, int]] = []
        self.ends: list[int] = []
        self.host: list[tuple[dict[str, int], int, int, int]] = []
        self.places: list[int] = []
        self.lent: list[int] = []
        transfer, ring = loader._transfer, loader._transfer.ring  # type: ignore[union-attr]
        begin, lend = transfer.begin, ring.lend  # type: ignore[union-attr]

        def begun(batch: Any) -> Any:
            sizes, found = {name: value.nbytes for name, value in batch.items()}, begin(batch)
            mapping, known = loader._taker.slots.memory().nbytes, transfer.registered  # type: ignore[union-attr]
            self.host.append((sizes, mapping, 0 if known.refused else known.size, transfer.staging))
            size = found.place.memory.numel()
            self.places.append(size * ring.count(size))
            return found

        def lent(place: Any, size: int, consumer: Any) -> Any:
            self.lent.append(size)
            return lend(place, size, consumer)

        monkeypatch.setattr(transfer, "begin", begun)
        monkeypatch.setattr(ring, "lend", lent)

    def add(self, batch: dict[str, torch.Tensor]) -> None:
        """A batch that was handed out: its tensors, and how far they reach in its place."""
        self.device.append({name: value.nbytes for name, value in batch.items()})
        filled = [value for value in batch.values() if value.nbytes]
        first = min(value.data_ptr() for value in filled)
        self.ends.append(max(aligned(value.data_ptr() - first + value.nbytes) for value in filled))


def compare(told: Any, seen: Seen) -> None:
    """Nothing is off by a byte."""
    count = len(seen.device)
    by_batch = [{name: int(values[n]) for name, values in told.device.items()} for n in range(count)]
    assert by_batch == seen.device
    assert told.place[:count].tolist() == seen.lent[:count]
    assert [end for end, size in zip(seen.ends, seen.lent, strict=True) if end > size] == []
    host = [{name: int(values[n]) for name, values in told.bytes.items()} for n in range(count)]
    assert host == [sizes for sizes, *_ in seen.host[:count]]
    for number, name in ((1, "slots"), (2, "registered"), (3, "staging")):
        assert told.reserved[name][:count].tolist() == [one[number] for one in seen.host[:count]], name
    assert told.reserved["ring"][:count].tolist() == seen.places[:count]


@pytest.mark.parametrize("how", HOW)
def test_every_byte_of_three_shuffled_epochs(complete: Path, late: Make, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = late(0.001, 0.001)
    loader = make(complete, backend, **HOW[how])
    told = loader.forecast(64 if how.startswith("parts") else EPOCHS * len(loader))
    assert set(told.epoch.tolist()) >= {0, 1}
    seen = Seen(loader, monkeypatch)
    for batch in itertools.islice(without_end(loader), len(told)):
        seen.add(batch)
        del batch
    compare(told, seen)
    # A forecast that always says the same would fail.
    assert len(set(told.place.tolist())) > 3
    side = 15 if "ops" in HOW[how] else 16
    assert (told.device["image"] * 16**2 == 2 * told.bytes["image"] * side**2).all() and told.device["image"].min() > 0
    assert all((told.device[name] == told.bytes[name]).all() for name in told.bytes if name != "image")
    if "__part__" in told.bytes:
        assert told.device["__part__"].max() > told.device["__part__"].min() and len(loader) > 6 * HOW[how].get("accumulate", 1)
    stats = loader.stats()["device"]
    assert stats["grown"] == stats["extra"] == 0
    loader.close()


@pytest.mark.parametrize("bits", [5, 64], ids=["room", "none"])
def test_what_is_reserved_is_what_there_is(complete: Path, late: Make, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the epoch that is under way, and of the next, whose largest batch is larger: by little, for which there is room."""
    monkeypatch.setattr(ring, "ROOM_BITS", bits)
    if bits == 64:
        monkeypatch.setattr("lfdata.loader.budget.ROOM", 1 << 60)
    backend = late()
    loader = make(complete, backend, max_bytes=130_000)
    told = loader.forecast(EPOCHS * len(loader))
    for epoch in range(EPOCHS):
        for number, _ in enumerate(loader):
            found = loader.stats()
            if number + 4 < len(loader):
                at = int(np.flatnonzero((told.epoch == epoch) & (told.batch == number))[0])
                reserved = {name: int(values[at]) for name, values in told.reserved.items()}
                there = {"slots": PAGE + found["slots"] * found["slot_bytes"], "registered": found["device"]["registered"]}
                assert there == {name: reserved[name] for name in there}
                assert found["device"]["staging"] == reserved["staging"]
                if number > 4:
                    assert found["device"]["bytes"] == reserved["ring"]
    assert len(set(told.reserved["ring"].tolist())) == (1 if bits == 5 else 2)
    assert (len(set(told.reserved["slots"].tolist())) > 1) == (bits == 64) and loader.stats()["device"]["grown"] == 0
    assert (loader.stats()["device"]["reservations"] > 1) == (bits == 64)
    loader.close()


def test_from_the_middle(complete: Path, late: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forecast begins with the first batch that is not copied yet, whatever is under way."""
    for taken in (1, 3, 5, 6, 7, 11):
        loader = make(complete, late(), engine="inline", max_bytes=130_000)
        seen, batches = Seen(loader, monkeypatch), without_end(loader)
        for _ in range(taken):
            seen.add(next(batches))
        ahead = len(seen.host)
        told = loader.forecast(12)
        for _ in range(ahead + len(told) - taken):
            seen.add(next(batches))
        for found in (seen.device, seen.ends, seen.lent, seen.host, seen.places):
            del found[:ahead]  # type: ignore[attr-defined]
        compare(told, seen)
        loader.close()


def test_batches_beyond_what_was_looked_at(numbers: Path, late: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lfdata.device.forecast.ROWS_LOOKED_AT", 8)
    monkeypatch.setattr("lfdata.device.forecast.ALIGN", 8)
    path = batchkit.write_numbers(numbers.parent / "grows", 64, lengths=[1 + row // 4 for row in range(64)])
    loader = DeviceLoader(Loader(path, 4, ["ids"], shuffle="sequential"), _backend=late())
    told, seen = loader.forecast(32), Seen(loader, monkeypatch)
    for batch in itertools.islice(without_end(loader), 32):
        seen.add(batch)
    compare(told, seen)
    assert loader.stats()["device"]["grown"] > 0 and len(set(told.reserved["ring"][:16].tolist())) > 2
    loader.close()


def test_slots_that_cannot_be_registered(complete: Path, late: Make) -> None:
    loader = make(complete, late(refuse="no more locked memory"))
    assert (loader.forecast(4).reserved["registered"] > 0).all(), "nobody knows yet"
    batches = iter(loader)
    with pytest.warns(UserWarning, match="no more locked memory"):
        next(batches)
    told = loader.forecast(4)
    assert told.reserved["registered"].tolist() == [0] * 4 and (told.reserved["slots"] > 0).all()
    loader.close()


def test_limits_that_do_not_hold_a_batch_are_told(complete: Path, late: Make) -> None:
    loader = DeviceLoader(Loader(complete, 6, RAGGED, engine="inline"), ops=OPS, _backend=late(), max_bytes=20_000)
    with pytest.raises(LimitError, match="do not hold 2 batches"):
        loader.forecast(4)
    loader.close()


def test_on_the_cpu(complete: Path) -> None:
    loader = DeviceLoader(Loader(complete, 6, RAGGED, engine="inline"), "cpu", ops=OPS)
    told = loader.forecast(2 * len(loader))
    found = [{name: value.nbytes for name, value in batch.items()} for _ in range(2) for batch in loader]
    assert [{name: int(values[n]) for name, values in told.device.items()} for n in range(len(told))] == found
    assert not told.place.any() and not told.reserved["ring"].any() and not told.reserved["registered"].any()
    stats = loader.stats()
    assert set(told.reserved["slots"].tolist()) == {PAGE + stats["slots"] * stats["slot_bytes"]}
    loader.close()


def test_a_loader_alone_says_nothing_of_a_device(complete: Path) -> None:
    told = Loader(complete, 6, RAGGED, engine="inline").forecast(4)
    assert told.device == told.reserved == {} and len(told.place) == 0 and told.total.min() > 0


def test_no_batches(complete: Path, late: Make) -> None:
    loader = make(complete, late())
    told = loader.forecast(0)
    assert len(told) == 0 and all(len(values) == 0 for values in (*told.device.values(), *told.reserved.values(), told.place))
    loader.close()
