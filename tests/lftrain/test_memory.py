"""Activations under a budget, memory by owner, and the batch plan."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trainkit
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lftrain import ActivationOptions, PrecisionOptions, Runtime
from lftrain.errors import ConfigError
from lftrain.memory.activations import PARTS, Measured, choose, measure, prepare, recompute
from lftrain.memory.ledger import LOOKS, Ledger
from lftrain.runtime.seed import seed_all
from lftrain.runtime.usage import MicroBatches
from lftrain.tune.batch import plan


class Wide(nn.Module):
    """A block that keeps about ``hidden`` numbers a row, with dropout."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(4, hidden), nn.Linear(hidden, 4), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.drop(self.up(x).tanh()))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.out = nn.ModuleList(Wide(hidden) for hidden in (16, 64, 256, 1024)), nn.Linear(4, 1)

    def blocks(self) -> list[nn.Module]:
        return list(self.layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.out(x)  # type: ignore[no-any-return]


def test_bytes_are_those_that_a_block_keeps() -> None:
    model, x = Stack(), torch.randn(10, 4)
    found = measure(model.blocks(), lambda: model(x))
    for one, hidden in zip(found, (16, 64, 256, 1024), strict=True):
        # tanh's output and what dropout gives, float32, and its mask; the block's input and parameters are others'.
        assert 2 * 4 * 10 * hidden <= one.bytes <= 3 * 4 * 10 * hidden
        assert one.ms > 0


def drawn() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def test_measuring_leaves_random_numbers_as_they_were() -> None:
    model, x = Stack(), torch.randn(10, 4)

    def drawing(network: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
        drawn()
        mean, rows = trainkit.loss(network, batch)
        return mean * random.random() * float(np.random.rand()), rows

    usage = MicroBatches(model, drawing, {"x": x, "y": torch.randn(10)}, PrecisionOptions(), torch.device("cpu"))
    for measured in (lambda: measure(model.blocks(), lambda: drawing(model, {"x": x, "y": x[:, 0]})), lambda: usage.bytes(4)):
        seed_all(5)
        wanted = drawn()
        seed_all(5)
        measured()
        assert drawn() == wanted


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 50)), min_size=1, max_size=9),
    st.integers(1, PARTS // 50),
)
def test_the_choice_is_the_best_there_is(blocks: list[tuple[int, int]], budget: int) -> None:
    measured = [Measured(str(number), size, float(ms)) for number, (size, ms) in enumerate(blocks)]
    again = choose(measured, budget)
    kept = [one for number, one in enumerate(measured) if number not in again]
    assert sum(one.bytes for one in kept) <= budget
    # Bytes are rounded up to a part of the budget: at least the best of all choices under the same rounding.
    sizes = [-(-one.bytes * PARTS // budget) for one in measured]
    best = max(
        sum(measured[number].ms for number in chosen)
        for count in range(len(measured) + 1)
        for chosen in itertools.combinations(range(len(measured)), count)
        if sum(sizes[number] for number in chosen) <= PARTS
    )
    assert sum(one.ms for one in kept) >= best


@pytest.mark.parametrize("places", [[0], [3], [0, 1, 2, 3]])
def test_recomputed_blocks_give_the_same_gradients(places: list[int]) -> None:
    x = torch.randn(10, 4)
    gradients = []
    for chosen in ([], places):
        model = Stack()
        recompute(model.blocks(), chosen)
        torch.manual_seed(7)
        model(x).sum().backward()
        gradients.append([one.grad for one in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def trained(points: Path, folder: Path, **parts: Any) -> Runtime:
    model = Stack()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    runtime = Runtime(model, trainkit.loss, trainkit.make_loader(points), optimizer, trainkit.options(folder, 5, **parts))
    runtime.run()
    return runtime


def test_a_run_under_a_budget_is_the_same_run(points: Path, tmp_path: Path) -> None:
    plain = trained(points, tmp_path / "plain")
    tight = trained(points, tmp_path / "tight", activations=ActivationOptions(mode="budget", budget_mb=0.04))
    assert trainkit.bits(plain.model) == trainkit.bits(tight.model)
    lines = [json.loads(line) for line in (tmp_path / "tight" / "metrics.jsonl").read_text().splitlines()]
    (told,) = [line["message"] for line in lines if line.get("name") == "plan"]
    assert "1 of 4 blocks are recomputed" in told


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (ActivationOptions(mode="budget"), "budget_mb"),
        (ActivationOptions(mode="torch"), "compile.blocks"),
    ],
)
def test_options_without_what_they_need_are_refused(
    points: Path, tmp_path: Path, options: ActivationOptions, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        trained(points, tmp_path, activations=options)


def test_the_budget_of_torch_is_set() -> None:
    before = torch._functorch.config.activation_memory_budget
    try:
        told = prepare([], ActivationOptions(mode="torch", torch_budget=0.3), True, lambda: None)
        assert torch._functorch.config.activation_memory_budget == 0.3 and "30%" in told
    finally:
        torch._functorch.config.activation_memory_budget = before


@settings(deadline=None)
@given(st.integers(1, 200), st.floats(1, 1000), st.floats(0, 500), st.floats(0, 100_000))
def test_a_plan_holds_the_batch_and_fits(share: int, each: float, fixed: float, limit: float) -> None:
    def measured(rows: int) -> float:
        return fixed + each * rows

    if measured(1) > limit:
        with pytest.raises(ConfigError, match="one row"):
            plan(share, limit, measured)
        return
    found = plan(share, limit, measured)
    assert found.rows * found.accumulate == share and measured(found.rows) <= limit
    larger = [rows for rows in range(found.rows + 1, share + 1) if share % rows == 0]
    assert all(measured(rows) > limit * (1 - 1e-9) for rows in larger)


def test_a_plan_that_was_promised_too_much_takes_the_next() -> None:
    """Memory that jumps where the line of two small sizes saw nothing of it."""
    assert plan(64, 100.0, lambda rows: rows + (1000.0 if rows > 16 else 0.0)).rows == 16


def test_a_plan_that_takes_less_than_was_promised_takes_more() -> None:
    """Sizes at which a library chooses a way that needs less."""
    assert plan(64, 100.0, lambda rows: rows + (60.0 if rows <= 8 else 0.0)).rows == 64
    assert plan(64, 100.0, lambda rows: 3.0 * rows if rows <= 16 else 1.5 * rows).rows == 64


def test_bytes_of_micro_batches_grow_with_their_rows() -> None:
    batch = {"x": torch.randn(16, 4), "y": torch.randn(16)}
    usage = MicroBatches(Stack(), trainkit.loss, batch, PrecisionOptions(), torch.device("cpu"))
    assert usage.rows == 16
    assert 1.9 < usage.bytes(16) / usage.bytes(8) < 2.1
    with pytest.raises(ConfigError, match="limit_mb"):
        usage.limit(None)
    with pytest.raises(ConfigError, match="'offsets'"):
        MicroBatches(Stack(), trainkit.loss, {**batch, "offsets": torch.zeros(17)}, PrecisionOptions(), torch.device("cpu"))


def test_memory_has_owners(points: Path, tmp_path: Path) -> None:
    model = Stack()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    found = Ledger(model, optimizer, trainkit.make_loader(points), torch.device("cpu"), 1.0).look()
    size = sum(one.nbytes for one in model.parameters()) / 1e6
    assert found["parameters"] == pytest.approx(size, abs=0.01) and found["gradients"] == pytest.approx(size, abs=0.01)
    assert found["optimizer"] == pytest.approx(2 * size, abs=0.01)
    assert found["host"] > 50


@pytest.mark.parametrize(
    ("course", "owner"),
    [
        ([float(10 * look) for look in range(LOOKS)], True),
        ([100.0, *([5.0] * LOOKS)], False),
        ([0.0, 90.0, *([90.0] * LOOKS)], False),
        ([float(look % 3 * 50) for look in range(3 * LOOKS)], False),
        ([0.1 * look for look in range(3 * LOOKS)], False),
    ],
)
def test_growth_that_never_falls_is_told_and_nothing_else(course: list[float], owner: bool) -> None:
    model = Stack()
    ledger = Ledger(model, torch.optim.SGD(model.parameters()), None, torch.device("cpu"), 50.0)
    told = [grown for value in course for grown in ledger.grown({"leak": value, "still": 3.0})]
    assert [name for name, _ in told] == (["leak"] if owner else [])


def test_measuring_is_no_training_for_buffers(tmp_path: Path) -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
            self.out = nn.Linear(4, 1)

        def blocks(self) -> list[nn.Module]:
            return [self.inner]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.inner(x))  # type: ignore[no-any-return]

    found = []
    for name, activations in (("none", ActivationOptions()), ("budget", ActivationOptions(mode="budget", budget_mb=1000.0))):
        torch.manual_seed(0)
        model = Normed()
        batches = [
            {"x": torch.randn(8, 4, generator=torch.Generator().manual_seed(one)), "y": torch.zeros(8)} for one in range(3)
        ]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        chosen = trainkit.options(tmp_path / name, 3, activations=activations)
        Runtime(model, trainkit.loss, trainkit.Batches(batches), optimizer, chosen).run()
        found.append(model.state_dict())
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())
    assert int(found[0]["inner.1.num_batches_tracked"]) == 3
    model = Normed()
    usage = MicroBatches(
        model, trainkit.loss, {"x": torch.randn(8, 4), "y": torch.zeros(8)}, PrecisionOptions(), torch.device("cpu")
    )
    usage.bytes(4)
    assert int(model.inner[1].num_batches_tracked) == 0  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [1, 3, 7, 32])
def test_all_blocks_that_fit_exactly_are_kept(count: int) -> None:
    blocks = [Measured(f"b{number}", 1_000_001, 1.0) for number in range(count)]
    assert choose(blocks, count * 1_000_001) == []
    # Of blocks of which one does not fit, no more than that is given up.
    assert len(choose(blocks, count * 1_000_001 - 1)) == 1


def test_state_that_is_no_tensor_is_told_before_the_first_step(tmp_path: Path) -> None:
    class Counting(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"calls": 3}

    model = nn.Sequential(Counting(4, 1))
    with pytest.raises(ConfigError, match=r"module '0' \(Counting\).*get_extra_state"):
        Runtime(
            model,
            trainkit.loss,
            trainkit.Batches([]),
            torch.optim.SGD(model.parameters(), lr=0.1),
            trainkit.options(tmp_path, 1),
        )
