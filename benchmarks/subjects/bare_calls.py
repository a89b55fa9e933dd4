"""Not a loader but a floor: the bare calls alone. Pictures: decoder and resize, on threads, over files that are already in memory; tokens:
one numpy gather a batch from a mapped array in the page cache."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.work import Batch, Settings, Workload, image_files, sequences, sweep
from benchmarks.subjects import torch_pil
from benchmarks.subjects.pixels import with_turbo

TITLE = "floor: the bare calls"
IMPORTS = ("simplejpeg", "cv2")
FORMAT = "files"
WORKLOADS = ("W1", "W2", "W3")
prepare = torch_pil.prepare


def workers(workload: Workload, cores: int) -> list[int]:
    """Threads."""
    return [1] if workload.source == "tokens" else sweep(cores)


def batches(workload: Workload, prepared: Path, settings: Settings) -> Iterator[Iterator[Batch]]:
    """Epochs without end: no storage, no queue, one output a batch."""
    return _tokens(workload, settings) if workload.source == "tokens" else _pictures(workload, settings)


def _tokens(workload: Workload, settings: Settings) -> Iterator[Iterator[Batch]]:
    rows = sequences(settings.source)
    rng = np.random.default_rng(settings.seed)
    while True:
        order = rng.permutation(len(rows))
        parts = (order[start : start + workload.batch] for start in range(0, len(order), workload.batch))
        yield (Batch(part, {"tokens": rows[part]}) for part in parts)


def _pictures(workload: Workload, settings: Settings) -> Iterator[Iterator[Batch]]:
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
