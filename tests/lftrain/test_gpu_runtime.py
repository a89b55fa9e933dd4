"""What else only a GPU can show: optimisers, precision, compiled blocks, memory, checkpoints, marks, the doctor."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpukit
import pytest
import runkit
import torch
import trainkit

from lftrain import CheckpointOptions, CompileOptions, MetricsOptions, PrecisionOptions, RunOptions, Runtime
from lftrain.health import doctor
from lftrain.memory.activations import choose, measure, recompute
from lftrain.models import make
from lftrain.options import GraphOptions, ModelOptions, OptimizerOptions
from lftrain.runtime.usage import MicroBatches
from lftrain.tune.batch import plan

pytestmark = gpukit.MARKS
DEVICE = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def fresh() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# -- optimisers and precision -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_a_fused_optimizer_trains_what_the_other_does(tmp_path: Path, kind: str) -> None:
    from lftrain.build import optimizer

    found = []
    for fused in (True, False):
        torch.manual_seed(0)
        model, loss = make(ModelOptions(kind="vla"))
        made = optimizer(model.cuda(), OptimizerOptions(kind=kind, lr=1e-3, fused=fused))  # type: ignore[arg-type]
        run = RunOptions(folder=str(tmp_path / str(fused)), steps=20, seed=3, device="cuda")
        chosen = trainkit.options(tmp_path, 20, run=run)
        runtime = Runtime(model, loss, trainkit.Batches(gpukit.scenes(20)), made, chosen)
        runtime.run()
        found.append(runtime)
    assert gpukit.same(*found, 1e-3, 1e-4)


@pytest.mark.parametrize("fused", [True, None])
def test_inf_is_skipped_by_every_optimizer(tmp_path: Path, fused: bool | None) -> None:
    batches = gpukit.scenes(10)
    batches[9]["action"][0, 0, 0] = float("inf")
    bad = gpukit.trained(tmp_path / "bad", 10, batches, fused=fused, factor=lambda _: 1.0)
    good = gpukit.trained(tmp_path / "good", 9, batches, fused=fused, factor=lambda _: 1.0)
    assert bad.watch.skipped == 1 and gpukit.same(bad, good)


def test_fp16_trains_as_torch_with_its_own_scaler(tmp_path: Path) -> None:
    batches = [{"x": torch.randn(8, 4), "y": torch.randn(8)} for _ in range(30)]
    model = trainkit.make_model(dropout=0.0).cuda()
    precision = PrecisionOptions(mode="fp16", clip=None, scale_init=1024.0, scale_growth_interval=5)
    run = RunOptions(folder=str(tmp_path), steps=30, seed=3, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    chosen = trainkit.options(tmp_path, 30, run=run, precision=precision)
    runtime = Runtime(model, trainkit.loss, trainkit.Batches(batches), optimizer, chosen)
    runtime.run()
    other = trainkit.make_model(dropout=0.0).cuda()
    optimizer = torch.optim.AdamW(other.parameters(), lr=1e-2, fused=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0, growth_interval=5)
    for batch in batches:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            mean, _ = trainkit.loss(other, {name: value.cuda() for name, value in batch.items()})
        scaler.scale(mean.float()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert float(runtime.precision.scale) == scaler.get_scale() > 1024.0
    for one, wanted in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, wanted, rtol=1e-2, atol=1e-3)


def test_the_largest_value_of_gradients_with_nan_is_not_finite() -> None:
    """What DDP's hook looks at."""
    gradients = [torch.ones(1000, device=DEVICE), torch.ones(5, 300, device=DEVICE)]
    gradients[1][3, 7] = float("nan")
    found = torch.stack(torch._foreach_norm(gradients, float("inf")))
    assert found.isfinite().tolist() == [True, False]


DETERMINISTIC = """
import hashlib, pathlib, sys
import gpukit
from lftrain import PrecisionOptions, RunOptions
folder = pathlib.Path(sys.argv[1])
run = RunOptions(folder=str(folder), steps=20, seed=3, device="cuda", deterministic=True)
done = gpukit.trained(folder, 20, run=run, precision=PrecisionOptions(mode="bf16"))
print(hashlib.sha256(gpukit.bits(done)).hexdigest())
"""


