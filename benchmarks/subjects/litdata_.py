"""litdata: chunks of 64 MB written by its ``optimize``, shuffled by its own order, decoded by libjpeg-turbo and OpenCV.

Tokens are stored for its ``TokensLoader``, which knows no keys: every block has the key in its first two ids.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.work import SEQUENCE, Batch, Settings, Workload, image_files, sequences, sweep
from benchmarks.subjects import torch_pil
from benchmarks.subjects.files import decoder, read, shrunk, stored_files

TITLE = "litdata + simplejpeg + cv2"
IMPORTS = ("torch.utils.data", "litdata", "simplejpeg", "cv2")
FORMAT = "litdata"
WORK = ("crop", "centre", "native", "tokens", "multimodal", "bytes", "build")
KEY_IDS = 2
BLOCK = KEY_IDS + SEQUENCE
PLACES = "places.npy"
# In blocks; for tokens its documentation sets the chunk's length, and has about as many.
CHUNK, AT_ONCE = 8012, 1000


def workers(workload: Workload, cores: int) -> list[int]:
    """0: in the consumer's process."""
    if workload.work == "build":
        return sweep(cores)
    return [0] if workload.work == "bytes" else [0, *sweep(cores)]


def record(item: tuple[int, dict[str, Path]]) -> dict[str, Any]:
    """One sample as it is stored: files as they are."""
    key, paths = item
    return read(paths) | {"key": key}


def record_shrunk(item: tuple[int, Path]) -> dict[str, Any]:
    """One picture as it is built."""
    key, path = item
    return {"jpg": shrunk(path), "key": key}


def blocks(item: tuple[Path, int]) -> Iterator[Any]:
    """Some sequences, each after its key."""
    source, start = item
    for key, row in enumerate(sequences(source)[start : start + AT_ONCE], start):
        yield np.concatenate([np.array([key], np.uint32).view(np.uint16), row])


def prepare(workload: Workload, source: Path, target: Path) -> None:
    """Chunks of the size its documentation uses, not compressed."""
    import litdata

    cores = len(os.sched_getaffinity(0))
    if workload.work == "tokens":
        litdata.optimize(
            fn=blocks,
            inputs=[(source, start) for start in range(0, len(sequences(source)), AT_ONCE)],
            output_dir=str(target),
            chunk_size=CHUNK * BLOCK,
            item_loader=litdata.TokensLoader(),
            num_workers=cores,
            verbose=False,
        )
        return
    files = list(enumerate(stored_files(workload, source)))
    litdata.optimize(fn=record, inputs=files, output_dir=str(target), chunk_bytes="64MB", num_workers=cores, verbose=False)
    # Its workers share the inputs as they like, so a sample's place is not its key.
    dataset: Any = litdata.StreamingDataset(str(target))
    np.save(target / PLACES, np.argsort([int(dataset[place]["key"]) for place in range(len(dataset))]))


def build(workload: Workload, source: Path, target: Path, workers: int) -> None:
    """In its processes."""
    import litdata

    inputs = list(enumerate(image_files(source)))
    litdata.optimize(
        fn=record_shrunk, inputs=inputs, output_dir=str(target), chunk_bytes="64MB", num_workers=workers, verbose=False
    )


def stored(workload: Workload, target: Path) -> Iterator[tuple[int, bytes]]:
    """Read back from first to last."""
    from litdata import StreamingDataset

    for item in StreamingDataset(str(target)):
        yield int(item["key"]), bytes(item["jpg"])


class Decode:
    """The data set's transform: a stored sample to its key and arrays."""

    def __init__(self, work: Workload, source: Path) -> None:
        self.work, self.source = work, source
        self.decode: Callable[[Any], Any] | None = None

    def __call__(self, item: Any) -> tuple[int, Any]:
        if self.work.work == "tokens":
            return int(item[:KEY_IDS].view(np.uint32)[0]), item[KEY_IDS:]
        if self.decode is None:
            self.decode = decoder(self.work, self.source)
        # Bytes come as memoryviews.
        text = {part: bytes(item[part]) for part in ("txt", "json") if part in item}
        return int(item["key"]), self.decode(item | text)


def loader_of(workload: Workload, prepared: Path, settings: Settings) -> Any:
    """Its loader; what its documentation leaves alone is left at its default."""
    import torch
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader

    torch.manual_seed(settings.seed)
    dataset = StreamingDataset(
        str(prepared),
        item_loader=TokensLoader(block_size=BLOCK) if workload.work == "tokens" else None,
        shuffle=True,
        drop_last=False,
        seed=settings.seed,
        transform=Decode(workload, settings.source),
    )
    return StreamingDataLoader(
        dataset,
        batch_size=workload.batch,
        num_workers=settings.workers,
        collate_fn=torch_pil.collate,
        persistent_workers=settings.workers > 0,
    )


def batches(workload: Workload, prepared: Path, settings: Settings) -> Iterator[Iterator[Batch]]:
    """Epochs without end."""
    return torch_pil.loop(loader_of(workload, prepared, settings), next(iter(workload.arrays)))


def resumable(workload: Workload, prepared: Path, settings: Settings, state: Any) -> tuple[Iterator[Batch], Callable[[], Any]]:
    """Through its loader's state."""
    loader = loader_of(workload, prepared, settings)
    if state is not None:
        loader.load_state_dict(state)
    return (torch_pil.batch_of(found) for found in loader), loader.state_dict


def reader(workload: Workload, prepared: Path, settings: Settings) -> Callable[[int], Any]:
    """By place."""
    from litdata import StreamingDataset

    dataset: Any = StreamingDataset(str(prepared))
    places = np.load(prepared / PLACES, allow_pickle=False).tolist()
    return lambda key: dataset[places[key]]["jpg"]
