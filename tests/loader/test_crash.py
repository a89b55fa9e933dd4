"""A sample that ends the decoder's process costs one sample."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lfdata import Loader
from lfdata import transforms as T
from lfdata.errors import DecoderError, SampleError

CRASHING = {"label": [T.Map("mapkit:crashes_on_five", (1,), "int64")], "ids": None}
HOW: dict[str, Any] = {"engine": "process", "shuffle": "sequential", "stall_seconds": 30}


def test_the_sample_is_masked_and_named(numbers: Path, caplog: pytest.LogCaptureFixture) -> None:
    loader = Loader(numbers, 8, CRASHING, bad_samples="mask", tail="pad", most_bad_rate=1.0, **HOW)
    plain = Loader(numbers, 8, ["label", "ids"], shuffle="sequential", tail="pad", engine="inline")
    bad = []
    for batch, other in zip(loader, plain, strict=True):
        mask = batch["__mask__"].numpy()
        bad += batch["__index__"].numpy()[other["__mask__"].numpy() & ~mask].tolist()
        assert np.array_equal(batch["label"].numpy()[mask, 0], other["label"].numpy()[mask])
    assert len(bad) == 1
    (event,) = {event.index: event for event in loader.stats()["events"]}.values()
    assert event.index == bad[0] and "crashed" in event.reason and event.action == "masked" and event.shard and event.key
    # Nobody knows which field it was.
    (line,) = {record.getMessage() for record in caplog.records if "index 5," in record.getMessage()}
    assert line.endswith("index 5, key b'0-5': a decoder process crashed over this sample: masked")
    # The second epoch knows it already.
    decoder = loader._pipelines[0]._engine
    crashes = decoder._crashes  # type: ignore[attr-defined]
    assert sum(len(batch["label"]) for batch in loader) and decoder._crashes == crashes  # type: ignore[attr-defined]
    loader.close()


def test_stop_names_it(numbers: Path) -> None:
    with pytest.raises(SampleError, match=r"index 5: key .*crashed over this sample"):
        list(Loader(numbers, 8, CRASHING, **HOW))


def test_two_decoders(numbers: Path) -> None:
    fields = {"label": CRASHING["label"]}
    loader = Loader(numbers, 8, fields, bad_samples="replace", most_bad_rate=1.0, processes=2, **HOW)
    found = [batch["label"].numpy()[:, 0] for batch in loader]
    assert 5 not in np.concatenate(found) and [event.index for event in loader.stats()["events"]].count(5) == 1
    loader.close()


def test_when_everything_crashes_the_run_ends(numbers: Path) -> None:
    fields = {"label": [T.Map("mapkit:always_crashes", (1,), "int64")]}
    with pytest.raises(DecoderError, match="SIGABRT"):
        list(Loader(numbers, 8, fields, bad_samples="mask", most_bad_rate=1.0, **HOW))


def test_nothing_is_decoded_here_if_so_asked(pictures: Path) -> None:
    fields = {"image": [T.CenterCrop(8)]}
    plain = [batch["image"] for batch in Loader(pictures, 8, fields, engine="inline")]
    loader = Loader(pictures, 8, fields, engine="process", isolate=True)
    engine: Any = None
    for number, batch in enumerate(loader):
        engine = engine or loader._pipelines[0]._engine
        assert not engine._helps and batch["image"].equal(plain[number])
    loader.close()


def test_more_crashes_than_are_allowed_in_a_row_but_batches_between_them(numbers: Path) -> None:
    fields = {"label": [T.Map("mapkit:crashes_on_tens", (1,), "int64")]}
    loader = Loader(numbers, 4, fields, bad_samples="mask", tail="pad", most_bad_rate=1.0, where=np.arange(103) < 60, **HOW)
    loader._producer.steps = 1
    masked = [batch["__index__"][~batch["__mask__"]].tolist() for batch in loader]
    assert [index for batch in masked for index in batch] == [0, 10, 20, 30, 40, 50]
    loader.close()


def test_a_substitute_that_crashes_is_replaced_too(numbers: Path) -> None:
    fields = {"label": [T.Map("mapkit:crashes_on_most", (1,), "int64")]}
    loader = Loader(numbers, 4, fields, bad_samples="replace", most_bad_rate=1.0, where=np.arange(103) < 8, **HOW)
    found = [int(value) for batch in loader for value in batch["label"][:, 0]]
    assert len(found) == 8 and set(found) <= {0, 1, 2, 3, 4}
    loader.close()


def test_a_partner_of_another_rank_that_crashes_is_masked_on_every_rank(pictures: Path) -> None:
    crashing = {"image": [T.CenterCrop(16), T.Map("mapkit:crashes_on_one_picture", (16, 16, 3), "uint8")], "label": None}
    plain = next(iter(Loader(pictures, 8, {"image": [T.CenterCrop(16)]}, shuffle="sequential", engine="inline")))
    os.environ["CRASHING_PICTURE"] = str(int(plain["image"][6].long().sum()))
    try:
        for rank in (0, 1):
            loader = Loader(
                pictures,
                8,
                crashing,
                batch_transforms=[T.MixUp(field="image", labels=["label"])],
                bad_samples="mask",
                most_bad_rate=1.0,
                rank=rank,
                world_size=2,
                **HOW,
            )
            batch = next(iter(loader))
            assert batch["__mask__"].tolist() == ([True] * 4 if rank == 0 else [True, True, False, True])
            loader.close()
    finally:
        del os.environ["CRASHING_PICTURE"]


def test_a_crash_where_ends_of_processes_are_ignored(numbers: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        loader = Loader(numbers, 8, CRASHING, bad_samples="mask", most_bad_rate=1.0, **HOW)
        masked = [index for batch in loader for index in batch["__index__"][~batch["__mask__"]].tolist()]
        loader.close()
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert masked == [5]
    assert any("ended (how is not known: SIGCHLD is ignored" in record.getMessage() for record in caplog.records)
