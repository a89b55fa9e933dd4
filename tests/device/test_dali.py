"""Pictures that DALI decodes are the loader's own but for rounding: the same samples, rectangles, names, shapes; whatever is odd about them.

By DALI's operators on the processor. What differs on a GPU is in test_gpu_dali.py.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dalikit
import numpy as np
import pytest
import torch
from dalikit import KINDS, kept, same
from latedevice import LateBackend, unheld
from pixelcheck import as_float64
from shardkit import Part, scalar, write_dataset

import lfdata.transforms as T
from lfdata import DeviceLoader, Loader
from lfdata.device import Images
from lfdata.device.dali import Pictures, regions
from lfdata.errors import BadSamplesError, OptionError, SampleError
from lfdata.format.meta import FieldMeta

pytest.importorskip("nvidia.dali", reason="DALI is not installed: pip install 'lfdata[dali]', or make test-dali")

CROPS = [T.RandomResizedCrop(48), T.RandomHorizontalFlip()]
FIELDS: dict[str, Any] = {"image": CROPS, "label": None}
Make = Callable[..., LateBackend]


def pair(path: Path, batch: int = 4, fields: Any = FIELDS, **options: Any) -> tuple[Loader, DeviceLoader]:
    """The loader by itself, and with DALI. PIL's pixels are the definition; the native decoder's differ from it where it decodes smaller."""
    options = {"engine": "inline", "threads": 2, "seed": 4, "native": False} | options
    return Loader(path, batch, fields, **options), DeviceLoader(Loader(path, batch, fields, **options), "cpu", decode="dali")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 pictures, every kind of file in turn."""
    return dalikit.write(tmp_path_factory.mktemp("files") / "set", 40, list(KINDS))


@pytest.fixture(scope="module")
def jpegs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dalikit.write(tmp_path_factory.mktemp("jpegs") / "set", 22, ["4:2:0", "4:4:4"])


@pytest.mark.parametrize("engine", ["inline", "thread", "process"])
def test_batches_are_the_loaders(files: Path, engine: str) -> None:
    plain, by_dali = pair(files, engine=engine)
    for ours, theirs in zip(kept(plain, 2), kept(by_dali, 2), strict=True):
        same(ours, theirs)
    found = by_dali.stats()["decoding"]
    assert found["pictures"] == 2 * 4 * sum(taken for taken, _ in KINDS.values()) and not found["failures"]
    plain.close()
    by_dali.close()


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_file(tmp_path: Path, kind: str) -> None:
    plain, by_dali = pair(dalikit.write(tmp_path / "set", 8, [kind]))
    for ours, theirs in zip(kept(plain), kept(by_dali), strict=True):
        same(ours, theirs)
    assert by_dali.stats()["decoding"]["pictures"] == (8 if KINDS[kind][0] else 0)


@pytest.mark.parametrize(
    "ops",
    [
        [T.Resize(40), T.CenterCrop(32)],
        [T.Resize((33, 47))],
        [T.RandomCrop(24), T.RandomHorizontalFlip(1.0)],
        [T.RandomResizedCrop((90, 120), scale=(0.01, 0.05))],
        [T.RandomHorizontalFlip(), T.Crop(3, 5, 20, 30)],
    ],
)
def test_every_rectangle(jpegs: Path, ops: list[Any]) -> None:
    """Also fractions of pixels, and pictures made larger."""
    plain, by_dali = pair(jpegs, fields={"image": ops})
    for ours, theirs in zip(kept(plain), kept(by_dali), strict=True):
        same(ours, theirs)
    assert by_dali.stats()["decoding"]["pictures"] > 0


def test_the_native_decoder_draws_the_same(jpegs: Path) -> None:
    """It may decode at half the size, so its pixels are further away; a crop elsewhere would be far off."""
    plain, by_dali = pair(jpegs, native=None)
    for ours, theirs in zip(kept(plain), kept(by_dali), strict=True):
        error = (ours["image"].double() - theirs["image"].double()).square().flatten(1).mean(1)
        psnr = 10 * torch.log10(255**2 / error.clamp(min=1e-9))
        assert psnr.min() > 28, psnr


def test_resume_in_the_middle(files: Path) -> None:
    """From a state of either, with either."""
    plain, by_dali = pair(files)
    whole = kept(plain)
    first = kept(by_dali, most=3)
    state = json.loads(json.dumps(by_dali.state_dict()))
    other, other_dali = pair(files)
    other_dali.load_state_dict(state)
    with pytest.warns(UserWarning, match="decoders have changed"):
        other.load_state_dict(state)
    for ours, theirs in zip(whole, first + kept(other_dali), strict=True):
        same(ours, theirs)
    for ours, theirs in zip(whole[3:], kept(other), strict=True):
        same(ours, theirs)


