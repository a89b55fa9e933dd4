"""What only a GPU can show: real copies from registered slots, real streams, real allocations, the compiled kernel."""

from __future__ import annotations

import gc
import warnings
from pathlib import Path
from typing import Any

import batchkit
import pytest
import torch
from pixelcheck import CASES, as_float64, by_kernel, checked, tolerance, unknown

import lfdata.transforms as T
from lfdata import DeviceLoader, Loader
from lfdata.device import Images, RegistrationWarning
from lfdata.device.backend import CudaBackend
from lfdata.errors import DeviceError, LimitError, SampleError

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

CUDA = torch.device("cuda", 0)
# A megabyte a batch, so that each has a slot of its own.
PICTURES: dict[str, Any] = {"image": [T.RandomResizedCrop(224), T.RandomHorizontalFlip()], "label": None}
DRAWN = Images(dtype="float32", crop=(200, 180), flip=0.5, mixup=0.4, cutmix=1.0)
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "pictures": ("pictures", {"fields": PICTURES, "engine": "process"}),
    "parts of batches": ("pictures", {"fields": PICTURES, "engine": "process", "max_bytes": "2MiB", "over": "split"}),
    "every kind": ("complete", {"fields": ["ids", "sound", "box", "points", "label", "caption", "blob"], "engine": "inline"}),
    "micro-batches": ("numbers", {"accumulate": 2}),
    "packed": ("numbers", {"fields": ["ids"], "packing": {"field": "ids", "window": 32, "capacity": 9}}),
}


@pytest.fixture(scope="module", autouse=True)
def first_device() -> None:
    torch.cuda.set_device(0)


def on_host(batch: dict[str, torch.Tensor]) -> str:
    return batchkit.digest({name: value.cpu() for name, value in batch.items()})


def busy(cycles: int = 40_000_000) -> None:
    """Keep the current stream busy for some 20 ms."""
    torch.cuda._sleep(cycles)


def delay_copies(monkeypatch: pytest.MonkeyPatch, cycles: int) -> None:
    """The stream of copies is busy before each."""
    copy = CudaBackend.copy

    def late(self: CudaBackend, pairs: Any, work: Any = None) -> None:
        copy(self, [], lambda: busy(cycles))
        copy(self, pairs, work)

    monkeypatch.setattr(CudaBackend, "copy", late)


