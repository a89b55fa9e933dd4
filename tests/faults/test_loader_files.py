"""Files that are truncated, deleted, replaced or unreadable under a running loader: typed errors that name them, never a dead process."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from faultkit import run, synthetic
from killkit import in_child
from loaderkit import BATCH, ENGINES, STEPS, dataset, decoders, expected, gate, loader, nothing_left, numbers, whole

from lfdata import Loader
from lfdata.errors import ChangedError, FormatError, LfdataError, StorageError, TruncatedError

# Starting decoders is left to the long tests where it adds little.
QUICK_ENGINES = ("thread", "inline", pytest.param("process", marks=pytest.mark.fault))
FIELDS: dict[str, Any] = {"about": None, "blob": None, "ids": None, "label": None}


def shards(target: Path) -> list[Path]:
    """The shard files."""
    return sorted(target.glob("*.lfd"))


def plain(target: Path, engine: str, **options: Any) -> Loader:
    """All kinds of fields, one sample a batch and few steps a slot, so that reading goes on for long."""
    return Loader(target, 1, FIELDS, engine=engine, **options)


def survives(body: Callable[[], None]) -> None:
    """Run in a child: a SIGBUS would be the end of it."""
    assert in_child(body) == 0


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("left", [pytest.param(0.0, marks=pytest.mark.fault), 0.1])
def test_truncated_while_it_iterates(place: Path, engine: str, left: float) -> None:
    target = dataset(place, 500)

    def body() -> None:
        one = plain(target, engine, bad_samples="stop")
        batches = iter(one)
        next(batches)
        for shard in shards(target):
            os.truncate(shard, int(shard.stat().st_size * left))
        began = time.monotonic()
        try:
            for _ in batches:
                pass
        except (FormatError, StorageError) as error:
            assert str(target) in str(error) and ".lfd" in str(error), error
            assert time.monotonic() - began < 5
        else:
            raise AssertionError("nobody noticed")
        assert not one._pipelines

    survives(body)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("field", ["about", "blob", "ids"])
def test_what_is_cut_or_gone_names_the_first_sample_that_it_costs(place: Path, engine: str, field: str) -> None:
    for number, harm in enumerate((lambda file: os.truncate(file, 200), lambda file: (file.unlink(), file.mkdir()))):
        target = dataset(place, 500, str(number))

        def body(target: Path = target, harm: Callable[[Path], object] = harm) -> None:
            # Opened anew at the first read.
            one = Loader(target, 5, [field], engine=engine, shuffle="sequential", isolate=True)
            file = shards(target)[-1]
            harm(file)
            seen: list[int] = []
            try:
                for batch in one:
                    seen += batch["__index__"].tolist()
            except (FormatError, StorageError) as error:
                first = next(row for row in range(500) if one.sources[0].shard_name(row) == file.name)
                for word in (str(file), f"{file.name}, index {first}, ", f"field '{field}'", "bring the file back as it was"):
                    assert word in str(error), error
                assert seen == list(range(len(seen))) and len(seen) <= first, seen
            else:
                raise AssertionError("nobody noticed")

        survives(body)


@pytest.mark.parametrize("engine", ["process", "inline"])
def test_the_index_truncated_while_lengths_are_read_from_it(place: Path, engine: str) -> None:
    """Packing reads lengths all along; where they lie in a mapping, a file that is cut must not end the process."""
    target = dataset(place, 400)

    def body() -> None:
        one = Loader(target, 2, ["ids"], engine=engine, packing={"field": "ids", "capacity": 64, "window": 64})
        batches = iter(one)
        next(batches)
        for file in [*shards(target), target / "index.lfi"]:
            os.truncate(file, file.stat().st_size // 3)
        try:
            for _ in batches:
                pass
            one.set_epoch(1)
            for _ in one:
                pass
        except LfdataError:
            return
        raise AssertionError("nobody noticed")

    survives(body)


@pytest.mark.parametrize("engine", ENGINES)
def test_deleted_while_it_iterates(place: Path, engine: str) -> None:
    target = dataset(place)
    with nothing_left():
        one = loader(target, engine=engine, shuffle="full")
        first = whole(one)
        second = iter(one)
        found = [numbers(next(second))]
        for file in target.iterdir():
            file.unlink()
        found += whole(second)
        assert sorted(chain(*first)) == sorted(chain(*found)) == list(range(BATCH * STEPS))
        one.close()
        # A new decoder has nothing to open.
        one.set_epoch(0)
        if engine == "process":
            with pytest.raises(LfdataError, match=str(target)):
                whole(one)
        one.close()
        del one, second


@pytest.mark.parametrize("engine", QUICK_ENGINES)
def test_replaced_while_it_iterates(place: Path, engine: str) -> None:
    """Another generation takes the data set's place: the old one to the end, or an error; never a mixture."""
    target = place / "target"
    run(target, synthetic(BATCH * STEPS, 0))
    one = Loader(target, BATCH, FIELDS, engine=engine)
    batches = iter(one)
    old = [bytes(next(batches)["blob"].numpy().tobytes())]
    reference = [bytes(batch["blob"].numpy().tobytes()) for batch in Loader(target, BATCH, FIELDS, engine="inline")]
    run(target, synthetic(BATCH * STEPS, 1), overwrite=True)
    try:
        old += [bytes(batch["blob"].numpy().tobytes()) for batch in batches]
        one.set_epoch(0)
        old = [bytes(batch["blob"].numpy().tobytes()) for batch in one]
    except LfdataError as error:
        assert str(target) in str(error)
    assert old == reference[: len(old)]
    one.close()


