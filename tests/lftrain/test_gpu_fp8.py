"""Frozen linear layers in fp8 on a GPU: the CPU's numbers, compiled, in a graph of the step, with gradients passing through."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import gpukit
import pytest
import torch
from torch import nn

from lftrain import ActivationOptions, CheckpointOptions, CompileOptions, GraphOptions, PrecisionOptions
from lftrain.compute.fp8 import Fp8Linear, convert, lacking
from lftrain.errors import ConfigError
from lftrain.models import make
from lftrain.options import ModelOptions
from lftrain.runtime.precision import Precision

DEVICE = torch.device("cuda", 0)
HAS = torch.cuda.is_available() and not lacking(DEVICE)
pytestmark = gpukit.MARKS
float8 = pytest.mark.skipif(not HAS, reason="a GPU without float8")
FROZEN = {"freeze": ["vision", "language"]}
FP8 = PrecisionOptions(mode="bf16", frozen="fp8")
# Wider than gpukit's: what differs by a bit of bf16 may be rounded to another number of three bits.
GRAPH = GraphOptions(enabled=True, tolerance=5e-2)
COMPILED = CompileOptions(blocks=True, dynamic=False)


@pytest.fixture(autouse=True)
def fresh() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def relative(one: torch.Tensor, other: torch.Tensor) -> float:
    first, second = one.detach().double().cpu(), other.detach().double().cpu()
    return float((first - second).norm() / second.norm())


def both(linear: nn.Linear, mode: str) -> list[tuple[nn.Module, Precision]]:
    """The layer in fp8 on the CPU and on the GPU."""
    found = []
    for device in (torch.device("cpu"), DEVICE):
        model = nn.Sequential(copy.deepcopy(linear)).to(device)
        precision = Precision(PrecisionOptions(mode=mode, frozen="fp8"), device)  # type: ignore[arg-type]
        precision.prepare(model)
        found.append((model, precision))
    return found


@float8
@pytest.mark.parametrize("mode", ["bf16", "fp16"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 5, 320])
def test_a_layer_gives_what_the_emulation_gives(mode: str, bias: bool, rows: int) -> None:
    torch.manual_seed(0)
    (plain, first), (model, second) = both(nn.Linear(1024, 768, bias=bias).requires_grad_(False), mode)
    ours, theirs = plain[0], model[0]
    assert isinstance(ours, Fp8Linear) and isinstance(theirs, Fp8Linear)
    assert torch.equal(theirs.weight.cpu(), ours.weight) and torch.equal(theirs.scale.cpu(), ours.scale)
    x = torch.randn(rows, 1, 1024)
    with first.autocast():
        wanted = plain(x)
    with second.autocast():
        found = model(x.cuda())
    assert found.shape == wanted.shape and found.dtype is wanted.dtype is first.type
    assert not rows or relative(found, wanted) < 1e-2


@float8
@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_pass_through_as_on_a_cpu(compiled: bool) -> None:
    torch.manual_seed(0)
    x, gradient = torch.randn(320, 512), torch.randn(320, 256).bfloat16()
    found = []
    for model, precision in both(nn.Linear(512, 256).requires_grad_(False), "bf16"):
        rows = x.clone().to(precision.device).requires_grad_()
        run = torch.compile(model, fullgraph=True) if compiled and precision.device.type == "cuda" else model
        with precision.autocast():
            run(rows).backward(gradient.to(precision.device))
        found.append(rows.grad)
    assert found[0] is not None and found[1] is not None and relative(found[1], found[0]) < 1e-2


@float8
@pytest.mark.parametrize("mode", ["bf16", "fp16"])
def test_compiled_blocks_in_a_graph_train_as_eager(tmp_path: Path, mode: str) -> None:
    told: dict[str, Any] = {"model": FROZEN, "precision": PrecisionOptions(mode=mode, frozen="fp8", scale_init=1024.0)}  # type: ignore[arg-type]
    batches = gpukit.scenes(20)
    eager = gpukit.trained(tmp_path / "eager", 20, batches, **told)
    graphed = gpukit.trained(tmp_path / "graphed", 20, batches, compile=COMPILED, graph=GRAPH, **told)
    assert gpukit.captured(graphed) and graphed.compiled is not None
    assert graphed.compiled.report()["fallbacks"] == 0
    assert gpukit.losses(tmp_path / "graphed") == pytest.approx(gpukit.losses(tmp_path / "eager"), rel=0.1)
    assert sum(isinstance(one, Fp8Linear) for one in graphed.model.modules()) == 19
    assert gpukit.alike(eager, graphed)


@float8
def test_what_is_trained_before_what_is_frozen_learns(tmp_path: Path) -> None:
    told: dict[str, Any] = {"model": {"freeze": ["language"]}, "precision": FP8}
    recomputed = ActivationOptions(mode="all")
    found = gpukit.trained(tmp_path, 20, compile=COMPILED, graph=GRAPH, activations=recomputed, **told)
    assert gpukit.captured(found) and found.compiled is not None and found.compiled.report()["fallbacks"] == 0
    first, _ = start()
    now, before = found.model.get_parameter("vision.embed.weight"), first.get_parameter("vision.embed.weight")
    assert now.requires_grad and 0 < relative(now, before) < 1


def start() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return make(ModelOptions(kind="vla"))


@float8
def test_a_checkpoint_keeps_the_originals_and_goes_on_without_fp8(tmp_path: Path) -> None:
    batches, keep = gpukit.scenes(12), CheckpointOptions(every=4)
    told: dict[str, Any] = {"model": FROZEN, "checkpoint": keep, "graph": GRAPH, "factor": lambda _: 1.0}
    gpukit.trained(tmp_path, 8, batches, precision=FP8, **told)
    plain = gpukit.trained(tmp_path, 12, batches, precision=PrecisionOptions(mode="bf16"), **told)
    first, _ = start()
    for name, one in plain.model.named_parameters():
        if not one.requires_grad:
            assert torch.equal(one.cpu(), first.get_parameter(name).bfloat16()), name
    again = gpukit.trained(tmp_path, 16, gpukit.scenes(16), precision=FP8, **told)
    assert again.step == 16 and gpukit.captured(again)


@float8
def test_weights_take_half_the_memory(tmp_path: Path) -> None:
    sizes = {}
    for frozen in ("compute", "fp8"):
        precision = PrecisionOptions(mode="bf16", frozen=frozen)  # type: ignore[arg-type]
        runtime = gpukit.built(tmp_path / frozen, 1, model={**FROZEN, "language_width": 512}, precision=precision)
        sizes[frozen] = sum(one.nbytes for one in runtime.model.parameters() if not one.requires_grad)
        assert all(one.is_cuda for one in runtime.model.parameters())
        runtime.close()
    assert 0.5 < sizes["fp8"] / sizes["compute"] < 0.6


@pytest.mark.skipif(HAS, reason="a GPU with float8")
def test_a_gpu_without_float8_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"8\.9"):
        convert(nn.Sequential(nn.Linear(32, 32).cuda().requires_grad_(False)), torch.bfloat16, DEVICE)
