"""A batch that is on the device, while another process decodes as much as a loader would: what decoding costs a consumer by taking processors,
caches and clock rate from it, with no loader in its process.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

import lfdata.transforms as T
from lfdata import Loader
from lfdata.loader.loader import NumpyLoader

# What the process is told: another batch, and that there are no more.
NEXT, END = b"\0", b"\1"
Pair = tuple[torch.Tensor, torch.Tensor]


def crops(
    loader: type[Loader], data: Path, field: str, side: int, batch: int, threads: int | None, **options: object
) -> Loader:
    """Random crops, mirrored at random."""
    fields = {field: [T.RandomResizedCrop(side), T.RandomHorizontalFlip()]}
    return loader(data, batch, fields, threads=threads, engine="process", **options)  # type: ignore[arg-type]


class Beside:
    """Takes a batch in a process of its own for each that is asked for here."""

    def __init__(self, data: Path, field: str, side: int, batch: int, threads: int | None) -> None:
        words = ["-m", "benchmarks.gpu.beside", str(data), field, str(side), str(batch), str(threads or 0)]
        self._process = subprocess.Popen([sys.executable, *words], stdin=subprocess.PIPE, bufsize=0)

    def batches(self, images: torch.Tensor, numbers: torch.Tensor) -> Iterator[Pair]:
        """The same batch again and again."""
        assert self._process.stdin is not None
        for found in itertools.repeat((images, numbers)):
            self._process.stdin.write(NEXT)
            yield found

    def close(self) -> None:
        """End the process. It is told: workers that others fork keep the pipe open."""
        assert self._process.stdin is not None
        self._process.stdin.write(END)
        self._process.stdin.close()
        self._process.wait()


def main(data: str, field: str, side: str, batch: str, threads: str) -> None:
    """The process: a batch for each byte."""
    loader = crops(NumpyLoader, Path(data), field, int(side), int(batch), int(threads) or None)
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    asked = b""
    while not asked.endswith(END) and (asked := os.read(0, 1 << 16)):
        for _ in range(asked.count(NEXT)):
            next(batches)
    loader.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
