"""The graph of the whole step, on a GPU: against eager, what it cannot hold, and what it must survive."""

from __future__ import annotations

import gc
import math
from pathlib import Path
from typing import Any

import gpukit
import pytest
import torch
import trainkit

from lftrain import ActivationOptions, CompileOptions, PrecisionOptions, RunOptions, Runtime
from lftrain.compute import adamw
from lftrain.errors import LossError
from lftrain.options import GraphOptions

pytestmark = gpukit.MARKS


@pytest.fixture(autouse=True)
def fresh() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16"])
def test_a_graph_trains_what_eager_does_over_100_steps(tmp_path: Path, mode: str) -> None:
    precision = PrecisionOptions(mode=mode, clip=0.5, scale_growth_interval=20)  # type: ignore[arg-type]
    eager = gpukit.trained(tmp_path / "eager", 100, precision=precision)
    graphed = gpukit.trained(tmp_path / "graphed", 100, precision=precision, graph=gpukit.GRAPH)
    assert gpukit.captured(graphed) and graphed.graphed is not None and graphed.graphed.replays == 97
    # A step that is skipped has no loss.
    given = ([math.nan if one is None else one for one in gpukit.losses(tmp_path / name)] for name in ("graphed", "eager"))
    found, wanted = (torch.tensor(some) for some in given)
    torch.testing.assert_close(found, wanted, rtol=0.05 if mode != "fp32" else 1e-3, atol=1e-2, equal_nan=True)
    rates = [[line["lr"] for line in gpukit.steps(tmp_path / name)] for name in ("graphed", "eager")]
    assert rates[0] == rates[1] and len(set(rates[0])) > 50
    assert eager.watch.skipped == graphed.watch.skipped
    assert gpukit.alike(eager, graphed)


def test_dropout_in_a_graph_draws_what_eager_draws(tmp_path: Path) -> None:
    batches = [{"x": torch.randn(64, 4), "y": torch.randn(64)} for _ in range(60)]
    found = []
    for name, graph in (("eager", GraphOptions()), ("graphed", gpukit.GRAPH)):
        model = trainkit.make_model(dropout=0.5).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        run = RunOptions(folder=str(tmp_path / name), steps=60, seed=3, device="cuda")
        chosen = trainkit.options(tmp_path / name, 60, run=run, graph=graph)
        runtime = Runtime(model, trainkit.loss, trainkit.Batches(batches), optimizer, chosen)
        runtime.run()
        found.append(torch.tensor(gpukit.losses(tmp_path / name)))
    assert gpukit.captured(runtime)
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)


