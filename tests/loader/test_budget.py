"""A byte budget: what is reserved, what is refused, and batches in parts that are the same batches."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import batchkit
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lfdata.transforms as T
from lfdata import Loader
from lfdata.errors import FormatError, LimitError, OptionError, StateError
from lfdata.loader import budget
from lfdata.loader.budget import FEWEST_SLOTS, LEAST_BYTES
from lfdata.loader.slots import PAGE

PART = "__part__"
# Pictures of their own size, recordings, tokens, and everything else.
HOW: dict[str, dict[str, Any]] = {
    "full": {},
    "process": {"engine": "process"},
    "inline": {"engine": "inline"},
    "sequential": {"shuffle": "sequential"},
    "pad": {"tail": "pad"},
    "accumulate": {"accumulate": 2},
    "rank": {"rank": 1, "world_size": 2},
    "mixture": {"mixture": {"weights": [3, 1], "block": 12}},
    "buckets": {"buckets": {"field": "ids", "window": 12}},
}


def _options(how: str) -> dict[str, Any]:
    return {"batch_size": 6, "seed": 3, "engine": "thread", "threads": 1} | HOW[how]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("budget")
    return [batchkit.write_all_kinds(folder / name, 41, seed=seed) for seed, name in enumerate("ab")]


def _whole(batches: Sequence[dict[str, torch.Tensor]]) -> list[dict[str, np.ndarray]]:
    """Parts put together again, without what says that they are."""
    found, parts = [], []
    for batch in batches:
        number, count = batch[PART][0].tolist()
        assert (batch[PART] == batch[PART][0]).all() and number == len(parts)
        parts.append({name: value for name, value in batch.items() if name != PART})
        if number == count - 1:
            found.append(batchkit.joined(parts))
            parts = []
    assert not parts
    return found


def _plain(batches: Sequence[dict[str, torch.Tensor]]) -> list[dict[str, np.ndarray]]:
    return [{name: value.numpy() for name, value in batch.items()} for batch in batches]


def _copied(loader: Loader, epochs: int = 1) -> list[dict[str, torch.Tensor]]:
    found = [{name: value.clone() for name, value in batch.items()} for _ in range(epochs) for batch in loader]
    loader.close()
    return found


def _equal(ones: Sequence[dict[str, np.ndarray]], others: Sequence[dict[str, np.ndarray]]) -> bool:
    return len(ones) == len(others) and all(map(batchkit.same, ones, others))


def _advised(told: Exception) -> int:
    """The budget that an error says."""
    return int(re.findall(r"Raise max_bytes to ([\d,]+\d)", str(told))[0].replace(",", ""))


def _least(source: Any, **options: Any) -> int:
    """The budget that just does without parts, as the error says it."""
    most = LEAST_BYTES
    while True:
        try:
            Loader(source, **options, max_bytes=most)
        except LimitError as told:
            most = _advised(told)
        else:
            assert most > LEAST_BYTES
            return most


@pytest.mark.parametrize("how", HOW)
def test_parts_are_the_batch(two: list[Path], how: str) -> None:
    source, options = two if how == "mixture" else two[0], _options(how)
    plain = Loader(source, **options)
    expected = _plain(_copied(plain, 2))
    enough = _least(source, **options)
    budget = enough * (3 if how == "rank" else 2) // 5
    loader = Loader(source, **options, max_bytes=budget, over="split")
    told = loader.forecast(loader_batches := len(loader))
    share = (budget - PAGE) // FEWEST_SLOTS // PAGE * PAGE
    assert told.total.max() <= share and len(plain) < loader_batches
    first = _copied(loader)
    assert len(first) == loader_batches
    assert [sum(value.nbytes for value in batch.values()) for batch in first] == told.total.tolist()
    counts = {int(batch[PART][0, 1]) for batch in first}
    assert max(counts) >= (2 if how == "rank" else 3)
    again = Loader(source, **options, max_bytes=budget, over="split")
    assert _equal(_whole(_copied(again, 2)), expected)


@pytest.mark.parametrize("how", ["full", "process", "inline", "accumulate", "rank", "mixture"])
def test_slots_are_as_large_as_the_largest_of_the_epoch(two: list[Path], how: str) -> None:
    source, options = two if how == "mixture" else two[0], _options(how)
    expected = _plain(_copied(Loader(source, **options)))
    enough = _least(source, **options)
    if how == "rank":
        # The least is that of the rank that needs most.
        enough = max(enough, _least(source, **options | {"rank": 0}))
    loader = Loader(source, **options, max_bytes=enough)
    steps = loader.forecast(len(loader)).total.reshape(-1, options.get("accumulate", 1)).sum(1)
    batches = iter(loader)
    next(batches)
    stats = loader.stats()
    assert stats["slots"] == FEWEST_SLOTS and stats["steps_a_slot"] == 1
    assert stats["slots"] * stats["slot_bytes"] + PAGE <= enough
    # Every array begins at a multiple of 64, and a row has a byte of status.
    assert steps.max() <= stats["slot_bytes"] <= steps.max() + 64 * 40 + PAGE
    assert stats["slot_bytes"] < loader._producer.bound
    assert _equal(_plain(_copied(loader)), expected)
    with pytest.raises(LimitError, match=f"max_bytes={enough - FEWEST_SLOTS * PAGE:,}"):
        Loader(source, **options, max_bytes=enough - FEWEST_SLOTS * PAGE)


def test_more_room_is_more_slots_then_more_steps(two: list[Path]) -> None:
    options: dict[str, Any] = {"batch_size": 6, "seed": 3, "engine": "thread", "threads": 1, "prefetch": 6}
    enough = _least(two[0], **options)
    found = []
    for times in (1, 2, 100):
        loader = Loader(two[0], **options, max_bytes=times * enough)
        batches = iter(loader)
        next(batches)
        stats = loader.stats()
        found.append((stats["slots"], stats["steps_a_slot"]))
        assert PAGE + stats["slots"] * stats["slot_bytes"] <= times * enough
        loader.close()
    free = Loader(two[0], **options)
    batches = iter(free)
    next(batches)
    assert found[0] == (3, 1) and found[0] < found[1] < found[2] == (7, free.stats()["steps_a_slot"])
    assert loader.stats()["slot_bytes"] == 0 and free.stats()["slots"] == 7
    free.close()


def test_packed_rows_in_parts(tmp_path: Path) -> None:
    path = batchkit.write_all_kinds(tmp_path / "a", 60)
    options: dict[str, Any] = {
        "batch_size": 4,
        "fields": {"ids": None},
        "packing": {"field": "ids", "capacity": 2000, "window": 32, "max_samples_per_row": 3},
        "tail": "pad",
        "engine": "inline",
    }
    expected = _plain(_copied(Loader(path, **options), 2))
    loader = Loader(path, **options, max_bytes=_least(path, **options) * 3 // 5, over="split")
    told, count = loader.forecast(len(loader)).total, len(loader)
    got = _copied(loader, 2)
    assert [sum(value.nbytes for value in batch.values()) for batch in got[:count]] == told.tolist()
    assert _equal(_whole(got), expected) and max(int(batch[PART][0, 1]) for batch in got) > 1
    with pytest.raises(LimitError, match="the packed row that begins with it takes"):
        Loader(path, **options, max_bytes=8 * PAGE, over="split")


@pytest.mark.parametrize("accumulate", [1, 2])
def test_all_ranks_have_the_same_parts(tmp_path: Path, accumulate: int) -> None:
    # Some sequences are long: a rank that has several is beyond the share, others are far below it.
    lengths = [4000 if number % 4 == 1 else 10 for number in range(64)]
    path = batchkit.write_numbers(tmp_path / "a", 64, lengths=lengths)
    options: dict[str, Any] = {"batch_size": 16, "seed": 1, "accumulate": accumulate, "engine": "inline"}
    whole = _plain(_copied(Loader(path, **options), 2))
    samples = [row for batch in whole for row in batch["__index__"].tolist()]
    for world in (1, 2, 4):
        loaders = [
            Loader(path, **options, rank=rank, world_size=world, max_bytes=17 * PAGE, over="split") for rank in range(world)
        ]
        assert len({len(loader) for loader in loaders}) == 1
        states = []
        steps: list[list[dict[str, torch.Tensor]]] = [[] for _ in loaders]
        for _ in range(2):
            for parts in zip(*loaders, strict=True):
                assert len({tuple(part[PART][0].tolist()) for part in parts}) == 1
                assert all(len(part["label"]) for part in parts)
                states.append([loader.state_dict() for loader in loaders])
                for rank, part in enumerate(parts):
                    steps[rank].append(part)
        assert all(state == ours[0] for ours in states for state in ours)
        ranks = [_whole(batches) for batches in steps]
        assert max(int(part[PART][0, 1]) for part in steps[0]) > 1
        # The ranks' micro-batches of a step, one rank after the other, are the step.
        again = [
            row
            for first in range(0, len(ranks[0]), accumulate)
            for mine in ranks
            for batch in mine[first : first + accumulate]
            for row in batch["__index__"].tolist()
        ]
        assert again == samples


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 3000), min_size=1, max_size=30),
    batch=st.integers(1, 6),
    world=st.integers(1, 2),
    accumulate=st.integers(1, 2),
    pages=st.integers(4, 40),
    tail=st.sampled_from(["drop_last", "pad"]),
)
def test_any_lengths_any_budget(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    batch: int,
    world: int,
    accumulate: int,
    pages: int,
    tail: str,
) -> None:
    path = batchkit.write_numbers(tmp_path_factory.mktemp("any") / "a", len(lengths), lengths=lengths)
    options: dict[str, Any] = {"batch_size": batch * world * accumulate, "tail": tail, "engine": "inline", "world_size": world}
    options |= {"accumulate": accumulate, "max_bytes": pages * PAGE, "over": "split", "shuffle": "sequential"}
    share = (pages - 1) // 3 * PAGE
    counts = set()
    for rank in range(world):
        try:
            loader = Loader(path, **options, rank=rank)
        except LimitError as told:
            assert "takes" in str(told) and max(lengths) * 4 + 512 > share
            counts.add(-1)
            continue
        plain = Loader(path, **options | {"max_bytes": None, "over": "error"}, rank=rank)
        made = [(loader.state_dict(), {name: value.clone() for name, value in one.items()}) for one in loader]
        assert _equal(_whole([one for _, one in made]), _plain(_copied(plain)))
        counts.add(len(made))
        for _, one in made:
            assert sum(value.nbytes for value in one.values()) <= share
        # From any state on the rest comes.
        for state, _ in made[:: max(1, len(made) // 3)]:
            at = [before for before, _ in made].index(state) + 1
            other = Loader(path, **options, rank=rank)
            other.load_state_dict(state)
            rest = [batchkit.digest(one) for one in itertools.islice(other, max(0, len(made) - at))]
            assert at == len(made) or rest == [batchkit.digest(one) for _, one in made[at:]]
            other.close()
        loader.close()
    assert len(counts) == 1, "ranks disagree"


@pytest.mark.parametrize("engine", ["inline", "thread", "process"])
def test_resume_between_parts(two: list[Path], engine: str) -> None:
    options: dict[str, Any] = {"batch_size": 8, "seed": 5, "threads": 1, "accumulate": 2, "over": "split"}
    budget = _least(two[0], **options | {"over": "error"}) // 3
    loader = Loader(two[0], **options, engine="inline", max_bytes=budget)
    states, digests = [], []
    for _ in range(2):
        for batch in loader:
            states.append(loader.state_dict())
            digests.append(batchkit.digest(batch))
    between = [number for number, state in enumerate(states) if "parts" in state]
    assert len(between) > 4
    for number in (between[0], between[len(between) // 2], between[-1], 0):
        other = Loader(two[0], **options, engine=engine, max_bytes=budget)
        other.load_state_dict(states[number])
        assert other.state_dict() == states[number]
        rest = [batchkit.digest(batch) for batch in itertools.islice(other, 5)]
        assert rest == digests[number + 1 : number + 1 + len(rest)] and rest
        other.close()


def test_a_state_between_parts_is_refused_elsewhere(two: list[Path]) -> None:
    options: dict[str, Any] = {"batch_size": 8, "seed": 5, "engine": "inline"}
    enough = _least(two[0], **options)
    loader = Loader(two[0], **options, max_bytes=enough // 3, over="split")
    batches = iter(loader)
    assert next(batches)[PART][0, 1] > 1
    state = loader.state_dict()
    assert state["samples"] == 0 and state["parts"] == 1
    same_share = Loader(two[0], **options, max_bytes=enough // 3, over="split", prefetch=5)
    same_share.load_state_dict(state)
    for others in (
        {"max_bytes": enough // 2, "over": "split"},
        {},
        {"max_bytes": enough},
        {"max_bytes": enough // 3, "over": "split", "accumulate": 2},
        {"max_bytes": enough // 3, "over": "split", "rank": 0, "world_size": 2},
    ):
        with pytest.raises(StateError, match="between the parts of a batch"):
            Loader(two[0], **options | others).load_state_dict(state)
    for wrong in (99, -1, "1", 1.5, True):
        with pytest.raises(StateError):
            same_share.load_state_dict({**state, "parts": wrong})
    # At the end of a step nothing of it is left: any budget, and none, goes on.
    while "parts" in (state := loader.state_dict()) or not state["samples"]:
        next(batches)
    for others in ({}, {"max_bytes": enough // 2, "over": "split"}, {"rank": 1, "world_size": 2}):
        other = Loader(two[0], **options | others)
        other.load_state_dict(state)
        assert len(next(iter(other))["__index__"])


def test_a_sample_beyond_the_share_is_named(tmp_path: Path) -> None:
    lengths = [500] * 20
    lengths[13] = 9000
    path = batchkit.write_numbers(tmp_path / "a", 20, lengths=lengths)
    for over in ("error", "split"):
        with pytest.raises(LimitError, match=r"\.lfd, index 13, key b'0-13': the sample takes 36,\d\d\d bytes") as told:
            Loader(path, 4, engine="inline", max_bytes=10 * PAGE, over=over)
        enough = _advised(told.value)
        left_out = Loader(path, 4, engine="inline", max_bytes=10 * PAGE, over=over, where=np.arange(20) != 13)
        assert sum(len(batch["label"]) for batch in left_out) == 16
    loader = Loader(path, 4, engine="inline", max_bytes=enough, over="split", shuffle="sequential")
    got = [batch["__index__"].tolist() for batch in loader]
    assert [row for rows in got for row in rows] == list(range(20))
    assert [len(rows) for rows in got] == [4, 4, 4, 1, 1, 2, 4]


@pytest.mark.parametrize("how", ["full", "rank", "accumulate", "pad"])
@pytest.mark.parametrize(("over", "share"), [("error", 1), ("error", 2), ("error", 4), ("split", 1), ("split", 2)])
def test_the_budget_that_is_advised_is_enough_and_no_more_than_that(tmp_path: Path, how: str, over: str, share: int) -> None:
    """Also where a sample is beyond the share alone: those of up to three pages are."""
    path = _uneven(tmp_path / "a")
    options = {"batch_size": 8, "engine": "inline", "seed": 4, "over": over, **HOW[how]}
    with pytest.raises(LimitError) as told:
        Loader(path, **options, max_bytes=PAGE * (1 + FEWEST_SLOTS * share))
    assert ("the sample takes" in str(told.value)) == (share < 3)
    enough = _advised(told.value)
    Loader(path, **options, max_bytes=enough)
    with pytest.raises(LimitError):
        Loader(path, **options, max_bytes=enough - 1)


def test_the_largest_sample_of_all_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where rows are looked up bit by bit."""
    monkeypatch.setattr(budget, "ROWS_AT_ONCE", 4)
    lengths = [500] * 40
    lengths[5], lengths[23], lengths[37] = 8000, 9000, 8500
    path = batchkit.write_numbers(tmp_path / "a", 40, lengths=lengths)
    for over in ("error", "split"):
        with pytest.raises(LimitError, match="index 23, key b'0-23'") as told:
            Loader(path, 4, engine="inline", max_bytes=10 * PAGE, over=over)
        Loader(path, 4, engine="inline", max_bytes=_advised(told.value), over=over)


