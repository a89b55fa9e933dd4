"""One subject of ``lfbench remote`` in a process of its own: epochs over a data set behind a server, every sample checked."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

KEY_BYTES = 8


class Job(msgspec.Struct, frozen=True):
    """What to do.

    Attributes:
        subject: one of :data:`SUBJECTS`.
        url: of the folder of data sets; local: an empty directory for what is kept; most: bytes that may be.
        samples, batch, workers, epochs: as they say; each sample is its number in 8 bytes, then anything.
        expected: a ``.npy`` file with the XXH3 of every sample.
    """

    subject: str
    url: str
    local: str
    most: int
    samples: int
    batch: int
    workers: int
    epochs: int
    expected: str
    names: tuple[str, ...] = ()
    options: dict[str, Any] = {}


def lfdata_(job: Job) -> Iterator[Iterable[Any]]:
    """This package's loader."""
    import lfdata

    options = {"max_bytes": job.most} | job.options.get("cache", {})
    cache = lfdata.Cache(job.local, **options)
    loader = lfdata.Loader(f"{job.url}/lfdata", job.batch, ["value"], tail="pad", cache=cache, **job.options.get("loader", {}))
    while True:
        yield _rows_of(loader)


def _rows_of(loader: Any) -> Iterator[Any]:
    for batch in loader:
        values, offsets, mask = batch["value"].numpy(), batch["value.offsets"].tolist(), batch["__mask__"].tolist()
        for row, there in enumerate(mask):
            if there:
                yield values[offsets[row] : offsets[row + 1]].tobytes()
    if os.environ.get("LFBENCH_COUNTS"):
        print(loader.stats()["storage"], file=sys.stderr)


def webdataset_(job: Job) -> Iterator[Iterable[Any]]:
    """Through curl and its own cache of whole tars, which has no bound."""
    import webdataset

    tars = [f"{job.url}/webdataset/{name}" for name in job.names]
    split = webdataset.shardlists.split_by_worker
    dataset = webdataset.WebDataset(
        tars, shardshuffle=len(tars), seed=0, cache_dir=job.local, empty_check=False, workersplitter=split
    )
    dataset = dataset.shuffle(1000).to_tuple("bin").batched(job.batch, collation_fn=list)
    loader = webdataset.WebLoader(dataset, batch_size=None, num_workers=job.workers, persistent_workers=job.workers > 0)
    while True:
        yield (row[0] for batch in loader for row in batch)


def streaming_(job: Job) -> Iterator[Iterable[Any]]:
    """Its own downloads, shuffle and cache."""
    from streaming import StreamingDataset
    from torch.utils.data import DataLoader

    os.environ["S3_ENDPOINT_URL"] = job.url
    dataset: Any = StreamingDataset(
        remote="s3://streaming", local=job.local, batch_size=job.batch, shuffle=True, cache_limit=job.most
    )
    for stream in dataset.streams:
        # It has fetched the index: workers would inherit that connection, and read each other's answers from it.
        stream._downloader.clean_up()
    loader: Any = DataLoader(
        dataset, batch_size=job.batch, num_workers=job.workers, collate_fn=list, persistent_workers=job.workers > 0
    )
    while True:
        yield (sample["value"] for batch in loader for sample in batch)


SUBJECTS: dict[str, Callable[[Job], Iterator[Iterable[Any]]]] = {
    "lfdata": lfdata_,
    "webdataset": webdataset_,
    "streaming": streaming_,
}


def run(job: Job) -> dict[str, Any]:
    """Seconds of each epoch (the first from before anything is imported), samples seen and how many of them more than once."""
    expected = np.load(job.expected, allow_pickle=False)
    began = time.perf_counter()
    seconds, repeated = [], []
    epochs = SUBJECTS[job.subject](job)
    for _ in range(job.epochs):
        seen = np.zeros(job.samples, np.int64)
        for sample in next(epochs):
            key = int.from_bytes(sample[:KEY_BYTES], "little")
            if xxhash.xxh3_64_intdigest(sample) != expected[key]:
                raise SystemExit(f"{job.subject}: sample {key} is not what was stored")
            seen[key] += 1
        seconds.append(time.perf_counter() - began)
        began = time.perf_counter()
        if not seen.all():
            raise SystemExit(f"{job.subject}: {int((seen == 0).sum())} samples of {job.samples} did not come")
        repeated.append(int(seen.sum()) - job.samples)
    return {"seconds": seconds, "repeated": repeated}


def write_mds(source: Path, target: Path) -> None:
    """MDS shards of the samples of a ``.npy`` file."""
    from streaming import MDSWriter

    with MDSWriter(out=str(target), columns={"value": "bytes"}, size_limit=16 << 20) as writer:
        for row in np.load(source, mmap_mode="r", allow_pickle=False):
            writer.write({"value": row.tobytes()})


if __name__ == "__main__":
    if sys.argv[1] == "write-mds":
        write_mds(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        result = run(msgspec.json.decode(sys.argv[1], type=Job))
        sys.stdout.flush()
        sys.stdout.buffer.write(b"\n" + msgspec.json.encode(result) + b"\n")
        sys.stdout.buffer.flush()
        # Peers leave threads and workers behind.
        os._exit(0)
