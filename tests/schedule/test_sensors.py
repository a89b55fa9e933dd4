"""Sensors against a stand-in for NVML's Python binding; what is there for real is tested on a GPU machine."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lfdata.schedule.sampler import Sampler
from lfdata.schedule.sensors import METRICS, Gpm, Reading, SensorError, Utilisation, find


class NVMLError(Exception):
    """As the binding has it."""


class Nvml(SimpleNamespace):
    """Counts sessions and samples; metrics are percentages of its own choosing."""

    NVMLError, NVML_SUCCESS, NVML_GPM_METRICS_GET_VERSION = NVMLError, 0, 7

    def __init__(self, supported: bool = True, broken: tuple[str, ...] = ()) -> None:
        super().__init__(
            sessions=0, samples=0, taken=0, values={1: 42.0, 2: 30.0, 20: 900.0}, supported=supported, broken=set(broken)
        )

    def _call(self, name: str) -> None:
        if name in self.broken:
            raise NVMLError(f"{name} failed")

    def nvmlInit(self) -> None:
        self._call("init")
        self.sessions += 1

    def nvmlShutdown(self) -> None:
        self.sessions -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self._call("handle")
        return f"handle of {uuid}"

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        self._call("rates")
        assert handle == "handle of GPU-1"
        return SimpleNamespace(gpu=55, memory=20)

    def nvmlGpmQueryDeviceSupport(self, handle: str) -> Any:
        return SimpleNamespace(isSupportedDevice=self.supported)

    def nvmlGpmSampleAlloc(self) -> Any:
        self.samples += 1
        return SimpleNamespace(at=None)

    def nvmlGpmSampleFree(self, sample: Any) -> None:
        self.samples -= 1

    def nvmlGpmSampleGet(self, handle: str, sample: Any) -> None:
        self._call("sample")
        self.taken += 1
        sample.at = self.taken

    def c_nvmlGpmMetricsGet_t(self) -> Any:
        return SimpleNamespace(version=0, metrics=[SimpleNamespace(metricId=0, nvmlReturn=0, value=0.0) for _ in METRICS])

    def nvmlGpmMetricsGet(self, wanted: Any) -> Any:
        assert wanted.version == 7 and wanted.numMetrics == len(METRICS) and wanted.sample2.at == wanted.sample1.at + 1
        for metric in wanted.metrics:
            metric.nvmlReturn = 0 if metric.metricId in self.values else 3
            metric.value = self.values.get(metric.metricId, 0.0)
        return wanted


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    found = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", found)
    return found


def test_gpm_gives_shares_between_one_call_and_the_next(nvml: Nvml) -> None:
    sensor = Gpm("GPU-1")
    for _ in range(3):
        reading = sensor.read()
        assert reading.busy == pytest.approx(0.42) and reading.more == {"sm": pytest.approx(0.3), "pcie_tx": 900.0}
        assert abs(reading.at - time.monotonic()) < 5
    sensor.close()
    assert (nvml.sessions, nvml.samples) == (0, 0)


def test_utilisation(nvml: Nvml) -> None:
    sensor = Utilisation("GPU-1")
    assert sensor.read().busy == pytest.approx(0.55)
    sensor.close()
    assert nvml.sessions == 0


@pytest.mark.parametrize("broken", ["sample", "handle", "init"])
def test_a_failure_at_the_start_leaves_nothing_open(nvml: Nvml, broken: str) -> None:
    nvml.broken = {broken}
    with pytest.raises(SensorError, match=f"NVML: {broken} failed"):
        Gpm("GPU-1")
    assert (nvml.sessions, nvml.samples) == (0, 0)


def test_the_best_sensor_that_works_is_taken(nvml: Nvml) -> None:
    assert find("GPU-1").name == "nvml-gpm" and find("GPU-1", "utilisation").name == "nvml-utilisation"
    nvml.supported = False
    assert find("GPU-1").name == "nvml-utilisation"
    with pytest.raises(SensorError, match="Hopper"):
        find("GPU-1", "gpm")
    nvml.broken = {"rates"}
    with pytest.raises(SensorError, match="gpm: .*utilisation: NVML: rates failed"):
        find("GPU-1")
    with pytest.raises(SensorError, match="no sensor is called 'heat'"):
        find("GPU-1", "heat")


def test_without_the_binding_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(SensorError, match=r"lfdata\[nvml\]"):
        find("GPU-1")


def test_no_share_of_busy_time_is_a_lost_sensor(nvml: Nvml) -> None:
    sensor = Gpm("GPU-1")
    del nvml.values[1]
    with pytest.raises(SensorError, match="busy"):
        sensor.read()


class Told:
    """A sensor that gives what it is told, and then fails."""

    name = "told"

    def __init__(self, *values: float) -> None:
        self.values = list(values)

    def read(self) -> Reading:
        if not self.values:
            raise RuntimeError("of the user's own")
        return Reading(self.values.pop(0), time.monotonic())

    def close(self) -> None:
        raise OSError("and closing fails too")


def _until(what: Any) -> None:
    deadline = time.monotonic() + 10
    while not what() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert what()


def test_the_sampler_publishes_and_survives_the_sensor() -> None:
    board, sensors = np.zeros(2, np.int64), [None, None, Told(0.25, 1.05)]
    sampler = Sampler(lambda: sensors.pop(0), board, every=0.01)
    assert sampler.busy() is None and sampler.state == "looking for a sensor"
    seen = set()
    _until(lambda: seen.add(sampler.busy()) or sampler.state.startswith("lost"))
    assert seen <= {None, 0.25, 1.0} and sampler.busy() is None and "of the user's own" in sampler.state
    sampler.close()
    assert not sampler._thread.is_alive()


@pytest.mark.parametrize(
    "found",
    [
        (0.5, 1.0),
        None,
        Reading(float("nan"), 1.0),
        Reading(55.0, 1.0),
        Reading(-5.0, 1.0),
        Reading(0.5, float("nan")),
        Reading(0.5, -1.0),
        Reading("half", 1.0),  # type: ignore[arg-type]
        Reading(0.5, "now"),  # type: ignore[arg-type]
        SystemExit(3),
        KeyboardInterrupt(),
    ],
    ids=repr,
)
def test_one_that_says_what_cannot_be_is_given_up(found: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Odd(Told):
        def read(self) -> Reading:
            if isinstance(found, BaseException):
                raise found
            return found  # type: ignore[no-any-return]

    sampler = Sampler(Odd, np.zeros(2, np.int64), every=0.01)
    _until(lambda: sampler.state.startswith("lost: "))
    sampler.close()
    assert sampler.busy() is None and sampler.last is None
    assert [record.message.startswith("the GPU sensor is lost") for record in caplog.records] == [True]


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.int8, Fraction, bool])
def test_busy_is_any_real_number(kind: Any) -> None:
    class Real(Told):
        def read(self) -> Reading:
            return Reading(kind(1), np.float64(time.monotonic()))

    sampler = Sampler(Real, np.zeros(2, np.int64), every=0.01)
    _until(lambda: sampler.busy() == 1.0)
    assert sampler.last is not None and type(sampler.last.busy) is type(sampler.last.at) is float
    sampler.close()


def test_a_time_in_the_future_is_refused_and_says_of_which_clock(caplog: pytest.LogCaptureFixture) -> None:
    """It would never be old, and a sensor that hangs after it never be noticed."""

    class Ahead(Told):
        def read(self) -> Reading:
            return Reading(0.5, time.monotonic() + 3)

    sampler = Sampler(Ahead, np.zeros(2, np.int64), every=0.01)
    _until(lambda: sampler.state.startswith("lost: "))
    sampler.close()
    assert sampler.last is None and "time.monotonic()" in sampler.state and "not in the future" in sampler.state
    assert len(_said(caplog)) == 1


def test_a_sampler_that_is_moved_publishes_there_and_one_without_a_board_asks_nothing() -> None:
    class Counting(Told):
        asked = closed = 0

        def read(self) -> Reading:
            self.asked += 1
            return Reading(0.5, time.monotonic())

        def close(self) -> None:
            self.closed += 1

    first, second, sensor = np.zeros(2, np.int64), np.zeros(2, np.int64), Counting()
    sampler = Sampler(lambda: sensor, first, every=0.01)
    _until(lambda: sampler.busy() == 0.5)
    sampler.move(None)
    assert sampler.busy() is None
    # One reading may be under way.
    time.sleep(0.05)
    asked = sensor.asked
    time.sleep(0.1)
    assert sensor.asked == asked and sensor.closed == 0 and sampler.state == "told"
    sampler.move(second)
    _until(lambda: sampler.busy() == 0.5)
    assert second[0] == 500 and second[1] > first[1]
    sampler.close()
    assert sensor.closed == 1 and sampler.busy() is None


def test_an_old_reading_is_no_reading() -> None:
    board = np.zeros(2, np.int64)
    sampler = Sampler(lambda: None, board, every=0.01)
    board[:] = 500, time.monotonic_ns()
    assert sampler.busy() == 0.5
    board[1] -= 2 * 10**9
    assert sampler.busy() is None
    sampler.close()


def test_a_sensor_that_cannot_be_had_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    def nothing() -> None:
        raise SensorError("no driver")

    sampler = Sampler(nothing, np.zeros(2, np.int64), every=0.01)
    _until(lambda: sampler.state == "lost: no driver")
    sampler.close()
    assert sum("no driver" in record.message for record in caplog.records) == 1


class Hanging(Told):
    """Answers when it is let go."""

    def __init__(self) -> None:
        super().__init__(0.25)
        self.asked, self.let_go, self.closed = threading.Event(), threading.Event(), threading.Event()

    def read(self) -> Reading:
        self.asked.set()
        self.let_go.wait()
        return super().read()

    def close(self) -> None:
        self.closed.set()


@pytest.fixture
def hanging() -> Iterator[Hanging]:
    sensor = Hanging()
    yield sensor
    sensor.let_go.set()


def _said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelname == "WARNING"]


def test_one_that_hangs_is_lost_and_told_once(hanging: Hanging, caplog: pytest.LogCaptureFixture) -> None:
    board = np.zeros(2, np.int64)
    sampler = Sampler(lambda: hanging, board, every=0.01, patience=0.02)
    assert hanging.asked.wait(10)
    _until(lambda: sampler.state.startswith("lost"))
    assert sampler.state == "lost: no answer for 0.02 seconds (told)" and sampler.busy() is None
    sampler.close()
    assert _said(caplog) == [f"the GPU sensor is lost, feedback goes by the consumer's waits alone: {sampler.state[6:]}"]
    # What it says at last is nobody's, and it is given back.
    hanging.let_go.set()
    assert hanging.closed.wait(10)
    assert sampler.busy() is None and sampler.last is None and not board.any()
    assert len(_said(caplog)) == 1


def test_one_that_hangs_does_not_hold_up_the_end(hanging: Hanging, caplog: pytest.LogCaptureFixture) -> None:
    board = np.zeros(2, np.int64)
    sampler = Sampler(lambda: hanging, board, every=0.01)
    assert hanging.asked.wait(10)
    sampler.close()
    assert sampler._thread.is_alive() and sampler._thread.daemon
    assert _said(caplog) == ["the GPU sensor hangs (told): its thread is left behind"]
    sampler.close()
    assert len(_said(caplog)) == 1
    hanging.let_go.set()
    assert hanging.closed.wait(10)
    assert not board.any()


def test_looking_for_one_may_hang_too(hanging: Hanging) -> None:
    def find() -> Hanging:
        hanging.let_go.wait()
        return hanging

    sampler = Sampler(find, np.zeros(2, np.int64), every=0.01, patience=0.02)
    _until(lambda: sampler.state == "lost: no answer for 0.02 seconds (looking for a sensor)")
    sampler.close()
    hanging.let_go.set()
    assert hanging.closed.wait(10), "one that was found too late is kept"
