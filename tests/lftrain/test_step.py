"""One step: micro-batches against the big batch, clipping, gradients that are not finite, the scale of fp16."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trainkit
from torch import nn

from lftrain import MetricsOptions, PrecisionOptions, Runtime
from lftrain.errors import ConfigError, LossError, NonFiniteError
from lftrain.runtime.precision import Precision


def ragged(seed: int, sizes: list[int]) -> list[dict[str, torch.Tensor]]:
    """Micro-batches of different numbers of rows."""
    made = torch.Generator().manual_seed(seed)
    return [{"x": torch.randn(size, 4, generator=made), "y": torch.randn(size, generator=made)} for size in sizes]


def joined(batches: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def trained(
    folder: Path, batches: list[dict[str, torch.Tensor]], accumulate: int, optimizer: Any = None, **parts: Any
) -> Runtime:
    """A run over all batches once."""
    model = trainkit.make_model(dropout=0.0)
    made = (optimizer or (lambda p: torch.optim.SGD(p, lr=0.1)))(model.parameters())
    chosen = trainkit.options(folder, len(batches) // accumulate, **parts)
    runtime = Runtime(model, trainkit.loss, trainkit.Batches(batches, accumulate), made, chosen)
    runtime.run()
    return runtime


def events(folder: Path, name: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "event" and line["name"] == name]


def test_ragged_micro_batches_make_the_step_of_the_big_batch(tmp_path: Path) -> None:
    parts = [ragged(1, [1, 9, 2]), ragged(2, [5, 1, 1]), ragged(3, [4, 4, 4])]
    small = trained(tmp_path / "small", [one for three in parts for one in three], 3)
    big = trained(tmp_path / "big", [joined(three) for three in parts], 1)
    for one, other in zip(small.model.parameters(), big.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert small.watch.loss == pytest.approx(big.watch.loss, rel=1e-5)


def test_a_step_is_the_textbook_one(tmp_path: Path) -> None:
    batches = ragged(1, [8, 8, 8])
    found = trained(tmp_path, batches, 1, lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True))
    model = trainkit.make_model(dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for batch in batches:
        optimizer.zero_grad()
        trainkit.loss(model, batch)[0].backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    for one, other in zip(found.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_clipping_comes_after_unscaling(tmp_path: Path) -> None:
    """With a scale of 2^16 a gradient clipped before would be 2^16 times too small."""
    batch = ragged(1, [8])
    plain = trained(tmp_path / "plain", batch, 1, precision=PrecisionOptions(clip=0.01))
    scaled = trained(tmp_path / "scaled", batch, 1, precision=PrecisionOptions(clip=0.01, mode="fp16"))
    start = trainkit.make_model(dropout=0.0)
    for first, one, other in zip(start.parameters(), plain.model.parameters(), scaled.model.parameters(), strict=True):
        torch.testing.assert_close(one - first, other - first, rtol=0.02, atol=1e-6)


@pytest.mark.parametrize("fused", [True, False])
def test_a_step_with_inf_changes_nothing_and_is_named(tmp_path: Path, fused: bool) -> None:
    batches = ragged(1, [4, 4, 4])
    batches[1]["y"][2] = float("inf")
    batches[1]["__index__"] = torch.tensor([7, 8, 9, 10])
    seen: list[bytes] = []

    def watched(model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
        seen.append(trainkit.bits(model))
        return trainkit.loss(model, batch)

    model = trainkit.make_model(dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    runtime = Runtime(model, watched, trainkit.Batches(batches), optimizer, trainkit.options(tmp_path, 3))
    result = runtime.run()
    assert seen[0] != seen[1] == seen[2] != trainkit.bits(model)
    assert {float(state["step"]) for state in optimizer.state.values()} == {2.0}
    assert result.skipped == 1 and result.finished
    (event,) = events(tmp_path, "skipped step")
    assert event["step"] == 2 and event["keys"] == [["7", "8", "9", "10"]]
    assert "'0.weight'" in event["message"]


def test_gradients_too_large_for_their_norm_are_told_as_such(tmp_path: Path) -> None:
    def huge(model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
        mean, rows = trainkit.loss(model, batch)
        return mean * 1e25, rows

    model = trainkit.make_model(dropout=0.0)
    before = trainkit.bits(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    result = Runtime(model, huge, trainkit.Batches(ragged(1, [4])), optimizer, trainkit.options(tmp_path, 1)).run()
    assert all(one.grad is not None and one.grad.isfinite().all() for one in model.parameters())
    assert result.skipped == 1 and trainkit.bits(model) == before
    (event,) = events(tmp_path, "skipped step")
    assert "not finite, or too large for their norm (float32), nothing was changed" in event["message"]


def test_keys_of_the_samples_come_from_the_loader(tmp_path: Path, points: Path) -> None:
    def bad_once(model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
        mean, rows = trainkit.loss(model, batch)
        return mean * (float("nan") if 20 in batch["__index__"] else 1.0), rows

    trainkit.make_runtime(points, trainkit.options(tmp_path, 8), the_loss=bad_once).run()
    (event,) = events(tmp_path, "skipped step")
    assert "point-20" in event["keys"][0] and len(event["keys"][0]) == 8


def test_it_stops_after_so_many_skips_in_a_row(tmp_path: Path) -> None:
    batches = ragged(1, [4] * 6)
    for number in (1, 3, 4, 5):
        batches[number]["y"][0] = float("nan")
    with pytest.raises(NonFiniteError, match="3 steps in a row") as caught:
        trained(tmp_path, batches, 1, precision=PrecisionOptions(max_skips=3))
    assert "step 6" in str(caught.value) and "learning rate" in str(caught.value)


def test_the_scale_follows_that_of_torch() -> None:
    """The same course as torch.amp.GradScaler, over good and bad steps."""
    chosen = PrecisionOptions(mode="fp16", scale_growth_interval=3)
    ours = Precision(chosen, torch.device("cpu"))
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=3)
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for bad in [0, 0, 0, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0]:
        theirs.scale(weight.sum()).backward()
        weight.grad.fill_(float("inf") if bad else 1.0)
        theirs.step(optimizer)
        theirs.update()
        optimizer.zero_grad()
        ours.update(torch.tensor(bool(bad)), torch.tensor(True))
        assert float(ours.scale) == theirs.get_scale()
    assert PrecisionOptions().scale_init == 2.0**16 and PrecisionOptions().scale_growth_interval == 2000


def test_a_scale_that_falls_under_one_stops_the_run(tmp_path: Path) -> None:
    batches = ragged(1, [4] * 6)
    for batch in batches:
        batch["y"].fill_(1e30)
    with pytest.raises(NonFiniteError, match="scale has fallen"):
        trained(tmp_path, batches, 1, precision=PrecisionOptions(mode="fp16", scale_init=4.0))


def test_trained_parameters_in_fp16_are_refused(tmp_path: Path) -> None:
    model = trainkit.make_model().half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="0.weight"):
        Runtime(model, trainkit.loss, trainkit.Batches(ragged(1, [4])), optimizer, trainkit.options(tmp_path, 1))


def test_frozen_parameters_are_kept_in_the_compute_type(tmp_path: Path) -> None:
    model = trainkit.make_model()
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2, fused=True)
    chosen = trainkit.options(tmp_path, 2, precision=PrecisionOptions(mode="bf16"))
    Runtime(model, trainkit.loss, trainkit.Batches(ragged(1, [4])), optimizer, chosen).run()
    assert (model[0].weight.dtype, model[3].weight.dtype) == (torch.bfloat16, torch.float32)


def test_a_parameter_without_a_gradient_gets_zeros(tmp_path: Path) -> None:
    model = trainkit.make_model()
    model.spare = nn.Parameter(torch.ones(3))  # type: ignore[assignment]
    model.forward = lambda x: model[3](model[2](model[1](model[0](x))))  # type: ignore[method-assign]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0, fused=True)
    Runtime(model, trainkit.loss, trainkit.Batches(ragged(1, [4])), optimizer, trainkit.options(tmp_path, 2)).run()
    assert model.spare.grad is not None and not model.spare.grad.any()


def test_an_optimizer_of_other_parameters_is_refused(tmp_path: Path) -> None:
    model = trainkit.make_model()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="3.weight"):
        Runtime(model, trainkit.loss, trainkit.Batches(ragged(1, [4])), optimizer, trainkit.options(tmp_path, 1))


@pytest.mark.parametrize("kind", ["sgd", "adamw", "adam"])
def test_a_first_step_that_is_skipped_leaves_no_trace(tmp_path: Path, kind: str) -> None:
    """torch's fused SGD makes its momentum in the first step, and would fill it with nothing."""
    makers: dict[str, Any] = {
        "sgd": lambda p, fused: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=fused),
        "adamw": lambda p, fused: torch.optim.AdamW(p, lr=1e-2, fused=fused),
        "adam": lambda p, fused: torch.optim.Adam(p, lr=1e-2, fused=fused),
    }
    found = []
    for fused in (True, None):
        batches = ragged(1, [8] * 6)
        batches[0]["x"][0, 0] = float("nan")
        # What is freed is what uninitialised memory holds next.
        junk = [torch.full((4096,), 1e30) for _ in range(50)]
        del junk
        runtime = trained(tmp_path / f"{fused}", batches, 1, lambda p, fused=fused: makers[kind](p, fused))
        assert runtime.watch.skipped == 1
        found.append([one.detach().clone() for one in runtime.model.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_the_loss_of_a_line_is_that_of_steps_that_counted(tmp_path: Path) -> None:
    batches = ragged(1, [8] * 6)
    for number in (1, 2, 5):
        batches[number]["x"][0, 0] = float("nan")
    one = [trained(tmp_path / f"{number}", [batches[number]], 1, lambda p: torch.optim.SGD(p, lr=0.0)) for number in (0, 3, 4)]
    runtime = trained(
        tmp_path / "all",
        batches,
        1,
        lambda p: torch.optim.SGD(p, lr=0.0),
        metrics=MetricsOptions(every=6, live="off", memory_every=0),
    )
    assert runtime.watch.skipped == 3
    lines = [json.loads(line) for line in (tmp_path / "all" / "metrics.jsonl").read_text().splitlines()]
    (line,) = [line for line in lines if line["kind"] == "step"]
    assert line["loss"] == pytest.approx(sum(each.watch.loss for each in one) / 3, rel=1e-5)


def weighted(counts: list[float | torch.Tensor]) -> Any:
    """The mean squared error, counted as told, call by call."""
    told = iter(counts)

    def of(model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
        count = next(told)
        return trainkit.loss(model, batch)[0] * (count != 0), count

    return of


def run_weighted(folder: Path, counts: list[Any], accumulate: int = 1, **parts: Any) -> Runtime:
    batches = ragged(1, [8] * len(counts))
    model = trainkit.make_model(dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=parts.pop("fused", True))
    chosen = trainkit.options(folder, len(counts) // accumulate, **parts)
    runtime = Runtime(model, weighted(counts), trainkit.Batches(batches, accumulate), optimizer, chosen)
    runtime.run()
    return runtime


@pytest.mark.parametrize("mode", ["fp32", "fp16"])
@pytest.mark.parametrize("unit", [1.0, 2.0**-12, 2.0**-80, 2.0**40])
def test_only_how_much_micro_batches_weigh_against_each_other_matters(tmp_path: Path, unit: float, mode: Any) -> None:
    """Also where a step's weights sum up to less than one."""
    precision = PrecisionOptions(mode=mode, clip=None, scale_init=1024.0)
    found = []
    for name, one in (("rows", 8.0), ("weights", unit)):
        runtime = run_weighted(tmp_path / name, [one, 3 * one, one / 2, one] * 3, accumulate=2, precision=precision)
        found.append((runtime.watch.loss, trainkit.bits(runtime.model)))
    assert found[0] == found[1]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("nothing", [0, torch.zeros(())])
def test_a_step_in_which_nothing_counts_is_skipped_and_counted(tmp_path: Path, nothing: Any, fused: bool) -> None:
    for place in range(3):
        counts: list[Any] = [8, 8, 8]
        counts.insert(place, nothing)
        folder = tmp_path / f"{place}"
        precision = PrecisionOptions(mode="fp16", scale_init=64.0, scale_growth_interval=3)
        runtime = run_weighted(folder, counts, precision=precision, fused=fused)
        assert runtime.watch.skipped == 1 and runtime.watch.loss > 0
        assert {float(state["step"]) for state in runtime.optimizer.state.values()} == {3.0}
        # Neither a bad step, which would halve the scale, nor a good one, after which it would have doubled before.
        assert float(runtime.precision.scale) == 128.0
        (event,) = events(folder, "skipped step")
        assert event["step"] == place + 1 and "nothing that counts" in event["message"]
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        losses = [line["loss"] for line in lines if line["kind"] == "step"]
        assert [loss is None for loss in losses] == [number == place for number in range(4)]


def test_steps_without_anything_that_counts_stop_the_run_after_so_many(tmp_path: Path) -> None:
    with pytest.raises(LossError, match="2 steps in a row were skipped.*step 3 has nothing that counts"):
        run_weighted(tmp_path, [8, 0, 0, 8], precision=PrecisionOptions(max_skips=2))


@pytest.mark.parametrize("odd", [-3, float("nan"), float("inf"), torch.tensor(-3.0)])
@pytest.mark.parametrize("place", [0, 3])
def test_a_count_that_cannot_be_is_named_and_changes_nothing(tmp_path: Path, odd: Any, place: int) -> None:
    seen: list[bytes] = []
    counts: list[Any] = [8, 8, 8, 8]
    counts[place] = odd
    told = weighted(counts)

    def watched(model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
        seen.append(trainkit.bits(model))
        return told(model, batch)

    model = trainkit.make_model(dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    runtime = Runtime(model, watched, trainkit.Batches(ragged(1, [8] * 4), 2), optimizer, trainkit.options(tmp_path, 2))
    said = f"step {place // 2 + 1}: the loss gives a count of {float(odd):g} in micro-batch {place % 2} of rank 0"
    with pytest.raises(LossError, match=said):
        runtime.run()
    assert trainkit.bits(model) == seen[-1]


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (lambda mean: mean, "returned Tensor"),
        (lambda mean: (mean, 8, 8), "returned 3 values"),
        (lambda mean: (float(mean), 8), "mean is a float"),
        (lambda mean: (mean * torch.ones(3), 8), r"mean is of shape \(3,\)"),
        (lambda mean: (mean.detach(), 8), "no gradient"),
        (lambda mean: (mean * (1 + 1j), 8), "mean is complex"),
        (lambda mean: (mean, torch.ones(8)), r"count is of shape \(8,\)"),
        (lambda mean: (mean, None), "count is None"),
    ],
)
def test_a_loss_that_returns_something_else_is_told_what_it_should(tmp_path: Path, returned: Any, said: str) -> None:
    def of(model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
        return returned(trainkit.loss(model, batch)[0])

    model = trainkit.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(LossError, match=said):
        Runtime(model, of, trainkit.Batches(ragged(1, [8])), optimizer, trainkit.options(tmp_path, 1)).run()


@pytest.mark.parametrize("odd", [-3.0, float("inf")])
def test_counts_of_held_out_data_are_looked_at_too(tmp_path: Path, odd: float) -> None:
    def of(model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
        return trainkit.loss(model, batch)[0], 8 if model.training else odd

    model = trainkit.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader, held = trainkit.Batches(ragged(1, [8])), ragged(2, [8, 8])
    runtime = Runtime(model, of, loader, optimizer, trainkit.options(tmp_path, 1), held_out=held)
    with pytest.raises(LossError, match=f"held-out data.* count of {odd:g} on rank 0"):
        runtime.run()


def test_an_evaluation_leaves_all_random_numbers_as_they_were(tmp_path: Path) -> None:
    def drawing(network: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
        mean, rows = trainkit.loss(network, batch)
        return mean * (random.random() + float(np.random.rand()) + float(torch.rand(()))), rows

    found = []
    for name, held_out in (("without", None), ("with", ragged(2, [4, 4]))):
        model = trainkit.make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        chosen = trainkit.options(tmp_path / name, 4)
        loader = trainkit.Batches(ragged(1, [8] * 4))
        Runtime(model, drawing, loader, optimizer, chosen, held_out=held_out, held_out_every=1).run()
        found.append(trainkit.bits(model))
    assert found[0] == found[1]
    still = trainkit.make_model()
    optimizer = torch.optim.SGD(still.parameters(), lr=0.0)
    chosen, held_out = trainkit.options(tmp_path / "still", 3), ragged(2, [4, 4])
    Runtime(still, drawing, trainkit.Batches(ragged(1, [8] * 3)), optimizer, chosen, held_out=held_out, held_out_every=1).run()
    lines = [json.loads(line) for line in (tmp_path / "still" / "metrics.jsonl").read_text().splitlines()]
    told = [line["loss"] for line in lines if line["kind"] == "held_out"]
    assert len(told) == 3 and len(set(told)) == 1
