"""webdataset: tar files of about 256 MB, shuffled by shard and through a buffer, decoded by libjpeg-turbo and OpenCV."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness.work import Batch, Settings, Workload, image_files, sweep
from benchmarks.subjects import torch_pil
from benchmarks.subjects.pixels import with_turbo

TITLE = "webdataset + simplejpeg + cv2"
IMPORTS = ("webdataset", "simplejpeg", "cv2")
FORMAT = "tar"
WORK = ("crop", "centre")
SHARDS = 16


def workers(workload: Workload, cores: int) -> list[int]:
    """0: in the consumer's process."""
    return [0, *sweep(cores)]


def prepare(workload: Workload, source: Path, target: Path) -> None:
    """As many tars as many workers can share; JPEG bytes as they are, the key as ``cls``."""
    import webdataset

    files = image_files(source)
    with webdataset.ShardWriter(f"{target}/%04d.tar", maxcount=max(1, -(-len(files) // SHARDS)), verbose=0) as writer:
        for key, path in enumerate(files):
            writer.write({"__key__": f"{key:08d}", "jpg": path.read_bytes(), "cls": key})


def batches(workload: Workload, prepared: Path, settings: Settings) -> Iterator[Iterator[Batch]]:
    """Epochs without end. Batches are made in the workers, as its documentation advises."""
    import webdataset

    decode = with_turbo(workload)

    def sample(item: dict[str, Any]) -> tuple[int, Any]:
        return int(item["cls"]), decode(item["jpg"])

    tars = sorted(str(path) for path in prepared.glob("*.tar"))
    dataset = (
        webdataset.WebDataset(tars, shardshuffle=len(tars), seed=settings.seed, empty_check=False)
        .shuffle(1000)
        .map(sample)
        .batched(workload.batch, collation_fn=torch_pil.collate)
    )
    loader: Any = webdataset.WebLoader(
        dataset, batch_size=None, num_workers=settings.workers, persistent_workers=settings.workers > 0
    )
    return torch_pil.loop(loader)