def test_deterministic_runs_have_the_same_bits(tmp_path: Path) -> None:
    """In processes of their own: cuBLAS must be told before it is used."""
    found = []
    for name in ("one", "other"):
        words = [sys.executable, "-c", DETERMINISTIC, str(tmp_path / name)]
        done = subprocess.run(words, capture_output=True, text=True, env=runkit.environment(), timeout=300, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        found.append(done.stdout.strip())
    assert len(found[0]) == 64 and found[0] == found[1]


# -- compiled blocks --------------------------------------------------------------------------------------------------


def test_compiled_blocks_give_the_gradients_of_eager_and_count_their_sizes(tmp_path: Path) -> None:
    sizes = [4, 4, 3, 5, 6, 4]
    batches = [gpukit.scenes(number + 1, rows)[number] for number, rows in enumerate(sizes)]
    eager = gpukit.trained(tmp_path / "eager", len(sizes), batches)
    compiled = gpukit.trained(tmp_path / "compiled", len(sizes), batches, compile=CompileOptions(blocks=True))
    assert gpukit.losses(tmp_path / "compiled") == pytest.approx(gpukit.losses(tmp_path / "eager"), rel=1e-3)
    assert gpukit.alike(eager, compiled)
    counts = [line["compile"] for line in gpukit.steps(tmp_path / "compiled")]
    # Four kinds of blocks for the first size, again for sizes that change, and no more.
    assert counts[0]["compilations"] >= 3 and counts[-1]["compilations"] == counts[3]["compilations"]
    assert counts[-1]["fallbacks"] == 0


# -- memory -----------------------------------------------------------------------------------------------------------

WIDE = {"action_width": 256, "action_layers": 12, "language_width": 128, "freeze": ["vision", "language"]}


def peak(model: Any, loss: Any, batch: dict[str, torch.Tensor]) -> float:
    """Of forward and backward, beyond what was there and gradients."""
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss(model, batch)[0].backward()
        torch.cuda.synchronize()
    return float(torch.cuda.max_memory_allocated() - before)


def test_blocks_keep_what_was_measured_and_a_budget_is_kept() -> None:
    torch.manual_seed(0)
    model, loss = make(ModelOptions(kind="vla", options=WIDE))
    batch = {name: value.cuda() for name, value in gpukit.scenes(1, rows=512)[0].items()}
    blocks = model.cuda().blocks()
    found = measure(blocks, lambda: loss(model, batch)[0])
    whole, largest = sum(one.bytes for one in found), max(one.bytes for one in found)
    plain = [block.forward for block in blocks]
    peaks = {}
    for share in (1.0, 0.5, 0.0):
        recompute(blocks, choose(found, share * whole))
        peaks[share] = peak(model, loss, batch)
        for block, forward in zip(blocks, plain, strict=True):
            block.forward = forward
    # Recomputing all but one block saves what was measured, but for inputs of blocks, which stay.
    saved = peaks[1.0] - peaks[0.0]
    assert 0.7 * (whole - largest) <= saved <= 1.05 * whole, (saved, whole, largest)
    assert peaks[0.5] <= peaks[0.0] + 0.5 * whole + largest
    assert peaks[0.0] < peaks[0.5] < peaks[1.0]


def test_a_micro_batch_takes_what_was_planned() -> None:
    torch.manual_seed(0)
    model, loss = make(ModelOptions(kind="vla", options=WIDE))
    usage = MicroBatches(model.cuda(), loss, gpukit.scenes(1, rows=512)[0], PrecisionOptions(mode="bf16"), DEVICE)
    limit = 1.1 * usage.bytes(128)
    found = plan(usage.rows, limit, usage.bytes)
    assert found.rows == 128 and found.accumulate == 4
    assert usage.bytes(found.rows) == pytest.approx(found.bytes, rel=0.1)
    assert 1e9 < usage.limit(None) < torch.cuda.get_device_properties(DEVICE).total_memory


def test_more_rows_than_fit_are_no_plan() -> None:
    model, loss = make(ModelOptions(kind="vla", options=WIDE))
    usage = MicroBatches(model.cuda(), loss, gpukit.scenes(1, rows=64)[0], PrecisionOptions(), DEVICE)
    least, total = usage.bytes(1), torch.cuda.get_device_properties(DEVICE).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 1e6) / total, DEVICE)
    try:
        assert usage.bytes(64) == float("inf")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, DEVICE)
    assert usage.bytes(1) == pytest.approx(least, rel=0.5)


def test_memory_has_owners(tmp_path: Path) -> None:
    runtime = gpukit.trained(tmp_path, 12, metrics=MetricsOptions(every=1, live="off", memory_every=1))
    found = gpukit.steps(tmp_path)[-1]["memory"]
    size = sum(one.nbytes for one in runtime.model.parameters()) / 1e6
    assert found["parameters"] == pytest.approx(size, rel=0.05)
    assert found["optimizer"] == pytest.approx(2 * size, rel=0.05)
    assert found["activations"] > 0 and found["cached"] >= 0


