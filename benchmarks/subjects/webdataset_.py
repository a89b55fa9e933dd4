"""webdataset: 16 tar files, so that workers can share them, shuffled by shard and through a buffer, decoded by libjpeg-turbo and OpenCV.

Its single samples cannot be read: the release has no ``wids``.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.work import Batch, Settings, Workload, image_files, sequences, sweep
from benchmarks.subjects import torch_pil
from benchmarks.subjects.files import decoder, read, shrunk, stored_files

TITLE = "webdataset + simplejpeg + cv2"
IMPORTS = ("webdataset", "simplejpeg", "cv2")
FORMAT = "tar"
WORK = ("crop", "centre", "native", "tokens", "multimodal", "build")
SHARDS = 16


def workers(workload: Workload, cores: int) -> list[int]:
    """0: in the consumer's process. Building: processes, each with a writer of its own."""
    return sweep(cores) if workload.work == "build" else [0, *sweep(cores)]


def prepare(workload: Workload, source: Path, target: Path) -> None:
    """As many tars as many workers can share; files as they are, ids as bytes."""
    if workload.work == "tokens":
        rows = sequences(source)
        write(target, len(rows), ({"ids": row.tobytes()} for row in rows))
    else:
        files = stored_files(workload, source)
        write(target, len(files), map(read, files))


def write(target: Path, count: int, samples: Iterable[dict[str, Any]]) -> None:
    """Samples by its writer, the key as ``cls``."""
    import webdataset

    with webdataset.ShardWriter(f"{target}/%04d.tar", maxcount=max(1, -(-count // SHARDS)), verbose=0) as writer:
        for key, sample in enumerate(samples):
            writer.write({"__key__": f"{key:08d}", "cls": key} | sample)


def build(workload: Workload, source: Path, target: Path, workers: int) -> None:
    """In processes, each with a writer and tars of its own, as its guide to large data sets has it."""
    items = list(enumerate(image_files(source)))
    target.mkdir()
    with multiprocessing.Pool(workers) as pool:
        pool.starmap(build_part, [(target, number, len(items), items[number::workers]) for number in range(workers)])


def build_part(target: Path, number: int, count: int, items: list[tuple[int, Path]]) -> None:
    """What one process writes."""
    import webdataset

    pattern, most = f"{target}/{number:02d}-%04d.tar", max(1, -(-count // SHARDS))
    with webdataset.ShardWriter(pattern, maxcount=most, verbose=0) as writer:
        for key, path in items:
            writer.write({"__key__": f"{key:08d}", "cls": key, "jpg": shrunk(path)})


def stored(workload: Workload, target: Path) -> Iterator[tuple[int, bytes]]:
    """Read back from first to last."""
    import webdataset

    for item in webdataset.WebDataset(tars(target), shardshuffle=False, empty_check=False):
        yield int(item["cls"]), item["jpg"]


def tars(folder: Path) -> list[str]:
    """Tar files of a folder."""
    return sorted(str(path) for path in folder.glob("*.tar"))


def batches(workload: Workload, prepared: Path, settings: Settings) -> Iterator[Iterator[Batch]]:
    """Epochs without end. Batches are made in the workers, as its documentation advises."""
    import webdataset

    decode = decoder(workload, settings.source)

    def sample(item: dict[str, Any]) -> tuple[int, Any]:
        return int(item["cls"]), np.frombuffer(item["ids"], np.uint16) if workload.work == "tokens" else decode(item)

    shards = tars(prepared)
    dataset = (
        webdataset.WebDataset(shards, shardshuffle=len(shards), seed=settings.seed, empty_check=False)
        .shuffle(1000)
        .map(sample)
        .batched(workload.batch, collation_fn=torch_pil.collate)
    )
    loader: Any = webdataset.WebLoader(
        dataset, batch_size=None, num_workers=settings.workers, persistent_workers=settings.workers > 0
    )
    return torch_pil.loop(loader, next(iter(workload.arrays)))
