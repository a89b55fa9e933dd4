"""Grain over ArrayRecord files: a global shuffle, processes that read, decode and make whole batches; libjpeg-turbo and OpenCV."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness.work import Batch, Settings, Workload, image_files, sweep
from benchmarks.subjects.pixels import with_turbo

TITLE = "Grain + simplejpeg + cv2"
IMPORTS = ("grain", "array_record.python.array_record_module", "simplejpeg", "cv2")
FORMAT = "arrayrecord"
WORK = ("crop", "centre")
SHARDS = 16
KEY_BYTES = 8
# Of each process. Grain's defaults, 16 threads and 500 elements ahead, are for elements of some KB; here one is a batch of 9.6 MB.
THREADS, AHEAD = 2, 2


def workers(workload: Workload, cores: int) -> list[int]:
    """0: threads in the consumer's process."""
    return [0, *sweep(cores)]


def prepare(workload: Workload, source: Path, target: Path) -> None:
    """Some files, one record a group, so that each can be read alone: the key in 8 bytes, then the JPEG bytes as they are."""
    from array_record.python import array_record_module

    files = image_files(source)
    step = max(1, -(-len(files) // SHARDS))
    for start in range(0, len(files), step):
        writer: Any = array_record_module.ArrayRecordWriter(str(target / f"{start:08d}.arrayrecord"), "group_size:1")
        for key in range(start, min(start + step, len(files))):
            writer.write(key.to_bytes(KEY_BYTES, "little") + files[key].read_bytes())
        writer.close()


class Decode:
    """A record to key and picture. The decoder is made where it is used, in each worker."""

    def __init__(self, work: Workload) -> None:
        self.work = work
        self.decode: Callable[[bytes], Any] | None = None

    def __call__(self, record: bytes) -> dict[str, Any]:
        if self.decode is None:
            self.decode = with_turbo(self.work)
        return {"key": int.from_bytes(record[:KEY_BYTES], "little"), "image": self.decode(record[KEY_BYTES:])}


def batches(workload: Workload, prepared: Path, settings: Settings) -> Iterator[Iterator[Batch]]:
    """Epochs without end, each shuffled anew; batches are made before the data set repeats, so none spans two epochs."""
    import grain

    paths = sorted(str(path) for path in prepared.glob("*.arrayrecord"))
    dataset: Any = (
        grain.MapDataset.source(grain.sources.ArrayRecordDataSource(paths))
        .shuffle(seed=settings.seed)
        .map(Decode(workload))
        .batch(workload.batch)
    )
    epoch = len(dataset)
    flow: Any = dataset.repeat().to_iter_dataset(grain.ReadOptions(num_threads=THREADS, prefetch_buffer_size=AHEAD))
    if settings.workers:
        flow = flow.mp_prefetch(grain.MultiprocessingOptions(num_workers=settings.workers))
    loader = iter(flow)
    while True:
        yield (Batch(found["key"], {"image": found["image"]}) for found in itertools.islice(loader, epoch))
