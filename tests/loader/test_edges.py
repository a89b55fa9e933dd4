"""Ranks without rows, rows that all crash, numbers of any integer type, labels that are mixed already."""

from __future__ import annotations

import inspect
import json
import os
import re
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lfdata import Loader
from lfdata import transforms as T
from lfdata.errors import DecoderError, OptionError
from lfdata.loader.pipeline import start

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


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"batch_size": 200}, "its 103 samples are fewer than batch_size=200, and tail='drop_last'"),
        ({"where": np.zeros(103, bool)}, r"there are no samples \(of 103 in the data"),
        (
            {"fields": ["ids"], "packing": {"field": "ids", "window": 16, "capacity": 64}},
            "its .* packed rows are fewer than batch_size=8",
        ),
    ],
)
def test_a_loader_without_batches_says_why_once(numbers: Path, options: dict[str, Any], why: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = Loader(**{"source": numbers, "batch_size": 8, "engine": "inline"} | options)
        assert list(loader) == list(loader) == []
    (warning,) = caught
    assert re.search(f"the loader has no batches: {why}", str(warning.message)) and warning.filename == __file__


def test_every_parameter_is_documented() -> None:
    args = str(Loader.__doc__).partition("Args:")[2].partition("Raises:")[0]
    described = {
        name.strip() for names in re.findall(r"^        (\w[\w, ]*):", args, re.MULTILINE) for name in names.split(",")
    }
    later = {name for line in re.findall(r"; ([\w, ]+and \w+):", args) for name in re.split(r", | and ", line)}
    parameters = {name for name in inspect.signature(Loader).parameters if not name.startswith("_")}
    assert described | later == parameters


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


@pytest.mark.parametrize(
    ("op", "named"), [(T.MixUp(labels=("none",)), "labels names 'none'"), (T.MixUp(field="none"), "field names 'none'")]
)
def test_a_field_that_is_not_there_cannot_be_mixed(pictures: Path, op: T.MixUp, named: str) -> None:
    with pytest.raises(
        OptionError, match=rf"MixUp: {named}, which the loader does not give; its fields are \['image', 'label'\]"
    ):
        Loader(pictures, 8, CROP, batch_transforms=[op])


def test_a_starting_decoder_says_nothing_of_an_interrupt(pictures: Path, capfd: pytest.CaptureFixture[str]) -> None:
    loader = Loader(pictures, 8, CROP, engine="process", isolate=True)
    loader._pipelines.append(start(loader._producer, *loader._options))
    (process,) = loader._pipelines[0]._engine.processes  # type: ignore[attr-defined]
    for _ in range(20):
        os.kill(process, signal.SIGINT)
        time.sleep(0.01)
    assert sum(1 for _ in loader) == 6
    loader.close()
    assert capfd.readouterr().err == ""


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
