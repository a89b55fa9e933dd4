"""Buffers of a model: as they were, after a step that is skipped."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import trainkit
from torch import nn

from lftrain import Runtime
from lftrain.runtime.buffers import Buffers


def made(sizes: list[int]) -> list[dict[str, torch.Tensor]]:
    """Micro-batches of so many rows."""
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(size, 4, generator=generator), "y": torch.randn(size, generator=generator)} for size in sizes]


class Counting(nn.Module):
    """Buffers of many kinds: statistics, a counter, a flag, one that is made anew each time, one not in checkpoints, tables that stay."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("odd", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("anew", torch.ones(2, 2))
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64), persistent=False)
        self.register_buffer("table", torch.arange(6.0))
        self.register_buffer("wide", torch.ones(1).expand(5))
        self.register_buffer("none", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, 4) -> (B, 1)."""
        if self.training:
            self.seen += len(x)
            self.odd.logical_not_()
            self.anew = self.anew * 2 + x.detach().sum()
            self.mean.lerp_(x.detach().mean(0).double(), 0.1)
        return self.last(torch.tanh(self.norm(self.first(x)))) * self.wide[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("how", ["inf", "nothing"])
@pytest.mark.parametrize("place", [0, 2])
def test_a_skipped_step_leaves_buffers_as_they_were(tmp_path: Path, place: int, how: str, fused: bool) -> None:
    seen: list[dict[str, torch.Tensor]] = []
    model = Counting()

    def watched(network: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
        seen.append({name: value.clone() for name, value in model.named_buffers()})
        mean, rows = trainkit.loss(network, batch)
        return (mean * 0, 0) if how == "nothing" and len(seen) - 1 in (2 * place, 2 * place + 1) else (mean, rows)

    batches = made([8] * 8)
    if how == "inf":
        batches[2 * place]["x"][0, 0] = float("inf")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    result = Runtime(model, watched, trainkit.Batches(batches, 2), optimizer, trainkit.options(tmp_path, 4)).run()
    assert result.skipped == 1
    befores = [*seen[::2], dict(model.named_buffers())]
    for name in befores[0]:
        for step, (before, after) in enumerate(pairwise(befores)):
            # The flag turns twice in a step.
            same = step == place or name in ("table", "wide", "odd")
            assert torch.equal(before[name], after[name]) == same, (name, step)
    assert int(model.seen) == 3 * 2 * 8
    assert all(torch.isfinite(value).all() for value in model.buffers())


def test_a_buffer_that_is_first_written_to_later_is_put_back_from_then_on(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 1))
    model.register_buffer("late", torch.zeros(2))
    calls: list[int] = []

    def late(network: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
        calls.append(len(calls))
        if calls[-1]:
            model.late += 1
        mean, rows = trainkit.loss(network, batch)
        return (mean * 0, 0) if calls[-1] == 2 else (mean, rows)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Runtime(model, late, trainkit.Batches(made([4] * 4)), optimizer, trainkit.options(tmp_path, 4)).run()
    assert model.late.tolist() == [2.0, 2.0]


def test_only_buffers_that_steps_change_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    joined_by_torch = torch.cat

    def counted(values: Any) -> torch.Tensor:
        joined = joined_by_torch(values)
        copied.append(joined.numel())
        return joined

    monkeypatch.setattr(torch, "cat", counted)
    model, x = Counting(), torch.randn(8, 4)
    buffers = Buffers(model)
    sums = []
    for _ in range(3):
        copied.clear()
        buffers.keep()
        sums.append(sum(copied))
        model(x)
        buffers.restore(torch.tensor(False))
    assert sums == [8 + 8 + 1 + 1 + 3 + 4 + 4 + 6] + [8 + 8 + 1 + 1 + 3 + 4 + 4] * 2
    copied.clear()
    plain = Buffers(trainkit.make_model())
    plain.keep()
    plain.restore(torch.tensor(True))
    assert plain.tensors() == copied == []