@pytest.mark.parametrize("engine", QUICK_ENGINES)
def test_one_shard_replaced_by_another_file(place: Path, engine: str) -> None:
    target = dataset(place)
    one = loader(target, engine=engine)
    name = shards(target)[-1]
    data = name.read_bytes()
    name.unlink()
    name.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    found = []
    with pytest.raises(FormatError, match=name.name):
        for batch in one:
            found.append(numbers(batch))
    assert found == expected()[: len(found)]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_shard_that_cannot_be_read(place: Path, engine: str) -> None:
    """A directory where a shard was: tried three times, then the run stops, at the step it belongs to, whatever the policy."""
    target = dataset(place)
    name = shards(target)[-1]
    name.unlink()
    name.mkdir()
    found: list[list[int]] = []
    with nothing_left():
        one = loader(target, engine=engine, bad_samples="replace")
        began = time.monotonic()
        with pytest.raises(StorageError, match=name.name):
            for batch in one:
                found.append(numbers(batch))
                del batch
        assert 0.4 < time.monotonic() - began < 10
        assert found == expected()[: len(found)] and len(found) >= 5
        assert not one._pipelines
        del one


@pytest.mark.parametrize("engine", ["thread", "inline"])
@pytest.mark.parametrize(("failures", "works"), [(1, True), (2, True), (3, False)])
def test_a_read_that_fails_is_tried_again(place: Path, monkeypatch: Any, engine: str, failures: int, works: bool) -> None:
    target = dataset(place)
    one = loader(target, engine=engine)
    source = one.sources[0]
    read, left = source.read_many, [failures]

    def failing(indices: Any, *arguments: Any, **options: Any) -> Any:
        if BATCH * 5 in list(indices) and left[0] > 0:
            left[0] -= 1
            raise StorageError("/a/shard.lfd", "read", errno.EIO, os.strerror(errno.EIO))
        return read(indices, *arguments, **options)

    monkeypatch.setattr(source, "read_many", failing)
    if works:
        assert whole(one) == expected()
        assert one.stats()["bad"] == 0
    else:
        found = []
        with pytest.raises(StorageError, match="Input/output error") as caught:
            for batch in one:
                found.append(numbers(batch))
        assert caught.value.errno == errno.EIO
        assert found == expected()[:5]
    one.close()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_job_fails_while_others_are_under_way(place: Path, monkeypatch: Any, engine: str) -> None:
    target, door = dataset(place), gate(place, monkeypatch)
    with nothing_left():
        one = loader(target, engine=engine, prefetch=4, **({"processes": 2} if engine == "process" else {}))
        batches = iter(one)
        found = [numbers(next(batches))]
        pids = decoders(one) if engine == "process" else []
        door.write_text("raise 70")
        with pytest.raises(LfdataError, match="is not liked"):
            for batch in batches:
                found.append(numbers(batch))
        # Some were finished before the door was shut.
        assert found == expected()[: len(found)] and len(found) <= 7
        assert not one._pipelines and len(pids) == (2 if engine == "process" else 0)
        door.unlink()
        state = one.state_dict()
        one.load_state_dict(state)
        assert whole(one) == expected(len(found))
        batch = None
        one.close()
        del one, batches


@pytest.mark.fault
@pytest.mark.parametrize("kind", [ChangedError, TruncatedError])
def test_errors_arrive_as_what_they_are(place: Path, kind: type[FormatError]) -> None:
    target = dataset(place)
    one = loader(target)
    name = shards(target)[0]
    data = name.read_bytes()
    os.truncate(name, len(data) - 100) if kind is TruncatedError else name.write_bytes(data + bytes(64))
    with pytest.raises(FormatError, match=name.name) as caught:
        whole(one)
    assert caught.value.file.endswith(name.name)


@pytest.mark.parametrize("policy", ["replace", "mask"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_file_cut_under_way_is_no_bad_sample(place: Path, engine: str, policy: str) -> None:
    target = dataset(place)
    one = loader(target, engine=engine, bad_samples=policy, most_bad_rate=1.0)
    batches = iter(one)
    next(batches)
    for shard in shards(target):
        os.truncate(shard, 0)
    with pytest.raises(FormatError, match="truncated|ends|bytes"):
        for _ in range(3):
            list(one)
    assert one.stats()["bad"] == 0
    one.close()