@pytest.mark.parametrize("rank", range(3))
def test_ranks(files: Path, rank: int) -> None:
    plain, by_dali = pair(files, 6, rank=rank, world_size=3, accumulate=2)
    for ours, theirs in zip(kept(plain), kept(by_dali), strict=True):
        same(ours, theirs)


def test_one_row_and_a_padded_last_batch(jpegs: Path) -> None:
    for batch in (1, 5):
        plain, by_dali = pair(jpegs, batch, tail="pad", bad_samples="mask")
        found = kept(by_dali)
        for ours, theirs in zip(kept(plain), found, strict=True):
            same(ours, theirs)
        assert sum(int(one["__mask__"].sum()) for one in found) == 22


@pytest.mark.parametrize("policy", ["stop", "replace", "mask"])
def test_bad_samples_by_the_same_policy(tmp_path: Path, policy: str) -> None:
    """Whole rectangles, so that our decoder meets the end of each. DALI must not show what is left of one."""
    path = dalikit.write(tmp_path / "set", 24, ["4:2:0", "webp"], dalikit.cut, wrong=(2, 14))
    plain, by_dali = pair(path, fields={"image": [T.Resize((40, 40))], "label": None}, bad_samples=policy, most_bad_rate=1)
    if policy == "stop":
        ours, theirs = list[Any](), list[Any]()
        for loader, found in ((plain, ours), (by_dali, theirs)):
            with pytest.raises(SampleError) as error:
                for batch in loader:  # type: ignore[attr-defined]
                    found.append({name: value.clone() for name, value in batch.items()})
            found.append(str(error.value))
        assert ours.pop() == theirs.pop()
    else:
        ours, theirs = kept(plain), kept(by_dali)
        assert [event.index for event in by_dali.stats()["events"]] == [event.index for event in plain.stats()["events"]]
        assert by_dali.stats()["bad"] == 2
    for one, other in zip(ours, theirs, strict=True):
        same(one, other)


@pytest.mark.parametrize("policy", ["stop", "replace", "mask"])
@pytest.mark.parametrize("late_copies", [False, True])
def test_what_dali_refuses_is_made_again(tmp_path: Path, policy: str, late_copies: bool, late: Make) -> None:
    """A picture that passes for a good one: the batch is the loader's own, and so are those that DALI had at the time."""
    path = dalikit.write(tmp_path / "set", 24, ["4:2:0"], dalikit.broken, wrong=(5,))
    options: dict[str, Any] = {"engine": "inline", "seed": 4, "native": False, "bad_samples": policy, "most_bad_rate": 1}
    plain = Loader(path, 4, FIELDS, **options)
    by_dali = DeviceLoader(
        Loader(path, 4, FIELDS, **options), "cpu", decode="dali", _backend=late(0.002) if late_copies else None
    )
    if policy == "stop":
        messages = []
        for loader in (plain, by_dali):
            with pytest.raises(SampleError) as error:
                kept(loader)
            messages.append(str(error.value))
        assert messages[0] == messages[1]
    else:
        ours = kept(plain)
        found: list[dict[str, torch.Tensor]] = []
        for batch in by_dali:
            if by_dali._transfer is not None:
                by_dali._transfer._backend.finish()
            found.append({name: value.clone() for name, value in batch.items()})
            assert torch.equal(by_dali.rows["__mask__"], batch["__mask__"])
        for one, other in zip(ours, found, strict=True):
            same(one, other)
        assert by_dali.stats()["bad"] == 1
    assert by_dali.stats()["decoding"]["failures"] == 1 and by_dali.stats()["decoding"]["remade"] >= 1
    by_dali.close()


def test_limits_of_bad_samples_count_those_too(tmp_path: Path) -> None:
    path = dalikit.write(tmp_path / "set", 12, ["4:2:0"], dalikit.broken, wrong=(5,))
    _, by_dali = pair(path, bad_samples="mask", most_bad=0)
    with pytest.raises(BadSamplesError):
        kept(by_dali)