def test_no_samples_and_one(tmp_path: Path) -> None:
    none = batchkit.write_numbers(tmp_path / "none", 0)
    with pytest.warns(UserWarning, match="no batches"):
        loader = Loader(none, 4, engine="inline", max_bytes="1MiB", over="split")
    assert len(loader) == 0 and list(loader) == [] and len(loader.forecast(3)) == 0
    one = batchkit.write_numbers(tmp_path / "one", 1, lengths=[700])
    padded = Loader(one, 5, tail="pad", engine="inline", max_bytes=LEAST_BYTES, over="split")
    got = _copied(padded)
    assert len(got) == 5 and [batch[PART][0].tolist() for batch in got] == [[n, 5] for n in range(5)]
    assert [batch["__mask__"].tolist() for batch in got] == [[True], [False], [False], [False], [False]]


def _uneven(path: Path) -> Path:
    """60 sequences of any length up to 3000."""
    return batchkit.write_numbers(path, 60, lengths=np.random.default_rng(0).integers(0, 3000, 60).tolist())


def _largest(path: Path, epochs: int, **options: Any) -> list[int]:
    """What each epoch needs at least."""
    found = []
    for epoch in range(epochs):
        loader = Loader(path, **options)
        loader.set_epoch(epoch)
        found.append(int(loader.forecast(len(loader)).total.max()))
    return found


