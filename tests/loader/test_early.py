"""The trainer's own lane: first batches are made ahead while the decoder starts, and it leaves nothing behind."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import batchkit
import pytest

import lfdata.transforms as T
from lfdata import Loader
from lfdata.codecs.pixels import CropDecoder
from lfdata.loader.early import EarlyLane
from lfdata.loader.jobs import Done, Job
from lfdata.loader.pipeline import start


def _job(number: int) -> Job:
    return Job(number, 0, number, 1, 0)


def _answers(lane: EarlyLane, count: int) -> list[Done]:
    found: list[Done] = []
    deadline = time.monotonic() + 10
    while len(found) < count and time.monotonic() < deadline:
        if (done := lane.take()) is not None:
            found.append(done)
    return found


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_jobs_are_done_in_turn_and_those_not_begun_come_back() -> None:
    before, gate, begun = _descriptors(), threading.Event(), threading.Event()

    def work(job: Job) -> Done:
        if job.number == 3:
            begun.set()
            assert gate.wait(10)
        return Done(job.number, 1)

    lane = EarlyLane(work)
    for number in range(1, 6):
        lane.submit(_job(number))
    assert [done.number for done in _answers(lane, 2)] == [1, 2]
    assert begun.wait(10)
    assert [job.number for job in lane.retire()] == [4, 5] and not lane.over
    gate.set()
    assert [done.number for done in _answers(lane, 1)] == [3]
    lane._thread.join(10)
    assert lane.over and lane.take() is None and lane.retire() == []
    lane.close()
    assert _descriptors() == before


def test_what_is_raised_is_an_answer() -> None:
    def work(job: Job) -> Done:
        raise SystemExit(3)

    lane = EarlyLane(work)
    lane.submit(_job(1))
    (done,) = _answers(lane, 1)
    assert done.failure is not None and "SystemExit: 3" in str(done.failure.error())
    lane.close()


def test_batches_are_made_ahead_while_the_decoder_starts(pictures: Path) -> None:
    # Large enough for a slot of one step.
    fields: dict[str, Any] = {"image": [T.RandomResizedCrop(224)], "label": None}
    plain = batchkit.digests(Loader(pictures, 8, fields, engine="inline"), 2)
    threads, descriptors = threading.active_count(), _descriptors()
    loader = Loader(pictures, 8, fields, engine="process")
    batches = iter(loader)
    found = [batchkit.digest(next(batches))]
    engine: Any = loader._pipelines[0]._engine
    early = not any(decoder.ready for decoder in engine._decoders)
    time.sleep(0.2)
    found.append(batchkit.digest(next(batches)))
    if early:
        assert max(loader.stats()["ready"]) >= 1, "nothing was made while the consumer was busy"
    found += [batchkit.digest(batch) for batch in batches]
    batch, deadline = None, time.monotonic() + 60
    while engine._lane is not None and time.monotonic() < deadline:
        for batch in loader:
            if len(found) < len(plain):
                found.append(batchkit.digest(batch))
        time.sleep(0.1)
    assert found == plain[: len(found)]
    assert engine._lane is None, "the decoder is ready, and the lane is still there"
    loader.close()
    del batches, batch, loader, engine
    assert threading.active_count() == threads and _descriptors() <= descriptors


@pytest.mark.parametrize("batches", [0, 1])
def test_closing_at_once_leaves_no_thread_and_no_descriptor(pictures: Path, batches: int) -> None:
    threads, descriptors = threading.active_count(), _descriptors()
    for _ in range(3):
        loader = Loader(pictures, 8, {"image": [T.RandomResizedCrop(64)]}, engine="process")
        iterator = iter(loader)
        for _ in range(batches):
            next(iterator)
        loader.close()
        del iterator, loader
    assert threading.active_count() == threads and _descriptors() <= descriptors


def test_closing_gives_up_the_job_in_work(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, descriptors = threading.active_count(), _descriptors()
    begun, closing, counts = threading.Event(), threading.Event(), []
    real, retire = CropDecoder.crop_resize, EarlyLane.retire

    def slow(self: CropDecoder, payloads: Any, *args: Any, **options: Any) -> Any:
        counts.append(len(payloads))
        begun.set()
        assert closing.wait(10)
        return real(self, payloads, *args, **options)

    def retired(self: EarlyLane) -> list[Job]:
        closing.set()
        return retire(self)

    monkeypatch.setattr(CropDecoder, "crop_resize", slow)
    monkeypatch.setattr(EarlyLane, "retire", retired)
    loader = Loader(pictures, 48, {"image": [T.CenterCrop(8)]}, engine="process", threads=1)
    pipeline = start(loader._producer, *loader._options)
    pipeline._submit(0, 0)
    assert begun.wait(10)
    pipeline.close()
    assert counts == [8] and threading.active_count() == threads
    del pipeline, loader
    assert _descriptors() <= descriptors
