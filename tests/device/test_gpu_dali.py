"""Pictures that DALI decodes on a GPU: the loader's own, but for another inverse transform."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import dalikit
import pytest
import torch
from dalikit import KINDS, kept

import lfdata.transforms as T
from lfdata import DeviceLoader, Loader
from lfdata.device import Images
from lfdata.errors import SampleError

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
pytest.importorskip("nvidia.dali", reason="DALI is not installed: pip install 'lfdata[dali]'")

FIELDS: dict[str, Any] = {"image": [T.RandomResizedCrop(64), T.RandomHorizontalFlip()], "label": None}
# docs/scheduler.md, "GPU decode": levels, of a picture on average.
MEAN = 2.0


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 pictures, every kind of file in turn."""
    return dalikit.write(tmp_path_factory.mktemp("files") / "set", 60, list(KINDS))


def loader(path: Path, **options: Any) -> Loader:
    return Loader(path, 6, FIELDS, **{"seed": 4, "native": False, "engine": "process", "threads": 2} | options)


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert list(ours) == list(theirs)
    for name, value in ours.items():
        other = theirs[name].cpu()
        assert (other.dtype, other.shape) == (value.dtype, value.shape), name
        if name == "image":
            error = (value.int() - other.int()).abs().flatten(1).float().mean(1)
            assert error.max() <= MEAN, error.tolist()
        else:
            assert torch.equal(value, other), name


def busy(cycles: int = 40_000_000) -> None:
    """Keep the current stream busy for some 20 ms."""
    torch.cuda._sleep(cycles)


def test_batches_are_the_loaders(files: Path) -> None:
    plain, by_dali = loader(files), DeviceLoader(loader(files), "cuda", decode="dali")
    for ours, theirs in zip(kept(plain, 2), kept(by_dali, 2), strict=True):
        same(ours, theirs)
    found = by_dali.stats()["decoding"]
    assert found["pictures"] >= 2 * 6 * sum(taken for taken, _ in KINDS.values()) and not found["failures"]
    plain.close()
    by_dali.close()


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_file(tmp_path: Path, kind: str) -> None:
    path = dalikit.write(tmp_path / "set", 12, [kind])
    for ours, theirs in zip(
        kept(loader(path)), kept(DeviceLoader(loader(path, engine="inline"), "cuda", decode="dali")), strict=True
    ):
        same(ours, theirs)


@pytest.mark.parametrize("hold", [1, 3])
def test_nothing_is_reused_too_early(files: Path, hold: int) -> None:
    """A consumer that is far behind the host, over some epochs; what it saw is compared afterwards."""
    host = DeviceLoader(loader(files), "cuda", decode="dali")
    expected = kept(host, 3)
    by_dali = DeviceLoader(loader(files), "cuda", decode="dali", ahead=3, hold=hold)
    found, held = [], list[Any]()
    for _ in range(3):
        for batch in by_dali:
            busy()
            found.append({name: value.clone() for name, value in batch.items()})
            held = [*held, batch][-hold:]
            del batch
    torch.cuda.synchronize()
    for ours, theirs in zip(expected, found, strict=True):
        for name, value in ours.items():
            if name == "image":
                # Which of several decoders of the GPU has a picture may differ from time to time.
                error = (value.int() - theirs[name].cpu().int()).abs().float().flatten(1).mean(1)
                assert error.max() <= MEAN, error.tolist()
            else:
                assert torch.equal(value, theirs[name].cpu())
    assert by_dali.stats()["device"]["extra"] == 0 and by_dali.stats()["device"]["grown"] == 0
    host.close()
    by_dali.close()


def test_with_the_kernel(files: Path) -> None:
    ops = {"image": Images(dtype="float32", channels_last=True)}
    plain = DeviceLoader(loader(files), "cuda", ops=ops)
    by_dali = DeviceLoader(loader(files), "cuda", ops=ops, decode="dali")
    for ours, theirs in zip(kept(plain), kept(by_dali), strict=True):
        error = (ours["image"] - theirs["image"]).abs().flatten(1).mean(1)
        assert ours["image"].shape == theirs["image"].shape and error.max() <= MEAN / 255 / 0.224
    plain.close()
    by_dali.close()


@pytest.mark.parametrize("policy", ["stop", "mask"])
def test_a_broken_picture(tmp_path: Path, policy: str) -> None:
    """One that passes for a good one: whatever DALI makes of it, no batch is lost and none is another."""
    path = dalikit.write(tmp_path / "set", 24, ["4:2:0"], dalikit.broken, wrong=(5,))
    options: dict[str, Any] = {"engine": "inline", "bad_samples": policy, "most_bad_rate": 1}
    by_dali = DeviceLoader(loader(path, **options), "cuda", decode="dali")
    if policy == "stop":
        with pytest.raises(SampleError, match="index 5"):
            kept(by_dali)
    else:
        for ours, theirs in zip(kept(loader(path, **options)), kept(by_dali), strict=True):
            same(ours, theirs)
    by_dali.close()


def test_left_in_mid_epoch_and_gone_on(files: Path) -> None:
    whole = kept(loader(files))
    by_dali = DeviceLoader(loader(files), "cuda", decode="dali")
    first = kept(by_dali, most=3)
    state = by_dali.state_dict()
    by_dali.close()
    gc.collect()
    other = DeviceLoader(loader(files), "cuda", decode="dali")
    other.load_state_dict(state)
    for ours, theirs in zip(whole, first + kept(other), strict=True):
        same(ours, theirs)
    other.close()
