"""Checkpoints: atomic at every operation, verified, damaged ones named, a full disk survived."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import trainkit
import xxhash
from killkit import in_child
from mounts import in_private_namespace, tmpfs
from torch import nn

from lfdata.errors import StorageError
from lfdata.format.durable import Files
from lftrain import CheckpointOptions, PrecisionOptions, Runtime
from lftrain.errors import CheckpointError, ConfigError, DamagedCheckpointError
from lftrain.runtime.checkpoint import LATEST
from lftrain.runtime.export import export
from lftrain.runtime.storage import MANIFEST, STATE, verify

STEPS = 4


def run(data: Path, folder: Path, steps: int = STEPS, files: Files | None = None, **chosen: Any) -> trainkit.Runtime:
    """A run with a checkpoint after each step."""
    options = trainkit.options(folder, steps, checkpoint=CheckpointOptions(**{"every": 1, "asynchronous": False, **chosen}))
    runtime = trainkit.make_runtime(data, options)
    if files is not None:
        runtime.checkpoints._files = files
    runtime.run()
    return runtime


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir() if path.is_dir())


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


@pytest.fixture(scope="module")
def whole(points: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Parameters after a run that nothing disturbed."""
    return trainkit.bits(run(points, tmp_path_factory.mktemp("whole")).model)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_newest_stay_and_latest_names_one(points: Path, tmp_path: Path, asynchronous: bool, whole: bytes) -> None:
    runtime = run(points, tmp_path, keep=2, asynchronous=asynchronous)
    assert names(tmp_path) == ["step-00000003", "step-00000004"]
    assert (tmp_path / "checkpoints" / LATEST).read_text() == "step-00000004\n"
    for name in names(tmp_path):
        verify(tmp_path / "checkpoints" / name)
    assert trainkit.bits(runtime.model) == whole


@pytest.mark.parametrize("first", range(1, STEPS))
def test_a_resumed_run_ends_in_the_same_bits(points: Path, tmp_path: Path, first: int, whole: bytes) -> None:
    run(points, tmp_path, first)
    torch.manual_seed(99)
    assert trainkit.bits(run(points, tmp_path).model) == whole


