"""litdata: chunks of 64 MB written by its ``optimize``, shuffled by its own order, decoded by libjpeg-turbo and OpenCV."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness.work import Batch, Settings, Workload, image_files, sweep
from benchmarks.subjects import torch_pil
from benchmarks.subjects.pixels import with_turbo

TITLE = "litdata + simplejpeg + cv2"
IMPORTS = ("torch.utils.data", "litdata", "simplejpeg", "cv2")
FORMAT = "litdata"
WORK = ("crop", "centre")


def workers(workload: Workload, cores: int) -> list[int]:
    """0: in the consumer's process."""
    return [0, *sweep(cores)]


def stored(item: tuple[int, str]) -> dict[str, Any]:
    """One sample as it is stored: JPEG bytes as they are."""
    key, path = item
    return {"image": Path(path).read_bytes(), "key": key}


def prepare(workload: Workload, source: Path, target: Path) -> None:
    """Chunks of the size its documentation uses, not compressed."""
    import litdata

    inputs = [(key, str(path)) for key, path in enumerate(image_files(source))]
    litdata.optimize(fn=stored, inputs=inputs, output_dir=str(target), chunk_bytes="64MB", num_workers=1, verbose=False)


class Decode:
    """The data set's transform: a stored sample to its key and picture."""

    def __init__(self, work: Workload) -> None:
        self.work = work
        self.decode: Callable[[bytes], Any] | None = None

    def __call__(self, item: dict[str, Any]) -> tuple[int, Any]:
        if self.decode is None:
            self.decode = with_turbo(self.work)
        return int(item["key"]), self.decode(item["image"])


def batches(workload: Workload, prepared: Path, settings: Settings) -> Iterator[Iterator[Batch]]:
    """Epochs without end; what its documentation leaves alone is left at its default."""
    import torch
    from litdata import StreamingDataLoader, StreamingDataset

    torch.manual_seed(settings.seed)
    dataset = StreamingDataset(str(prepared), shuffle=True, drop_last=False, seed=settings.seed, transform=Decode(workload))
    loader: Any = StreamingDataLoader(
        dataset,
        batch_size=workload.batch,
        num_workers=settings.workers,
        collate_fn=torch_pil.collate,
        persistent_workers=settings.workers > 0,
    )
    return torch_pil.loop(loader)
