"""How busy the GPU is: one interface, several sources."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from lfdata.errors import LfdataError

# Names of NVML's GPU performance metrics that are read, by what they are called here (NVML's numbers: nvmlGpmMetricId_t).
METRICS = {"busy": 1, "sm": 2, "sm_occupancy": 3, "tensor": 5, "memory": 10, "pcie_tx": 20, "pcie_rx": 21}
# Rates, MiB/s; everything else is a percentage.
_RATES = ("pcie_tx", "pcie_rx")


class SensorError(LfdataError):
    """A sensor cannot be had, or does not answer any more."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What a sensor says of the time since it was last asked.

    Attributes:
        busy: share of that time in which the GPU did anything, 0 to 1.
        at: when it was read, of the clock ``time.monotonic`` (not ``time.time``): one in the future is refused, since it would never be old.
        more: other figures by name: shares from 0 to 1, rates in MiB/s.
    """

    busy: float
    at: float
    more: dict[str, float] = field(default_factory=dict)


class Sensor(Protocol):
    """Anything that can say how busy a GPU was. Read by one thread.

    One of your own belongs to the loader that it was given to (``Loader(feedback=)``), over all its epochs and iterations.
    """

    name: str

    def read(self) -> Reading:
        """Since the last call. Raises :class:`SensorError` when it is lost."""
        ...

    def close(self) -> None:
        """Give back what it holds. Called once, and nothing is read after: when it is lost, or its loader is closed or gone."""
        ...


class Utilisation:
    """NVML's utilisation rate of one GPU: cheap, everywhere, and late (the driver averages over up to a second)."""

    name = "nvml-utilisation"

    def __init__(self, uuid: str) -> None:
        self._nvml, self._handle = _handle(uuid)
        self.read()

    def read(self) -> Reading:
        """Of the driver's last sample period."""
        rates = _asked(self._nvml, lambda: self._nvml.nvmlDeviceGetUtilizationRates(self._handle))
        return Reading(rates.gpu / 100, time.monotonic(), {"memory": rates.memory / 100})

    def close(self) -> None:
        """End NVML's session."""
        _ended(self._nvml)


class Gpm:
    """NVML's GPU performance metrics (Hopper and newer): exact shares of the time between two samples."""

    name = "nvml-gpm"

    def __init__(self, uuid: str) -> None:
        self._nvml, self._handle = nvml, handle = _handle(uuid)
        self._samples: list[Any] = []
        try:
            support = _asked(nvml, lambda: nvml.nvmlGpmQueryDeviceSupport(handle))
            if not support.isSupportedDevice:
                raise SensorError("this GPU has no performance metrics (they come with Hopper)")
            self._samples = [_asked(nvml, nvml.nvmlGpmSampleAlloc) for _ in range(2)]
            _asked(nvml, lambda: nvml.nvmlGpmSampleGet(handle, self._samples[0]))
        except SensorError:
            self.close()
            raise

    def read(self) -> Reading:
        """Since the last call."""
        nvml, (before, now) = self._nvml, self._samples
        _asked(nvml, lambda: nvml.nvmlGpmSampleGet(self._handle, now))
        wanted = nvml.c_nvmlGpmMetricsGet_t()
        wanted.version, wanted.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, len(METRICS)
        wanted.sample1, wanted.sample2 = before, now
        for place, number in enumerate(METRICS.values()):
            wanted.metrics[place].metricId = number
        found = _asked(nvml, lambda: nvml.nvmlGpmMetricsGet(wanted)) or wanted
        self._samples = [now, before]
        values = {}
        for place, name in enumerate(METRICS):
            metric = found.metrics[place]
            if metric.nvmlReturn == nvml.NVML_SUCCESS:
                values[name] = float(metric.value) / (1 if name in _RATES else 100)
        if "busy" not in values:
            raise SensorError("NVML gives no share of busy time")
        return Reading(values.pop("busy"), time.monotonic(), values)

    def close(self) -> None:
        """Free the samples, end NVML's session."""
        for sample in self._samples:
            _asked(self._nvml, partial(self._nvml.nvmlGpmSampleFree, sample))
        self._samples = []
        _ended(self._nvml)


def find(uuid: str, wanted: str = "auto") -> Sensor:
    """A sensor of a GPU: ``gpm``, ``utilisation``, or the first of these that works.

    Raises:
        SensorError: none does; it says why.
    """
    kinds: dict[str, Callable[[str], Sensor]] = {"gpm": Gpm, "utilisation": Utilisation}
    why = []
    for name, make in kinds.items():
        if wanted in ("auto", name):
            try:
                return make(uuid)
            except SensorError as error:
                why.append(f"{name}: {error}")
    raise SensorError("; ".join(why) or f"no sensor is called {wanted!r}; there are auto, {', '.join(kinds)}")


def _handle(uuid: str) -> tuple[Any, Any]:
    """NVML, started, and a GPU's handle there. GPUs are known by UUID: their numbers differ between CUDA and NVML."""
    try:
        import pynvml
    except ModuleNotFoundError as error:
        raise SensorError("nvidia-ml-py is not installed: pip install 'lfdata[nvml]'") from error
    _asked(pynvml, pynvml.nvmlInit)
    try:
        return pynvml, _asked(pynvml, lambda: pynvml.nvmlDeviceGetHandleByUUID(uuid))
    except SensorError:
        _ended(pynvml)
        raise


def _asked(nvml: Any, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except nvml.NVMLError as error:
        raise SensorError(f"NVML: {error}") from error


def _ended(nvml: Any) -> None:
    _asked(nvml, nvml.nvmlShutdown)
