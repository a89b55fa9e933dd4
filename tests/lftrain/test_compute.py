"""Compiled blocks and the graph of the step, as far as a CPU goes: the same numbers, counted, and never silently eager."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import runkit
import torch
import trainkit
from torch import nn

from lftrain import AdamW, CompileOptions, GraphOptions, Runtime
from lftrain.build import optimizer
from lftrain.compute.compile import CompiledBlocks
from lftrain.compute.graph import _why
from lftrain.errors import ConfigError
from lftrain.options import OptimizerOptions

EAGER = CompileOptions(blocks=True, backend="eager")


class Layer(nn.Module):
    """A block; ``odd`` makes it one that cannot be traced."""

    def __init__(self, odd: bool = False) -> None:
        super().__init__()
        self.inner, self.odd = nn.Linear(4, 4), odd

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.odd and float(x.sum()) > 1e9:
            return x
        return x + self.inner(x).tanh()


class Stack(nn.Module):
    def __init__(self, odd: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.out = nn.ModuleList([Layer(), Layer(odd), Layer()]), nn.Linear(4, 1)

    def blocks(self) -> list[nn.Module]:
        return list(self.layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.out(x)  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def fresh() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def trained(points: Path, folder: Path, model: nn.Module, **parts: Any) -> Runtime:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    runtime = Runtime(model, trainkit.loss, trainkit.make_loader(points), optimizer, trainkit.options(folder, 6, **parts))
    runtime.run()
    return runtime


def test_compiled_blocks_train_the_same_model(points: Path, tmp_path: Path) -> None:
    plain = trained(points, tmp_path / "plain", Stack())
    compiled = trained(points, tmp_path / "compiled", Stack(), compile=EAGER)
    for one, other in zip(plain.model.parameters(), compiled.model.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    assert plain.model.state_dict().keys() == compiled.model.state_dict().keys()
    last = [line for line in lines(tmp_path / "compiled") if line["kind"] == "step"][-1]
    assert last["compile"]["fallbacks"] == 0 and last["compile"]["compilations"] >= 1


def test_a_block_that_cannot_be_traced_is_told_and_runs(points: Path, tmp_path: Path) -> None:
    plain = trained(points, tmp_path / "plain", Stack())
    compiled = trained(points, tmp_path / "compiled", Stack(odd=True), compile=EAGER)
    for one, other in zip(plain.model.parameters(), compiled.model.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    told = [line for line in lines(tmp_path / "compiled") if line.get("name") == "eager block"]
    assert len(told) == 1 and "Layer 1" in told[0]["message"]
    assert [line for line in lines(tmp_path / "compiled") if line["kind"] == "step"][-1]["compile"]["fallbacks"] == 1


def test_too_many_shapes_are_told_and_run() -> None:
    told: list[str] = []
    blocks = [Layer()]
    options = CompileOptions(blocks=True, backend="eager", dynamic=False, limit=3)
    compiled = CompiledBlocks(blocks, options, lambda name, message, **_: told.append(message))
    for rows in range(2, 9):
        assert blocks[0](torch.randn(rows, 4)).shape == (rows, 4)
    assert compiled.report() == {"compilations": 3, "fallbacks": 1}
    assert len(told) == 1 and "bucket the lengths" in told[0]


def test_one_compilation_for_all_shapes_where_it_is_asked_for() -> None:
    blocks = [Layer()]
    compiled = CompiledBlocks(blocks, CompileOptions(blocks=True, backend="eager", dynamic=True), lambda *_, **__: None)
    for rows in range(2, 9):
        blocks[0](torch.randn(rows, 4))
    assert compiled.report() == {"compilations": 1, "fallbacks": 0}


def test_a_second_run_of_a_process_uses_what_the_first_compiled() -> None:
    counts = []
    for _ in range(4):
        blocks = [Layer()]
        options = CompileOptions(blocks=True, backend="eager", limit=2)
        compiled = CompiledBlocks(blocks, options, lambda *_, **__: None)
        blocks[0](torch.randn(3, 4))
        counts.append(compiled.report())
    assert counts == [{"compilations": 1, "fallbacks": 0}, *([{"compilations": 0, "fallbacks": 0}] * 3)]


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on a CPU")
def test_inductor_gives_the_gradients_of_eager() -> None:
    plain, compiled = Stack(), Stack()
    told: list[str] = []
    guard = CompiledBlocks(compiled.blocks(), CompileOptions(blocks=True), lambda name, message, **_: told.append(message))
    for model in (plain, compiled):
        for rows in (3, 5, 6):
            model(torch.linspace(-1, 1, 4 * rows).view(rows, 4)).square().mean().backward()
    for one, other in zip(plain.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    # Once for the first size and once for all others; what comes into the first block needs no gradient, what comes into others does.
    assert guard.report() == {"compilations": 4, "fallbacks": 0} and not told


def test_a_compiler_that_is_not_there_is_told_and_the_block_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", ("no-such-compiler",))
    monkeypatch.setattr(torch._inductor.config, "fx_graph_cache", False)
    told: list[str] = []
    plain, compiled = Layer(), Layer()
    compiled.load_state_dict(plain.state_dict())
    CompiledBlocks([compiled], CompileOptions(blocks=True), lambda name, message, **_: told.append(message))
    x = torch.randn(3, 7, 4)
    torch.testing.assert_close(compiled(x), plain(x))
    assert len(told) == 1 and "Layer 0" in told[0]


def test_what_cannot_be_compiled_at_all_is_refused(points: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="blocks"):
        trained(points, tmp_path, trainkit.make_model(), compile=EAGER)
    with pytest.raises(ConfigError, match="inductr"):
        trained(points, tmp_path, Stack(), compile=CompileOptions(blocks=True, backend="inductr"))


def test_without_a_gpu_the_step_is_eager_with_the_reason(points: Path, tmp_path: Path) -> None:
    plain = trained(points, tmp_path / "plain", Stack())
    graphed = trained(points, tmp_path / "graphed", Stack(), graph=GraphOptions(enabled=True))
    assert trainkit.bits(plain.model) == trainkit.bits(graphed.model)
    (told,) = [line for line in lines(tmp_path / "graphed") if line.get("name") == "no graph"]
    assert "there is no GPU" in told["message"]
    last = [line for line in lines(tmp_path / "graphed") if line["kind"] == "step"][-1]
    assert last["graph"] == {"replays": 0, "eager": 6}


def test_the_reason_of_a_failed_capture_is_the_first_failure_and_says_what_to_look_for() -> None:
    try:
        try:
            raise RuntimeError("no such operation in a capture\nmore of it")
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")
    except RuntimeError as error:
        assert _why(error) == "the capture failed: no such operation in a capture"
    told = _why(RuntimeError("called a synchronizing CUDA operation"))
    assert "waits for the device" in told and ".item()" in told


def test_an_optimizer_that_is_not_fused_is_left_to_torch() -> None:
    for kind in ("adamw", "sgd"):
        made = optimizer(Stack(), OptimizerOptions(kind=kind, fused=False))  # type: ignore[arg-type]
        # False would be a loop over the parameters on a GPU.
        assert all(group["fused"] is None and group["foreach"] is None for group in made.param_groups)
        assert all(group["fused"] for group in optimizer(Stack(), OptimizerOptions(kind=kind)).param_groups)  # type: ignore[arg-type]


def test_the_optimizers_kernel_computes_adamw(tmp_path: Path) -> None:
    """By Triton's interpreter, where Triton is."""
    pytest.importorskip("triton")
    environment = {**runkit.environment(), "TRITON_INTERPRET": "1"}
    script = Path(__file__).with_name("adamwcheck.py")
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


