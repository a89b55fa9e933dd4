"""From what happens in the loader and on the GPU to threads and look-ahead (docs/scheduler.md)."""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np

from lfdata.errors import OptionError
from lfdata.loader.jobs import Done
from lfdata.loader.slots import Slots
from lfdata.loader.spans import STAGES
from lfdata.schedule.control import Controller, Tick
from lfdata.schedule.sampler import Sampler
from lfdata.schedule.sensors import Sensor, find

WANTED = ("auto", "gpm", "utilisation", "wait")
Wanted = bool | str | Sensor


def checked(wanted: Wanted) -> Wanted:
    """The option ``feedback``. Raises :class:`OptionError`."""
    if isinstance(wanted, str):
        known = wanted in WANTED
    else:
        known = isinstance(wanted, bool) or (
            callable(getattr(wanted, "read", None)) and callable(getattr(wanted, "close", None))
        )
    if not known:
        raise OptionError(f"feedback {wanted!r}; there are True, False, {', '.join(map(repr, WANTED))}, or a Sensor")
    return wanted


class Feedback:
    """Watches one loader. What is measured costs a few microseconds a slot; the sensor has a thread of its own.

    Attributes:
        device: number of the GPU that batches are copied to, if that is known; else it is the one that is current.
    """

    def __init__(self, wanted: Wanted, threads: int, ahead: int, processes: int, slots: Slots) -> None:
        self.controller = Controller(threads, ahead, processes)
        self._wanted, self._width = wanted, slots.width
        self.device: int | None = None
        self._gpu: str | None = None
        self._handed = self._copying = 0.0
        self._sampler = None if wanted in (False, "wait") else Sampler(self._find, slots.board)

    def copied(self, seconds: float) -> None:
        """The device waited so long for a copy from the host."""
        self._copying += seconds

    def tick(self, done: Done, waited: float, ready: int) -> None:
        """A slot is handed out."""
        now = time.perf_counter()
        if self._gpu is None and self._sampler is not None:
            self._gpu = current_gpu(self.device)
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
        if not isinstance(self._wanted, bool | str):
            return self._wanted
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
        """End the sampler. A sensor that hangs does not keep the slots."""
        if self._sampler is not None:
            self._sampler.close()
        self._width = np.zeros_like(self._width)


def current_gpu(device: int | None = None) -> str | None:
    """The UUID, as NVML writes it, of a GPU that this process uses by now, of the current one by default; CUDA is not started for that."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device() if device is None else device).uuid}"
