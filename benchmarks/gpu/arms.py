"""Ways to bring batches to the device, one rung more each; and torch's own."""

from __future__ import annotations

import io
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from benchmarks.gpu.beside import Beside, crops
from lfdata import DeviceLoader, Loader, ShardDataset
from lfdata.device import Images, dali
from lfdata.device.backend import backend_of
from lfdata.device.images import IMAGENET_MEAN, IMAGENET_STD
from lfdata.device.register import Registered
from lfdata.loader.taker import Taker

# Host batches that are held until their copies are done, where nobody else does it.
HELD = 3
# Ways that need a library beside torch; and those that fork workers, which come first.
FEW = " (a quarter of the workers)"
DALI = "nvidia.dali"
NEEDS = {
    "decoded by DALI": DALI,
    "DALI": DALI,
    "webdataset": "webdataset",
    f"webdataset{FEW}": "webdataset",
}
TORCH = ("torch DataLoader", f"torch DataLoader{FEW}")
FORKED = (*TORCH, "webdataset", f"webdataset{FEW}")
LADDER = ("loader", "registered", "ahead", "kernel", "feedback")
BESIDE = "resident beside decoding"
NAMES = ("resident", "resident uint8", BESIDE, *LADDER, *TORCH, *NEEDS)


class Setting:
    """What all arms share."""

    def __init__(self, data: Path, field: str, device: torch.device, side: int, threads: int | None) -> None:
        self.data, self.field, self.device, self.side, self.threads = data, field, device, side, threads
        self.mean = (255 * torch.tensor(IMAGENET_MEAN, device=device)).view(1, 3, 1, 1)
        self.std = (255 * torch.tensor(IMAGENET_STD, device=device)).view(1, 3, 1, 1)

    def loader(self, batch: int, **options: Any) -> Loader:
        """Random crops, mirrored at random."""
        return crops(Loader, self.data, self.field, self.side, batch, self.threads, **options)

    def normalised(self, images: torch.Tensor) -> torch.Tensor:
        """As users write it, in torch's operations: bf16 (rows, channels, height, width)."""
        return ((images.permute(0, 3, 1, 2).float() - self.mean) / self.std).to(torch.bfloat16)


class Arm:
    """Batches without end: pictures on the device, bf16 (rows, 3, side, side), their numbers, and what goes with them when it ends."""

    def __init__(
        self, batches: Iterator[tuple[torch.Tensor, torch.Tensor]], close: Callable[[], None], stats: Any = None
    ) -> None:
        self.batches, self.close = batches, close
        self.stats: Callable[[], dict[str, Any]] = stats or dict


def endless(loader: Any) -> Iterator[Any]:
    """Epoch after epoch."""
    while True:
        yield from loader


