"""What only a GPU can show: the graph of the step against eager, shapes outside of it, marks without waiting, fp16."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import trainkit

from lftrain import CompileOptions, GraphOptions, MetricsOptions, PrecisionOptions, RunOptions, Runtime
from lftrain.models import make
from lftrain.options import ModelOptions, OptimizerOptions
from lftrain.runtime.rates import schedule

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


def scenes(count: int, rows: int = 4) -> list[dict[str, torch.Tensor]]:
    made = torch.Generator().manual_seed(1)
    return [
        {
            "image": torch.randint(0, 256, (rows, 32, 32, 3), generator=made, dtype=torch.uint8),
            "tokens": torch.randint(1, 256, (rows, 6), generator=made),
            "state": torch.randn(rows, 2, generator=made),
            "action": torch.randn(rows, 8, 2, generator=made) * (1 + number % 7),
        }
        for number in range(count)
    ]


def trained(
    folder: Path, steps: int, batches: list[dict[str, torch.Tensor]] | None = None, total: int = 0, **parts: Any
) -> Runtime:
    """The small vision-language-action model over changing data, learning rate, random numbers and clipping."""
    torch.manual_seed(0)
    model, loss = make(ModelOptions(kind="vla"))
    optimizer = torch.optim.AdamW(model.cuda().parameters(), lr=1e-3, fused=True)
    run = RunOptions(folder=str(folder), steps=steps, seed=3, device="cuda")
    factor = schedule(OptimizerOptions(warmup=10), total or steps)
    metrics = MetricsOptions(every=1, live="off")
    chosen = trainkit.options(folder, steps, **{"run": run, "metrics": metrics, **parts})
    runtime = Runtime(model, loss, trainkit.Batches(batches or scenes(steps)), optimizer, chosen, schedule=factor)
    runtime.run()
    return runtime


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in lines(folder) if line["kind"] == "step"]


@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16"])
def test_a_graph_trains_what_eager_does_over_100_steps(tmp_path: Path, mode: str) -> None:
    precision = PrecisionOptions(mode=mode, clip=0.5, scale_growth_interval=20)  # type: ignore[arg-type]
    eager = trained(tmp_path / "eager", 100, precision=precision)
    graphed = trained(tmp_path / "graphed", 100, precision=precision, graph=GraphOptions(enabled=True, tolerance=1e-2))
    assert graphed.graphed is not None and graphed.graphed.captured, graphed.graphed and graphed.graphed.reason
    assert graphed.graphed.replays == 97
    found, wanted = torch.tensor(losses(tmp_path / "graphed")), torch.tensor(losses(tmp_path / "eager"))
    torch.testing.assert_close(found, wanted, rtol=0.05 if mode != "fp32" else 1e-3, atol=1e-2)
    assert eager.watch.skipped == graphed.watch.skipped
    for one, other in zip(eager.model.parameters(), graphed.model.parameters(), strict=True):
        assert torch.nn.functional.cosine_similarity(one.flatten(), other.flatten(), 0) > 0.99


def test_inf_in_a_replayed_step_is_skipped_and_named(tmp_path: Path) -> None:
    batches = scenes(20)
    batches[12]["action"][0, 0, 0] = float("inf")
    graphed = trained(tmp_path, 20, batches, graph=GraphOptions(enabled=True))
    assert graphed.graphed is not None and graphed.graphed.captured and graphed.watch.skipped == 1
    (event,) = [line for line in lines(tmp_path) if line.get("name") == "skipped step"]
    assert event["step"] == 13


def test_a_shape_outside_of_the_graph_is_told_and_runs(tmp_path: Path) -> None:
    batches = scenes(20)
    batches[10] = scenes(1, rows=3)[0]
    graphed = trained(tmp_path, 20, batches, graph=GraphOptions(enabled=True))
    assert graphed.graphed is not None and graphed.graphed.replays == 16 and graphed.graphed.eager == 4
    (told,) = [line for line in lines(tmp_path) if line.get("name") == "no graph"]
    assert "is (3," in told["message"] and "instead of (4," in told["message"]


def test_a_loss_that_reads_from_the_device_is_not_captured_and_runs(tmp_path: Path) -> None:
    model = trainkit.make_model().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def reading(model: Any, batch: dict[str, torch.Tensor]) -> Any:
        mean, rows = trainkit.loss(model, batch)
        return mean * (2.0 if float(mean) < -1 else 1.0), rows

    batches = [{"x": torch.randn(4, 4), "y": torch.randn(4)} for _ in range(8)]
    run = RunOptions(folder=str(tmp_path), steps=8, device="cuda")
    chosen = trainkit.options(tmp_path, 8, run=run, graph=GraphOptions(enabled=True))
    runtime = Runtime(model, reading, trainkit.Batches(batches), optimizer, chosen)
    result = runtime.run()
    assert result.step == 8 and runtime.graphed is not None and not runtime.graphed.captured
    (told,) = [line for line in lines(tmp_path) if line.get("name") == "no graph"]
    assert "capture failed" in told["message"]


def test_a_resumed_run_goes_on_from_the_same_losses(tmp_path: Path) -> None:
    batches = scenes(12)
    trained(tmp_path / "whole", 12, batches)
    trained(tmp_path / "parts", 6, batches, total=12)
    trained(tmp_path / "parts", 12, batches)
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=0.05)


def test_compiled_blocks_and_graph_together(tmp_path: Path) -> None:
    parts: dict[str, Any] = {"compile": CompileOptions(blocks=True), "graph": GraphOptions(enabled=True, tolerance=1e-2)}
    both = trained(tmp_path / "both", 20, precision=PrecisionOptions(mode="bf16"), **parts)
    plain = trained(tmp_path / "plain", 20, precision=PrecisionOptions(mode="bf16"))
    assert both.graphed is not None and both.graphed.captured
    assert both.watch.loss == pytest.approx(plain.watch.loss, rel=0.1)


def test_the_split_of_a_step_is_measured_by_events(tmp_path: Path) -> None:
    trained(tmp_path, 12)
    found = [line["ms"] for line in lines(tmp_path) if line["kind"] == "step" and line["ms"]]
    assert found and all({"data", "forward", "backward", "optimizer"} <= set(one) for one in found)


def test_batches_copied_ahead_train_what_plain_copies_do(tmp_path: Path) -> None:
    """Through lfdata.DeviceLoader and without; and going on from the middle of an epoch, where batches were ahead."""
    data = trainkit.write_points(tmp_path / "d")

    def run(name: str, steps: int, ahead: int, accumulate: int = 1) -> Runtime:
        model = trainkit.make_model(dropout=0.0)
        optimizer = torch.optim.AdamW(model.cuda().parameters(), lr=1e-2, fused=True)
        chosen = RunOptions(folder=str(tmp_path / name), steps=steps, seed=3, device="cuda", copy_ahead=ahead)
        loader = trainkit.make_loader(data, accumulate=accumulate)
        runtime = Runtime(model, trainkit.loss, loader, optimizer, trainkit.options(tmp_path / name, steps, run=chosen))
        runtime.run()
        return runtime

    for accumulate in (1, 2):
        plain, ahead, parts = (f"{name}-{accumulate}" for name in ("plain", "ahead", "parts"))
        run(plain, 20, 0, accumulate)
        run(ahead, 20, 3, accumulate)
        run(parts, 11, 3, accumulate)
        run(parts, 20, 2, accumulate)
        assert losses(tmp_path / ahead) == pytest.approx(losses(tmp_path / plain), rel=1e-4)
        assert losses(tmp_path / parts) == pytest.approx(losses(tmp_path / plain), rel=1e-4)
