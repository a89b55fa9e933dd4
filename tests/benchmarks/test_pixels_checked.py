"""Pictures that are not as good as asked for, or not those of their keys, are refused."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFilter

from benchmarks.harness import verify
from benchmarks.harness.pictures import Source, distance
from benchmarks.harness.verify import WrongWorkError
from benchmarks.harness.work import WORKLOADS, centre, draw_crop, image_files, resized, signatures

W1, W2, W10 = WORKLOADS["W1"], WORKLOADS["W2"], WORKLOADS["W10"]
COUNT = 12


def photo(seed: int, width: int = 512, height: int = 384) -> Any:
    """A picture with detail at every scale, as photos have it: noise summed over octaves, and a few sharp edges."""
    rng = np.random.default_rng(seed)
    total = np.zeros((height, width, 3))
    for octave in range(8):
        cells = 3 << octave
        small = Image.fromarray(rng.integers(0, 256, (cells, cells, 3), dtype=np.uint8))
        total += (np.asarray(small.resize((width, height), Image.Resampling.BICUBIC), float) - 128) / 1.4**octave
    for _ in range(6):
        x, y = rng.integers(0, width - 40), rng.integers(0, height - 40)
        total[y : y + rng.integers(20, 120), x : x + rng.integers(20, 120)] += rng.normal(0, 40, 3)
    return Image.fromarray((128 + 0.45 * total).clip(0, 255).astype(np.uint8))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    for number in range(COUNT):
        photo(number).save(folder / f"{number:03d}.jpg", quality=93)
    return folder


def _encoded(image: Any, kind: str = "JPEG", **options: Any) -> Any:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return Image.open(out).convert("RGB")


def _middle(image: Any, resample: Any = Image.Resampling.BILINEAR, size: tuple[int, int] | None = None) -> np.ndarray[Any, Any]:
    image = image.resize(size or resized(*image.size), resample)
    x, y = centre(*image.size)
    return np.asarray(image.crop((x, y, x + 224, y + 224)))


def _half(path: Path) -> np.ndarray[Any, Any]:
    with Image.open(path) as image:
        size = resized(*image.size)
        image.draft("RGB", (image.width // 2, image.height // 2))
        return _middle(image.convert("RGB"), size=size)


def _by_area(path: Path) -> np.ndarray[Any, Any]:
    cv2 = pytest.importorskip("cv2")
    image = np.asarray(Image.open(path).convert("RGB"))
    size = resized(image.shape[1], image.shape[0])
    x, y = centre(*size)
    made: np.ndarray[Any, Any] = cv2.resize(image, size, interpolation=cv2.INTER_AREA)[y : y + 224, x : x + 224]
    return made


def _opened(path: Path) -> Any:
    return Image.open(path).convert("RGB")


RIGHT: dict[str, tuple[Callable[[Path], Any], str]] = {
    "the reference": (lambda path: verify.reference(path), ""),
    "an area filter": (_by_area, ""),
    "encoded anew, and said so": (lambda path: _middle(_encoded(_opened(path), quality=90, subsampling="4:2:0")), "JPEG"),
}
WRONG: dict[str, tuple[Callable[[Path], Any], str]] = {
    "half-size decoding": (_half, ""),
    "brighter": (lambda path: verify.reference(path).astype(int).__add__(4).clip(0, 255).astype(np.uint8), ""),
    "encoded anew at 50": (lambda path: _middle(_encoded(_opened(path), quality=50)), ""),
    "encoded anew at 50, and said so": (lambda path: _middle(_encoded(_opened(path), quality=50)), "JPEG"),
    "nearest neighbour": (lambda path: _middle(_opened(path), Image.Resampling.NEAREST), ""),
    "blurred": (lambda path: np.asarray(Image.fromarray(verify.reference(path)).filter(ImageFilter.BoxBlur(1))), ""),
}


def _keep(path: Path, images: Any, keys: Any = None) -> Path:
    images = np.stack(images)
    keys = np.arange(len(images)) if keys is None else keys
    np.savez(path, keys=keys, image=images, signature_keys=keys, signatures=signatures(images))
    return path


@pytest.mark.parametrize("name", RIGHT)
def test_right_pictures_pass(name: str, source: Path, tmp_path: Path) -> None:
    make, reencodes = RIGHT[name]
    kept = _keep(tmp_path / "kept.npz", [make(path) for path in image_files(source)])
    assert verify.check_pixels(W2, source, kept, reencodes)["compared"] == COUNT
    assert verify.check_signatures(source, kept, tmp_path / "known.npy", reencodes) == COUNT


@pytest.mark.parametrize("name", WRONG)
def test_cheaper_pictures_are_refused(name: str, source: Path, tmp_path: Path) -> None:
    make, reencodes = WRONG[name]
    kept = _keep(tmp_path / "kept.npz", [make(path) for path in image_files(source)])
    with pytest.raises(WrongWorkError, match="mean absolute difference|median PSNR"):
        verify.check_pixels(W2, source, kept, reencodes)


def test_two_keys_that_are_swapped_are_found_among_all(source: Path, tmp_path: Path) -> None:
    right = [verify.reference(path) for path in image_files(source)]
    keys = np.arange(COUNT)
    keys[[4, 9]] = keys[[9, 4]]
    known = tmp_path / "known.npy"
    assert verify.check_signatures(source, _keep(tmp_path / "kept.npz", right), known) == COUNT and known.exists()
    with pytest.raises(WrongWorkError, match=r"2 of 12 pictures are not those of their keys; first key 9 \(009.jpg\)"):
        verify.check_signatures(source, _keep(tmp_path / "kept.npz", right, keys), known)


def _crop(image: Any, rng: Any, resample: Any = Image.Resampling.BILINEAR) -> Any:
    x, y, w, h = draw_crop(rng, *image.size)
    made = np.asarray(image.crop((x, y, x + w, y + h)).resize((224, 224), resample))
    return made[:, ::-1] if rng.random() < 0.5 else made


@pytest.fixture(scope="module")
def crops(source: Path) -> list[Any]:
    """One of every picture, by either of two filters."""
    rng = random.Random(3)
    filters = (Image.Resampling.BILINEAR, Image.Resampling.BOX)
    return [_crop(_opened(path), rng, filters[number % 2]) for number, path in enumerate(image_files(source))]


def test_crops_of_the_source_itself_are_found_in_it(source: Path, crops: list[Any], tmp_path: Path) -> None:
    found = verify.check_real(W1, source, _keep(tmp_path / "kept.npz", crops))
    assert found["real_crops"] == COUNT and found["far"] == 0 and found["median_distance"] < 3


OTHERS: dict[str, Callable[[list[Any]], list[Any]]] = {
    "black for half of the keys": lambda crops: [crop if row % 2 else np.zeros_like(crop) for row, crop in enumerate(crops)],
    "one colour": lambda crops: [np.full_like(crop, crop.mean((0, 1)).astype(np.uint8)) for crop in crops],
    "another key's": lambda crops: crops[1:] + crops[:1],
    "colours in another order": lambda crops: [crop[..., ::-1] for crop in crops],
    "turned": lambda crops: [np.rot90(crop) for crop in crops],
}


@pytest.mark.parametrize("name", OTHERS)
def test_pictures_that_are_no_crops_of_the_source_are_refused(
    name: str, source: Path, crops: list[Any], tmp_path: Path
) -> None:
    with pytest.raises(WrongWorkError, match=r"pictures are no crops of their source; first key"):
        verify.check_real(W1, source, _keep(tmp_path / "kept.npz", OTHERS[name](crops)))


def test_native_crops_of_the_source_itself_are_found_in_it(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    photo(1, 1500, 1100).save(tmp_path / "0.jpg", quality=93)
    whole = np.asarray(_opened(tmp_path / "0.jpg"))
    right = []
    for _ in range(3):
        x, y = rng.integers(0, 1500 - 224), rng.integers(0, 1100 - 224)
        right.append(whole[y : y + 224, x : x + 224])
    keys = np.zeros(3, np.int64)
    assert verify.check_real(W10, tmp_path, _keep(tmp_path / "kept.npz", right, keys))["far"] == 0
    for wrong in ([image // 3 for image in right], [image[:, ::-1] for image in right]):
        with pytest.raises(WrongWorkError, match="no crops of their source"):
            verify.check_real(W10, tmp_path, _keep(tmp_path / "kept.npz", wrong, keys))


def test_a_dark_source_does_not_make_its_own_crops_far(tmp_path: Path) -> None:
    Image.fromarray(np.asarray(photo(5)) // 12).save(tmp_path / "0.jpg")
    rng = random.Random(0)
    assert distance(Source(tmp_path / "0.jpg"), _crop(_opened(tmp_path / "0.jpg"), rng)) < 3
