"""Feedback in a running loader: fewer threads for a slow consumer, and never other bytes."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import batchkit
import numpy as np
import pytest

import lfdata.transforms as T
from lfdata import Loader
from lfdata.codecs.pixels import native_module
from lfdata.errors import OptionError
from lfdata.loader import feedback
from lfdata.schedule.sensors import Reading, SensorError

needs_native = pytest.mark.skipif(native_module is None, reason="lfdata.codecs._pixels is not built")


@needs_native
def test_a_slow_consumer_is_fed_by_one_thread(tmp_path: Path) -> None:
    path = batchkit.write_pictures(tmp_path / "d", 32)
    fields: dict[str, Any] = {"image": [T.RandomResizedCrop(224)], "label": None}
    plain = batchkit.digests(Loader(path, 8, fields, engine="inline", threads=1), 10)
    loader = Loader(path, 8, fields, engine="process", threads=3, feedback=True)
    widths, found = [], []
    for _ in range(10):
        for batch in loader:
            found.append(batchkit.digest(batch))
            time.sleep(0.08)
            widths.append(loader.stats()["width"])
    assert found == plain
    assert widths[0] in (0, 3) and min(widths[1:]) < 3, widths
    loader.close()
    assert Loader(path, 8, fields).stats()["width"] == 0


class Fake:
    """A GPU that is as busy as it is told to be."""

    name = "fake"

    def __init__(self, busy: float, fail_after: int = 1 << 30) -> None:
        self.busy, self.left, self.closed = busy, fail_after, 0

    def read(self) -> Reading:
        self.left -= 1
        if self.left < 0:
            raise SensorError("the driver is gone")
        return Reading(self.busy, time.monotonic(), {"sm": self.busy})

    def close(self) -> None:
        self.closed += 1


@needs_native
@pytest.mark.parametrize(("busy", "verdict"), [(0.3, "consumer"), (0.99, "fed")])
def test_a_gpu_that_idles_beside_ready_batches_is_the_consumers_fault(tmp_path: Path, busy: float, verdict: str) -> None:
    path = batchkit.write_pictures(tmp_path / "d", 32)
    sensor = Fake(busy)
    loader = Loader(path, 8, {"image": [T.RandomResizedCrop(224)], "label": None}, engine="process", threads=2, feedback=sensor)
    deadline, found = time.monotonic() + 60, {"verdict": "", "width": 0}
    # A machine that is busy elsewhere makes the decoder late now and then.
    while (found["verdict"], found["width"]) != (verdict, 1) and time.monotonic() < deadline:
        for _ in loader:
            time.sleep(0.06)
        found = loader.stats()["feedback"]
    assert found["verdict"] == verdict and found["sensor"] == "fake", found
    assert found["busy"] == busy and found["reading"] == {"sm": busy}
    assert found["width"] == 1, "an idle GPU beside ready batches made decoding faster"
    loader.close()
    assert sensor.closed == 1


@needs_native
def test_a_sensor_that_is_lost_is_told_and_does_not_stop_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is told once, the batches are the same, and what is left, the consumer's waits, still sets the width."""
    path = batchkit.write_pictures(tmp_path / "d", 32)
    fields: dict[str, Any] = {"image": [T.RandomResizedCrop(224)]}
    sensor = Fake(0.5, fail_after=2)
    loader = Loader(path, 8, fields, engine="process", threads=2, feedback=sensor)
    found, said, deadline = list[str](), loader.stats()["feedback"], time.monotonic() + 60
    epochs = 0
    while epochs < 4 or (said["width"] != 1 and time.monotonic() < deadline):
        for batch in loader:
            found.append(batchkit.digest(batch))
            time.sleep(0.06)
        epochs, said = epochs + 1, loader.stats()["feedback"]
    assert said["sensor"] == "lost: the driver is gone" and said["busy"] is None and sensor.closed == 1
    assert said["width"] == 1, "nothing sets the width any more"
    # Nobody says any more what the GPU does.
    assert said["verdict"] in ("unknown", "read", "decode", "augment", "plan")
    assert sum("sensor is lost" in record.message for record in caplog.records) == 1
    loader.close()
    assert found == batchkit.digests(Loader(path, 8, fields, engine="inline", threads=1), epochs)


