"""Not a loader but a floor: the bare calls alone. Pictures: decoder and resize, on threads, over files that are already in memory; tokens:
one numpy gather a batch from a mapped array in the page cache; reads: a copy of bytes that are in memory; samples of several parts: the
plain worker's libraries with libjpeg-turbo, on threads; building: decode, resize and encode on threads, into one file."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.work import Batch, Settings, Workload, image_files, resized, sequences, sweep
from benchmarks.subjects import torch_pil
from benchmarks.subjects.files import decoder, read, stored_files

TITLE = "floor: the bare calls"
IMPORTS = ("simplejpeg", "cv2")
FORMAT = "files"
WORK = ("crop", "centre", "native", "tokens", "multimodal", "bytes", "build")
prepare = torch_pil.prepare


def workers(workload: Workload, cores: int) -> list[int]:
    """Threads."""
    return {"tokens": [1], "bytes": [0]}.get(workload.work, sweep(cores))


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


def _pictures(workload: Workload, settings: Settings, first: int = 0) -> Iterator[Iterator[Batch]]:
    """Epochs; the first one from a batch on."""
    data = [read(paths) for paths in stored_files(workload, settings.source)]
    decode = decoder(workload, settings.source)
    several = workload.work == "multimodal"
    order = random.Random(settings.seed)
    random.seed(settings.seed)
    pool = ThreadPoolExecutor(settings.workers)

    def epoch(first: int = 0) -> Iterator[Batch]:
        keys = list(range(len(data)))
        order.shuffle(keys)
        for start in range(first * workload.batch, len(keys), workload.batch):
            mine = keys[start : start + workload.batch]
            out = {name: np.empty((len(mine), *shape), dtype) for name, (shape, dtype) in workload.arrays.items()}

            def one(row: int, mine: list[int] = mine, out: dict[str, Any] = out) -> None:
                found = decode(data[mine[row]])
                for name, array in (found if several else {"image": found}).items():
                    out[name][row] = array

            list(pool.map(one, range(len(mine)), chunksize=4))
            yield Batch(mine, out)

    yield epoch(first)
    while True:
        yield epoch()


def resumable(workload: Workload, prepared: Path, settings: Settings, state: Any) -> tuple[Iterator[Batch], Callable[[], Any]]:
    """The number of batches consumed is all there is to know."""
    done = state or 0
    epoch = next(_pictures(workload, settings, done))

    def counted() -> Iterator[Batch]:
        nonlocal done
        for batch in epoch:
            done += 1
            yield batch

    return counted(), lambda: done


def reader(workload: Workload, prepared: Path, settings: Settings) -> Callable[[int], bytes]:
    """A copy of what is in memory."""
    data = [path.read_bytes() for path in image_files(settings.source)]
    return lambda key: bytes(memoryview(data[key]))


def build(workload: Workload, source: Path, target: Path, workers: int) -> None:
    """Pictures one behind the other in one file, and where each ends."""
    import cv2
    import simplejpeg

    cv2.setNumThreads(0)

    def one(path: Path) -> bytes:
        image = simplejpeg.decode_jpeg(path.read_bytes(), "RGB")
        image = cv2.resize(image, resized(image.shape[1], image.shape[0]), interpolation=cv2.INTER_AREA)
        data: bytes = simplejpeg.encode_jpeg(image, 90, "RGB", "420")
        return data

    target.mkdir()
    ends = [0]
    with open(target / "pictures", "wb") as file, ThreadPoolExecutor(workers) as pool:
        for data in pool.map(one, image_files(source)):
            ends.append(ends[-1] + file.write(data))
    np.save(target / "ends.npy", np.array(ends))


def stored(workload: Workload, target: Path) -> Iterator[tuple[int, bytes]]:
    """Read back."""
    ends, data = np.load(target / "ends.npy", allow_pickle=False).tolist(), (target / "pictures").read_bytes()
    for key, (start, stop) in enumerate(itertools.pairwise(ends)):
        yield key, data[start:stop]