@pytest.mark.parametrize("with_ops", [False, True])
@pytest.mark.parametrize(("copies", "consumer"), [(0.0, 0.0), (0.004, 0.0), (0.0, 0.01), (0.004, 0.01)])
def test_nothing_is_reused_too_early(files: Path, with_ops: bool, copies: float, consumer: float, late: Make) -> None:
    """Over a device that is late: DALI's memory, the ring's and the slots are looked at when the host has long gone on."""
    backend, ops = late(copies, consumer), {"image": Images(dtype="float32")} if with_ops else None
    options: dict[str, Any] = {"engine": "thread", "threads": 2, "seed": 4}
    on_host = DeviceLoader(Loader(files, 4, FIELDS, **options), "cpu", decode="dali", ops=ops)
    loader = DeviceLoader(Loader(files, 4, FIELDS, **options), decode="dali", ops=ops, _backend=backend)
    found: list[dict[str, torch.Tensor]] = []
    for _ in range(2):
        for batch in loader:
            readers = {name: unheld(value) for name, value in batch.items()}
            backend.consumer_stream.late(lambda readers=readers: found.append({name: read() for name, read in readers.items()}))  # type: ignore[misc]
            del batch
    backend.consumer_stream.finish()
    for ours, theirs in zip(kept(on_host, 2), found, strict=True):
        assert list(ours) == list(theirs)
        assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    stats = loader.stats()
    assert stats["device"]["extra"] == 0 and stats["device"]["grown"] == 0 and stats["copied"] == 0
    loader.close()
    on_host.close()


@pytest.mark.parametrize("late_copies", [False, True])
def test_the_devices_own_mixing(files: Path, late_copies: bool, late: Make) -> None:
    """Crops, mirroring, MixUp and CutMix of what DALI decoded: with the draws that there are without it."""
    op = Images((0.5,) * 3, (0.25,) * 3, "float32", crop=(33, 40), flip=0.5, mixup=0.4, cutmix=1.0)
    fields: dict[str, Any] = {"image": [T.RandomResizedCrop(48)], "label": None}
    options: dict[str, Any] = {"engine": "inline", "seed": 4, "tail": "pad", "native": False}
    backend = late(0.002) if late_copies else None
    pixels = kept(DeviceLoader(Loader(files, 6, fields, **options), "cpu", decode="dali"))
    drawn = kept(DeviceLoader(Loader(files, 6, fields, **options), "cpu", ops={"image": op}))
    loader = DeviceLoader(Loader(files, 6, fields, **options), "cpu", ops={"image": op}, decode="dali", _backend=backend)
    found = []
    for batch in loader:
        if backend is not None:
            backend.finish()
        found.append({name: value.clone() for name, value in batch.items()})
    for one, ours, theirs in zip(pixels, drawn, found, strict=True):
        assert list(ours) == list(theirs) and "image.box" in theirs
        assert all(torch.equal(value, theirs[name]) for name, value in ours.items() if name != "image")
        exact = as_float64(op, theirs | {"image": one["image"]})
        assert np.abs(theirs["image"].double().numpy() - exact).max() < 1e-5
        assert not set(theirs["image.partner"][theirs["__mask__"]].tolist()) - set(
            torch.nonzero(theirs["__mask__"]).flatten().tolist()
        )
    assert loader.stats()["decoding"]["pictures"] > 0 and not loader.stats()["decoding"]["failures"]
    loader.close()


@pytest.mark.parametrize("policy", ["replace", "mask"])
def test_the_devices_own_mixing_of_what_dali_refuses(tmp_path: Path, policy: str, late: Make) -> None:
    """A row that turns out bad is nobody's partner; one that takes its place has draws of its own."""
    path = dalikit.write(tmp_path / "set", 24, ["4:2:0"], dalikit.broken, wrong=(5,))
    op = Images(dtype="float32", flip=0.5, mixup=0.4, cutmix=1.0)
    options: dict[str, Any] = {"engine": "inline", "seed": 4, "native": False, "bad_samples": policy, "most_bad_rate": 1}
    ours = kept(DeviceLoader(Loader(path, 4, FIELDS, **options), "cpu", ops={"image": op}))
    backend = late(0.002)
    loader = DeviceLoader(Loader(path, 4, FIELDS, **options), ops={"image": op}, decode="dali", _backend=backend)
    for one, theirs in zip(ours, loader, strict=True):
        backend.finish()
        assert all(torch.equal(value, theirs[name]) for name, value in one.items() if name != "image")
    assert loader.stats()["decoding"]["remade"] >= 1
    loader.close()