def test_adamw_in_a_graph_is_that_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large parameters by the kernel, small ones by torch; scaled gradients, skipped steps, a rate that changes."""
    monkeypatch.setattr(adamw, "LARGE", 1 << 12)
    torch.manual_seed(0)
    shapes = [(5001,), (64, 65), (300, 300), (7,)]
    ours, theirs = ([torch.nn.Parameter(torch.randn(shape, device="cuda")) for shape in shapes] for _ in range(2))
    for one, other in zip(ours, theirs, strict=True):
        other.data.copy_(one)
    optimizers: list[Any] = [
        kind(
            [{"params": some[:2], "weight_decay": 0.1}, {"params": some[2:], "weight_decay": 0.0}],
            lr=torch.tensor(1e-2, device="cuda"),
            betas=(0.9, 0.95),
            fused=True,
            capturable=True,
        )
        for kind, some in ((adamw.AdamW, ours), (torch.optim.AdamW, theirs))
    ]
    gradients = [torch.randn_like(one) for one in ours]
    scale, bad = torch.ones((), device="cuda"), torch.zeros((), device="cuda")
    for optimizer, some in zip(optimizers, (ours, theirs), strict=True):
        optimizer.grad_scale, optimizer.found_inf = scale, bad
        for one, gradient in zip(some, gradients, strict=True):
            one.grad = gradient if optimizer is optimizers[0] else gradient.clone()
        # The first makes the state, the second has the kernel compiled, which a capture cannot.
        optimizer.step()
        optimizer.step()
    assert adamw._kernels() is not None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizers[0].step()
    for number in range(30):
        scale.fill_(2.0 ** (number % 5))
        bad.fill_(float(number in (3, 17)))
        optimizers[0].param_groups[0]["lr"].fill_(1e-2 / (1 + number))
        for kept, one in zip(gradients, theirs, strict=True):
            kept.copy_(torch.randn_like(kept) * scale)
            one.grad = kept.clone()
        graph.replay()
        optimizers[1].param_groups[0]["lr"].fill_(1e-2 / (1 + number))
        optimizers[1].step()
        assert all(one.grad is kept for one, kept in zip(ours, gradients, strict=True))
    for one, other in zip(ours, theirs, strict=True):
        # Rounding of 32 steps: by the interpreter on a CPU 2e-6 for parameters, 4e-7 for averages.
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        state, wanted = optimizers[0].state[one], optimizers[1].state[other]
        assert float(state["step"]) == float(wanted["step"]) == 30
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(state[name], wanted[name], rtol=1e-5, atol=2e-6)


def test_a_learning_rate_of_zero_reaches_replayed_steps(tmp_path: Path) -> None:
    batches = gpukit.scenes(20)
    still = gpukit.trained(tmp_path / "still", 20, batches, graph=gpukit.GRAPH, factor=lambda step: float(step < 10))
    short = gpukit.trained(tmp_path / "short", 10, batches, graph=gpukit.GRAPH, factor=lambda step: 1.0)
    assert gpukit.captured(still) and gpukit.captured(short)
    assert gpukit.same(still, short)


def test_micro_batches_are_in_the_graph(tmp_path: Path) -> None:
    precision = PrecisionOptions(clip=0.5)
    batches = gpukit.scenes(60)
    eager = gpukit.trained(tmp_path / "eager", 20, batches, accumulate=3, precision=precision)
    graphed = gpukit.trained(tmp_path / "graphed", 20, batches, accumulate=3, precision=precision, graph=gpukit.GRAPH)
    assert gpukit.captured(graphed) and gpukit.alike(eager, graphed)
    assert gpukit.losses(tmp_path / "graphed") == pytest.approx(gpukit.losses(tmp_path / "eager"), rel=1e-3)


def test_frozen_parts_in_the_compute_type_are_in_the_graph(tmp_path: Path) -> None:
    frozen = {"freeze": ["vision", "language"]}
    graphed = gpukit.trained(tmp_path, 12, model=frozen, precision=PrecisionOptions(mode="bf16"), graph=gpukit.GRAPH)
    assert gpukit.captured(graphed)
    kinds = {one.dtype for one in graphed.model.parameters() if not one.requires_grad}
    assert kinds == {torch.bfloat16}


def test_inf_in_a_replayed_step_is_skipped_and_named(tmp_path: Path) -> None:
    batches = gpukit.scenes(20)
    batches[12]["action"][0, 0, 0] = float("inf")
    graphed = gpukit.trained(tmp_path, 20, batches, graph=GraphOptions(enabled=True))
    assert gpukit.captured(graphed) and graphed.watch.skipped == 1
    (event,) = gpukit.events(tmp_path, "skipped step")
    assert event["step"] == 13


def test_inf_in_a_replayed_step_of_fp16_halves_the_scale_and_changes_nothing(tmp_path: Path) -> None:
    batches = gpukit.scenes(13)
    batches[12]["action"][0, 0, 0] = float("inf")
    precision = PrecisionOptions(mode="fp16", scale_init=256.0)
    bad = gpukit.trained(tmp_path / "bad", 13, batches, precision=precision, graph=gpukit.GRAPH, factor=lambda _: 1.0)
    good = gpukit.trained(tmp_path / "good", 12, batches, precision=precision, graph=gpukit.GRAPH, factor=lambda _: 1.0)
    assert gpukit.captured(bad) and bad.watch.skipped == 1 and good.watch.skipped == 0
    assert float(bad.precision.scale) == 128.0
    assert gpukit.same(bad, good, 1e-2, 1e-4)


@pytest.mark.parametrize("graph", [True, False])
def test_statistics_are_those_of_the_steps_that_count(tmp_path: Path, graph: bool) -> None:
    batches = [{"x": torch.randn(64, 4), "y": torch.randn(64)} for _ in range(12)]
    found = []
    for name, bad in (("without", None), ("with", 8)):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
        ).cuda()
        given = list(batches)
        if bad is not None:
            given.insert(bad, {"x": torch.full((64, 4), math.inf), "y": torch.zeros(64)})
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        run = RunOptions(folder=str(tmp_path / name), steps=len(given), seed=3, device="cuda")
        chosen = trainkit.options(tmp_path / name, len(given), run=run, graph=GraphOptions(enabled=graph))
        runtime = Runtime(model, trainkit.loss, trainkit.Batches(given), optimizer, chosen)
        runtime.run()
        assert not graph or gpukit.captured(runtime)
        assert runtime.watch.skipped == (bad is not None)
        assert int(model[1].num_batches_tracked) == len(batches)  # type: ignore[arg-type]
        found.append([value.clone() for value in (*model.buffers(), *model.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def weighted(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> Any:
    """Another loss than the model's, with a weight that is on the device."""
    pictures, weight = [batch["image"]], batch["weight"][0]
    made = model(
        pictures, batch["tokens"], batch["state"], batch["action"], torch.full((len(batch["state"]),), 0.5, device="cuda")
    )
    return made.float().square().mean() * (weight != 0), weight


