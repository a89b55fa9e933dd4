"""A trace of some steps, operator by operator: ui.perfetto.dev and chrome://tracing show it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


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
            running.export_chrome_trace(str(self._path))
