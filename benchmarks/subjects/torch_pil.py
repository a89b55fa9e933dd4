"""torch's DataLoader over a folder of files, decoded by PIL: the plain way."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import multimodal
from benchmarks.harness.work import Batch, Settings, Workload, image_files, sweep
from benchmarks.subjects.pixels import with_pil

TITLE = "torch DataLoader + PIL"
IMPORTS: tuple[str, ...] = ("torch.utils.data", "PIL.Image")
FORMAT = "files"
WORK = ("crop", "centre", "native", "multimodal", "bytes")


def workers(workload: Workload, cores: int) -> list[int]:
    """0: in the consumer's process."""
    return [0] if workload.work == "bytes" else [0, *sweep(cores)]


def prepare(workload: Workload, source: Path, target: Path) -> None:
    """Files are read where they lie."""


class Files:
    """Map-style data set: one file a sample, or the files of one stem."""

    def __init__(self, work: Workload, source: Path, decoder: Callable[[], Callable[[Any], Any]]) -> None:
        self.paths = [str(path) for path in image_files(source)]
        self.parts = multimodal.parts_of(source) if work.work == "multimodal" else []
        self.decoder = decoder
        self.decode: Callable[[Any], Any] | None = None

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[int, Any]:
        if self.decode is None:
            self.decode = self.decoder()
        if self.parts:
            return index, self.decode({part: path.read_bytes() for part, path in self.parts[index].items()})
        with open(self.paths[index], "rb") as file:
            return index, self.decode(file.read())


def collate(samples: list[tuple[int, Any]]) -> tuple[Any, Any]:
    """A batch as torch tensors: keys, and one array or several by name."""
    import torch

    if isinstance(samples[0][1], dict):
        return multimodal.collate(samples)
    return torch.tensor([key for key, _ in samples]), torch.from_numpy(np.stack([image for _, image in samples]))


def batch_of(found: tuple[Any, Any], name: str = "image") -> Batch:
    """What :func:`collate` made, as a batch."""
    keys, arrays = found
    return Batch(keys, arrays if isinstance(arrays, dict) else {name: arrays})


def loop(loader: Any, name: str = "image") -> Iterator[Iterator[Batch]]:
    """Epochs of a loader of what :func:`collate` makes."""
    while True:
        yield (batch_of(found, name) for found in loader)


def loader_of(kind: Any, dataset: Any, work: Workload, settings: Settings, together: Callable[[Any], Any] = collate) -> Any:
    """A shuffled loader of torch's or torchdata's kind, workers kept between epochs."""
    import torch

    torch.manual_seed(settings.seed)
    return kind(
        dataset,
        work.batch,
        shuffle=True,
        num_workers=settings.workers,
        collate_fn=together,
        persistent_workers=settings.workers > 0,
    )


def epochs(
    dataset: Any, work: Workload, settings: Settings, together: Callable[[Any], Any] = collate
) -> Iterator[Iterator[Batch]]:
    """torch's own."""
    from torch.utils.data import DataLoader

    return loop(loader_of(DataLoader, dataset, work, settings, together), next(iter(work.arrays)))


def stateful(dataset: Any, work: Workload, settings: Settings, state: Any) -> tuple[Iterator[Batch], Callable[[], Any]]:
    """torchdata's DataLoader with a state, over the same data set. The state is what it gives, as MessagePack in base64."""
    import msgspec
    import torch
    from torchdata.stateful_dataloader import StatefulDataLoader

    loader = loader_of(StatefulDataLoader, dataset, work, settings)

    def packed(value: Any) -> Any:
        """A tensor (the state of a random generator) as MessagePack has none."""
        return msgspec.msgpack.Ext(1, msgspec.msgpack.encode([str(value.numpy().dtype), value.numpy().tobytes()]))

    def unpacked(_: int, data: memoryview) -> Any:
        dtype, raw = msgspec.msgpack.decode(data)
        return torch.from_numpy(np.frombuffer(bytearray(raw), dtype))

    if state is not None:
        loader.load_state_dict(msgspec.msgpack.decode(base64.b64decode(state), ext_hook=unpacked, strict=False))

    def save() -> str:
        return base64.b64encode(msgspec.msgpack.encode(loader.state_dict(), enc_hook=packed)).decode()

    return (batch_of(found) for found in loader), save


def files(workload: Workload, settings: Settings) -> Files:
    """The data set."""
    multi = workload.work == "multimodal"
    return Files(workload, settings.source, lambda: multimodal.with_libraries(settings.source) if multi else with_pil(workload))


def batches(workload: Workload, prepared: Path, settings: Settings) -> Iterator[Iterator[Batch]]:
    """Epochs without end."""
    return epochs(files(workload, settings), workload, settings)


def resumable(workload: Workload, prepared: Path, settings: Settings, state: Any) -> tuple[Iterator[Batch], Callable[[], Any]]:
    """Through torchdata's StatefulDataLoader."""
    return stateful(files(workload, settings), workload, settings, state)


def reader(workload: Workload, prepared: Path, settings: Settings) -> Callable[[int], bytes]:
    """A file's bytes."""
    paths = [str(path) for path in image_files(settings.source)]

    def read(key: int) -> bytes:
        with open(paths[key], "rb") as file:
            return file.read()

    return read
