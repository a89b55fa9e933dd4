"""Ranks without rows, rows that all crash, numbers of any integer type, labels that are mixed already."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from lfdata import Loader
from lfdata import transforms as T
from lfdata.errors import DecoderError, OptionError

CROP = {"image": [T.CenterCrop(8)], "label": None}


@pytest.mark.parametrize("engine", ["inline", "process"])
def test_ranks_without_rows_have_empty_batches(complete: Path, engine: str) -> None:
    found = []
    for rank in range(7):
        loader = Loader(complete, 4, rank=rank, world_size=7, static=False, engine=engine)
        found += [index for batch in loader for index in batch["__index__"].tolist()]
        loader.close()
    assert sorted(found) == list(range(40))


def test_a_row_that_crashes_alone_in_its_slot_is_masked(pictures: Path) -> None:
    fields = {"label": [T.Map("mapkit:crashes_on_five", (1,), "int64")], "image": [T.Resize((700, 700))]}
    loader = Loader(
        pictures, 1, fields, shuffle="sequential", engine="process", bad_samples="mask", most_bad_rate=1.0, stall_seconds=30
    )
    masks = [bool(batch["__mask__"]) for batch in loader]
    assert len(masks) == 48 and masks.count(False) == len({event.index for event in loader.stats()["events"]}) > 0
    loader.close()


def test_any_integer_type_does(pictures: Path) -> None:
    plain = Loader(pictures, 8, CROP, seed=3, engine="inline")
    other = Loader(pictures, np.int64(8), CROP, seed=np.uint64(3), block=np.int32(1024), engine="inline")  # type: ignore[arg-type]
    other.set_epoch(np.int64(2))  # type: ignore[arg-type]
    plain.set_epoch(2)
    assert json.loads(json.dumps(other.state_dict())) == plain.state_dict()
    for one, two in zip(plain, other, strict=True):
        assert one["__index__"].tolist() == two["__index__"].tolist()


@pytest.mark.parametrize("option", ["batch_size", "seed", "block", "prefetch", "processes", "threads", "most_bad"])
@pytest.mark.parametrize("value", [1.5, "4", float("nan")])
def test_what_is_no_whole_number_is_named(pictures: Path, option: str, value: object) -> None:
    options = {"batch_size": 8, option: value}
    with pytest.raises(OptionError, match=f"{option} is a whole number"):
        Loader(pictures, fields=CROP, **options)  # type: ignore[arg-type]


def test_epochs_and_rates_have_limits(pictures: Path) -> None:
    with pytest.raises(OptionError, match="most_bad_rate"):
        Loader(pictures, 8, CROP, most_bad_rate=float("nan"))
    loader = Loader(pictures, 8, CROP, engine="inline")
    for epoch in (-1, 1 << 63, 1.5):
        with pytest.raises(OptionError, match="epoch"):
            loader.set_epoch(epoch)  # type: ignore[arg-type]


def test_a_label_that_another_transform_mixes_is_refused(pictures: Path) -> None:
    with pytest.raises(OptionError, match="mixed by an earlier"):
        Loader(pictures, 8, CROP, batch_transforms=[T.MixUp(field="image"), T.MixUp(field="label", labels=("image",))])


def test_a_killed_decoder_is_noticed_though_a_function_of_the_user_forked(numbers: Path) -> None:
    fields = {"label": [T.Map("mapkit:forks_on_five", (1,), "int64")]}
    loader = Loader(numbers, 8, fields, shuffle="sequential", engine="process", stall_seconds=300)
    batches = iter(loader)
    next(batches)
    began = time.monotonic()
    os.kill(loader._pipelines[0]._engine._decoders[0].process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
    with pytest.raises(DecoderError, match="SIGKILL"):
        for _ in range(10):
            list(loader)
    assert time.monotonic() - began < 60
    loader.close()
