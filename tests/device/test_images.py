"""Pictures as a model takes them, against the same in float64."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import batchkit
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from latedevice import unheld
from pixelcheck import CASES, TOLERANCES, as_float64, checked, compared, made, scene, tolerance, unknown

import lfdata.transforms as T
from lfdata import DeviceLoader, Loader
from lfdata.device import Images
from lfdata.device.rule import gathered
from lfdata.errors import OptionError


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_torch_gives_what_float64_does(dtype: str, channels_last: bool, case: str) -> None:
    checked(case, dtype, channels_last, torch.device("cpu"))


@settings(max_examples=150, deadline=None)
@given(
    case=st.sampled_from(sorted(CASES)),
    dtype=st.sampled_from(sorted(TOLERANCES)),
    channels_last=st.booleans(),
    channels=st.sampled_from([1, 3]),
    rows=st.integers(1, 19),
    size=st.tuples(st.integers(1, 21), st.integers(1, 21)),
    room=st.tuples(st.integers(0, 5), st.integers(0, 5)),
    seed=st.integers(0, 1 << 20),
)
def test_any_size_is_what_float64_gives(
    case: str,
    dtype: str,
    channels_last: bool,
    channels: int,
    rows: int,
    size: tuple[int, int],
    room: tuple[int, int],
    seed: int,
) -> None:
    op = made(case, dtype, channels_last, channels, size)
    shape = (rows, size[0] + room[0], size[1] + room[1], channels)
    compared(op, scene(shape, size if op.crop is not None else None, seed), torch.device("cpu"))


def test_crops_that_nobody_waits_for_are_the_same() -> None:
    """As torch takes them on a GPU; one that is not within its picture is told, and reads nothing beside it."""
    batch = scene((6, 9, 8, 3), (5, 8))
    offset = batch["offset"]
    which = torch.tensor([3, 0, 0, 5])
    found, there = gathered(batch["image"], which, offset[which], (5, 8))
    assert there.all()
    for one, row in zip(found, which.tolist(), strict=True):
        top, left = offset[row].tolist()
        assert torch.equal(one, batch["image"][row, top : top + 5, left : left + 8])
    wrong = torch.tensor([[-1, 0], [5, 0], [0, 1], [0, -7], [2**31 - 1, 0], [4, 0]], dtype=torch.int32)
    assert gathered(batch["image"], slice(None), wrong, (5, 8))[1].tolist() == [False] * 5 + [True]


@pytest.mark.parametrize("offset", [(-1, 0), (3, 0), (0, -1), (0, 2), (-(2**31), 0)])
def test_a_crop_beyond_the_picture_is_an_error(offset: tuple[int, int]) -> None:
    batch = scene((4, 6, 5, 3), (4, 4))
    batch["offset"][2] = torch.tensor(offset)
    op = Images(dtype="float32", crop=4, offset="offset")
    out = op.out(torch.empty(op.bytes(batch["image"].nbytes, (6, 5, 3)), dtype=torch.uint8), batch["image"].shape)
    with pytest.raises(OptionError, match=r"row 2: a crop of 4 x 4 at .*top is 0 to 2, left 0 to 1"):
        op.run("image", batch["image"], out, batch)


def test_what_the_check_of_kernels_looks_for_is_seen() -> None:
    """A kernel that reads beside a picture instead of making NaN would not pass."""

    def careless(op: Images, batch: dict[str, Any], out: torch.Tensor) -> None:
        out.zero_()

    with pytest.raises(AssertionError):
        unknown(torch.device("cpu"), careless)


def test_a_value_that_is_off_by_one_level_is_seen() -> None:
    """The tolerances would not let a wrong level pass."""
    images = scene((1, 4, 4, 3))["image"]
    worst = {dtype: tolerance(dtype, 1.0) for dtype in ("float32", "float16", "bfloat16")}
    changed = images.clone()
    changed[0, 0, 0, 0] = int(changed[0, 0, 0, 0]) ^ 1
    op = Images()
    difference = np.abs(as_float64(op, {"image": images}) - as_float64(op, {"image": changed})).max()
    assert difference > max(worst.values())


@pytest.mark.parametrize("ops", [{}, {"image": Images(dtype="float32", flip="label")}])
def test_a_loader_on_the_cpu_gives_them(pictures: Path, ops: dict[str, Any]) -> None:
    fields: dict[str, Any] = {"image": [T.RandomResizedCrop(16)], "label": None}
    plain = Loader(pictures, 8, fields)
    loader = DeviceLoader(Loader(pictures, 8, fields), "cpu", ops=ops)
    for ours, theirs in zip(plain, loader, strict=True):
        assert torch.equal(theirs["label"], ours["label"])
        if not ops:
            assert theirs["image"].dtype == torch.uint8 and torch.equal(theirs["image"], ours["image"])
            continue
        assert theirs["image"].shape == (8, 3, 16, 16) and theirs["image"].dtype == torch.float32
        expected = as_float64(ops["image"], dict(ours))
        assert np.abs(theirs["image"].double().numpy() - expected).max() < 1e-5
    plain.close()
    loader.close()


def test_results_lie_in_the_ring_and_uint8_travels(pictures: Path, late: Any) -> None:
    backend, fields = late(0.002, 0.004), {"image": [T.RandomResizedCrop(16)], "label": None}
    op = Images(dtype="bfloat16", channels_last=True)
    expected = [as_float64(op, dict(batch)) for batch in Loader(pictures, 8, fields)]  # type: ignore[arg-type]
    loader = DeviceLoader(Loader(pictures, 8, fields), ops={"image": op}, _backend=backend)  # type: ignore[arg-type]
    found: list[np.ndarray] = []
    for epoch in range(3):
        for batch in loader:
            assert batch["image"].is_contiguous(memory_format=torch.channels_last)
            read = unheld(batch["image"])
            backend.consumer_stream.late(lambda read=read: found.append(read().double().numpy()))  # type: ignore[misc]
            del batch
        if epoch == 0:
            backend.consumer_stream.finish()
            assert len(found) == len(expected)
            allocations = backend.allocations
            for one, other in zip(found, expected, strict=True):
                assert np.abs(one - other).max() <= tolerance("bfloat16", 3.0)
    stats = loader.stats()["device"]
    assert stats["grown"] == stats["extra"] == 0 and backend.allocations == allocations
    per_batch = stats["copied_bytes"] / stats["batches"]
    assert 8 * 16 * 16 * 3 < per_batch < 8 * 16 * 16 * 3 + 500, "not uint8"
    loader.close()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"dtype": "float64"}, "there are float32"),
        ({"std": (1.0, 0.0, 1.0)}, "std above 0"),
        ({"mean": (0.5,)}, "one number a channel"),
        ({"weight": "lam"}, "partner="),
        ({"flip": 1.5}, "Images: flip is a number from 0 up to 1, not 1.5"),
        ({"flip": True}, "Images: flip"),
        ({"mixup": 0}, "Images: mixup is a number from 0.001 up to 10"),
        ({"cutmix": float("nan")}, "Images: cutmix"),
        ({"cutmix": "box"}, "Images: cutmix"),
        ({"mix_prob": -1}, "Images: mix_prob"),
        ({"switch_prob": 2}, "Images: switch_prob"),
        ({"crop": 0}, "Images: crop is 0"),
        ({"crop": (3, 4, 5)}, "Images: crop"),
        ({"crop": "field"}, "Images: crop"),
        ({"offset": "field"}, "give its size with crop="),
        ({"crop": 3, "offset": 4}, "Images: offset is the name of a field, not 4"),
        ({"partner": 1}, "Images: partner is the name of a field"),
        ({"mixup": 0.2, "partner": "field"}, "leave one out"),
        ({"weight": "field", "mixup": 0.2}, "partner="),
        ({"mean": None}, "Images: mean is a number for each channel.*not None"),
        ({"mean": "123"}, "Images: mean is a number for each channel"),
        ({"std": ("a", "b", "c")}, "Images: std is a number for each channel"),
        ({"std": True}, "Images: std"),
        ({"mean": 0.5}, "one number a channel"),
        ({"channels_last": "no"}, "Images: channels_last is True or False, not 'no'"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], match: str) -> None:
    with pytest.raises(OptionError, match=match):
        Images(**options)


@pytest.mark.parametrize(
    ("ops", "match"),
    [
        ({"image": Images(mean=(0.0,), std=(1.0,))}, "1 channels"),
        ({"label": Images()}, "field 'label': Images takes uint8"),
        ({"picture": Images()}, "no field 'picture'"),
        ({"image": "x"}, r"ops\['image'\] is 'x'; ops is a mapping from names of fields"),
        ({"image": Images}, r"ops\['image'\] is <class"),
        ([Images()], "ops is a mapping from names of fields to what is made of them"),
        (Images(), "ops is a mapping"),
        ({"image": Images(partner="label", weight="label")}, "weight is torch.float32"),
    ],
)
def test_fields_that_do_not_go_with_it(pictures: Path, ops: dict[str, Any], match: str) -> None:
    with pytest.raises(OptionError, match=match):
        for _ in DeviceLoader(Loader(pictures, 8, {"image": [T.CenterCrop(16)], "label": None}), "cpu", ops=ops):
            pass


@pytest.mark.parametrize("what", ["flip", "offset", "partner", "weight", "box"])
def test_a_field_that_is_not_there_is_told_at_once(pictures: Path, what: str) -> None:
    """And the loader is as it was."""
    inner = Loader(pictures, 8, {"image": [T.CenterCrop(16)], "label": None})
    needed: dict[str, Any] = {"weight": {"partner": "label"}, "box": {"partner": "label"}, "offset": {"crop": 3, "flip": 0.5}}
    options = needed.get(what, {"crop": 3})
    with pytest.raises(OptionError, match=rf"'image': {what}='nothing' is the name of a field.*there are .*image, label"):
        DeviceLoader(inner, "cpu", ops={"image": Images(**options, **{what: "nothing"})})
    assert list(next(iter(inner))) == ["__index__", "__mask__", "image", "label"]


def test_what_is_drawn_for_one_field_is_there_for_another(sets: Path) -> None:
    path = batchkit.write_all_kinds(sets / "two", complete=True)
    inner = Loader(path, 4, {"picture": [T.Resize((8, 8))]}, engine="inline")
    (batch, *_) = DeviceLoader(inner, "cpu", ops={"picture": Images(crop=4, flip=0.5)})
    assert set(batch) >= {"picture.crop", "picture.flip"}
    other = Loader(path, 4, {"picture": [T.Resize((8, 8))], "label": None}, engine="inline")
    (batch, *_) = DeviceLoader(other, "cpu", ops={"picture": Images(crop=4, flip="label")})
    assert batch["picture"].shape == (4, 3, 4, 4) and "picture.flip" not in batch


def test_one_number_for_one_channel() -> None:
    one, same = Images(mean=0.5, std=np.float32(0.25)), Images(mean=(0.5,), std=torch.tensor([0.25]))  # type: ignore[arg-type]
    assert one == same
    grey = torch.arange(24, dtype=torch.uint8).reshape(2, 3, 4, 1)
    op = Images(mean=0.5, std=0.25, dtype="float32")
    out = op.out(torch.empty(op.bytes(grey.nbytes, (3, 4, 1)), dtype=torch.uint8), grey.shape)
    op.run("image", grey, out, {})
    assert np.abs(out.numpy() - as_float64(Images(mean=(0.5,), std=(0.25,)), {"image": grey})).max() < 1e-5


def test_a_partner_that_is_no_row_of_the_batch_is_an_error() -> None:
    batch = scene((4, 6, 5, 3))
    batch["partner"][2] = 4
    op = Images(dtype="float32", partner="partner", weight="weight")
    out = op.out(torch.empty(op.bytes(batch["image"].nbytes, (6, 5, 3)), dtype=torch.uint8), batch["image"].shape)
    with pytest.raises(OptionError, match="0 to 3"):
        op.run("image", batch["image"], out, batch)


def test_the_kernel_computes_the_same(tmp_path: Path) -> None:
    """By Triton's interpreter, where Triton is: what the kernel says, on the CPU."""
    pytest.importorskip("triton")
    script = Path(__file__).with_name("pixelcheck.py")
    paths = [str(Path(batchkit.__file__).parents[2]), str(script.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, check=False, timeout=300, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-3000:]