def test_left_in_mid_epoch_and_gone_on(files: Path, late: Make) -> None:
    """What DALI had under way is nobody's: the next batches are the next ones."""
    plain, _ = pair(files)
    whole = kept(plain)
    backend = late(0.001)
    loader = DeviceLoader(Loader(files, 4, FIELDS, engine="thread", seed=4, native=False), decode="dali", _backend=backend)

    def taken(most: int) -> list[dict[str, torch.Tensor]]:
        found = []
        for batch in loader:
            backend.finish()
            found.append({name: value.clone() for name, value in batch.items()})
            del batch
            if len(found) == most:
                break
        return found

    taken(2)
    state = loader.state_dict()
    for _ in range(3):
        loader.load_state_dict(state)
        for ours, theirs in zip(whole[2:5], taken(3), strict=True):
            same(ours, theirs)
    loader.close()
    loader.set_epoch(0)
    for ours, theirs in zip(whole, taken(99), strict=True):
        same(ours, theirs)
    loader.close()


def test_batches_that_are_kept_never_change(files: Path) -> None:
    _, by_dali = pair(files)
    held = list(by_dali)
    before = [batch["image"].clone() for batch in held]
    by_dali.close()
    gc.collect()
    assert all(torch.equal(one, batch["image"]) for one, batch in zip(before, held, strict=True))


def test_rows_without_a_picture(tmp_path: Path) -> None:
    rows: list[Any] = []
    for number in range(12):
        values = {"label": scalar(number, "int64")}
        if number % 3:
            values["image"] = dalikit.KEEP.encode(dalikit.file(dalikit.scene(number, 70, 60)))
        rows.append((b"%d" % number, values))
    write_dataset(tmp_path / "set", dalikit.FIELDS, [Part(rows)], name="some")
    plain, by_dali = pair(tmp_path / "set")
    for ours, theirs in zip(kept(plain), kept(by_dali), strict=True):
        assert "image.present" in ours
        same(ours, theirs)
    assert by_dali.stats()["decoding"]["pictures"] == 8


def test_two_fields_from_two_sources(tmp_path: Path) -> None:
    """Mixed, each with a pipeline of its own; a field of grey pictures has one channel."""
    fields = (*dalikit.FIELDS, FieldMeta("grey", "image", dalikit.KEEP.params))
    paths = []
    for seed in (0, 100):
        rows: list[Any] = []
        for number in range(9):
            pixels = dalikit.scene(seed + number, 70, 60 + number)
            image, grey = (dalikit.KEEP.encode(dalikit.file(pixels, mode=mode)) for mode in ("RGB", "L"))
            rows.append((b"%d" % number, {"image": image, "grey": grey, "label": scalar(number, "int64")}))
        write_dataset(tmp_path / str(seed), fields, [Part(rows)], name=f"two-{seed}")
        paths.append(tmp_path / str(seed))
    options: dict[str, Any] = {"mixture": {}, "engine": "inline", "native": False, "seed": 1}
    wanted = {"image": CROPS, "grey": [T.RandomCrop(32)], "label": None}
    plain = Loader(paths, 6, wanted, **options)
    by_dali = DeviceLoader(Loader(paths, 6, wanted, **options), "cpu", decode="dali")
    for ours, theirs in zip(kept(plain), kept(by_dali), strict=True):
        assert ours["grey"].shape[1:] == (32, 32, 1) and "__source__" in ours
        dalikit.apart(ours.pop("grey"), theirs.pop("grey"))
        same(ours, theirs)
    assert by_dali.stats()["decoding"]["pictures"] == 2 * 6 * len(plain)


def test_what_else_is_asked_of_a_picture_is_refused(jpegs: Path) -> None:
    for ops, options in (
        ([*CROPS, T.ColorJitter(0.4)], {}),
        ([], {}),
        (CROPS, {"batch_transforms": [T.MixUp()]}),
    ):
        loader = Loader(jpegs, 4, {"image": ops, "label": None}, engine="inline", **options)
        before = kept(loader)
        with pytest.raises(OptionError, match="decode='cpu'"):
            DeviceLoader(loader, "cpu", decode="dali")
        after = DeviceLoader(loader, "cpu", decode="auto")
        loader.set_epoch(0)
        assert all(torch.equal(a["image"], b["image"]) for a, b in zip(before, kept(after), strict=True))
    with pytest.raises(OptionError, match="no field of pictures"):
        DeviceLoader(Loader(jpegs, 4, ["label"]), "cpu", decode="dali")


def test_regions_hold_what_the_filter_sees() -> None:
    boxes = np.array([[10.5, 4, 30.25, 20], [0, 0, 64, 48]])
    found = regions(Pictures([], boxes, np.array([[64, 48], [64, 48]]), np.array([True, False])), (8, 8))
    start, shape, first, last = (one.tolist() for one in found)
    assert start == [[1, 6], [0, 0]] and shape == [[22, 29], [48, 64]]
    assert first == [[3, 24.25], [0, 0]] and last == [[19, 4.5], [48, 64]]