# -- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("graph", [False, True])
def test_a_resumed_run_sees_the_same_samples_and_random_numbers(points: Path, tmp_path: Path, graph: bool) -> None:
    def run(name: str, steps: int, keep: list[torch.Tensor]) -> Runtime:
        def loss(model: Any, batch: dict[str, torch.Tensor]) -> Any:
            mean, rows = trainkit.loss(model, batch)
            if not graph:
                keep.append(batch["__index__"].clone())
            return mean, rows

        model = trainkit.make_model().cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        told = RunOptions(folder=str(tmp_path / name), steps=steps, seed=3, device="cuda")
        options = trainkit.options(tmp_path, steps, run=told, graph=GraphOptions(enabled=graph))
        runtime = Runtime(model, loss, trainkit.make_loader(points), optimizer, options)
        runtime.run()
        return runtime

    whole: list[torch.Tensor] = []
    parts: list[torch.Tensor] = []
    one = run("whole", 24, whole)
    run("parts", 11, parts)
    other = run("parts", 24, parts)
    assert [batch.tolist() for batch in whole] == [batch.tolist() for batch in parts]
    assert gpukit.losses(tmp_path / "parts") == pytest.approx(gpukit.losses(tmp_path / "whole"), rel=1e-3)
    assert gpukit.same(one, other, 1e-3, 1e-4)


def test_a_checkpoint_holds_its_own_step_though_training_goes_on(tmp_path: Path) -> None:
    batches = gpukit.scenes(12)
    checkpoint = CheckpointOptions(every=6, keep=3, asynchronous=True)
    factor = {"factor": lambda _: 1.0, "graph": gpukit.GRAPH}
    gpukit.trained(tmp_path / "long", 12, batches, checkpoint=checkpoint, **factor)
    short = gpukit.trained(tmp_path / "short", 6, batches, **factor)
    taken = tmp_path / "taken" / "checkpoints"
    shutil.copytree(tmp_path / "long" / "checkpoints" / "step-00000006", taken / "step-00000006")
    found = gpukit.trained(tmp_path / "taken", 6, batches, **factor)
    assert found.step == 6 and gpukit.same(found, short)
    later = gpukit.trained(tmp_path / "long", 12, batches, **factor)
    with pytest.raises(AssertionError):
        gpukit.same(later, short)


# -- records ----------------------------------------------------------------------------------------------------------


def test_the_split_of_a_step_is_measured_by_events(tmp_path: Path) -> None:
    gpukit.trained(tmp_path, 12)
    found = [line["ms"] for line in gpukit.steps(tmp_path) if line["ms"]]
    assert found and all({"data", "forward", "backward", "optimizer"} <= set(one) for one in found)
    assert all(value >= 0 for one in found for value in one.values())


def test_replayed_steps_are_a_part_of_their_own(tmp_path: Path) -> None:
    gpukit.trained(tmp_path, 20, graph=GraphOptions(enabled=True))
    found = [line["ms"] for line in gpukit.steps(tmp_path)[6:] if line["ms"]]
    assert found and all(one["graph"] > 0 and "forward" not in one for one in found)
    last = gpukit.steps(tmp_path)[-1]
    assert last["graph"]["replays"] + last["graph"]["eager"] >= 19


def test_a_trace_shows_kernels(tmp_path: Path) -> None:
    gpukit.trained(tmp_path, 8, metrics=MetricsOptions(every=1, live="off", trace_first=5, trace_steps=2))
    seen = json.loads((tmp_path / "trace-0.json").read_text())["traceEvents"]
    assert any(one.get("cat") == "kernel" for one in seen)


def test_the_environment_of_a_run_names_the_gpu(tmp_path: Path) -> None:
    gpukit.trained(tmp_path, 2)
    found = json.loads((tmp_path / "run.json").read_text())["environment"]
    assert found["gpu"]["name"] == torch.cuda.get_device_name(0) and found["gpu"]["cuda"] == torch.version.cuda


def test_the_doctor_sees_the_gpu() -> None:
    found = doctor.examine()
    assert len(found["gpus"]) == torch.cuda.device_count()
    assert found["gpus"][0]["name"] == torch.cuda.get_device_name(0)
    assert found["torch"]["cuda"] and found["torch"]["nccl"]
    text = doctor.render(found)
    assert "gpu 0" in text and found["gpus"][0]["name"] in text
    assert not any("torch cannot use it" in line for line in found["advice"])
