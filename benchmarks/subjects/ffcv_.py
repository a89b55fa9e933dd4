"""FFCV: a .beton file of pictures encoded anew as JPEG, decoded, cropped and resized by its own compiled pipeline in threads.

It stores what its own encoder (OpenCV, quality 90 by default) makes of the decoded pictures; there is no way to keep the source's bytes.
Built from source: OpenCV and libjpeg-turbo with their headers, and pkg-config, have to be installed first.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.work import SEQUENCE, Batch, Settings, Workload, image_files, sequences, sweep
from benchmarks.subjects.files import shrink

TITLE = "FFCV"
IMPORTS = ("torch", "ffcv.loader", "ffcv.fields.rgb_image", "ffcv.transforms")
FORMAT = "beton"
WORK = ("crop", "centre", "native", "tokens", "build")
REENCODES = "JPEG of quality 90, by OpenCV"
# Of the file; a picture has to fit into one. Its default is 8 MiB, less than large photos take.
PAGE = 2**26


def workers(workload: Workload, cores: int) -> list[int]:
    """Threads of its compiled code."""
    return sweep(cores)


class Pictures:
    """What its writer reads: pictures in RGB and their keys, in the order of the fields."""

    def __init__(self, source: Path, small: bool = False) -> None:
        self.paths, self.small = image_files(source), small

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        from PIL import Image

        if self.small:
            return shrink(self.paths[index]), int(index)
        with Image.open(self.paths[index]) as image:
            return image.convert("RGB"), int(index)


class Sequences:
    """Ids and their keys. torch had no unsigned 16-bit integers: it advises signed ones, and to reinterpret them later."""

    def __init__(self, source: Path) -> None:
        self.rows = sequences(source)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.rows[index].view(np.int16), int(index)


def write(dataset: Any, target: Path, field: Any, **options: Any) -> None:
    """One file by its writer, in as many processes as there are cores unless ``options`` say otherwise."""
    from ffcv.fields import IntField
    from ffcv.writer import DatasetWriter

    DatasetWriter(str(target / "data.beton"), {"data": field, "key": IntField()}, **options).from_indexed_dataset(dataset)


def prepare(workload: Workload, source: Path, target: Path) -> None:
    """Without ``max_resolution`` pictures keep their size."""
    from ffcv.fields import NDArrayField, RGBImageField

    if workload.work == "tokens":
        write(Sequences(source), target, NDArrayField(np.dtype(np.int16), (SEQUENCE,)))
    else:
        options = {"page_size": PAGE} if workload.work == "native" else {}
        write(Pictures(source), target, RGBImageField(write_mode="jpg"), **options)


def build(workload: Workload, source: Path, target: Path, workers: int) -> None:
    """Resized by PIL in the writer's processes, encoded by OpenCV (quality 90, 4:2:0)."""
    from ffcv.fields import RGBImageField

    target.mkdir()
    write(Pictures(source, small=True), target, RGBImageField(write_mode="jpg", jpeg_quality=90), num_workers=workers)


def stored(workload: Workload, target: Path) -> Iterator[tuple[int, bytes]]:
    """What its reader says where in the file a picture lies; sizes are in its allocation table."""
    from ffcv.reader import Reader

    found = Reader(str(target / "data.beton"))
    data = np.memmap(found.file_name, np.uint8, "r")
    sizes = dict(zip(found.alloc_table["ptr"].tolist(), found.alloc_table["size"].tolist(), strict=True))
    for image, key in found.metadata:
        start = int(image["data_ptr"])
        yield int(key), data[start : start + sizes[start]].tobytes()


def placed_crop(work: Workload) -> Any:
    """Its centre-crop decoder, with the crop where the workload has it; the work is the same.

    For W2 its own crop lies in the exact middle of the source. W2 rounds in the resized picture, which for 512 x 384 is 0.9 source pixels
    further left: on sharp pictures more than the tolerance.
    """
    from ffcv.fields.rgb_image import CenterCropRGBImageDecoder

    def anywhere(height: Any, width: Any, scale: Any, ratio: Any) -> Any:
        return int(np.random.uniform(0, height - 223)), int(np.random.uniform(0, width - 223)), 224, 224

    def centre(height: Any, width: Any, scale: Any, ratio: Any) -> Any:
        shorter = min(height, width)
        tall, wide = 256 * height // shorter, 256 * width // shorter
        top, left = round((tall - 224) / 2) * height / tall, round((wide - 224) / 2) * width / wide
        return round(top), round(left), round(224 * height / tall), round(224 * width / wide)

    class Placed(CenterCropRGBImageDecoder):  # type: ignore[misc,unused-ignore]
        @property
        def get_crop_generator(self) -> Any:
            return anywhere if work.work == "native" else centre

    return Placed((224, 224), ratio=224 / 256)


def batches(workload: Workload, prepared: Path, settings: Settings) -> Iterator[Iterator[Batch]]:
    """Epochs without end. For W2 the square of 224/256 of the shorter side; tensors stay height x width x channels."""
    from ffcv.fields.decoders import IntDecoder, NDArrayDecoder
    from ffcv.fields.rgb_image import RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import RandomHorizontalFlip, ToTensor

    if workload.work == "crop":
        steps = [RandomResizedCropRGBImageDecoder((224, 224)), RandomHorizontalFlip(), ToTensor()]
    elif workload.work == "tokens":
        steps = [NDArrayDecoder(), ToTensor()]
    else:
        steps = [placed_crop(workload), ToTensor()]
    loader = Loader(
        str(prepared / "data.beton"),
        batch_size=workload.batch,
        num_workers=settings.workers,
        os_cache=True,
        order=OrderOption.RANDOM,
        seed=settings.seed,
        drop_last=False,
        pipelines={"data": steps, "key": [IntDecoder(), ToTensor()]},
    )
    return loop(loader, workload)


def loop(loader: Any, workload: Workload) -> Iterator[Iterator[Batch]]:
    """Epochs of its loader; keys come as one column."""
    ((name, (_, dtype)),) = workload.arrays.items()
    while True:
        yield (Batch(keys.reshape(-1), {name: data.numpy().view(dtype)}) for data, keys in loader)
