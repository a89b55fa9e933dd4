"""A trace of some steps, operator by operator: ui.perfetto.dev and chrome://tracing show it."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

log = logging.getLogger("lftrain")


class Trace:
    """Traces steps ``first`` to ``first + steps - 1`` of a run (counted from 0) into ``path``; without ``first`` it does nothing.

    Tracing slows the steps that it sees; their times in metrics.jsonl are not those of others.
    """

    def __init__(self, path: Path, first: int | None, steps: int, device: torch.device) -> None:
        self._path, self._first, self._steps, self._cuda = path, first, steps, device.type == "cuda"
        self._profile: profile | None = None

    def before(self, step: int) -> None:
        """Before a step."""
        if self._first is not None and step == self._first:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._cuda else [])]
            self._profile = profile(activities=activities, record_shapes=True)
            self._profile.start()

    def after(self, step: int) -> None:
        """After a step: the last of the trace writes it."""
        if self._profile is not None and self._first is not None and step + 1 >= self._first + self._steps:
            self.close()

    def close(self) -> None:
        """Write what there is."""
        running, self._profile = self._profile, None
        if running is not None:
            running.stop()
            try:
                running.export_chrome_trace(str(self._path))
                whole = self._path.read_bytes()[-16:].rstrip().endswith(b"}")
            except (OSError, RuntimeError) as error:
                log.error("the trace cannot be written: %s: %s", self._path, error)
                return
            if not whole:
                log.error("the trace %s is not whole, as on a full disk", self._path)