@pytest.mark.parametrize("kind", KINDS)
def test_every_byte_is_the_loaders(kind: str, request: pytest.FixtureRequest) -> None:
    name, options = KINDS[kind]
    path = request.getfixturevalue(name)
    plain = batchkit.digests(Loader(path, 8, seed=5, **options), 2)
    loader = DeviceLoader(Loader(path, 8, seed=5, **options), "cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("error", RegistrationWarning)
        found = [on_host(batch) for _ in range(2) for batch in loader]
    stats = loader.stats()["device"]
    assert found == plain
    assert stats["registered"] > 0 and not stats["refused"] and stats["grown"] == 0 and stats["extra"] == 0
    loader.close()


@pytest.mark.parametrize("slow", ["copies", "consumer", "both"])
def test_nothing_is_reused_too_early(pictures: Path, slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy device: slots are refilled and places overwritten while it is far behind the host."""
    plain = batchkit.digests(Loader(pictures, 8, PICTURES, seed=2), 4)
    loader = DeviceLoader(Loader(pictures, 8, PICTURES, seed=2, engine="process", threads=2), "cuda", ahead=3)
    if slow != "consumer":
        delay_copies(monkeypatch, 40_000_000)
    copies: list[dict[str, torch.Tensor]] = []
    for _ in range(4):
        for batch in loader:
            if slow != "copies":
                busy()
            # Read on the device after the wait, into memory of its own; the host goes on at once.
            copies.append({name: value.clone() for name, value in batch.items()})
            del batch
    torch.cuda.synchronize()
    assert [on_host(batch) for batch in copies] == plain
    assert loader.stats()["copied"] == 0
    loader.close()


def test_what_autograd_keeps_is_not_overwritten(pictures: Path) -> None:
    """The pictures are dropped at once; the backward pass, much later, still reads them."""
    op = {"image": Images(dtype="float32")}
    weight = torch.ones((), device=CUDA, requires_grad=True)
    loader = DeviceLoader(Loader(pictures, 8, PICTURES, seed=2, engine="inline"), "cuda", ops=op, ahead=1)
    sums, expected = [], []
    for batch in loader:
        sums.append((batch["image"] * weight).sum())
        expected.append(batch["image"].double().sum())
        del batch
    for value, exact in zip(sums, expected, strict=True):
        (gradient,) = torch.autograd.grad(value, weight)
        assert float(gradient) == pytest.approx(float(exact), rel=1e-4, abs=1.0)
    assert loader.stats()["device"]["extra"] > 0
    loader.close()


@pytest.mark.parametrize("ops", [None, {"image": Images(dtype="bfloat16")}, {"image": DRAWN}])
def test_no_allocation_in_the_steady_state(pictures: Path, ops: Any) -> None:
    """Over 200 steps: no segment of torch's, no allocation at all, no place of the ring."""
    loader = DeviceLoader(Loader(pictures, 8, PICTURES, engine="process"), "cuda", ops=ops)
    total = torch.zeros((), device=CUDA)
    steps, marks = 0, []
    while steps < 230:
        for batch in loader:
            # In place, so that what is counted is not the consumer's.
            total.add_(batch["label"][0])
            steps += 1
            if steps >= 30:
                stats = torch.cuda.memory_stats()
                names = ("segment.all.allocated", "allocation.all.allocated", "num_device_alloc")
                marks.append(tuple(stats.get(name, 0) for name in names))
            del batch
    assert len(set(marks)) == 1, (marks[0], marks[-1])
    assert loader.stats()["device"]["grown"] == loader.stats()["device"]["extra"] == 0
    loader.close()


def test_close_gives_everything_back(pictures: Path) -> None:
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated()
    loader = DeviceLoader(Loader(pictures, 8, PICTURES, engine="process"), "cuda")
    batches = iter(loader)
    kept = next(batches)
    next(batches)
    loader.close()
    assert kept["image"].float().mean().isfinite()
    del kept, batches
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    assert loader.stats()["device"]["registered"] == 0


def test_a_registration_that_is_really_refused(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slots are registered by somebody else already, which CUDA refuses. Nothing of that error is left for others."""
    plain = batchkit.digests(Loader(pictures, 8, PICTURES))
    register = CudaBackend.register

    def twice(self: CudaBackend, address: int, size: int) -> str:
        assert register(self, address, size) == ""
        try:
            return register(self, address, size)
        finally:
            self.unregister(address)

    monkeypatch.setattr(CudaBackend, "register", twice)
    loader = DeviceLoader(Loader(pictures, 8, PICTURES, engine="process"), "cuda")
    with pytest.warns(RegistrationWarning, match="CUDA error"):
        found = [on_host(batch) for batch in loader]
    stats = loader.stats()["device"]
    assert found == plain and stats["registered"] == 0 and "CUDA error" in stats["refused"] and stats["pageable"] >= 6
    assert float(torch.ones(3, device=CUDA).sum()) == 3.0
    loader.close()


def test_registered_slots_count_as_pinned(pictures: Path) -> None:
    inner = Loader(pictures, 8, PICTURES, engine="process")
    loader = DeviceLoader(inner, "cuda")
    batches = iter(loader)
    next(batches)
    transfer = loader._transfer
    assert transfer is not None and transfer.registered is not None
    slots = inner._pipelines[0].slots
    assert torch.from_numpy(slots.memory()).is_pinned()
    memory = slots.memory()
    loader.close()
    assert not torch.from_numpy(memory).is_pinned()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_the_kernel_gives_what_float64_does(dtype: str, channels_last: bool, case: str) -> None:
    pytest.importorskip("triton")
    checked(case, dtype, channels_last, CUDA, by_kernel)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_torch_on_the_gpu_gives_what_float64_does(dtype: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lfdata.device.images._kernels", lambda: None)
    checked(case, dtype, False, CUDA)


def test_what_is_not_there_makes_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    unknown(CUDA, by_kernel)


def test_pictures_of_a_loader_are_made_on_the_gpu(pictures: Path) -> None:
    op = Images(dtype="bfloat16", channels_last=True)
    plain = Loader(pictures, 8, PICTURES)
    loader = DeviceLoader(Loader(pictures, 8, PICTURES), "cuda", ops={"image": op})
    for ours, theirs in zip(plain, loader, strict=True):
        expected = as_float64(op, dict(ours))
        assert theirs["image"].is_contiguous(memory_format=torch.channels_last)
        assert abs(theirs["image"].double().cpu().numpy() - expected).max() <= tolerance("bfloat16", 3.0)
    plain.close()
    loader.close()


@pytest.mark.parametrize("by", ["kernel", "torch"])
def test_what_is_drawn_is_done_on_the_gpu(pictures: Path, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on the CPU: the same draws, and the pictures that float64 makes with them."""
    if by == "torch":
        monkeypatch.setattr("lfdata.device.images._kernels", lambda: None)
    else:
        pytest.importorskip("triton")
    pixels = Loader(pictures, 8, PICTURES, seed=3)
    on_cpu = DeviceLoader(Loader(pictures, 8, PICTURES, seed=3), "cpu", ops={"image": DRAWN})
    loader = DeviceLoader(Loader(pictures, 8, PICTURES, seed=3), "cuda", ops={"image": DRAWN})
    for _ in range(2):
        for plain, ours, theirs in zip(pixels, on_cpu, loader, strict=True):
            assert list(ours) == list(theirs)
            found = {name: value.cpu() for name, value in theirs.items()}
            assert all(torch.equal(value, found[name]) for name, value in ours.items() if name != "image")
            expected = as_float64(DRAWN, found | {"image": plain["image"]})
            assert abs(found["image"].double().numpy() - expected).max() <= tolerance("float32", 3.0)
    for one in (pixels, on_cpu, loader):
        one.close()


def test_states_and_errors_are_those_of_the_plain_loader(pictures: Path, sets: Path) -> None:
    plain = Loader(pictures, 8, PICTURES, seed=5)
    loader = DeviceLoader(Loader(pictures, 8, PICTURES, seed=5), "cuda", ahead=3)
    for _ in zip(plain, loader, strict=True):
        assert loader.state_dict() == plain.state_dict()
    plain.close()
    loader.close()
    path = batchkit.write_pictures(sets / "one-bad-gpu", 32, bad=[19])
    bad = DeviceLoader(Loader(path, 4, {"image": [T.CenterCrop(16)]}, shuffle="sequential"), "cuda", ahead=3)
    found = []
    with pytest.raises(SampleError, match="p19"):
        for batch in bad:
            found += batch["__index__"].tolist()
    assert found == list(range(16))
    bad.close()


def test_a_device_or_memory_that_is_not_there(pictures: Path) -> None:
    with pytest.raises(DeviceError, match="GPUs"):
        DeviceLoader(Loader(pictures, 8, PICTURES), f"cuda:{torch.cuda.device_count()}")
    backend = CudaBackend(CUDA)
    with pytest.raises(LimitError, match="Lower ahead"):
        backend.memory(1 << 50)
    assert float(torch.ones(3, device=CUDA).sum()) == 3.0


def test_waits_for_copies_are_told_to_the_feedback(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    delay_copies(monkeypatch, 100_000_000)
    loader = DeviceLoader(Loader(pictures, 8, PICTURES, engine="process", threads=1, feedback="wait"), "cuda")
    for _ in range(4):
        for _ in loader:
            # The copies ahead go on meanwhile.
            torch.cuda.current_stream().synchronize()
    found = loader.stats()
    assert found["device"]["waited"] > 0.2 and found["feedback"]["verdict"] == "copy", found["feedback"]
    loader.close()


def test_copies_from_slots_are_as_fast_as_from_pinned_memory() -> None:
    """Not a measurement: from pageable memory it would be several times slower."""
    from lfdata.device.register import Registered
    from lfdata.loader.slots import Slots

    slots = Slots(2, 64 << 20)
    slots.memory()[:] = 1
    registered = Registered(CudaBackend(CUDA), slots)
    assert not registered.refused
    source, pinned = torch.frombuffer(slots.slot(0), dtype=torch.uint8), torch.empty(64 << 20, dtype=torch.uint8).pin_memory()
    target = torch.empty_like(source, device=CUDA)

    def seconds(host: torch.Tensor) -> float:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        marks[0].record()
        for _ in range(10):
            target.copy_(host, non_blocking=True)
        marks[1].record()
        torch.cuda.synchronize()
        return float(marks[0].elapsed_time(marks[1]))

    seconds(source), seconds(pinned)
    assert min(seconds(source) for _ in range(5)) < 2 * min(seconds(pinned) for _ in range(5))
    registered.release()
    slots.close()