@pytest.mark.parametrize("graph", [True, False])
def test_weights_below_one_and_steps_that_count_nothing_need_no_wait(tmp_path: Path, graph: bool) -> None:
    def trained(name: str, unit: float, nothing: int) -> Any:
        batches = gpukit.scenes(20 if nothing else 19)
        for number, batch in enumerate(batches):
            batch["weight"] = torch.full((4,), 0.0 if nothing and number == nothing else unit)
        if nothing:
            batches[nothing + 1 :] = [{**one, "weight": torch.full((4,), unit)} for one in gpukit.scenes(19)[nothing:]]
        return gpukit.trained(
            tmp_path / name,
            len(batches),
            batches,
            the_loss=weighted,
            graph=GraphOptions(enabled=graph, tolerance=1e-2),
            factor=lambda _: 1.0,
        )

    plain, small, empty = trained("plain", 1.0, 0), trained("small", 2.0**-10, 0), trained("empty", 2.0**-10, 12)
    assert not graph or all(gpukit.captured(one) for one in (plain, small, empty))
    assert gpukit.same(plain, small, 1e-2, 1e-4) and gpukit.same(plain, empty, 1e-2, 1e-4)
    assert (plain.watch.skipped, empty.watch.skipped) == (0, 1)
    (event,) = gpukit.events(tmp_path / "empty", "skipped step")
    assert event["step"] == 13 and "nothing that counts" in event["message"]


def test_nothing_is_collected_while_a_step_is_captured(tmp_path: Path) -> None:
    seen: dict[bool, list[bool]] = {True: [], False: []}

    def loss(model: Any, batch: Any) -> Any:
        seen[torch.cuda.is_current_stream_capturing()].append(gc.isenabled())
        return weighted(model, batch)

    batches = [{**one, "weight": torch.ones(4)} for one in gpukit.scenes(8)]
    assert gpukit.captured(
        gpukit.trained(tmp_path, 8, batches, the_loss=loss, graph=GraphOptions(enabled=True, tolerance=1e-2))
    )
    assert seen[True] == [False] and all(seen[False]) and gc.isenabled()


def test_a_count_that_cannot_be_in_a_replayed_step_changes_nothing(tmp_path: Path) -> None:
    batches = gpukit.scenes(20)
    for number, batch in enumerate(batches):
        batch["weight"] = torch.full((4,), -2.0 if number == 12 else 2.0)
    with pytest.raises(LossError, match="step 13: the loss gives a count of -2 in micro-batch 0 of rank 0"):
        gpukit.trained(tmp_path, 20, batches, the_loss=weighted, graph=GraphOptions(enabled=True))


