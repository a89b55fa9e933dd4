"""A state continues the run to the bit, from any step, on any number of ranks; and is refused where it cannot."""

from __future__ import annotations

import json
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from batchkit import digest, digests, epoch_of, same, write_numbers

import lfdata.transforms as T
from lfdata import Loader
from lfdata.errors import StateError
from lfdata.loader import loader as module
from lfdata.loader.produce import Producer

PICTURES: dict[str, Any] = {"image": [T.RandomResizedCrop(12), T.RandomHorizontalFlip(), T.ColorJitter(0.3)], "label": None}
PACKED: dict[str, Any] = {"packing": {"field": "ids", "window": 32, "capacity": 9}, "tail": "pad"}
MIXTURE: dict[str, Any] = {"mixture": {"weights": [0.7, 0.3], "block": 16, "n": 120}}
CASES: dict[str, tuple[tuple[str, ...], Any, dict[str, Any]]] = {
    "pictures": (("pictures",), PICTURES, {}),
    "block": (("numbers",), None, {"shuffle": "block", "block": 8, "window": 2, "tail": "pad"}),
    "buckets": (("numbers",), ["ids"], {"buckets": {"field": "ids", "window": 24}}),
    "mixture": (("numbers", "more_numbers"), ["ids", "label"], MIXTURE),
    "packing": (("numbers",), ["ids"], PACKED),
    "packed mixture": (("numbers", "more_numbers"), ["ids"], {**PACKED, **MIXTURE}),
    "mixup": (("pictures",), PICTURES, {"batch_transforms": [T.MixUp(labels=("label",))]}),
    "where": (("numbers",), None, {"where": np.arange(103) % 4 > 0}),
}


def make(case: str, request: pytest.FixtureRequest, **more: Any) -> Loader:
    names, fields, options = CASES[case]
    paths = [request.getfixturevalue(name) for name in names]
    return Loader(paths if len(paths) > 1 else paths[0], 8, fields, seed=11, **{"engine": "inline", **options, **more})


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(state))
    assert found == state and len(json.dumps(state)) < 3000
    return found