class Strict(Fake):
    """As :class:`Fake`, and cannot be read once it is closed, nor by two threads."""

    def __init__(self) -> None:
        super().__init__(0.5)
        self.reads, self.after, self.threads = 0, 0, set[int]()

    def read(self) -> Reading:
        self.after += bool(self.closed)
        self.reads += 1
        self.threads.add(threading.get_ident())
        return super().read()


def _fed(loader: Loader, sensor: Strict) -> dict[str, Any]:
    """Iterates until the sensor has been read again."""
    reads, deadline = sensor.reads, time.monotonic() + 60
    found: dict[str, Any] = {}
    for _ in _for_ever(loader):
        time.sleep(0.02)
        found = loader.stats()["feedback"]
        if sensor.reads > reads + 1:
            break
        assert time.monotonic() < deadline, found
    return found


def _for_ever(loader: Loader) -> Iterator[dict[str, Any]]:
    while True:
        yield from loader


@needs_native
def test_a_sensor_of_ones_own_is_read_over_all_iterations_and_closed_once(tmp_path: Path) -> None:
    path = batchkit.write_pictures(tmp_path / "d", 32)
    sensor = Strict()
    loader = Loader(path, 8, {"image": [T.RandomResizedCrop(32)]}, engine="process", threads=1, feedback=sensor)
    for _ in range(3):
        # Each is left early, which ends the decoder.
        assert _fed(loader, sensor)["sensor"] == "fake"
        assert sensor.closed == 0
    loader.close()
    loader.close()
    assert (sensor.closed, sensor.after, len(sensor.threads)) == (1, 0, 1)
    # Begun anew without it.
    assert sum(1 for _ in loader) == 4
    assert loader.stats()["feedback"]["sensor"] == "none" and sensor.after == 0
    loader.close()
    assert sensor.closed == 1