def one_batch(setting: Setting, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first batch of the loader, uint8, on the device. Not random numbers: they cost a GPU more power than pictures, and so some clock."""
    loader = setting.loader(batch)
    try:
        found = next(iter(loader))
        return found[setting.field].to(setting.device, copy=True), found["__index__"].to(setting.device, copy=True)
    finally:
        loader.close()


def resident(setting: Setting, batch: int) -> Arm:
    """One batch that is there already, as the model takes it."""
    images, numbers = one_batch(setting, batch)
    return Arm(itertools.repeat((setting.normalised(images), numbers)), lambda: None)


def resident_bytes(setting: Setting, batch: int) -> Arm:
    """One batch of uint8 that is there, made into what the model takes each time by torch's operations."""
    images, numbers = one_batch(setting, batch)
    return Arm(((setting.normalised(images), numbers) for _ in itertools.count()), lambda: None)


def resident_beside(setting: Setting, batch: int) -> Arm:
    """The same, while as many batches are decoded for nobody."""
    images, numbers = one_batch(setting, batch)
    other = Beside(setting.data, setting.field, setting.side, batch, setting.threads)
    return Arm(other.batches(setting.normalised(images), numbers), other.close)


def plain(setting: Setting, batch: int, register: bool = False) -> Arm:
    """The loader, copied by ``Tensor.to``; ``register``: from slots that are page-locked."""
    loader = setting.loader(batch)
    known: list[Registered] = []

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        held: deque[Any] = deque()
        backend = backend_of(setting.device)
        for found in endless(loader):
            slots = Taker(loader).slots
            if register and backend is not None and slots is not None and not known:
                known.append(Registered(backend, slots))
            images = found[setting.field].to(setting.device, non_blocking=True)
            numbers = found["__index__"].to(setting.device, non_blocking=True)
            if register and setting.device.type == "cuda":
                copied = torch.cuda.Event()
                copied.record()
                held.append((copied, found))
                while len(held) > HELD - 1 or (held and held[0][0].query()):
                    held.popleft()[0].synchronize()
            del found
            yield setting.normalised(images), numbers

    def close() -> None:
        for one in known:
            one.release()
        loader.close()

    return Arm(batches(), close, loader.stats)


def on_device(setting: Setting, batch: int, kernel: bool, decode: str = "cpu", **options: Any) -> Arm:
    """DeviceLoader; ``kernel``: with pictures made by it, else by torch's operations in the step; ``decode``: by whom they are decoded."""
    # In the memory order that torch's operations give.
    ops = {setting.field: Images(channels_last=True)} if kernel else None
    loader = DeviceLoader(
        setting.loader(batch, **options),
        setting.device,
        ops=ops,
        decode=decode,
        decode_threads=setting.threads,
    )

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for found in endless(loader):
            images, numbers = found[setting.field], found["__index__"]
            del found
            yield (images if kernel else setting.normalised(images)), numbers
            del images, numbers

    return Arm(batches(), loader.close, loader.stats)


class Stored(Dataset[Any]):
    """The pictures of the shards for torch's DataLoader: stored bytes, decoded by the fastest library that is there, cropped and resized."""

    def __init__(self, data: Path, field: str, side: int) -> None:
        self.path, self.field, self.side = data, field, side
        self._opened: ShardDataset | None = None
        self.length = len(ShardDataset(data))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self._opened is None:
            torch.set_num_threads(1)
            self._opened = ShardDataset(self.path)
        (stored,) = self._opened.read_many([index], [self.field], decode=False)[self.field]
        return torch.from_numpy(cropped(bytes(stored), self.side, np.random.default_rng())), index


def cropped(stored: bytes, side: int, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """A random resized crop, mirrored at random: uint8 (side, side, 3)."""
    image = decoded(stored)
    height, width = image.shape[:2]
    for _ in range(10):
        area, ratio = height * width * rng.uniform(0.08, 1.0), np.exp(rng.uniform(np.log(3 / 4), np.log(4 / 3)))
        w, h = round(np.sqrt(area * ratio)), round(np.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            top, left = rng.integers(0, height - h + 1), rng.integers(0, width - w + 1)
            image = image[top : top + h, left : left + w]
            break
    found = resized(image, side)
    return np.ascontiguousarray(found[:, ::-1] if rng.random() < 0.5 else found)


def decoded(stored: bytes) -> np.ndarray[Any, Any]:
    """By libjpeg-turbo where simplejpeg is, else by PIL."""
    if stored[:2] == b"\xff\xd8" and "simplejpeg" in libraries():
        import simplejpeg

        return simplejpeg.decode_jpeg(stored, fastdct=False)  # type: ignore[no-any-return]
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(stored)).convert("RGB"))


def resized(image: np.ndarray[Any, Any], side: int) -> np.ndarray[Any, Any]:
    """By OpenCV where it is, else by PIL."""
    if "cv2" in libraries():
        import cv2

        cv2.setNumThreads(0)
        return cv2.resize(np.ascontiguousarray(image), (side, side), interpolation=cv2.INTER_AREA)  # type: ignore[no-any-return]
    from PIL import Image

    return np.asarray(Image.fromarray(image).resize((side, side), Image.Resampling.BILINEAR))


def libraries() -> list[str]:
    """Which of the fast libraries are there."""
    return [name for name in ("simplejpeg", "cv2") if find_spec(name) is not None]


def there(module: str) -> bool:
    """Whether a module of :data:`NEEDS` can be imported."""
    return dali.available() if module == DALI else find_spec(module) is not None


class Forever(Sampler[int]):
    """Permutation after permutation, so that workers never stop at the end of an epoch."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __iter__(self) -> Iterator[int]:
        rng = np.random.default_rng(0)
        while True:
            yield from rng.permutation(self._length).tolist()


def torch_loader(setting: Setting, batch: int, workers: int) -> Arm:
    """torch's DataLoader with pinned memory, copied without waiting."""
    data = Stored(setting.data, setting.field, setting.side)
    loader = DataLoader(
        data,
        batch,
        sampler=Forever(len(data)),
        num_workers=workers,
        pin_memory=setting.device.type == "cuda",
        prefetch_factor=2 if workers else None,
    )
    source = iter(loader)

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for images, numbers in source:
            yield (
                setting.normalised(images.to(setting.device, non_blocking=True)),
                numbers.to(setting.device, non_blocking=True),
            )

    def close() -> None:
        end = getattr(source, "_shutdown_workers", None)
        if end is not None:
            end()

    return Arm(batches(), close)


def quarter(workers: int) -> int:
    """Fewer, since workers also take the trainer's processor from it; one at least."""
    return max(1, workers // 4)


def arms(setting: Setting, batch: int, workers: int) -> dict[str, Callable[[], Arm]]:
    """By name; the first ones are what the others are compared with, then the ladder, then torch's, then what needs a library that is there."""
    from benchmarks.gpu.peers import peers

    ours: dict[str, Callable[[], Arm]] = {"decoded by DALI": lambda: on_device(setting, batch, kernel=True, decode="dali")}
    others = ours | peers(setting, batch, workers)
    return {
        "resident": lambda: resident(setting, batch),
        "resident uint8": lambda: resident_bytes(setting, batch),
        BESIDE: lambda: resident_beside(setting, batch),
        "loader": lambda: plain(setting, batch),
        "registered": lambda: plain(setting, batch, register=True),
        "ahead": lambda: on_device(setting, batch, kernel=False),
        "kernel": lambda: on_device(setting, batch, kernel=True),
        "feedback": lambda: on_device(setting, batch, kernel=True, feedback=True),
        **{
            name: (lambda count=count: torch_loader(setting, batch, count))  # type: ignore[misc]
            for name, count in zip(TORCH, (workers, quarter(workers)), strict=True)
        },
        **{name: make for name, make in others.items() if there(NEEDS[name])},
    }
