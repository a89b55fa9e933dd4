"""Floor: the calls that the loader makes for its pictures, and nothing around them: rectangles drawn at once for a batch, stored bytes that
lie in memory already, decoded into one and the same output."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.work import Batch, Settings, Workload, sweep
from benchmarks.subjects import lfdata_loader

TITLE = "floor: the loader's own calls"
IMPORTS = ("lfdata.dataset", "lfdata.transforms", "lfdata.codecs.pixels")
FORMAT = "lfdata"
WORK = ("crop", "centre")
prepare = lfdata_loader.prepare


def workers(workload: Workload, cores: int) -> list[int]:
    """Threads of a call."""
    return sweep(cores)


def _uniform(rng: Any, rows: int, _: str, count: int) -> Any:
    return rng.random((rows, count))


def batches(workload: Workload, prepared: Path, settings: Settings) -> Iterator[Iterator[Batch]]:
    """Epochs without end: no order but numpy's, no process, no slots."""
    import lfdata.transforms as T
    from lfdata.codecs.pixels import CropDecoder
    from lfdata.dataset import ShardDataset

    dataset = ShardDataset(prepared / "shards")
    everything = np.arange(len(dataset))
    stored = list(dataset.read_many(everything, ["image"], decode=False)["image"])
    sizes = dataset.sizes("image", everything)
    keys = dataset.column("n")
    decoder = CropDecoder(dataset.schema["image"].params)
    geometry: list[Any] = lfdata_loader.fields_of(workload)["image"]
    rng = np.random.default_rng(settings.seed)
    out = np.empty((workload.batch, 224, 224, 3), np.uint8)

    def epoch() -> Iterator[Batch]:
        order = rng.permutation(len(dataset))
        for start in range(0, len(order), workload.batch):
            mine = order[start : start + workload.batch]
            here = {role: column[mine] for role, column in sizes.items()}
            draws = partial(_uniform, rng, len(mine))
            placed = T.place(geometry, here["width"], here["height"], draws)
            pictures = [stored[row] for row in mine.tolist()]
            failed = decoder.crop_resize(pictures, here, placed.boxes, placed.flips, out[: len(mine)], threads=settings.workers)
            if failed:
                raise next(iter(failed.values()))
            yield Batch(keys[mine], {"image": out[: len(mine)]})

    while True:
        yield epoch()
