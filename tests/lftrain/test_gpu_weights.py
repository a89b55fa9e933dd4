"""Weights in bf16 beside fp32 masters, on a GPU: the kernel, compiled blocks and a graph, against fp32 weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gpukit
import pytest
import torch
from torch import nn

from lftrain import AdamW, CompileOptions, PrecisionOptions
from lftrain.compute import adamw
from lftrain.compute.masters import HalfLinear, convert

pytestmark = gpukit.MARKS
COMPILED = CompileOptions(blocks=True)


def told(weights: str, **more: Any) -> dict[str, Any]:
    return {"precision": PrecisionOptions(mode="bf16", weights=weights, **more)}  # type: ignore[arg-type]


@pytest.mark.parametrize("graph", [False, True])
def test_a_run_is_that_of_fp32_weights_within_rounding(tmp_path: Path, graph: bool) -> None:
    batches = gpukit.scenes(30)
    parts: dict[str, Any] = {"compile": COMPILED, "graph": gpukit.GRAPH} if graph else {}
    plain = gpukit.trained(tmp_path / "fp32", 30, batches, **told("fp32"), **parts)
    found = gpukit.trained(tmp_path / "compute", 30, batches, **told("compute"), **parts)
    if graph:
        assert gpukit.captured(found) and gpukit.captured(plain)
        assert found.compiled is not None and found.compiled.report()["fallbacks"] == 0
    assert gpukit.losses(tmp_path / "compute") == pytest.approx(gpukit.losses(tmp_path / "fp32"), rel=2e-2)
    halves = [one.weight for one in found.model.modules() if isinstance(one, HalfLinear)]
    assert len(halves) > 20
    for weight in halves:
        assert weight.dtype is torch.bfloat16 and torch.equal(weight, weight.master.bfloat16())  # type: ignore[attr-defined]


def test_skipped_steps_in_a_graph_change_nothing(tmp_path: Path) -> None:
    batches = gpukit.scenes(12)
    batches[8]["action"].fill_(float("inf"))
    found = gpukit.trained(tmp_path, 12, batches, **told("compute"), graph=gpukit.GRAPH)
    assert gpukit.captured(found) and found.watch.skipped == 1
    assert all(bool(one.isfinite().all()) for one in found.model.state_dict().values())


def test_the_kernel_and_torch_s_update_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    made = torch.Generator("cuda").manual_seed(1)
    found = []
    for kernel in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(512, 384, device="cuda"), nn.Linear(8, 8, device="cuda"))
        (large, small) = convert(model, torch.bfloat16)
        optimizer: Any = AdamW(model.parameters(), lr=torch.tensor(1e-2, device="cuda"), fused=True, capturable=True)
        if not kernel:
            monkeypatch.setattr(adamw, "_kernels", lambda: None)
        made.manual_seed(1)
        for number in range(10):
            for one in model.parameters():
                one.grad = torch.randn(one.shape, generator=made, device="cuda").to(one.dtype)
            optimizer.grad_scale, optimizer.found_inf = (
                torch.tensor(4.0, device="cuda"),
                torch.tensor(float(number == 5), device="cuda"),
            )
            optimizer.step()
        for weight in (large, small):
            assert torch.equal(weight, weight.master.bfloat16())  # type: ignore[attr-defined]
            assert int(optimizer.state[weight]["step"]) == 9
        found.append([*model.state_dict().values(), *(optimizer.state[large][name] for name in adamw.AVERAGES)])
    for one, other in zip(*found, strict=True):
        assert one.dtype is torch.float32
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
