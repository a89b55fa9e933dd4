"""Not a loader but a floor: the decoder and resize calls alone, on threads, over files that are already in memory."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.work import Batch, Settings, Workload, image_files, sweep
from benchmarks.subjects import torch_pil
from benchmarks.subjects.pixels import with_turbo

TITLE = "floor: bare simplejpeg + cv2 calls"
IMPORTS = ("simplejpeg", "cv2")
FORMAT = "files"
WORKLOADS = ("W1", "W2")
prepare = torch_pil.prepare


def workers(workload: Workload, cores: int) -> list[int]:
    """Threads."""
    return sweep(cores)


def batches(workload: Workload, prepared: Path, settings: Settings) -> Iterator[Iterator[Batch]]:
    """Epochs without end: no storage, no queue, one output a batch."""
    data = [path.read_bytes() for path in image_files(settings.source)]
    decode = with_turbo(workload)
    order = random.Random(settings.seed)
    random.seed(settings.seed)
    pool = ThreadPoolExecutor(settings.workers)

    def epoch() -> Iterator[Batch]:
        keys = list(range(len(data)))
        order.shuffle(keys)
        for start in range(0, len(keys), workload.batch):
            mine = keys[start : start + workload.batch]
            out = np.empty((len(mine), 224, 224, 3), np.uint8)

            def one(row: int, mine: list[int] = mine, out: Any = out) -> None:
                out[row] = decode(data[mine[row]])

            list(pool.map(one, range(len(mine)), chunksize=4))
            yield Batch(mine, {"image": out})

    while True:
        yield epoch()
