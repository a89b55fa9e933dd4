"""Runs of the small vision-language-action model on a GPU, for the tests that need one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import trainkit

from lftrain import AdamW, GraphOptions, MetricsOptions, RunOptions, Runtime
from lftrain.models import make
from lftrain.options import ModelOptions, OptimizerOptions
from lftrain.runtime.rates import schedule

MARKS = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
# Wider than its default: kernels of small matrices differ by stream in bf16 and fp16.
GRAPH = GraphOptions(enabled=True, tolerance=1e-2)


def scenes(count: int, rows: int = 4) -> list[dict[str, torch.Tensor]]:
    """Batches that differ, and whose gradients do."""
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


def built(
    folder: Path,
    steps: int,
    batches: list[dict[str, torch.Tensor]] | None = None,
    total: int = 0,
    the_loss: Any = None,
    fused: bool | None = True,
    model: dict[str, Any] | None = None,
    factor: Any = None,
    accumulate: int = 1,
    held_out: Any = None,
    held_out_every: int = 0,
    **parts: Any,
) -> Runtime:
    """The model over changing data, learning rate, random numbers and clipping, ready to run."""
    torch.manual_seed(0)
    network, loss = make(ModelOptions(kind="vla", options=model or {}))
    trained = [one for one in network.cuda().parameters() if one.requires_grad]
    optimizer = AdamW(trained, lr=1e-3, fused=fused)
    run = RunOptions(folder=str(folder), steps=steps, seed=3, device="cuda")
    metrics = MetricsOptions(every=1, live="off")
    chosen = trainkit.options(folder, steps, **{"run": run, "metrics": metrics, **parts})
    factor = factor or schedule(OptimizerOptions(warmup=10), total or steps)
    loader = trainkit.Batches(batches or scenes(steps * accumulate), accumulate)
    return Runtime(
        network,
        the_loss or loss,
        loader,
        optimizer,
        chosen,
        schedule=factor,
        held_out=held_out,
        held_out_every=held_out_every,
    )


def trained(folder: Path, steps: int, *arguments: Any, **parts: Any) -> Runtime:
    """:func:`built`, and run."""
    runtime = built(folder, steps, *arguments, **parts)
    runtime.run()
    return runtime


def lines(folder: Path) -> list[dict[str, Any]]:
    """Of metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def steps(folder: Path) -> list[dict[str, Any]]:
    """Those of steps."""
    return [line for line in lines(folder) if line["kind"] == "step"]


def losses(folder: Path) -> list[float | None]:
    """Of each step that was not skipped."""
    return [line["loss"] for line in steps(folder)]


def events(folder: Path, name: str) -> list[dict[str, Any]]:
    """Events of a name."""
    return [line for line in lines(folder) if line.get("name") == name]


def captured(runtime: Runtime) -> bool:
    """Whether steps come from the graph; shows why not."""
    assert runtime.graphed is not None
    assert runtime.graphed.captured, runtime.graphed.reason
    return True


def alike(one: Runtime, other: Runtime, most: float = 0.2) -> bool:
    """Whether training changed two models alike: their difference is a small part of the change."""
    torch.manual_seed(0)
    first, _ = make(ModelOptions(kind="vla", options=msgspec.to_builtins(one.model.options)))
    difference, change = 0.0, 0.0
    trained = ([each for each in model.parameters() if each.requires_grad] for model in (one.model, other.model, first))
    for a, b, start in zip(*trained, strict=True):
        difference += float((a - b).square().sum())
        change += float((a - start.cuda()).square().sum())
    assert difference < most**2 * change, (difference, change)
    return True


def same(one: Runtime, other: Runtime, rtol: float = 1e-4, atol: float = 1e-5) -> bool:
    """Whether two models hold the same parameters, but for the order in which a GPU adds."""
    for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), rtol=rtol, atol=atol)
    return True


def bits(runtime: Runtime) -> bytes:
    """All parameters, to the bit."""
    return b"".join(value.detach().cpu().view(torch.uint8).numpy().tobytes() for value in runtime.model.state_dict().values())
