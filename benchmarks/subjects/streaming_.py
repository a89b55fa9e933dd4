"""mosaicml-streaming: MDS shards of 64 MB read from the local disk, shuffled by its own order, decoded by libjpeg-turbo and OpenCV."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness.work import Batch, Settings, Workload, image_files, sweep
from benchmarks.subjects import torch_pil
from benchmarks.subjects.pixels import with_turbo

TITLE = "mosaicml-streaming + simplejpeg + cv2"
IMPORTS = ("torch.utils.data", "streaming", "simplejpeg", "cv2")
FORMAT = "mds"
WORK = ("crop", "centre")


def workers(workload: Workload, cores: int) -> list[int]:
    """0: in the consumer's process."""
    return [0, *sweep(cores)]


def prepare(workload: Workload, source: Path, target: Path) -> None:
    """Shards of its default size; JPEG bytes as they are, neither compressed nor hashed."""
    from streaming import MDSWriter

    with MDSWriter(out=str(target), columns={"image": "bytes", "key": "int"}) as writer:
        for key, path in enumerate(image_files(source)):
            writer.write({"image": path.read_bytes(), "key": key})


def decoded(work: Workload, **options: Any) -> Any:
    """Its data set with a decoding ``__getitem__``, as its documentation shows it."""
    from streaming import StreamingDataset

    class Decoded(StreamingDataset):  # type: ignore[misc,unused-ignore]
        decode: Callable[[bytes], Any] | None = None

        def __getitem__(self, at: Any) -> tuple[int, Any]:
            if self.decode is None:
                self.decode = with_turbo(work)
            item = super().__getitem__(at)
            return int(item["key"]), self.decode(item["image"])

    return Decoded(**options)


def tidy(prepared: Path) -> None:
    """Remove the shared memory and locks of earlier processes over these files, which the harness ended without their exit handlers.

    Its own ``clean_stale_shared_memory`` stops at the first number that is free, and would take those of any other training too.
    """
    shared = Path("/dev/shm")
    for found in shared.glob("*_locals"):
        if str(prepared).encode() in found.read_bytes():
            number = found.name.partition("_")[0]
            for path in (*shared.glob(f"{number}_*"), *Path(tempfile.gettempdir()).glob(f"{number}_*_filelock")):
                path.unlink(missing_ok=True)


def batches(workload: Workload, prepared: Path, settings: Settings) -> Iterator[Iterator[Batch]]:
    """Epochs without end. The data set is told the batch size, as it asks for; all else that reads ahead is left at its default."""
    import torch
    from torch.utils.data import DataLoader

    tidy(prepared)
    torch.manual_seed(settings.seed)
    dataset = decoded(workload, local=str(prepared), batch_size=workload.batch, shuffle=True, shuffle_seed=settings.seed)
    loader: Any = DataLoader(
        dataset,
        workload.batch,
        num_workers=settings.workers,
        collate_fn=torch_pil.collate,
        persistent_workers=settings.workers > 0,
    )
    return torch_pil.loop(loader)
