"""The iterator and what becomes of its memory: keeping, breaking off, entering again, closing."""

from __future__ import annotations

import gc
import itertools
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from batchkit import digest, digests

import lfdata.transforms as T
from lfdata import Loader
from lfdata.errors import LfdataError

FIELDS: dict[str, Any] = {"image": [T.RandomResizedCrop(16)], "label": None}
ENGINES = [{"engine": "inline"}, {"engine": "thread"}, {"engine": "process", "processes": 2}]
each_engine = pytest.mark.parametrize("options", ENGINES, ids=lambda options: options["engine"])


def children() -> set[int]:
    """Processes that this one has started."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        found |= set(map(int, (task / "children").read_text().split()))
    return found


@each_engine
def test_batches_that_are_kept_do_not_change(pictures: Path, options: dict[str, Any], decoders_alone: None) -> None:
    expected = digests(Loader(pictures, 4, FIELDS, engine="inline"), epochs=8)
    loader = Loader(pictures, 4, FIELDS, **options)
    kept: list[dict[str, torch.Tensor]] = []
    for _ in range(8):  # a slot has all steps of an epoch, and there are six of them at most
        kept += list(loader)
    assert loader.stats()["copied"] > 0 and loader.stats()["rows"] == 8 * 48
    assert [digest(batch) for batch in kept] == expected
    loader.close()
    gc.collect()
    assert [digest(batch) for batch in kept] == expected
    for batch in kept:
        batch["image"].zero_()
    assert digests(Loader(pictures, 4, FIELDS, engine="inline"), epochs=8) == expected


@each_engine
def test_one_tensor_of_a_batch_is_enough_to_keep_its_memory(pictures: Path, options: dict[str, Any]) -> None:
    labels, loader = [], Loader(pictures, 4, FIELDS, **options)
    for batch in loader:
        labels.append(batch["label"][1:])
    loader.close()
    plain = [batch["label"][1:].tolist() for batch in Loader(pictures, 4, ["label"], engine="inline")]
    assert [label.tolist() for label in labels] == plain


@each_engine
def test_nothing_is_copied_for_a_consumer_that_lets_go(pictures: Path, options: dict[str, Any]) -> None:
    loader = Loader(pictures, 4, FIELDS, **options)
    for _ in range(3):
        for batch in loader:
            batch["image"].float().mean()
    assert loader.stats()["copied"] == 0
    loader.close()


@each_engine
def test_broken_off_and_entered_again(pictures: Path, options: dict[str, Any]) -> None:
    expected = digests(Loader(pictures, 4, FIELDS, engine="inline"), epochs=2)
    before, threads = children(), threading.active_count()
    loader = Loader(pictures, 4, FIELDS, **options)
    for stop in (1, 5, 3):
        found = []
        for batch in loader:
            found.append(digest(batch))
            if len(found) == stop:
                break
        del batch
        gc.collect()
        assert found == expected[:stop] and loader.epoch == 0
        assert children() == before and threading.active_count() == threads
    assert digests(loader, epochs=2) == expected
    assert children() == before


@each_engine
def test_a_failure_of_the_consumer_frees_everything(pictures: Path, options: dict[str, Any]) -> None:
    before, loader = children(), Loader(pictures, 4, FIELDS, **options)

    def train() -> None:
        for _ in loader:
            raise RuntimeError("the training step failed")

    with pytest.raises(RuntimeError, match="training step"):
        train()
    gc.collect()
    assert children() == before and not loader._pipelines


@each_engine
def test_two_iterators_the_second_ends_the_first(pictures: Path, options: dict[str, Any]) -> None:
    expected = digests(Loader(pictures, 4, FIELDS, engine="inline"), epochs=2)
    loader = Loader(pictures, 4, FIELDS, **options)
    first = iter(loader)
    assert [digest(next(first)) for _ in range(2)] == expected[:2]
    second = iter(loader)
    assert next(first, None) is None
    assert [digest(batch) for batch in second] == expected[:12]
    assert next(first, None) is None and loader.epoch == 1
    assert digests(loader) == expected[12:]


@each_engine
def test_the_first_dropped_does_not_end_the_second(pictures: Path, options: dict[str, Any]) -> None:
    expected = digests(Loader(pictures, 4, FIELDS, engine="inline"))
    loader = Loader(pictures, 4, FIELDS, **options)
    first = iter(loader)
    next(first)
    second = iter(loader)
    begun = [digest(next(second))]
    del first
    gc.collect()
    assert begun + [digest(batch) for batch in second] == expected
    loader.close()


@each_engine
def test_closed_and_used_again(pictures: Path, options: dict[str, Any]) -> None:
    expected, before = digests(Loader(pictures, 4, FIELDS, engine="inline"), epochs=2), children()
    loader = Loader(pictures, 4, FIELDS, **options)
    loader.close()
    batches = iter(loader)
    kept = [next(batches), next(batches)]
    loader.close()
    loader.close()
    assert next(batches, None) is None and children() == before
    assert [digest(batch) for batch in kept] == expected[:2]
    assert digests(loader) == expected[:12]
    assert digests(loader) == expected[12:]


@each_engine
def test_a_loader_that_is_forgotten_leaves_nothing(pictures: Path, options: dict[str, Any]) -> None:
    before, threads, descriptors = children(), threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        loader = Loader(pictures, 4, FIELDS, **options)
        batches = iter(loader)
        kept = next(batches)
        del loader, batches
        gc.collect()
        assert children() == before and threading.active_count() == threads
        assert len(kept["label"]) == 4
        del kept
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 2


def test_set_epoch_while_iterating_ends_the_iteration(numbers: Path) -> None:
    loader = Loader(numbers, 4, engine="inline")
    batches = iter(loader)
    next(batches)
    loader.set_epoch(7)
    assert next(batches, None) is None and loader.epoch == 7
    again = Loader(numbers, 4, engine="inline")
    again.set_epoch(7)
    assert digests(loader) == digests(again)


def test_a_forked_process_is_told_to_make_its_own(numbers: Path) -> None:
    loader = Loader(numbers, 4, engine="inline")
    next(iter(loader))
    child = os.fork()
    if not child:
        try:
            next(iter(loader))
        except LfdataError as error:
            os._exit(7 if "forked" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_tensors_may_be_pinned_by_the_consumer(numbers: Path) -> None:
    for batch in itertools.islice(Loader(numbers, 4, engine="inline"), 2):
        assert all(value.is_contiguous() and value.device.type == "cpu" for value in batch.values())