def test_a_sensor_of_ones_own_outlives_larger_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a budget, between two epochs."""
    monkeypatch.setattr("lfdata.loader.budget.ROOM", 1 << 60)
    path = batchkit.write_numbers(tmp_path / "d", 60, lengths=np.random.default_rng(0).integers(0, 3000, 60).tolist())
    sensor, sizes = Strict(), set[int]()
    loader = Loader(
        path, 5, ["label", "ids"], seed=2, engine="process", threads=1, feedback=sensor, max_bytes="1MiB", prefetch=1
    )
    for _ in range(6):
        for _ in loader:
            assert sensor.closed == 0
        sizes.add(loader.stats()["slot_bytes"])
        time.sleep(0.15)
    assert len(sizes) > 1 and sensor.reads, "no slots were made anew"
    assert _fed(loader, sensor)["sensor"] == "fake" and (sensor.closed, sensor.after) == (0, 0)
    del loader
    gc.collect()
    assert (sensor.closed, sensor.after, len(sensor.threads)) == (1, 0, 1)


def test_a_sensor_of_ones_own_is_closed_also_if_nothing_was_iterated(tmp_path: Path) -> None:
    path = batchkit.write_pictures(tmp_path / "d", 8)
    sensors = [Strict(), Strict()]
    loader, other = (Loader(path, 8, ["label"], feedback=sensor) for sensor in sensors)
    loader.close()
    del other
    gc.collect()
    assert [(sensor.closed, sensor.reads) for sensor in sensors] == [(1, 0), (1, 0)]


class Hanging(Fake):
    """Does not answer until it is let go."""

    def __init__(self) -> None:
        super().__init__(0.5)
        self.asked, self.let_go = threading.Event(), threading.Event()

    def read(self) -> Reading:
        self.asked.set()
        self.let_go.wait()
        return super().read()


@needs_native
def test_a_sensor_that_hangs_keeps_neither_the_end_nor_the_slots(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = batchkit.write_pictures(tmp_path / "d", 32)
    fields: dict[str, Any] = {"image": [T.RandomResizedCrop(32)]}
    sensor, mapped = Hanging(), _slots_mapped()
    loader = Loader(path, 8, fields, engine="process", threads=2, feedback=sensor)
    try:
        assert [batchkit.digest(batch) for batch in loader] == batchkit.digests(Loader(path, 8, fields, engine="inline"))
        assert sensor.asked.wait(10)
        assert _slots_mapped() > mapped
        loader.close()
        assert not sensor.let_go.is_set() and sensor.closed == 0
        assert [record.message for record in caplog.records if "hangs" in record.message] == [
            "the GPU sensor hangs (fake): its thread is left behind"
        ]
        gc.collect()
        assert _slots_mapped() == mapped
    finally:
        sensor.let_go.set()


def _slots_mapped() -> int:
    return Path("/proc/self/maps").read_text().count("lfdata-slots")


@needs_native
def test_a_slow_decoder_is_named(tmp_path: Path) -> None:
    path = batchkit.write_pictures(tmp_path / "d", 32)
    loader = Loader(path, 8, {"image": [T.RandomResizedCrop(400)]}, engine="process", threads=1, feedback="wait", isolate=True)
    for _ in range(6):
        for _ in loader:
            pass
    found = loader.stats()["feedback"]
    assert (found["verdict"], found["sensor"], found["busy"]) == ("decode", "none", None)
    loader.close()


@needs_native
def test_look_ahead_and_threads_go_down_for_a_slow_consumer(tmp_path: Path) -> None:
    path = batchkit.write_pictures(tmp_path / "d", 48)
    loader = Loader(path, 4, {"image": [T.RandomResizedCrop(224)]}, engine="process", threads=3, prefetch=3, feedback="wait")
    ahead, deadline = 3, time.monotonic() + 60
    while ahead > 1 and time.monotonic() < deadline:
        for _ in loader:
            time.sleep(0.03)
            ahead = min(ahead, loader.stats()["feedback"]["ahead"])
    assert ahead == 1
    loader.close()


def test_a_sensor_asked_for_without_a_gpu_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(feedback, "TELL_SECONDS", 0.0)
    monkeypatch.setattr(feedback, "current_gpu", lambda _: None)
    path = batchkit.write_pictures(tmp_path / "d", 16)
    for wanted, times in (("gpm", 1), (True, 0), ("wait", 0)):
        caplog.clear()
        loader = Loader(path, 4, ["label"], engine="process", feedback=wanted)
        for _ in range(2):
            for _ in loader:
                pass
        assert sum("uses no GPU" in record.message for record in caplog.records) == times
        loader.close()


def test_no_such_feedback(tmp_path: Path) -> None:
    path = batchkit.write_pictures(tmp_path / "d", 8)
    with pytest.raises(OptionError, match="feedback 'always'"):
        Loader(path, 4, ["image"], feedback="always")


@needs_native
def test_the_width_limits_the_threads_of_the_pool(tmp_path: Path) -> None:
    """In a program of its own: the limit is of the whole process."""
    import subprocess
    import sys

    script = """
import threading, time
import numpy as np
from io import BytesIO
from PIL import Image
from lfdata.codecs.image import make_image_encoder
from lfdata.codecs.pixels import CropDecoder, watch_width
pixels = np.random.default_rng(0).integers(0, 256, (600, 800, 3), dtype=np.uint8)
out = BytesIO(); Image.fromarray(pixels).save(out, "JPEG", quality=95)
encoder = make_image_encoder({"codec": "keep"}); item = encoder.encode(out.getvalue())
n = 32
sizes = {k: np.full(n, item.sizes[k]) for k in ("width", "height", "channels", "codec", "bits")}
decoder = CropDecoder(encoder.params)
made = np.zeros((n, 64, 64, 3), np.uint8)
boxes = np.tile([0.0, 0, 800, 600], (n, 1))
def call(spent):
    begin = time.perf_counter()
    assert not decoder.crop_resize([item.payload] * n, sizes, boxes, np.zeros(n, bool), made, threads=4, spent=spent)
    return time.perf_counter() - begin
def parallel():
    work = []
    seconds = call(work.append)
    return work[0] / seconds
call(lambda _: None)
width = np.zeros(1, np.int64)
watch_width(width)
free = parallel()
width[0] = 1
one = parallel()
# While a call is under way: it begins with one thread and gets three more.
grown = []
thread = threading.Thread(target=lambda: grown.append(parallel()))
thread.start(); time.sleep(0.02); width[0] = 4; thread.join()
width[0] = 0
print(free, one, grown[0])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    free, one, grown = map(float, done.stdout.split())
    # Threads at work at a time, whether or not there are processors for them.
    assert one < 1.1 and free > 1.5 * one and grown > 1.2 * one, done.stdout