@pytest.mark.parametrize("engine", ["inline", "thread", "process"])
def test_a_later_epoch_that_needs_more_gets_it(tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lfdata.loader.budget.ROOM", 1 << 60)
    path = _uneven(tmp_path / "a")
    options: dict[str, Any] = {"batch_size": 5, "seed": 2, "shuffle": "full"}
    needs = _largest(path, 6, **options)
    assert any(need > max(needs[:number]) for number, need in enumerate(needs) if number)
    expected = _plain(_copied(Loader(path, **options), 6))
    budget = PAGE + FEWEST_SLOTS * (max(needs) + 2 * PAGE)
    loader = Loader(path, **options, engine=engine, threads=1, max_bytes=budget, fields=["label", "ids"])
    got, sizes, held = [], [], None
    for epoch in range(6):
        for batch in loader:
            # The last batch of an epoch is held while the slots are made anew.
            held = batch
            got.append({name: value.clone().numpy() for name, value in held.items()})
        sizes.append(loader.stats()["slot_bytes"])
        assert loader.stats()["slots"] * sizes[-1] + PAGE <= budget and needs[epoch] <= sizes[-1]
        assert batchkit.same(got[-1], {name: value.numpy() for name, value in held.items()})
    assert _equal(got, expected)
    assert sizes == sorted(sizes) and len(set(sizes)) > 1
    loader.close()


def test_a_little_more_in_a_later_epoch_has_room(tmp_path: Path) -> None:
    path = _uneven(tmp_path / "a")
    options: dict[str, Any] = {"batch_size": 5, "seed": 2, "shuffle": "full"}
    needs = _largest(path, 6, **options)
    assert needs[0] < max(needs) <= needs[0] * 9 // 8
    most = PAGE + FEWEST_SLOTS * (max(needs) * 9 // 8 + 2 * PAGE)
    loader = Loader(path, **options, engine="inline", threads=1, max_bytes=most, fields=["label", "ids"])
    sizes = [loader.stats()["slot_bytes"] for _ in range(6) for _ in loader]
    assert len(set(sizes)) == 1 and max(needs) <= sizes[0] <= max(needs) * 9 // 8 + 2 * PAGE
    loader.close()
    # Not at the cost of a slot, nor beyond the budget.
    least = PAGE + FEWEST_SLOTS * PAGE * (-(-needs[0] // PAGE) + 1)
    tight = Loader(path, **options, engine="inline", threads=1, max_bytes=least, fields=["label", "ids"])
    batches = iter(tight)
    next(batches)
    found = tight.stats()
    assert found["slots"] == FEWEST_SLOTS and found["slots"] * found["slot_bytes"] + PAGE <= least
    tight.close()


def test_an_epoch_beyond_the_budget_is_told_before_its_first_step(tmp_path: Path) -> None:
    path = _uneven(tmp_path / "a")
    options: dict[str, Any] = {"batch_size": 5, "seed": 2}
    least = []
    for epoch in range(6):
        loader = Loader(path, **options, max_bytes="1GiB")
        assert loader._budget is not None
        least.append(loader._budget.epoch(epoch).slot(1))
    worse = next(number for number, need in enumerate(least) if need > least[0] + PAGE)
    budget = PAGE + FEWEST_SLOTS * -(-max(least[:worse]) // PAGE) * PAGE
    for engine in ("inline", "thread"):
        loader = Loader(path, **options, engine=engine, max_bytes=budget)
        for _ in range(worse):
            assert sum(1 for _ in loader) == 12
        with pytest.raises(LimitError, match=f"of epoch {worse} takes"):
            next(iter(loader))
        assert not loader._pipelines
        # Other epochs go on.
        loader.set_epoch(0)
        assert sum(1 for _ in loader) == 12
        loader.close()


def test_bad_samples_in_parts(tmp_path: Path) -> None:
    path = batchkit.write_all_kinds(tmp_path / "a", 24, complete=True)
    batchkit.spoil(path, [5, 14], "caption")
    options: dict[str, Any] = {"batch_size": 8, "shuffle": "sequential", "engine": "thread", "threads": 1, "most_bad_rate": 1.0}
    budget = _least(path, **options) // 2
    expected = _plain(_copied(Loader(path, **options, bad_samples="mask")))
    loader = Loader(path, **options, bad_samples="mask", max_bytes=budget, over="split")
    got = [{name: value.clone() for name, value in batch.items()} for batch in loader]
    assert _equal(_whole(got), expected) and len(got) > 3
    assert [(event.step, event.row, event.index) for event in loader.stats()["events"]] == [(0, 5, 5), (1, 6, 14)]
    assert loader.stats()["rows"] == 24 and loader.stats()["bad"] == 2
    loader.close()
    stopping = Loader(path, **options, max_bytes=budget, over="split")
    seen = []
    with pytest.raises(FormatError, match="index 5"):
        for batch in stopping:
            seen += batch["__index__"].tolist()
    assert seen == list(range(len(seen))) and 0 < len(seen) <= 5
    stopping.close()


def test_memory_of_a_part_is_all_filled(two: list[Path]) -> None:
    options: dict[str, Any] = {"batch_size": 6, "seed": 3, "engine": "inline", "accumulate": 2}
    budget = _least(two[0], **options) // 2
    expected = batchkit.digests(Loader(two[0], **options, max_bytes=budget, over="split"))
    loader = Loader(two[0], **options, max_bytes=budget, over="split")
    poisoned = batchkit.poisoned(loader)
    assert batchkit.digests(poisoned) == expected


def test_a_consumer_that_keeps_parts_gets_copies(two: list[Path]) -> None:
    options: dict[str, Any] = {"batch_size": 6, "seed": 3, "engine": "thread", "threads": 1}
    budget = _least(two[0], **options) // 2
    loader = Loader(two[0], **options, max_bytes=budget, over="split")
    kept = list(loader)
    assert loader.stats()["copied"] > 0 and loader.stats()["slots"] == FEWEST_SLOTS
    assert _equal(_whole(kept), _plain(_copied(Loader(two[0], **options))))
    loader.close()


def test_options_that_make_no_sense(two: list[Path], complete: Path) -> None:
    for wrong in (0, -1, LEAST_BYTES - 1, 1.5, True, "", "4 GiBs", "GiB", "1e9", "٣GiB", b"4GiB", "9" * 30):
        with pytest.raises(OptionError, match="max_bytes"):
            Loader(two[0], 4, max_bytes=wrong)  # type: ignore[arg-type]
    for text, number in (
        ("1MiB", 1 << 20),
        ("1.5 MiB", 3 << 19),
        ("2MB", 2_000_000),
        ("300000", 300_000),
        ("300000B", 300_000),
    ):
        budget = Loader(two[0], 2, ["label"], max_bytes=text)._budget
        assert budget is not None and budget._most == number
    with pytest.raises(OptionError, match="over"):
        Loader(two[0], 4, max_bytes="1GiB", over="drop")
    with pytest.raises(OptionError, match="give max_bytes"):
        Loader(two[0], 4, over="split")
    with pytest.raises(OptionError, match="static=True"):
        Loader(two[0], 5, max_bytes="1GiB", over="split", static=False, rank=0, world_size=2)
    fields = {"image": [T.RandomResizedCrop(16)], "label": None}
    mix: dict[str, Any] = {"batch_transforms": [T.MixUp(field="image", labels=["label"])]}
    with pytest.raises(OptionError, match="MixUp mixes"):
        Loader(complete, 4, fields, max_bytes="1GiB", over="split", **mix)
    mixed = Loader(complete, 4, fields, max_bytes="1GiB", engine="thread", threads=1, **mix)
    free = Loader(complete, 4, fields, engine="thread", threads=1, **mix)
    assert batchkit.digests(mixed) == batchkit.digests(free)


def test_uneven_ranks_within_a_budget(two: list[Path]) -> None:
    options: dict[str, Any] = {"batch_size": 5, "seed": 1, "static": False, "world_size": 2, "engine": "inline"}
    least = max(_least(two[0], **options, rank=rank) for rank in range(2))
    for rank in range(2):
        expected = _plain(_copied(Loader(two[0], **options, rank=rank)))
        assert _equal(_plain(_copied(Loader(two[0], **options, rank=rank, max_bytes=least))), expected)
        # The rank that needs less says the same.
        with pytest.raises(LimitError, match="on rank 1"):
            Loader(two[0], **options, rank=rank, max_bytes=least - FEWEST_SLOTS * PAGE)


def test_memory_of_free_slots_is_given_back_while_a_batch_is_held(two: list[Path]) -> None:
    options: dict[str, Any] = {"batch_size": 6, "seed": 3, "engine": "thread", "threads": 1}
    # A step a slot, so that all are used.
    loader = Loader(two[0], **options, max_bytes=_least(two[0], **options))
    batches = iter(loader)
    held = next(batches)
    expected = batchkit.digest(held)
    slots = loader._pipelines[0].slots
    descriptor = os.dup(slots.descriptor)
    while next(batches, None) is not None:
        pass
    before = os.fstat(descriptor).st_blocks * 512
    loader.close()
    # The first page, and the slot that is held.
    assert before > PAGE + slots.size >= os.fstat(descriptor).st_blocks * 512
    assert batchkit.digest(held) == expected
    os.close(descriptor)
