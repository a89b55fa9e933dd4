"""LoaderDataset: the loader's order and state out of the workers of torch's DataLoader and torchdata's StatefulDataLoader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from batchkit import digest, digests
from torch.utils.data import DataLoader

import lfdata.transforms as T
from lfdata import Loader, LoaderDataset
from lfdata.errors import OptionError, StateError
from lfdata.loader.stateful import Steps

torchdata = pytest.importorskip("torchdata.stateful_dataloader")

FIELDS: dict[str, Any] = {"image": [T.RandomResizedCrop(12)], "label": None}
MIXED: dict[str, Any] = {"batch_transforms": [T.MixUp(labels=("label",))]}
BUDGET: dict[str, Any] = {"max_bytes": 130_000}
PACKED: dict[str, Any] = {"packing": {"field": "ids", "window": 32, "capacity": 9}, "tail": "pad"}


def stateful(dataset: LoaderDataset, workers: int, **options: Any) -> Any:
    # fork: a worker that is spawned imports torch first, which takes seconds. Spawned ones are tested below.
    how = {"multiprocessing_context": "fork"} if workers else {}
    return torchdata.StatefulDataLoader(dataset, batch_size=None, num_workers=workers, **{**how, **options})


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
def test_the_loaders_order(pictures: Path, numbers: Path, workers: int) -> None:
    for path, fields, options in ((pictures, FIELDS, MIXED), (numbers, ["ids"], PACKED), (pictures, ["image"], BUDGET)):
        dataset = LoaderDataset(path, 8, fields, **options)
        whole = digests(Loader(path, 8, fields, engine="inline", **options), epochs=2)
        first = len(dataset)
        assert [digest(batch) for batch in stateful(dataset, workers)] == whole[:first]
        dataset.set_epoch(1)
        assert [digest(batch) for batch in stateful(dataset, workers)] == whole[first:]
        assert len(dataset) == len(whole) - first


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_in_parts_out_of_one_worker(pictures: Path, workers: int) -> None:
    options: dict[str, Any] = {"max_bytes": 64_000, "over": "split"}
    whole = digests(Loader(pictures, 8, ["image"], engine="inline", **options))
    dataset = LoaderDataset(pictures, 8, ["image"], **options)
    assert len(dataset) == len(whole) > 6
    loader, found = stateful(dataset, workers), []
    for batch in loader:
        found.append(digest(batch))
        if int(batch["__part__"][0, 0]) == 0 and len(found) > 3:
            state = loader.state_dict()
            break
    again = stateful(LoaderDataset(pictures, 8, ["image"], **options), workers)
    again.load_state_dict(state)
    assert found + [digest(batch) for batch in again] == whole
    with pytest.raises(OptionError, match="out of order"):
        list(stateful(LoaderDataset(pictures, 8, ["image"], **options), 2))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [1, 2, 5])
def test_resume_is_exact_at_the_same_number_of_workers(pictures: Path, workers: int, stop: int) -> None:
    whole = digests(Loader(pictures, 6, FIELDS, engine="inline", **MIXED), epochs=4)[24:]
    dataset = LoaderDataset(pictures, 6, FIELDS, **MIXED)
    dataset.set_epoch(3)
    loader, found = stateful(dataset, workers), []
    for batch in loader:
        found.append(digest(batch))
        if len(found) == stop:
            state = loader.state_dict()
            break
    again = stateful(LoaderDataset(pictures, 6, FIELDS, **MIXED), workers)
    again.load_state_dict(state)
    assert found + [digest(batch) for batch in again] == whole


@pytest.mark.parametrize("workers", [0, 2])
def test_after_the_last_batch_and_again(pictures: Path, workers: int) -> None:
    whole = digests(Loader(pictures, 8, FIELDS, engine="inline"), epochs=2)
    loader = stateful(LoaderDataset(pictures, 8, FIELDS), workers)
    assert [digest(batch) for batch in loader] == whole[:6]
    state = loader.state_dict()
    dataset = LoaderDataset(pictures, 8, FIELDS)
    again = stateful(dataset, workers)
    again.load_state_dict(state)
    dataset.set_epoch(1)  # torchdata goes on with a new iteration after a finished one
    assert [digest(batch) for batch in again] == whole[6:]


def test_workers_that_stay_see_the_epoch(pictures: Path) -> None:
    whole = digests(Loader(pictures, 8, FIELDS, engine="inline"), epochs=3)
    dataset = LoaderDataset(pictures, 8, FIELDS)
    loader = stateful(dataset, 2, persistent_workers=True)
    for epoch in range(3):
        dataset.set_epoch(epoch)
        assert [digest(batch) for batch in loader] == whole[epoch * 6 : epoch * 6 + 6]


def test_a_ranks_part(pictures: Path) -> None:
    for rank in range(2):
        dataset = LoaderDataset(pictures, 8, FIELDS, rank=rank, world_size=2, **MIXED)
        whole = digests(Loader(pictures, 8, FIELDS, rank=rank, world_size=2, engine="inline", **MIXED))
        assert [digest(batch) for batch in stateful(dataset, 2)] == whole


def test_in_torchs_own_dataloader(pictures: Path) -> None:
    whole = digests(Loader(pictures, 8, FIELDS, engine="inline"))
    dataset = LoaderDataset(pictures, 8, FIELDS)
    for workers in (0, 2):
        loader: Any = DataLoader(dataset, batch_size=None, num_workers=workers)
        assert len(loader) == 6 and [digest(batch) for batch in loader] == whole


@pytest.mark.slow
def test_in_spawned_workers(pictures: Path) -> None:
    whole = digests(Loader(pictures, 8, FIELDS, engine="inline"), epochs=2)
    dataset = LoaderDataset(pictures, 8, FIELDS)
    loader = stateful(dataset, 2, multiprocessing_context="spawn", persistent_workers=True)
    for epoch in range(2):
        dataset.set_epoch(epoch)
        assert [digest(batch) for batch in loader] == whole[epoch * 6 : epoch * 6 + 6]


def test_more_workers_than_steps(pictures: Path) -> None:
    dataset = LoaderDataset(pictures, 24, FIELDS)
    whole = digests(Loader(pictures, 24, FIELDS, engine="inline"))
    assert [digest(batch) for batch in stateful(dataset, 3)] == whole and len(whole) == 2


def test_a_workers_state_is_json_and_its_own(pictures: Path) -> None:
    steps = iter(LoaderDataset(pictures, 8, FIELDS))
    assert isinstance(steps, Steps)
    next(steps)
    state = json.loads(json.dumps(steps.state_dict()))
    assert state == steps.state_dict() and state["loader"]["samples"] == 8
    with pytest.raises(StateError, match="worker 1 of 2, this is worker 0 of 1"):
        steps.load_state_dict({**state, "worker": 1, "workers": 2})
    with pytest.raises(StateError, match="seed"):
        other = iter(LoaderDataset(pictures, 8, FIELDS, seed=1))
        assert isinstance(other, Steps)
        other.load_state_dict(state)
    assert sum(1 for _ in steps) == 5 and next(steps, None) is None
    assert (steps.state_dict()["loader"]["epoch"], steps.state_dict()["loader"]["samples"]) == (0, 48)
    steps.load_state_dict(state)
    assert sum(1 for _ in steps) == 5


def test_options_that_are_the_dataloaders_are_refused(pictures: Path) -> None:
    with pytest.raises(OptionError, match="engine, prefetch"):
        LoaderDataset(pictures, 8, FIELDS, engine="process", prefetch=3)
    one = [digest(batch) for batch in stateful(LoaderDataset(pictures, 8, FIELDS, accumulate=2), 1)]
    assert one == digests(Loader(pictures, 8, FIELDS, accumulate=2, engine="inline"))
    with pytest.raises(Exception, match="accumulate with several workers"):
        list(stateful(LoaderDataset(pictures, 8, FIELDS, accumulate=2), 2))


def test_batches_outlive_their_workers(pictures: Path) -> None:
    kept = list(stateful(LoaderDataset(pictures, 8, FIELDS), 2))
    assert [digest(batch) for batch in kept] == digests(Loader(pictures, 8, FIELDS, engine="inline"))
    assert all(isinstance(value, torch.Tensor) for batch in kept for value in batch.values())
