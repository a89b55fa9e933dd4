"""Grain over ArrayRecord files: a global shuffle, processes that read, decode and make whole batches; libjpeg-turbo and OpenCV."""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.work import MULTIMODAL_PARTS, Batch, Settings, Workload, image_files, sequences, sweep
from benchmarks.subjects.files import decoder, read, shrunk, stored_files

TITLE = "Grain + simplejpeg + cv2"
IMPORTS = ("grain", "array_record.python.array_record_module", "simplejpeg", "cv2")
FORMAT = "arrayrecord"
WORK = ("crop", "centre", "native", "tokens", "multimodal", "bytes", "build")
SHARDS = 16
KEY_BYTES, SIZE_BYTES = 8, 4
# Of each process. Grain's defaults, 16 threads and 500 elements ahead, are for elements of some KB; here one is a batch of 9.6 MB.
THREADS, AHEAD = 2, 2


def workers(workload: Workload, cores: int) -> list[int]:
    """0: threads in the consumer's process. Building: processes, each with a writer of its own."""
    return {"bytes": [0], "build": sweep(cores)}.get(workload.work, [0, *sweep(cores)])


def prepare(workload: Workload, source: Path, target: Path) -> None:
    """Files as they are, ids as bytes."""
    if workload.work == "tokens":
        rows = sequences(source)
        write(target, len(rows), (row.tobytes() for row in rows))
    else:
        files = stored_files(workload, source)
        write(target, len(files), (packed(list(read(paths).values())) for paths in files))


def packed(parts: list[bytes]) -> bytes:
    """Parts of a sample one behind the other; where there are several, their sizes first."""
    sizes = [len(part).to_bytes(SIZE_BYTES, "little") for part in parts] if len(parts) > 1 else []
    return b"".join([*sizes, *parts])


def unpacked(data: bytes) -> dict[str, bytes]:
    """Parts of a multimodal sample by name."""
    at = len(MULTIMODAL_PARTS) * SIZE_BYTES
    found = {}
    for part, size in zip(MULTIMODAL_PARTS, np.frombuffer(data, np.uint32, len(MULTIMODAL_PARTS)).tolist(), strict=True):
        found[part] = data[at : at + size]
        at += size
    return found


def write(target: Path, count: int, records: Iterable[bytes]) -> None:
    """Some files of as many records each."""
    step = max(1, -(-count // SHARDS))
    numbered = enumerate(records)
    for start in range(0, count, step):
        write_file(target, start, itertools.islice(numbered, step))


def write_file(target: Path, start: int, records: Iterable[tuple[int, bytes]]) -> None:
    """One file, one record a group, so that each can be read alone: the key in 8 bytes, then what is stored."""
    from array_record.python import array_record_module

    writer: Any = array_record_module.ArrayRecordWriter(str(target / f"{start:08d}.arrayrecord"), "group_size:1")
    for key, record in records:
        writer.write(key.to_bytes(KEY_BYTES, "little") + record)
    writer.close()


def build(workload: Workload, source: Path, target: Path, workers: int) -> None:
    """In processes, each with files of its own: a file has one writer."""
    files = image_files(source)
    target.mkdir()
    step = max(1, -(-len(files) // SHARDS))
    parts = [(target, start, files[start : start + step]) for start in range(0, len(files), step)]
    # Started anew, not forked: its writer has threads.
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        pool.starmap(build_file, parts, chunksize=1)


def build_file(target: Path, start: int, paths: list[Path]) -> None:
    """What one process writes at a time."""
    write_file(target, start, ((key, shrunk(path)) for key, path in enumerate(paths, start)))


def stored(workload: Workload, target: Path) -> Iterator[tuple[int, bytes]]:
    """Read back a record at a time."""
    for record in records_of(target):
        yield int.from_bytes(record[:KEY_BYTES], "little"), record[KEY_BYTES:]


def records_of(folder: Path) -> Any:
    """Its random-access source."""
    import grain

    return grain.sources.ArrayRecordDataSource(sorted(str(path) for path in folder.glob("*.arrayrecord")))


class Decode:
    """A record to key and arrays. The decoder is made where it is used, in each worker."""

    def __init__(self, work: Workload, source: Path) -> None:
        self.work, self.source = work, source
        self.decode: Callable[[Any], Any] | None = None

    def __call__(self, record: bytes) -> dict[str, Any]:
        key, data = int.from_bytes(record[:KEY_BYTES], "little"), record[KEY_BYTES:]
        if self.work.work == "tokens":
            return {"key": key, "tokens": np.frombuffer(data, np.uint16)}
        if self.decode is None:
            self.decode = decoder(self.work, self.source)
        if self.work.work == "multimodal":
            return {"key": key, **self.decode(unpacked(data))}
        return {"key": key, "image": self.decode({"jpg": data})}


def mapped(workload: Workload, prepared: Path, settings: Settings) -> Any:
    """Batches of an epoch, by number."""
    import grain

    source: Any = grain.MapDataset.source(records_of(prepared))
    return source.shuffle(seed=settings.seed).map(Decode(workload, settings.source)).batch(workload.batch)


def flow(workload: Workload, dataset: Any, settings: Settings) -> Iterator[Any]:
    """Batches in order, made in threads or processes."""
    import grain

    tokens = workload.work == "tokens"
    read_options = grain.ReadOptions() if tokens else grain.ReadOptions(num_threads=THREADS, prefetch_buffer_size=AHEAD)
    found = dataset.to_iter_dataset(read_options)
    if settings.workers:
        found = found.mp_prefetch(grain.MultiprocessingOptions(num_workers=settings.workers))
    return iter(found)


def batch_of(found: dict[str, Any]) -> Batch:
    """What it gives, as a batch."""
    return Batch(found.pop("key"), found)


def batches(workload: Workload, prepared: Path, settings: Settings) -> Iterator[Iterator[Batch]]:
    """Epochs without end, each shuffled anew; batches are made before the data set repeats, so none spans two epochs."""
    dataset = mapped(workload, prepared, settings)
    loader = flow(workload, dataset.repeat(), settings)
    while True:
        yield map(batch_of, itertools.islice(loader, len(dataset)))


def resumable(workload: Workload, prepared: Path, settings: Settings, state: Any) -> tuple[Iterator[Batch], Callable[[], Any]]:
    """Through its iterator's state."""
    loader: Any = flow(workload, mapped(workload, prepared, settings), settings)
    if state is not None:
        loader.set_state(state)
    return map(batch_of, loader), loader.get_state


def reader(workload: Workload, prepared: Path, settings: Settings) -> Callable[[int], Any]:
    """By position, which is the key."""
    source = records_of(prepared)
    return lambda key: memoryview(source[key])[KEY_BYTES:]
