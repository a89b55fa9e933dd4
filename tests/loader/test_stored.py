"""What a loader delivers for somebody else to decode: the bytes and rectangles it would have decoded itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import batchkit
import numpy as np
import pytest
import torch

import lfdata.transforms as T
from lfdata import DeviceLoader, Loader
from lfdata.codecs.base import IMAGE_CODECS
from lfdata.codecs.pixels import CropDecoder
from lfdata.errors import OptionError
from lfdata.loader.taker import Taker

FIELDS: dict[str, Any] = {"image": [T.RandomResizedCrop(24), T.RandomHorizontalFlip()], "label": None}
BESIDE = ("image.stored", "image.stored.offsets", "image.boxes", "image.sides", "image.flips")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return batchkit.write_pictures(tmp_path_factory.mktemp("pictures") / "set", 30)


def storing(path: Path, **options: Any) -> Loader:
    loader = Loader(path, 6, FIELDS, **{"seed": 2, "engine": "inline"} | options)
    Taker(loader).store(["image"], "a test")
    return loader


def decoded(loader: Loader, batch: dict[str, torch.Tensor]) -> np.ndarray:
    """By the loader's own decoder, from what was delivered."""
    stored, offsets, boxes, sides, flips = (batch[name].numpy() for name in BESIDE)
    count = len(boxes)
    sizes = {"width": sides[:, 0], "height": sides[:, 1], "channels": np.full(count, 3), "bits": np.full(count, 8)}
    sizes["codec"] = np.full(count, IMAGE_CODECS["jpeg"])
    out = np.zeros((count, 24, 24, 3), np.uint8)
    payloads = [stored[offsets[row] : offsets[row + 1]] for row in range(count)]
    assert not CropDecoder(loader.sources[0].schema["image"].params).crop_resize(payloads, sizes, boxes, flips, out)
    return out


@pytest.mark.parametrize("engine", ["inline", "thread", "process"])
def test_decoding_it_gives_the_loaders_pixels(pictures: Path, engine: str) -> None:
    plain, loader = Loader(pictures, 6, FIELDS, seed=2, engine="inline"), storing(pictures, engine=engine, threads=2)
    for ours, found in zip(plain, loader, strict=True):
        assert set(found) == {*ours, *BESIDE}
        assert np.array_equal(ours["image"].numpy(), decoded(loader, found))
        assert torch.equal(ours["__index__"], found["__index__"])
    loader.close()


def test_the_forecast_is_exact(pictures: Path) -> None:
    loader = storing(pictures)
    forecast = loader.forecast(len(loader)).bytes
    for number, batch in enumerate(loader):
        assert {name: int(sizes[number]) for name, sizes in forecast.items()} == {n: v.nbytes for n, v in batch.items()}


def test_bytes_that_do_not_match_their_check_are_replaced_as_ever(tmp_path: Path) -> None:
    """Also where the replacement is larger than any that was planned: there is room for its pixels."""
    path = batchkit.write_pictures(tmp_path / "set", 12)
    batchkit.spoil(path, (4, 9))
    options: dict[str, Any] = {"bad_samples": "replace", "most_bad_rate": 1}
    plain, loader = Loader(path, 6, FIELDS, seed=2, engine="inline", **options), storing(path, **options)
    for ours, found in zip(plain, loader, strict=True):
        assert torch.equal(ours["__index__"], found["__index__"]) and bool(found["__mask__"].all())
    assert [event.index for event in loader.stats()["events"]] == [event.index for event in plain.stats()["events"]]


def test_where_there_is_no_room_for_bytes_there_are_pixels(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lfdata.loader.stored.StoredImages._most", lambda self, role: 1500)
    plain, loader = Loader(pictures, 6, FIELDS, seed=2, engine="inline"), storing(pictures)
    seen = set()
    for ours, found in zip(plain, loader, strict=True):
        there = np.diff(found["image.stored.offsets"].numpy()) > 0
        seen.update(there.tolist())
        assert torch.equal(ours["image"][torch.from_numpy(~there)], found["image"][torch.from_numpy(~there)])
    assert seen == {True, False}


def test_a_batch_again_is_the_loaders_own(pictures: Path) -> None:
    plain, loader = Loader(pictures, 6, FIELDS, seed=2, engine="inline", accumulate=2), storing(pictures, accumulate=2)
    taker = Taker(loader)
    for ours, _ in zip(plain, taker.begin(), strict=True):
        again = taker.again(taker.spot)
        assert list(again) == list(ours) and all(torch.equal(value, again[name]) for name, value in ours.items())


def test_who_comes_after_gets_pixels(pictures: Path) -> None:
    """The one who asked for stored bytes is gone; as long as he is there, nobody else changes what comes."""
    plain = Loader(pictures, 6, FIELDS, seed=2, engine="inline")
    loader = Loader(pictures, 6, FIELDS, seed=2, engine="inline")
    first = Taker(loader)
    first.store(["image"], "a test")
    first.join()
    with pytest.raises(OptionError, match="another DeviceLoader over this Loader"):
        DeviceLoader(loader, "cpu")
    assert "image.stored" in next(iter(loader))
    first.leave()
    loader.set_epoch(0)
    assert batchkit.digests(DeviceLoader(loader, "cpu")) == batchkit.digests(plain)  # type: ignore[arg-type]
    assert loader.state_dict() == plain.state_dict()


def test_an_epoch_under_way_is_not_ended(pictures: Path) -> None:
    loader = Loader(pictures, 6, FIELDS, seed=2, engine="inline")
    taken = 0
    for _ in loader:
        taken += 1
        with pytest.raises(OptionError, match="in the middle of an epoch"):
            Taker(loader).store(["image"], "a test")
    assert taken == 5
