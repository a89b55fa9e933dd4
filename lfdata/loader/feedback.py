"""From what happens in the loader and on the GPU to threads and look-ahead (docs/scheduler.md)."""

from __future__ import annotations

import logging
import os
import sys
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfdata.errors import OptionError
from lfdata.loader.jobs import Done
from lfdata.loader.slots import Slots
from lfdata.loader.spans import STAGES
from lfdata.schedule.control import Controller, Tick
from lfdata.schedule.sampler import Sampler
from lfdata.schedule.sensors import Sensor, find

NAMED = ("gpm", "utilisation")
WANTED = ("auto", *NAMED, "wait")
# A process that asked for a sensor and uses no GPU for so long is told.
TELL_SECONDS = 5.0
log = logging.getLogger("lfdata")


class Own:
    """A sensor of the user's, for all pipelines of a loader: one thread reads it, and closes it once."""

    def __init__(self, sensor: Sensor) -> None:
        self._sensor, self._process = sensor, os.getpid()
        self._sampler: Sampler | None = None
        self._closed = False

    def begin(self, board: NDArray[np.int64]) -> Sampler | None:
        """Have it read for a pipeline; ``None``: it was closed with its loader."""
        if self._closed:
            return None
        if self._sampler is None:
            self._sampler = Sampler(lambda: self._sensor, board)
        else:
            self._sampler.move(board)
        return self._sampler

    def close(self) -> None:
        """With the loader."""
        closed, self._closed = self._closed, True
        if self._sampler is not None:
            self._sampler.close()
        elif not closed and os.getpid() == self._process:
            try:
                self._sensor.close()
            except Exception as error:
                log.debug("closing the sensor: %r", error)


Wanted = bool | str | Sensor
Watching = bool | str | Own


def checked(wanted: Wanted) -> Watching:
    """The option ``feedback``. Raises :class:`OptionError`."""
    if isinstance(wanted, bool) or (isinstance(wanted, str) and wanted in WANTED):
        return wanted
    if isinstance(wanted, str) or not all(callable(getattr(wanted, name, None)) for name in ("read", "close")):
        raise OptionError(f"feedback {wanted!r}; there are True, False, {', '.join(map(repr, WANTED))}, or a Sensor")
    return Own(wanted)


class Feedback:
    """Watches one loader. What is measured costs a few microseconds a slot; the sensor has a thread of its own.

    Attributes:
        device: number of the GPU that batches are copied to, if that is known; else it is the one that is current.
    """

    def __init__(self, wanted: Watching, threads: int, ahead: int, processes: int, slots: Slots) -> None:
        self.controller = Controller(threads, ahead, processes)
        self._wanted, self._width = wanted, slots.width
        self.device: int | None = None
        self._gpu: str | None = None
        self._handed = self._copying = 0.0
        self._began, self._told = time.perf_counter(), False
        self._sampler: Sampler | None = None
        if isinstance(wanted, Own):
            self._sampler = wanted.begin(slots.board)
        elif wanted not in (False, "wait"):
            self._sampler = Sampler(self._find, slots.board)

    def copied(self, seconds: float) -> None:
        """The device waited so long for a copy from the host."""
        self._copying += seconds

    def tick(self, done: Done, waited: float, ready: int) -> None:
        """A slot is handed out."""
        now = time.perf_counter()
        if self._gpu is None and self._sampler is not None:
            self._gpu = current_gpu(self.device)
            if self._gpu is None and self._wanted in NAMED and not self._told and now - self._began > TELL_SECONDS:
                self._told = True
                log.warning(
                    "feedback=%r was asked for, and this process uses no GPU: feedback goes by the consumer's waits alone",
                    self._wanted,
                )
        if self._handed:
            stages = dict.fromkeys(STAGES, 0.0)
            for stage, _, seconds, _ in done.spans:
                stages[STAGES[stage]] += seconds
            busy = None if self._sampler is None else self._sampler.busy()
            self.controller.tick(Tick(now - self._handed, waited, done.decoding, ready, self._copying, busy, stages))
            self._width[0] = self.controller.width
        self._handed, self._copying = now, 0.0

    def _find(self) -> Sensor | None:
        """Called by the sampler until there is something to look at: a GPU that this process uses."""
        return None if self._gpu is None else find(self._gpu, "auto" if self._wanted is True else str(self._wanted))

    def report(self) -> dict[str, Any]:
        """For :meth:`lfdata.Loader.stats`."""
        sampler, controller = self._sampler, self.controller
        return {
            "width": controller.width,
            "ahead": controller.ahead,
            "verdict": controller.verdict(),
            "sensor": "none" if sampler is None else sampler.state,
            "gpu": self._gpu,
            "busy": None if sampler is None else sampler.busy(),
            "reading": {} if sampler is None or sampler.last is None else sampler.last.more,
        }

    def close(self) -> None:
        """End the sampler, but for one of the loader's. A sensor that hangs does not keep the slots."""
        if self._sampler is not None:
            if isinstance(self._wanted, Own):
                self._sampler.move(None)
            else:
                self._sampler.close()
        self._width = np.zeros_like(self._width)


def current_gpu(device: int | None = None) -> str | None:
    """The UUID, as NVML writes it, of a GPU that this process uses by now, of the current one by default; CUDA is not started for that."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device() if device is None else device).uuid}"
