"""Grain with nothing tuned: its default threads and elements ahead, samples made into batches after them, an iterator an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness.work import Batch, Settings, Workload
from benchmarks.subjects import grain_

TITLE = "Grain, defaults"
IMPORTS = grain_.IMPORTS
FORMAT = grain_.FORMAT
WORK = ("crop", "centre")
workers = grain_.workers
prepare = grain_.prepare


def batches(workload: Workload, prepared: Path, settings: Settings) -> Iterator[Iterator[Batch]]:
    """Epochs without end."""
    import grain

    source: Any = grain.MapDataset.source(grain_.records_of(prepared))
    epoch = 0
    while True:
        samples = source.shuffle(seed=settings.seed + epoch).map(grain_.Decode(workload, settings.source))
        found = samples.to_iter_dataset().batch(workload.batch)
        if settings.workers:
            found = found.mp_prefetch(grain.MultiprocessingOptions(num_workers=settings.workers))
        yield map(grain_.batch_of, found)
        epoch += 1