def test_a_shape_outside_of_the_graph_is_told_and_runs(tmp_path: Path) -> None:
    batches = gpukit.scenes(20)
    batches[10] = gpukit.scenes(1, rows=3)[0]
    eager = gpukit.trained(tmp_path / "eager", 20, batches)
    graphed = gpukit.trained(tmp_path / "graphed", 20, batches, graph=GraphOptions(enabled=True))
    assert graphed.graphed is not None and graphed.graphed.replays == 16 and graphed.graphed.eager == 4
    (told,) = gpukit.events(tmp_path / "graphed", "no graph")
    assert "is (3," in told["message"] and "instead of (4," in told["message"]
    assert gpukit.alike(eager, graphed)


def test_shapes_that_differ_all_the_time_are_counted_and_told_now_and_then(tmp_path: Path) -> None:
    batches = [gpukit.scenes(1, rows=4 if number < 5 else 3)[0] for number in range(25)]
    graphed = gpukit.trained(tmp_path, 25, batches, graph=GraphOptions(enabled=True))
    assert gpukit.captured(graphed) and graphed.graphed is not None and graphed.graphed.eager == 3 + 20
    assert len(gpukit.events(tmp_path, "no graph")) == 5  # the 1st, 2nd, 4th, 8th, 16th


def test_a_loss_that_reads_from_the_device_is_not_captured_and_leaves_memory_as_it_was(tmp_path: Path) -> None:
    def reading(model: Any, batch: dict[str, torch.Tensor]) -> Any:
        mean = (
            (model([batch["image"]], batch["tokens"], batch["state"], batch["action"], torch.zeros(4).cuda())).square().mean()
        )
        return mean * (2.0 if float(mean) < -1 else 1.0), 4

    runtime = gpukit.built(tmp_path, 1000, gpukit.scenes(1000), the_loss=reading, graph=GraphOptions(enabled=True))
    runtime.advance(20)
    assert runtime.graphed is not None and not runtime.graphed.captured
    (told,) = gpukit.events(tmp_path, "no graph")
    assert "waits for the device" in told["message"]
    before = torch.cuda.memory_allocated()
    runtime.advance(40)
    assert torch.cuda.memory_allocated() - before < 100_000
    runtime.close()


@pytest.mark.parametrize("how", ["raises", "waits"])
def test_what_fails_only_while_it_is_captured_is_told_and_trains_as_eager(tmp_path: Path, how: str) -> None:
    batches = [{"x": torch.randn(4, 4), "y": torch.randn(4)} for _ in range(8)]

    def odd(model: Any, batch: dict[str, torch.Tensor]) -> Any:
        if torch.cuda.is_current_stream_capturing():
            if how == "raises":
                raise RuntimeError("not in a capture, please")
            torch.cuda.synchronize()
        return trainkit.loss(model, batch)

    found = []
    for name, graph in (("eager", GraphOptions()), ("odd", GraphOptions(enabled=True))):
        model = trainkit.make_model().cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        run = RunOptions(folder=str(tmp_path / name), steps=8, seed=3, device="cuda")
        chosen = trainkit.options(tmp_path / name, 8, run=run, graph=graph)
        runtime = Runtime(model, odd, trainkit.Batches(batches), optimizer, chosen)
        runtime.run()
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
        found.append(runtime)
    # Memory that several streams use is freed, which it is not while torch believes in a capture.
    before, side = torch.cuda.memory_allocated(), torch.cuda.Stream()
    for _ in range(20):
        torch.empty(1 << 20, device="cuda").record_stream(side)
    torch.cuda.synchronize()
    torch.empty(1 << 20, device="cuda")
    assert torch.cuda.memory_allocated() - before < 4 << 20
    (told,) = gpukit.events(tmp_path / "odd", "no graph")
    assert "the capture failed: " + ("not in a capture, please" if how == "raises" else "") in told["message"]
    assert gpukit.same(*found)