def test_nothing_is_pickled(points: Path, tmp_path: Path) -> None:
    """No file of a checkpoint begins as pickles and torch's archives do, and all but the tensors is JSON."""
    run(points, tmp_path, 1)
    for path in (tmp_path / "checkpoints" / "step-00000001").iterdir():
        data = path.read_bytes()
        assert not data.startswith((b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04"))
        if path.suffix == ".json":
            json.loads(data.split(b"\n")[0])


class Killer(Files):
    """Ends the process with SIGKILL before or after the n-th operation."""

    def __init__(self, number: int, after: bool) -> None:
        self.left, self.after, self.count = number, after, 0

    def call(self, operation: str, path: Path, function: Callable[[], Any], **detail: object) -> Any:
        self.count += 1
        if self.count == self.left and not self.after:
            os.kill(os.getpid(), signal.SIGKILL)
        found = function()
        if self.count == self.left and self.after:
            os.kill(os.getpid(), signal.SIGKILL)
        return found


@pytest.mark.fault
def test_killed_at_each_operation_a_sound_one_is_left(points: Path, tmp_path: Path, whole: bytes) -> None:
    """Two steps are kept in peace; the third's checkpoint is killed at operation after operation."""
    counting = Killer(-1, False)
    run(points, tmp_path / "counted", 2, keep=1)
    runtime = run(points, tmp_path / "counted", 3, counting, keep=1)
    assert runtime.step == 3 and counting.count > 10
    torch.set_num_threads(1)  # a forked child cannot use the pool of threads
    run(points, tmp_path / "two", 2, keep=1)
    for number in range(1, counting.count + 1):
        for after in (False, True) if number % 3 == 0 else (bool(number % 2),):
            folder = tmp_path / f"killed-{number}-{after}"
            shutil.copytree(tmp_path / "two", folder)
            assert in_child(lambda f=folder, n=number, a=after: run(points, f, 3, Killer(n, a), keep=1)) == -signal.SIGKILL
            there = [name for name in names(folder) if name.startswith("step-")]
            assert there, "no checkpoint is left"
            for name in there:
                verify(folder / "checkpoints" / name)
            latest = (folder / "checkpoints" / LATEST).read_text().strip()
            assert latest in ("step-00000002", "step-00000003")
            assert latest == "step-00000002" or latest in there
            assert trainkit.bits(run(points, folder).model) == whole
            assert not [name for name in names(folder) if name.startswith(".tmp")]


@pytest.mark.parametrize("name", ["rank-0.bin", "state.json", "manifest.json"])
@pytest.mark.parametrize("harm", ["flip", "cut", "more", "remove"])
def test_a_damaged_one_is_named_and_the_one_before_is_taken(
    points: Path, tmp_path: Path, name: str, harm: str, whole: bytes
) -> None:
    run(points, tmp_path, 3)
    path = tmp_path / "checkpoints" / "step-00000003" / name
    if harm == "flip":
        flip(path, path.stat().st_size // 3)
    elif harm == "cut":
        os.truncate(path, path.stat().st_size // 2)
    elif harm == "more":
        path.write_bytes(path.read_bytes() + b"x")
    else:
        path.unlink()
    with pytest.raises(DamagedCheckpointError, match=name):
        verify(path.parent)
    runtime = run(points, tmp_path)
    assert trainkit.bits(runtime.model) == whole
    assert "damaged-step-00000003" in names(tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    (event,) = [line for line in lines if line.get("name") == "damaged checkpoint"]
    assert name in event["message"]


def test_a_damaged_tensor_is_named(points: Path, tmp_path: Path) -> None:
    run(points, tmp_path, 1)
    folder = tmp_path / "checkpoints" / "step-00000001"
    manifest = verify(folder)
    place = manifest.tensors["model.3.weight"].pieces[0]
    flip(folder / place.file, place.byte + 5)
    with pytest.raises(CheckpointError, match=r"rank-0.bin.*'model.3.weight' is damaged.*another run.folder"):
        run(points, tmp_path)


def forged(path: Path, change: Callable[[dict[str, Any], dict[str, Any]], Any]) -> None:
    """Another state and manifest, with checks that match."""
    state = json.loads((path / STATE).read_bytes())
    manifest = json.loads((path / MANIFEST).read_bytes().split(b"\n")[0])
    change(state, manifest)
    content = json.dumps(state).encode()
    (path / STATE).write_bytes(content)
    manifest["files"][STATE] = [len(content), xxhash.xxh3_64_hexdigest(content)]
    text = json.dumps(manifest).encode()
    (path / MANIFEST).write_bytes(text + b"\n" + xxhash.xxh3_64_hexdigest(text).encode() + b"\n")


def first(manifest: dict[str, Any]) -> dict[str, Any]:
    """Of the tensors."""
    return next(iter(manifest["tensors"].values()))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "change",
    [
        lambda state, _: state.update(own=None),
        lambda state, _: state.update(watch=[1]),
        lambda state, _: state.update(nominal="x"),
        lambda state, _: state.update(held_out=[1]),
        lambda _, manifest: manifest.update(step=-5),
        lambda _, manifest: manifest.update(step=10**18 * 9),
        lambda _, manifest: first(manifest).update(dtype="int8"),
        lambda _, manifest: first(manifest)["pieces"][0].update(bytes=10**15),
        lambda _, manifest: first(manifest)["pieces"][0].update(byte=10**15),
        lambda _, manifest: first(manifest)["pieces"][0].update(sizes=[-4, -16]),
        lambda _, manifest: first(manifest)["pieces"][0].update(file="../x"),
    ],
)
def test_a_state_that_makes_no_sense_is_damage_whatever_its_checks_say(
    points: Path, tmp_path: Path, whole: bytes, change: Callable[[dict[str, Any], dict[str, Any]], Any]
) -> None:
    run(points, tmp_path, STEPS - 1)
    forged(tmp_path / "checkpoints" / f"step-{STEPS - 1:08d}", change)
    runtime = run(points, tmp_path)
    assert trainkit.bits(runtime.model) == whole
    assert f"damaged-step-{STEPS - 1:08d}" in names(tmp_path)


@pytest.mark.parametrize("name", [STATE, MANIFEST])
def test_what_is_no_file_is_not_read(points: Path, tmp_path: Path, name: str) -> None:
    run(points, tmp_path, STEPS - 1)
    path = tmp_path / "checkpoints" / f"step-{STEPS - 1:08d}" / name
    path.unlink()
    path.symlink_to("/dev/zero")
    assert run(points, tmp_path).step == STEPS


def test_resume_as_told(points: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="must"):
        run(points, tmp_path, 1, resume="must")
    run(points, tmp_path, 1, resume="never")
    with pytest.raises(ConfigError, match="never"):
        run(points, tmp_path, 2, resume="never")
    assert run(points, tmp_path, 2, resume="must").step == 2


def test_another_model_is_refused(points: Path, tmp_path: Path) -> None:
    run(points, tmp_path, 1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Dropout(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    runtime = trainkit.Runtime(model, trainkit.loss, trainkit.make_loader(points), optimizer, trainkit.options(tmp_path, 2))
    with pytest.raises(CheckpointError, match=r"'model.0.weight' has shape \(16, 4\), here \(8, 4\)"):
        runtime.run()


def test_two_runs_in_one_folder_are_refused(points: Path, tmp_path: Path) -> None:
    first = trainkit.make_runtime(points, trainkit.options(tmp_path, 1))
    with pytest.raises(CheckpointError, match="another run"):
        trainkit.make_runtime(points, trainkit.options(tmp_path, 1))
    first.run()
    trainkit.make_runtime(points, trainkit.options(tmp_path, 2)).run()


def _on_a_full_disk(points: Path, place: Path) -> None:
    disk = place / "disk"
    disk.mkdir()
    tmpfs(disk, 1 << 20)
    folder, filler, calls = disk / "run", disk / "filler", []

    def filling(model: torch.nn.Module, batch: Any) -> Any:
        """The loss; before the third step something else fills the disk."""
        calls.append(1)
        if len(calls) == 3:
            with open(filler, "wb", buffering=0) as file, pytest.raises(OSError):
                while True:
                    file.write(bytes(4096))
        return trainkit.loss(model, batch)

    chosen = trainkit.options(folder, 9, checkpoint=CheckpointOptions(every=1, asynchronous=False, failures=3))
    runtime = trainkit.make_runtime(points, chosen, the_loss=filling)
    with pytest.raises(CheckpointError, match=r"3 checkpoints in a row have failed.*No space left"):
        runtime.run()
    assert names(folder) == ["step-00000001", "step-00000002"]
    for name in names(folder):
        verify(folder / "checkpoints" / name)
    with pytest.raises(StorageError, match="No space left"):
        run(points, folder, 9)
    filler.unlink()
    assert run(points, folder, 9).step == 9


def test_a_full_disk_costs_only_that_checkpoint(points: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    in_private_namespace(lambda: _on_a_full_disk(points, tmp_path))


@pytest.mark.parametrize("ended", ["finished", "stopped"])
@pytest.mark.parametrize("every", [0, 1])
def test_a_run_whose_last_checkpoint_failed_has_not_gone_well(
    points: Path, tmp_path: Path, whole: bytes, every: int, ended: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One failure is no reason to stop, but nobody would look for a checkpoint after a run that says it is done."""
    last = STEPS if ended == "finished" else STEPS - 1

    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def watched(model: Any, batch: Any) -> Any:
        calls.append(1)
        if len(calls) == last - 1:
            runtime._asked = ended == "stopped"  # before the next step
        if len(calls) == last:
            monkeypatch.setattr(runtime.checkpoints, "_file", full)
        return trainkit.loss(model, batch)

    calls: list[int] = []
    chosen = trainkit.options(tmp_path, STEPS, checkpoint=CheckpointOptions(every=every, asynchronous=False))
    runtime = trainkit.make_runtime(points, chosen, the_loss=watched)
    with pytest.raises(CheckpointError, match="the last checkpoint could not be written.*No space left"):
        runtime.run()
    assert runtime.step == last
    again = trainkit.make_runtime(points, chosen)
    assert again.run().finished and trainkit.bits(again.model) == whole


def test_export_is_what_the_model_holds(points: Path, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    runtime = run(points, tmp_path, 1, export=True)
    found = safetensors.load_file(tmp_path / "model.safetensors")
    assert found.keys() == runtime.model.state_dict().keys()
    assert all(torch.equal(found[name], value) for name, value in runtime.model.state_dict().items())
    with safetensors.safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "step": "1"}
    # The same weights are the same bytes; names and values are as they may be.
    model, files = nn.ModuleDict({"größe": nn.Linear(3, 2), "other": nn.Linear(2, 1).half()}), set()
    for number in range(12):
        export(model, tmp_path / f"{number}.safetensors", 7)
        files.add((tmp_path / f"{number}.safetensors").read_bytes())
    assert len(files) == 1
    found = safetensors.load_file(tmp_path / "0.safetensors")
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("fused", [True, None])
def test_a_checkpoint_from_before_any_good_step_can_be_gone_on_from(points: Path, tmp_path: Path, fused: bool | None) -> None:
    def part(steps: int) -> Any:
        model = trainkit.make_model(dropout=0.0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
        precision = PrecisionOptions(mode="fp16", scale_init=2.0**40, max_skips=100)
        chosen = trainkit.options(tmp_path, steps, checkpoint=CheckpointOptions(every=1), precision=precision)
        runtime = Runtime(model, trainkit.loss, trainkit.make_loader(points), optimizer, chosen)
        runtime.run()
        return runtime

    first = part(2)
    assert first.watch.skipped == 2
    second = part(40)
    assert second.step == 40 and 2 < second.watch.skipped < 40


def test_only_damaged_ones_are_no_reason_to_begin_anew(points: Path, tmp_path: Path) -> None:
    run(points, tmp_path, 1)
    (tmp_path / "checkpoints" / "step-00000001" / "manifest.json").unlink()
    for _ in range(2):
        with pytest.raises(CheckpointError, match="another run.folder"):
            run(points, tmp_path, 3)