@pytest.mark.parametrize("case", CASES)
def test_the_rest_is_what_the_uninterrupted_run_gives(case: str, request: pytest.FixtureRequest) -> None:
    """Broken off and continued at random steps, several times an epoch, over two epochs and more."""
    whole = digests(make(case, request), epochs=3)
    draw, found, state = random.Random(case), [], None
    while len(found) < len(whole):
        loader = make(case, request, threads=draw.choice([1, 2]))
        if state is not None:
            loader.load_state_dict(through_json(state))
        stop = draw.randint(1, 8)
        while stop and len(found) < len(whole):
            for batch in loader:
                found.append(digest(batch))
                state, stop = loader.state_dict(), stop - 1
                if not stop or len(found) == len(whole):
                    break
        loader.close()
        assert found == whole[: len(found)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("step", [0, 3])
def test_another_world_size_goes_on_from_the_same_sample(case: str, step: int, request: pytest.FixtureRequest) -> None:
    whole = epoch_of([make(case, request)])
    for before, after in ((1, 2), (2, 4), (4, 1), (2, 8)):
        states = []
        for rank in range(before):
            loader = make(case, request, rank=rank, world_size=before)
            batches = iter(loader)
            for _ in range(step):
                next(batches)
            states.append(through_json(loader.state_dict()))
            loader.close()
        assert all(state == states[0] for state in states)
        assert states[0]["samples"] == step * 8 and states[0]["epoch"] == 0
        loaders = [make(case, request, rank=rank, world_size=after) for rank in range(after)]
        for loader in loaders:
            loader.load_state_dict(states[0])
            assert loader.state_dict()["samples"] == (step * 8 if step < len(whole) else 0)
        if step < len(whole):
            found = epoch_of(loaders)
            assert len(found) == len(whole) - step and all(map(same, found, whole[step:]))
        else:
            assert {loader.epoch for loader in loaders} == {1}


@pytest.mark.parametrize("engine", ["thread", "process"])
def test_from_one_engine_to_another(pictures: Path, engine: str) -> None:
    whole = digests(Loader(pictures, 8, PICTURES, engine="inline"), epochs=2)
    loader = Loader(pictures, 8, PICTURES, engine=engine, prefetch=3)
    batches = iter(loader)
    begun = [digest(next(batches)) for _ in range(4)]
    state = loader.state_dict()
    batches.close()
    again = Loader(pictures, 8, PICTURES, engine="inline")
    again.load_state_dict(state)
    assert begun + digests(again) == whole[:6]
    back = Loader(pictures, 8, PICTURES, engine=engine)
    back.load_state_dict(state)
    assert digests(back, epochs=2) == whole[4:]


@pytest.mark.parametrize("world", [1, 2])
def test_within_a_step_of_micro_batches(numbers: Path, world: int) -> None:
    for rank in range(world):
        how: dict[str, Any] = {"rank": rank, "world_size": world, "accumulate": 4, "engine": "inline"}
        whole = digests(Loader(numbers, 8, **how))
        for done in (1, 2, 3, 4, 7, 21):
            loader = Loader(numbers, 8, **how)
            batches = iter(loader)
            assert [digest(next(batches)) for _ in range(done)] == whole[:done]
            state = through_json(loader.state_dict())
            assert state["samples"] == done * 2
            again = Loader(numbers, 8, **how)
            again.load_state_dict(state)
            assert digests(again) == whole[done:]


def test_a_state_within_a_step_is_of_its_ranks(numbers: Path) -> None:
    """Two ranks' first micro-batches are rows 0, 1 and 4, 5: no position says that."""
    loader = Loader(numbers, 8, rank=0, world_size=2, accumulate=2, engine="inline")
    batches = iter(loader)
    next(batches)
    within = loader.state_dict()
    next(batches)
    after = loader.state_dict()
    for options in (
        {"accumulate": 2},
        {"rank": 0, "world_size": 2, "accumulate": 4},
        {"rank": 0, "world_size": 4, "accumulate": 2},
    ):
        other = Loader(numbers, 8, engine="inline", **options)
        with pytest.raises(StateError, match="within a step, after 4 of 8 samples"):
            other.load_state_dict(within)
        other.load_state_dict(after)
        assert next(iter(other))["label"].tolist()
    one = Loader(numbers, 8, accumulate=2, engine="inline")
    next(iter(one))
    finer = Loader(numbers, 8, accumulate=4, engine="inline")
    finer.load_state_dict(one.state_dict())
    assert len(list(finer)) == 4 * 12 - 2
    with pytest.raises(StateError, match="no whole number of batches"):
        Loader(numbers, 8, engine="inline").load_state_dict(one.state_dict())


def test_after_the_last_batch(numbers: Path) -> None:
    """The epoch is over: nothing of it comes again, and the next is the uninterrupted run's next."""
    whole = digests(Loader(numbers, 8, engine="inline"), epochs=2)
    loader = Loader(numbers, 8, engine="inline")
    state: dict[str, Any] = {}
    for _ in loader:
        state = loader.state_dict()
    assert (state["epoch"], state["samples"]) == (0, 96)
    assert (loader.state_dict()["epoch"], loader.state_dict()["samples"]) == (1, 0)
    again = Loader(numbers, 8, engine="inline")
    again.load_state_dict(state)
    assert (again.epoch, again.state_dict()["samples"]) == (1, 0)
    assert digests(again) == whole[12:]


def test_what_was_prefetched_does_not_count(pictures: Path) -> None:
    loader = Loader(pictures, 8, PICTURES, engine="thread", prefetch=4)
    for number, _ in enumerate(loader, 1):
        assert loader.state_dict()["samples"] == number * 8
        if number == 5:
            break
    assert loader.state_dict()["samples"] == 40
    loader.close()
    assert loader.state_dict()["samples"] == 40


def test_nothing_before_the_position_is_made_again(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[tuple[int, int, int]] = []
    run = Producer.run

    def counted(self: Producer, job: Any, *args: Any) -> Any:
        jobs.append((job.epoch, job.first, job.steps))
        return run(self, job, *args)

    monkeypatch.setattr(Producer, "run", counted)
    loader = Loader(pictures, 2, PICTURES, engine="inline")
    state = {**loader.state_dict(), "epoch": 1_000_000, "samples": 40}
    loader.load_state_dict(state)
    assert jobs == []
    batches = iter(loader)
    next(batches)
    assert jobs and all(epoch == 1_000_000 and first >= 20 for epoch, first, _ in jobs)
    assert sum(steps for _, _, steps in jobs) <= loader.stats()["steps_a_slot"]


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"seed": 5}, r"seed \(0 in the state, 5 here\)"),
        (
            {"fields": {"image": [T.RandomResizedCrop(13)], "label": None}},
            r"fields\[0\]\.transforms\[0\]\.size\[0\] .* 13 here",
        ),
        ({"fields": ["label"]}, "fields"),
        ({"shuffle": "block"}, r"order\.mode \('full' in the state, 'block' here\)"),
        ({"tail": "pad"}, "tail .*'drop_last' in the state, 'pad' here"),
        ({"bad_samples": "mask"}, "bad .*'stop' in the state, 'mask' here"),
        ({"batch_transforms": [T.MixUp()]}, "batch_transforms"),
        ({"where": np.arange(48) < 47}, "data"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_state_of_something_else_is_refused(pictures: Path, changed: dict[str, Any], what: str) -> None:
    state = Loader(pictures, 8, PICTURES, engine="inline").state_dict()
    other = Loader(pictures, 8, **{"fields": PICTURES, "engine": "inline", **changed})
    with pytest.raises(StateError, match=what):
        other.load_state_dict(state)


def test_another_data_set_is_refused(tmp_path: Path, numbers: Path) -> None:
    state = Loader(numbers, 8, engine="inline").state_dict()
    changed = write_numbers(tmp_path / "changed", 103, lengths=[3] * 103)
    with pytest.raises(StateError, match="differs in data"):
        Loader(changed, 8, engine="inline").load_state_dict(state)
    moved = write_numbers(tmp_path / "moved", 103)
    Loader(moved, 8, engine="inline").load_state_dict(state)


def test_where_packing_keeps_its_counts_does_not_matter(tmp_path: Path, numbers: Path) -> None:
    packing = PACKED["packing"]
    first = Loader(numbers, 8, ["ids"], packing={**packing, "cache": str(tmp_path / "a")}, engine="inline")
    next(iter(first))
    second = Loader(numbers, 8, ["ids"], packing=packing, engine="inline")
    second.load_state_dict(first.state_dict())
    assert list((tmp_path / "a").iterdir())


@pytest.mark.parametrize(
    "damage",
    [
        {"version": 99},
        {"epoch": -1},
        {"samples": -8},
        {"samples": "many"},
        {"identity": 5},
        {"identity": None},
        {"batch_size": 0},
        {"samples": 3},
    ],
    ids=str,
)
def test_what_is_no_state_is_refused(numbers: Path, damage: dict[str, Any]) -> None:
    loader = Loader(numbers, 8, engine="inline")
    good = loader.state_dict()
    with pytest.raises(StateError):
        loader.load_state_dict({**good, **damage})
    for name in good:
        with pytest.raises(StateError):
            loader.load_state_dict({key: value for key, value in good.items() if key != name})
    loader.load_state_dict(good)


def test_the_batch_size_changes_by_allowance(numbers: Path) -> None:
    plain = [int(label) for batch in Loader(numbers, 1, ["label"], engine="inline") for label in batch["label"]]
    loader = Loader(numbers, 8, ["label"], engine="inline")
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    state = loader.state_dict()
    for size, fits in ((12, True), (4, True), (16, False)):
        other = Loader(numbers, size, ["label"], engine="inline")
        with pytest.raises(StateError, match="batch size is 8"):
            other.load_state_dict(state)
        if not fits:
            with pytest.raises(StateError, match="24 samples"):
                other.load_state_dict(state, allow_batch_change=True)
            continue
        other.load_state_dict(state, allow_batch_change=True)
        found = [int(label) for batch in other for label in batch["label"]]
        assert found == plain[24 : 24 + len(found)] and len(found) > 70


@pytest.mark.parametrize("tail", ["drop_last", "pad"])
@pytest.mark.parametrize("size", [4, 10, 16, 103])
def test_at_the_end_of_an_epoch_any_batch_size_goes_on_with_the_next(numbers: Path, size: int, tail: str) -> None:
    loader = Loader(numbers, 8, ["label"], engine="inline", tail=tail)
    state: dict[str, Any] = {}
    for _ in loader:
        state = loader.state_dict()
    assert (state["epoch"], state["samples"]) == (0, 96 if tail == "drop_last" else 104)
    other, fresh = (Loader(numbers, size, ["label"], engine="inline", tail=tail) for _ in range(2))
    with pytest.raises(StateError, match="batch size is 8"):
        other.load_state_dict(state)
    other.load_state_dict(state, allow_batch_change=True)
    fresh.set_epoch(1)
    assert digests(other) == digests(fresh)


@pytest.mark.parametrize("options", [PACKED, {"buckets": {"field": "ids", "window": 48}}], ids=["packing", "buckets"])
def test_the_batch_size_of_what_depends_on_it_does_not(numbers: Path, options: dict[str, Any]) -> None:
    state = Loader(numbers, 8, ["ids"], engine="inline", **options).state_dict()
    with pytest.raises(StateError, match="packed or bucketed"):
        Loader(numbers, 4, ["ids"], engine="inline", **options).load_state_dict(state, allow_batch_change=True)


def test_another_build_of_the_decoders_warns(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = Loader(pictures, 8, PICTURES, engine="inline")
    state = loader.state_dict()
    monkeypatch.setattr(module, "build", lambda: {**state["build"], "jpeg": "another"})
    with pytest.warns(UserWarning, match="jpeg: .* then, another now"):
        loader.load_state_dict(state)
    assert len(list(loader)) == 6


def test_a_consumer_that_counts_batches_comes_to_the_next_epoch(numbers: Path) -> None:
    whole = digests(Loader(numbers, 8, engine="inline"), epochs=4)
    loader = Loader(numbers, 8, engine="inline")
    found = []
    for _ in range(2):
        batches = iter(loader)
        found += [digest(next(batches)) for _ in range(len(loader))]
    # The iterator is kept; now one that is dropped.
    state = through_json(loader.state_dict())
    del batches
    found += [digest(batch) for _, batch in zip(range(len(loader)), loader, strict=False)]
    found += digests(loader)
    assert found == whole
    again = Loader(numbers, 8, engine="inline")
    again.load_state_dict(state)
    assert (again.epoch, again.state_dict()["samples"]) == (2, 0)
    assert digests(again, epochs=2) == whole[2 * len(loader) :]


def test_the_decoder_goes_on_when_every_batch_was_taken(pictures: Path) -> None:
    loader = Loader(pictures, 8, PICTURES, engine="process")
    for _ in range(3):
        batches = iter(loader)
        for _ in range(len(loader)):
            next(batches)
        batches.close()
        assert loader._pipelines
    batches = iter(loader)
    next(batches)
    batches.close()
    assert not loader._pipelines


def test_a_loaded_place_is_kept_until_a_batch_is_taken(numbers: Path) -> None:
    whole = digests(Loader(numbers, 8, engine="inline"), epochs=2)
    loader = Loader(numbers, 8, engine="inline")
    batches = iter(loader)
    for _ in range(2):
        next(batches)
    state = through_json(loader.state_dict())
    other = Loader(numbers, 8, engine="inline")
    other.load_state_dict(state)
    iter(other)
    other.set_epoch(other.epoch)
    assert [digest(batch) for batch in other] == whole[2 : len(loader)]
    other.load_state_dict(state)
    other.set_epoch(1)
    assert digests(other) == whole[len(loader) :]
    other.load_state_dict(state)
    next(iter(other))
    other.set_epoch(0)
    assert digests(other) == whole[: len(loader)]


def test_another_decoder_is_told(pictures: Path) -> None:
    state = through_json(Loader(pictures, 8, PICTURES, engine="inline").state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Loader(pictures, 8, PICTURES, engine="inline").load_state_dict(state)
    if state["build"]["native"] == "True":
        with pytest.warns(UserWarning, match="native: True then, False now"):
            Loader(pictures, 8, PICTURES, engine="inline", native=False).load_state_dict(state)
