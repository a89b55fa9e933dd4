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
from latedevice import unheld
from pixelcheck import CASES, as_float64, checked, scene, tolerance

import lfdata.transforms as T
from lfdata import DeviceLoader, Loader
from lfdata.device import Images
from lfdata.errors import OptionError


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_torch_gives_what_float64_does(dtype: str, channels_last: bool, case: str) -> None:
    checked(case, dtype, channels_last, torch.device("cpu"))


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
        ({"image": Images(flip="nothing")}, "the batch has no 'nothing'"),
        ({"image": Images(partner="label", weight="label")}, "weight is torch.float32"),
    ],
)
def test_fields_that_do_not_go_with_it(pictures: Path, ops: dict[str, Any], match: str) -> None:
    with pytest.raises(OptionError, match=match):
        for _ in DeviceLoader(Loader(pictures, 8, {"image": [T.CenterCrop(16)], "label": None}), "cpu", ops=ops):
            pass


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