def test_experts_are_not_captured_and_train(tmp_path: Path) -> None:
    graphed = gpukit.trained(tmp_path, 8, model={"experts": 4}, graph=GraphOptions(enabled=True))
    assert graphed.graphed is not None and not graphed.graphed.captured and graphed.graphed.eager == 8
    assert len(gpukit.events(tmp_path, "no graph")) == 1


@pytest.mark.parametrize(
    ("kind", "said"),
    [(lambda p: torch.optim.SGD(p, fused=True), "SGD cannot be captured"), (lambda p: torch.optim.AdamW(p), "not fused")],
)
def test_an_optimizer_that_cannot_be_captured_is_named(tmp_path: Path, kind: Any, said: str) -> None:
    model = trainkit.make_model().cuda()
    batches = [{"x": torch.randn(4, 4), "y": torch.randn(4)} for _ in range(8)]
    run = RunOptions(folder=str(tmp_path), steps=6, device="cuda")
    chosen = trainkit.options(tmp_path, 6, run=run, graph=GraphOptions(enabled=True))
    result = Runtime(model, trainkit.loss, trainkit.Batches(batches), kind(model.parameters()), chosen).run()
    (told,) = gpukit.events(tmp_path, "no graph")
    assert result.step == 6 and said in told["message"]


def test_an_evaluation_between_replays_disturbs_nothing(tmp_path: Path) -> None:
    batches, held_out = gpukit.scenes(20), gpukit.scenes(2, rows=3)
    plain = gpukit.trained(tmp_path / "plain", 20, batches, graph=gpukit.GRAPH)
    watched = gpukit.trained(tmp_path / "watched", 20, batches, graph=gpukit.GRAPH, held_out=held_out, held_out_every=5)
    assert gpukit.captured(watched) and gpukit.same(plain, watched)
    found = [line["loss"] for line in gpukit.lines(tmp_path / "watched") if line["kind"] == "held_out"]
    assert len(found) == 4 and len(set(found)) == 4


def test_recomputed_blocks_are_in_the_graph(tmp_path: Path) -> None:
    recomputed = ActivationOptions(mode="all")
    eager = gpukit.trained(tmp_path / "eager", 20)
    graphed = gpukit.trained(tmp_path / "graphed", 20, activations=recomputed, graph=gpukit.GRAPH)
    assert gpukit.captured(graphed) and gpukit.alike(eager, graphed)


def test_compiled_blocks_and_graph_together(tmp_path: Path) -> None:
    parts: dict[str, Any] = {"compile": CompileOptions(blocks=True), "graph": gpukit.GRAPH}
    both = gpukit.trained(tmp_path / "both", 20, precision=PrecisionOptions(mode="bf16"), **parts)
    plain = gpukit.trained(tmp_path / "plain", 20, precision=PrecisionOptions(mode="bf16"))
    assert gpukit.captured(both) and both.compiled is not None and not both.compiled.fallbacks
    assert both.watch.loss == pytest.approx(plain.watch.loss, rel=0.1)
    assert gpukit.alike(both, plain, 0.3)


def test_a_graph_is_captured_while_another_thread_pins_memory(tmp_path: Path) -> None:
    from torch.utils.data import DataLoader

    batches = gpukit.scenes(400)
    loader = DataLoader(batches, batch_size=None, num_workers=1, pin_memory=True)  # type: ignore[arg-type]

    class Pinned(trainkit.Batches):
        def __iter__(self) -> Any:
            yield from loader

    runtime = gpukit.built(tmp_path, 30, batches, graph=GraphOptions(enabled=True))
    runtime.feed._loader = Pinned(batches)
    runtime.run()
    assert gpukit.captured(runtime) and runtime.watch.skipped == 0


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
        assert gpukit.losses(tmp_path / ahead) == pytest.approx(gpukit.losses(tmp_path / plain), rel=1e-4)
        assert gpukit.losses(tmp_path / parts) == pytest.approx(gpukit.losses(tmp_path / plain), rel=1e-4)
