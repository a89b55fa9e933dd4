"""FFCV: a .beton file of pictures encoded anew as JPEG, decoded, cropped and resized by its own compiled pipeline in threads.

It stores what its own encoder (OpenCV, quality 90 by default) makes of the decoded pictures; there is no way to keep the source's bytes.
Built from source: OpenCV and libjpeg-turbo with their headers, and pkg-config, have to be installed first.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness.work import Batch, Settings, Workload, image_files, sweep

TITLE = "FFCV"
IMPORTS = ("torch", "ffcv.loader", "ffcv.fields.rgb_image", "ffcv.transforms")
FORMAT = "beton"
WORK = ("crop", "centre")


def workers(workload: Workload, cores: int) -> list[int]:
    """Threads of its compiled code."""
    return sweep(cores)


class Pictures:
    """What its writer reads: pictures in RGB and their keys, in the order of the fields."""

    def __init__(self, source: Path) -> None:
        self.paths = image_files(source)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        from PIL import Image

        with Image.open(self.paths[index]) as image:
            return image.convert("RGB"), int(index)


def prepare(workload: Workload, source: Path, target: Path) -> None:
    """One file. Without ``max_resolution`` pictures keep their size."""
    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter

    fields = {"image": RGBImageField(write_mode="jpg"), "key": IntField()}
    DatasetWriter(str(target / "data.beton"), fields).from_indexed_dataset(Pictures(source))


def placed_crop() -> Any:
    """Its centre-crop decoder, with the crop where W2 has it; the work is the same.

    Its own crop lies in the exact middle of the source. W2 rounds in the resized picture, which for 512 x 384 is 0.9 source pixels
    further left: on sharp pictures more than the tolerance.
    """
    from ffcv.fields.rgb_image import CenterCropRGBImageDecoder

    def crop(height: Any, width: Any, scale: Any, ratio: Any) -> Any:
        shorter = min(height, width)
        tall, wide = 256 * height // shorter, 256 * width // shorter
        top, left = round((tall - 224) / 2) * height / tall, round((wide - 224) / 2) * width / wide
        return round(top), round(left), round(224 * height / tall), round(224 * width / wide)

    class Placed(CenterCropRGBImageDecoder):  # type: ignore[misc,unused-ignore]
        @property
        def get_crop_generator(self) -> Any:
            return crop

    return Placed((224, 224), ratio=224 / 256)


def batches(workload: Workload, prepared: Path, settings: Settings) -> Iterator[Iterator[Batch]]:
    """Epochs without end. For W2 the square of 224/256 of the shorter side; tensors stay height x width x channels."""
    from ffcv.fields.decoders import IntDecoder
    from ffcv.fields.rgb_image import RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import RandomHorizontalFlip, ToTensor

    if workload.work == "crop":
        steps = [RandomResizedCropRGBImageDecoder((224, 224)), RandomHorizontalFlip(), ToTensor()]
    else:
        steps = [placed_crop(), ToTensor()]
    loader = Loader(
        str(prepared / "data.beton"),
        batch_size=workload.batch,
        num_workers=settings.workers,
        os_cache=True,
        order=OrderOption.RANDOM,
        seed=settings.seed,
        drop_last=False,
        pipelines={"image": steps, "key": [IntDecoder(), ToTensor()]},
    )
    return loop(loader)


def loop(loader: Any) -> Iterator[Iterator[Batch]]:
    """Epochs of its loader; keys come as one column."""
    while True:
        yield (Batch(keys.reshape(-1), {"image": images}) for images, keys in loader)
