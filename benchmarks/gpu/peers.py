"""Peers that feed a GPU by themselves, out of the same pictures: DALI as its guides have it, and webdataset."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.arms import FEW, Arm, Setting, cropped, quarter
from lfdata import ShardDataset
from lfdata.device.images import IMAGENET_MEAN, IMAGENET_STD

# Tar files, so that workers can share them; samples that webdataset shuffles among.
TARS, SHUFFLED = 16, 1000
ROWS_AT_ONCE = 256


def stored(setting: Setting) -> Iterator[tuple[int, bytes]]:
    """The stored bytes of every picture, with its number."""
    data = ShardDataset(setting.data)
    for first in range(0, len(data), ROWS_AT_ONCE):
        some = range(first, min(first + ROWS_AT_ONCE, len(data)))
        for index, found in zip(some, data.read_many(list(some), [setting.field], decode=False)[setting.field], strict=True):
            yield index, bytes(found)


def threads_of(setting: Setting) -> int:
    """All cores, if nothing else was asked for."""
    return setting.threads or len(os.sched_getaffinity(0))


def dali(setting: Setting, batch: int) -> Arm:
    """Files read, decoded, cropped and normalised by one pipeline, on the GPU where there is one; float16, which is the smallest it makes."""
    from nvidia.dali import Pipeline, fn, types
    from nvidia.dali.plugin.base_iterator import LastBatchPolicy
    from nvidia.dali.plugin.pytorch import DALIGenericIterator

    folder = Path(tempfile.mkdtemp())
    files = []
    for index, found in stored(setting):
        files.append(folder / f"{index:08d}")
        files[-1].write_bytes(found)
    gpu = setting.device.type == "cuda"
    device_id = (setting.device.index or 0) if gpu else None
    pipe: Any = Pipeline(batch, threads_of(setting), device_id, seed=0, prefetch_queue_depth=3)
    with pipe:
        encoded, numbers = fn.readers.file(
            files=[str(file) for file in files],
            labels=list(range(len(files))),
            random_shuffle=True,
            name="reader",
        )
        images = fn.decoders.image_random_crop(
            encoded,
            device="mixed" if gpu else "cpu",
            random_area=[0.08, 1.0],
            random_aspect_ratio=[3 / 4, 4 / 3],
            num_attempts=10,
            adjust_orientation=False,
        )
        images = fn.resize(images, size=(setting.side, setting.side), antialias=True)
        images = fn.crop_mirror_normalize(
            images,
            dtype=types.FLOAT16,
            output_layout="CHW",
            mean=[255 * one for one in IMAGENET_MEAN],
            std=[255 * one for one in IMAGENET_STD],
            mirror=fn.random.coin_flip(probability=0.5),
        )
        pipe.set_outputs(images, numbers.gpu() if gpu else numbers)
    loader = DALIGenericIterator(
        [pipe], ["image", "number"], reader_name="reader", last_batch_policy=LastBatchPolicy.DROP, auto_reset=True
    )

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            for (found,) in loader:
                # In the type and memory order that the others give.
                yield (
                    found["image"].to(torch.bfloat16, memory_format=torch.channels_last),
                    found["number"].reshape(-1).to(torch.int64),
                )

    return Arm(batches(), lambda: shutil.rmtree(folder, ignore_errors=True))


class Sample:
    """Decoded and cropped in a worker."""

    def __init__(self, side: int) -> None:
        self._side = side

    def __call__(self, item: dict[str, Any]) -> tuple[torch.Tensor, int]:
        torch.set_num_threads(1)
        return torch.from_numpy(cropped(item["jpg"], self._side, np.random.default_rng())), int(item["cls"])


def webdataset(setting: Setting, batch: int, workers: int) -> Arm:
    """Tar files, read and decoded by worker processes, batches made there, pinned, copied without waiting."""
    import webdataset as wds

    folder, gpu = Path(tempfile.mkdtemp()), setting.device.type == "cuda"
    count = len(ShardDataset(setting.data))
    with wds.ShardWriter(f"{folder}/%04d.tar", maxcount=max(1, -(-count // TARS)), verbose=0) as writer:
        for index, found in stored(setting):
            writer.write({"__key__": f"{index:08d}", "cls": index, "jpg": found})
    tars = sorted(str(path) for path in folder.glob("*.tar"))
    dataset = (
        # Without end: a worker's share of an epoch may be less than a batch.
        wds.WebDataset(tars, resampled=True, seed=0, empty_check=False, shardshuffle=False)
        .shuffle(SHUFFLED)
        .map(Sample(setting.side))
        .batched(batch, partial=False)
    )
    # A worker without a tar would wait for ever.
    loader: Any = wds.WebLoader(
        dataset, batch_size=None, num_workers=min(workers, len(tars)), pin_memory=gpu, prefetch_factor=2 if workers else None
    )
    source = iter(loader)

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for images, numbers in source:
            yield (
                setting.normalised(torch.as_tensor(images).to(setting.device, non_blocking=True)),
                torch.as_tensor(numbers).to(setting.device, non_blocking=True),
            )

    def close() -> None:
        nonlocal source
        source = iter(())
        shutil.rmtree(folder, ignore_errors=True)

    return Arm(batches(), close)


def peers(setting: Setting, batch: int, workers: int) -> dict[str, Callable[[], Arm]]:
    """By name."""
    return {
        "DALI": lambda: dali(setting, batch),
        "webdataset": lambda: webdataset(setting, batch, workers),
        f"webdataset{FEW}": lambda: webdataset(setting, batch, quarter(workers)),
    }
