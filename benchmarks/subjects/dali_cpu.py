"""NVIDIA DALI without a GPU: its pipeline reads, decodes and resizes in C++ threads; torch tensors come out.

Its pipeline can be saved and restored; it reads files, and writes no format of its own.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness.work import Batch, Settings, Workload, image_files, sweep
from benchmarks.subjects import torch_pil

TITLE = "DALI on CPU"
IMPORTS = ("nvidia.dali.fn", "nvidia.dali.plugin.pytorch")
FORMAT = "files"
WORK = ("crop", "centre", "native")
prepare = torch_pil.prepare


def workers(workload: Workload, cores: int) -> list[int]:
    """Threads of the pipeline; at least one."""
    return sweep(cores)


def pipeline(work: Workload, settings: Settings, decoder: str = "cpu", device_id: int | None = None, **more: Any) -> Any:
    """Files in, pictures and keys out. Options not given are as DALI sets them (two batches ahead, a shuffle buffer of 1024).

    ``decoder``: ``cpu``, or ``mixed``: the GPU ``device_id`` decodes and does the rest.
    """
    from nvidia.dali import Pipeline, fn

    files = [str(path) for path in image_files(settings.source)]
    pipe: Any = Pipeline(work.batch, settings.workers, device_id=device_id, seed=settings.seed, **more)
    with pipe:
        encoded, keys = fn.readers.file(
            files=files, labels=list(range(len(files))), random_shuffle=True, pad_last_batch=True, name="reader"
        )
        if work.work == "native":
            place = {f"crop_pos_{axis}": fn.random.uniform(range=(0.0, 1.0)) for axis in "xy"}
            images = fn.decoders.image_crop(encoded, device=decoder, crop=(224, 224), adjust_orientation=False, **place)
        elif work.work == "crop":
            images = fn.decoders.image_random_crop(
                encoded,
                device=decoder,
                random_area=[0.08, 1.0],
                random_aspect_ratio=[3 / 4, 4 / 3],
                num_attempts=10,
                adjust_orientation=False,
            )
            images = fn.resize(images, size=(224, 224), antialias=True)
            images = fn.flip(images, horizontal=fn.random.coin_flip(probability=0.5))
        else:
            images = fn.decoders.image(encoded, device=decoder, adjust_orientation=False)
            # As the reference: the picture is stretched to whole pixels, and an odd margin leaves the smaller half before the crop.
            images = fn.resize(images, resize_shorter=256, antialias=True, subpixel_scale=False)
            images = fn.crop(images, crop=(224, 224), rounding="truncate")
        pipe.set_outputs(images, keys)
    return pipe


def loader_of(pipe: Any) -> Any:
    """Its iterator. The reader pads the last batch, and the iterator cuts it to what is left."""
    from nvidia.dali.plugin.base_iterator import LastBatchPolicy
    from nvidia.dali.plugin.pytorch import DALIGenericIterator

    return DALIGenericIterator(
        [pipe],
        ["image", "key"],
        reader_name="reader",
        last_batch_policy=LastBatchPolicy.PARTIAL,
        auto_reset=True,
    )


def epoch(loader: Any) -> Iterator[Batch]:
    """Batches up to the end of the epoch."""
    return (Batch(found[0]["key"].reshape(-1), {"image": found[0]["image"]}) for found in loader)


def batches(workload: Workload, prepared: Path, settings: Settings) -> Iterator[Iterator[Batch]]:
    """Epochs without end."""
    loader = loader_of(pipeline(workload, settings))
    while True:
        yield epoch(loader)


def resumable(workload: Workload, prepared: Path, settings: Settings, state: Any) -> tuple[Iterator[Batch], Callable[[], Any]]:
    """Through its checkpoints, which have to be asked for when the pipeline is made."""
    checkpoint = None if state is None else base64.b64decode(state)
    loader = loader_of(pipeline(workload, settings, enable_checkpointing=True, checkpoint=checkpoint))

    def save() -> str:
        return base64.b64encode(loader.checkpoints()[0]).decode()

    return epoch(loader), save
