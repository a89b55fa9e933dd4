"""The record of a measurement on a GPU: written after each piece, so that what is known stays whatever happens next."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import record
from lftrain.runtime.environment import gpu, version

PACKAGES = ("torch", "triton", "numpy", "pillow", "pillow-simd")


def no_gpu(device: torch.device, instead: str) -> None:
    """Exit if a GPU is asked for and there is none. ``instead``: what goes on a CPU."""
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit(f"torch sees no GPU: {instead} tries everything on a CPU, and 'lftrain doctor' says what is missing")


class Log:
    """A record at ``path``, gone on with if there is one of the same name.

    Args:
        module: whose command line it was. anew: what is there already is overwritten.
    """

    def __init__(self, path: Path, name: str, module: str, device: torch.device, anew: bool = False) -> None:
        if reason := record.writable(path):
            raise record.RecordError(reason)
        self.path, self._began = path, time.perf_counter()
        earlier = record.read(path)["results"] if path.exists() and path.stat().st_size and not anew else {}
        self.made = record.made(name, {}, earlier)
        arguments = record.command_line(sys.argv[1:]).removeprefix("lfbench").strip()
        self.made["command"] = f"python -m {module} {arguments}"
        self.made["versions"] |= {name: found for name in PACKAGES if (found := version(name))}
        self.made["machine"]["gpu"] = gpu(device) if device.type == "cuda" else None
        self.results: dict[str, Any] = self.made["results"]

    def put(self, part: str, **values: Any) -> None:
        """Add to a part of the results and write all."""
        begun = {"command": self.made["command"], "commit": self.made["commit"], "date": self.made["date"]}
        self.results[part] = {**self.results.get(part, {}), **begun, **values}
        record.write(self.made, self.path)

    def fresh(self, part: str) -> None:
        """Forget what an earlier run wrote of a part."""
        self.results.pop(part, None)

    def adopt(self) -> None:
        """Take what another process has added to the record."""
        self.results |= record.read(self.path)["results"]

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.perf_counter() - self._began

    def say(self, *words: object) -> None:
        """A line of progress, with the seconds since the start."""
        print(f"[{self.seconds:6.1f} s]", *words, flush=True)


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median, extremes and quartiles, rounded."""
    return {name: round(value, 4) for name, value in record.summary(values).items()}


def ratios(first: Sequence[float], other: Sequence[float]) -> dict[str, float]:
    """How many times faster the other is, by rounds."""
    count = min(len(first), len(other))
    return {name: round(value, 4) for name, value in record.ratio(first[:count], other[:count]).items()}
