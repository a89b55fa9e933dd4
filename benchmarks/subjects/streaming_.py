"""mosaicml-streaming: MDS shards of 64 MB read from the local disk, shuffled by its own order, decoded by libjpeg-turbo and OpenCV."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness.work import MULTIMODAL_PARTS, SEQUENCE, Batch, Settings, Workload, image_files, sequences, sweep
from benchmarks.subjects import torch_pil
from benchmarks.subjects.files import decoder, read, shrunk, stored_files

TITLE = "mosaicml-streaming + simplejpeg + cv2"
IMPORTS = ("torch.utils.data", "streaming", "simplejpeg", "cv2")
FORMAT = "mds"
WORK = ("crop", "centre", "native", "tokens", "multimodal", "bytes", "build")
PICTURE = {"jpg": "bytes", "key": "int"}
COLUMNS = {
    "tokens": {"tokens": f"ndarray:uint16:{SEQUENCE}", "key": "int"},
    "multimodal": dict.fromkeys(MULTIMODAL_PARTS, "bytes") | {"key": "int"},
}


def workers(workload: Workload, cores: int) -> list[int]:
    """0: in the consumer's process."""
    if workload.work == "build":
        return sweep(cores)
    return [0] if workload.work == "bytes" else [0, *sweep(cores)]


def prepare(workload: Workload, source: Path, target: Path) -> None:
    """Shards of its default size; files as they are, ids as arrays, neither compressed nor hashed."""
    from streaming import MDSWriter

    samples: Iterator[dict[str, Any]] = map(read, stored_files(workload, source))
    if workload.work == "tokens":
        samples = ({"tokens": row} for row in sequences(source))
    with MDSWriter(out=str(target), columns=COLUMNS.get(workload.work, PICTURE)) as writer:
        for key, sample in enumerate(samples):
            writer.write(sample | {"key": key})


def build_part(target: Path, items: list[tuple[int, Path]]) -> None:
    """What one process writes."""
    from streaming import MDSWriter

    with MDSWriter(out=str(target), columns=PICTURE) as writer:
        for key, path in items:
            writer.write({"jpg": shrunk(path), "key": key})


def build(workload: Workload, source: Path, target: Path, workers: int) -> None:
    """A folder of shards a process, then one index for all, as its documentation shows it."""
    from streaming.base.util import merge_index

    items = list(enumerate(image_files(source)))
    target.mkdir()
    with multiprocessing.Pool(workers) as pool:
        pool.starmap(build_part, [(target / f"{part:05d}", items[part::workers]) for part in range(workers)])
    merge_index(str(target))


def stored(workload: Workload, target: Path) -> Iterator[tuple[int, bytes]]:
    """Read back a sample at a time."""
    from streaming import StreamingDataset

    dataset: Any = StreamingDataset(local=str(target), batch_size=1)
    for row in range(len(dataset)):
        yield int(dataset[row]["key"]), dataset[row]["jpg"]
    tidy(target)


def decoded(work: Workload, source: Path, **options: Any) -> Any:
    """Its data set with a decoding ``__getitem__``, as its documentation shows it."""
    from streaming import StreamingDataset

    class Decoded(StreamingDataset):  # type: ignore[misc,unused-ignore]
        decode: Callable[[Any], Any] | None = None

        def __getitem__(self, at: Any) -> tuple[int, Any]:
            item = super().__getitem__(at)
            if work.work == "tokens":
                return int(item["key"]), item["tokens"]
            if self.decode is None:
                self.decode = decoder(work, source)
            return int(item["key"]), self.decode(item)

    return Decoded(batch_size=work.batch, shuffle=True, **options)


def tidy(prepared: Path) -> None:
    """Remove the shared memory and locks of earlier processes over these files, which the harness ended without their exit handlers.

    Its own ``clean_stale_shared_memory`` stops at the first number that is free, and would take those of any other training too.
    """
    shared = Path("/dev/shm")
    for found in shared.glob("*_locals"):
        try:
            mine = str(prepared).encode() in found.read_bytes()
        except OSError:
            # Somebody else's, or gone by now.
            continue
        if mine:
            number = found.name.partition("_")[0]
            for path in (*shared.glob(f"{number}_*"), *Path(tempfile.gettempdir()).glob(f"{number}_*_filelock")):
                path.unlink(missing_ok=True)


def loader_of(kind: Any, workload: Workload, prepared: Path, settings: Settings) -> Any:
    """A loader of a kind. The data set is told the batch size, as it asks for; all else that reads ahead is left at its default."""
    import torch

    tidy(prepared)
    torch.manual_seed(settings.seed)
    return kind(
        decoded(workload, settings.source, local=str(prepared), shuffle_seed=settings.seed),
        batch_size=workload.batch,
        num_workers=settings.workers,
        collate_fn=torch_pil.collate,
        persistent_workers=settings.workers > 0,
    )


def batches(workload: Workload, prepared: Path, settings: Settings) -> Iterator[Iterator[Batch]]:
    """Epochs without end."""
    from torch.utils.data import DataLoader

    return torch_pil.loop(loader_of(DataLoader, workload, prepared, settings), next(iter(workload.arrays)))


def resumable(workload: Workload, prepared: Path, settings: Settings, state: Any) -> tuple[Iterator[Batch], Callable[[], Any]]:
    """Through its own loader, which counts samples for the data set's state."""
    from streaming import StreamingDataLoader

    loader = loader_of(StreamingDataLoader, workload, prepared, settings)
    if state is not None:
        loader.load_state_dict(state)
    return (torch_pil.batch_of(found) for found in loader), loader.state_dict


def reader(workload: Workload, prepared: Path, settings: Settings) -> Callable[[int], Any]:
    """By position, which is the key."""
    from streaming import StreamingDataset

    tidy(prepared)
    dataset: Any = StreamingDataset(local=str(prepared), batch_size=1)
    return lambda key: dataset[key]["jpg"]
