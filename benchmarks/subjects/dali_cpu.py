"""NVIDIA DALI without a GPU: its pipeline reads, decodes and resizes in C++ threads; torch tensors come out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness.work import Batch, Settings, Workload, image_files, sweep
from benchmarks.subjects import torch_pil

TITLE = "DALI on CPU"
IMPORTS = ("nvidia.dali.fn", "nvidia.dali.plugin.pytorch")
FORMAT = "files"
WORK = ("crop", "centre")
prepare = torch_pil.prepare


def workers(workload: Workload, cores: int) -> list[int]:
    """Threads of the pipeline; at least one."""
    return sweep(cores)


def pipeline(work: Workload, settings: Settings) -> Any:
    """Files in, pictures and keys out. Options not given are as DALI sets them (two batches ahead, a shuffle buffer of 1024)."""
    from nvidia.dali import Pipeline, fn

    files = [str(path) for path in image_files(settings.source)]
    pipe: Any = Pipeline(work.batch, settings.workers, device_id=None, seed=settings.seed)
    with pipe:
        encoded, keys = fn.readers.file(
            files=files, labels=list(range(len(files))), random_shuffle=True, pad_last_batch=True, name="reader"
        )
        if work.work == "crop":
            images = fn.decoders.image_random_crop(
                encoded,
                device="cpu",
                random_area=[0.08, 1.0],
                random_aspect_ratio=[3 / 4, 4 / 3],
                num_attempts=10,
                adjust_orientation=False,
            )
            images = fn.resize(images, size=(224, 224), antialias=True)
            images = fn.flip(images, horizontal=fn.random.coin_flip(probability=0.5))
        else:
            images = fn.decoders.image(encoded, device="cpu", adjust_orientation=False)
            # As the reference: the picture is stretched to whole pixels, and an odd margin leaves the smaller half before the crop.
            images = fn.resize(images, resize_shorter=256, antialias=True, subpixel_scale=False)
            images = fn.crop(images, crop=(224, 224), rounding="truncate")
        pipe.set_outputs(images, keys)
    return pipe


def batches(workload: Workload, prepared: Path, settings: Settings) -> Iterator[Iterator[Batch]]:
    """Epochs without end. The reader pads the last batch, and the iterator cuts it to what is left."""
    from nvidia.dali.plugin.base_iterator import LastBatchPolicy
    from nvidia.dali.plugin.pytorch import DALIGenericIterator

    loader: Any = DALIGenericIterator(
        [pipeline(workload, settings)],
        ["image", "key"],
        reader_name="reader",
        last_batch_policy=LastBatchPolicy.PARTIAL,
        auto_reset=True,
    )
    while True:
        yield (Batch(found[0]["key"].reshape(-1), {"image": found[0]["image"]}) for found in loader)