def test_on_a_cpu_adamw_is_that_of_torch() -> None:
    models = [Stack(), Stack()]
    made: list[torch.optim.Optimizer] = [
        AdamW(models[0].parameters(), lr=1e-2, fused=True),
        torch.optim.AdamW(models[1].parameters(), lr=1e-2, fused=True),
    ]
    for number in range(5):
        x = torch.full((3, 4), float(number))
        for model, one in zip(models, made, strict=True):
            one.zero_grad()
            model(x).square().mean().backward()
            one.step()
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)
    made[1].load_state_dict(made[0].state_dict())
    options = OptimizerOptions(lr=1e-3)
    assert type(optimizer(models[0], options)) is AdamW


def test_hooks_of_adamw_are_called_once_a_step() -> None:
    model = Stack()
    torch.optim.AdamW(model.parameters())  # has torch's own step call hooks
    torch.optim.Adam(model.parameters())
    one, calls = AdamW(model.parameters(), lr=1e-2), []
    one.register_step_pre_hook(lambda *_: calls.append("before"))
    one.register_step_post_hook(lambda *_: calls.append("after"))
    model(torch.ones(3, 4)).sum().backward()
    before = [value.detach().clone() for value in model.parameters()]
    one.step()
    assert calls == ["before", "after"]
    assert not any(torch.equal(value, other) for value, other in zip(model.parameters(), before, strict=True))
