"""Frozen linear layers in fp8: their numbers, what is stored, what is refused, and that everything else of a run goes on as before."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runkit
import torch
import trainkit
from torch import nn

from lftrain import ActivationOptions, CheckpointOptions, CompileOptions, PrecisionOptions, Runtime
from lftrain.compute.fp8 import Fp8Linear, convert, lacking, product, quantized
from lftrain.errors import CheckpointError, ConfigError
from lftrain.models import make
from lftrain.options import ModelOptions
from lftrain.runtime.precision import Precision

CPU = torch.device("cpu")
FP8 = PrecisionOptions(mode="bf16", frozen="fp8")
FROZEN = {"freeze": ["vision", "language"]}


@pytest.fixture(autouse=True)
def fresh() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Stack(nn.Module):
    """Trained, two frozen blocks, trained: gradients pass through what is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into, self.out = nn.Linear(4, 32), nn.Linear(32, 1)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 48), nn.SiLU(), nn.Linear(48, 32, bias=False)) for _ in range(2)
        )
        self.layers.requires_grad_(False)

    def blocks(self) -> list[nn.Module]:
        return list(self.layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.into(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.out(x)  # type: ignore[no-any-return]


def prepared(model: nn.Module, mode: str = "bf16", frozen: str = "fp8") -> Precision:
    found = Precision(PrecisionOptions(mode=mode, frozen=frozen), CPU)  # type: ignore[arg-type]
    found.prepare(model)
    return found


def layers(model: nn.Module) -> list[Fp8Linear]:
    return [one for one in model.modules() if isinstance(one, Fp8Linear)]


def dequantized(layer: Fp8Linear) -> torch.Tensor:
    return layer.weight.view(torch.float8_e4m3fn).float() * layer.scale[:, None]


def relative(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


# -- numbers ----------------------------------------------------------------------------------------------------------


def e4m3(values: np.ndarray) -> np.ndarray:
    """Rounded to 3 bits of mantissa, exponents from -6, ties to even: float64."""
    wide = values.astype(np.float64)
    _, exponent = np.frexp(wide)
    unit = np.exp2(np.maximum(exponent - 1, -6) - 3.0)
    return np.clip(np.rint(wide / unit) * unit, -448, 448)  # type: ignore[no-any-return]


def by_rows(values: torch.Tensor) -> np.ndarray:
    """Quantised by row and multiplied back: float64."""
    plain = values.float().numpy()
    scale = np.abs(plain).max(1, keepdims=True) * np.float32(1 / 448)
    return e4m3(plain / scale) * scale.astype(np.float64)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
def test_the_product_is_that_of_the_quantised_rows(kind: torch.dtype, bias: bool) -> None:
    torch.manual_seed(1)
    linear = nn.Linear(96, 80, bias=bias).requires_grad_(False)
    # Rows of very different sizes, and small numbers beside large ones: subnormal in float8.
    rows = (torch.randn(40, 96) * torch.logspace(-3, 3, 40)[:, None] * torch.logspace(-6, 0, 96)).to(kind)
    model = nn.Sequential(linear)
    prepared(model, "bf16" if kind is torch.bfloat16 else "fp16")
    weight = by_rows(layers(model)[0].original)
    wanted = by_rows(rows) @ weight.T + (linear.bias.double().numpy() if bias else 0.0)
    with torch.autocast("cpu", kind):
        found = model(rows)
    assert found.dtype is kind
    least = torch.finfo(kind).smallest_normal * torch.finfo(kind).eps
    bound = least + torch.finfo(kind).eps * np.abs(wanted) + 1e-6 * (np.abs(by_rows(rows)) @ np.abs(weight.T))
    assert (np.abs(found.double().numpy() - wanted) <= bound).all()


def test_torch_multiplies_the_same_rows_to_the_same() -> None:
    torch.manual_seed(1)
    rows, weight = torch.randn(40, 96), torch.randn(80, 96)
    (values, scales), (weights, scale) = quantized(rows), quantized(weight)
    try:
        wanted = torch._scaled_mm(values, weights.t(), scales, scale.t(), out_dtype=torch.bfloat16)
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"this torch does not on a CPU: {error}")
    found = product(rows, weights.view(torch.uint8), scale[:, 0], None, torch.bfloat16)
    torch.testing.assert_close(found, wanted, rtol=2**-7, atol=1e-3)


def test_the_error_is_that_of_three_bits() -> None:
    torch.manual_seed(1)
    linear = nn.Linear(512, 256).requires_grad_(False)
    rows, plain = torch.randn(64, 512), copy.deepcopy(linear)
    model = nn.Sequential(linear)
    with prepared(model).autocast():
        found = model(rows)
    # Each factor is off by 2.6 % (half a unit of 3 bits, spread evenly), a sum of products by the root of twice its square.
    assert 0.02 < relative(found, plain(rows)) < 0.06


def test_rows_with_inf_or_nan_are_nan_and_others_untouched() -> None:
    model = nn.Sequential(nn.Linear(32, 16).requires_grad_(False))
    precision, rows = prepared(model), torch.randn(4, 32)
    with precision.autocast():
        plain = model(rows)
        rows[1, 3], rows[2, 4] = float("inf"), float("nan")
        found = model(rows)
    assert found[1:3].isnan().all() and torch.equal(found[[0, 3]], plain[[0, 3]])


def test_zeros_and_no_rows_at_all() -> None:
    model = nn.Sequential(nn.Linear(32, 16, bias=False).requires_grad_(False))
    with prepared(model).autocast():
        assert not model(torch.zeros(2, 3, 32)).any() and model(torch.zeros(2, 3, 32)).shape == (2, 3, 16)
        assert model(torch.zeros(0, 32)).shape == (0, 16)
        with pytest.raises(RuntimeError, match="shapes|size"):
            model(torch.zeros(2, 64))


# -- gradients --------------------------------------------------------------------------------------------------------


def test_a_gradient_passes_through_as_by_the_quantised_weights() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(96, 80).requires_grad_(False))
    precision, rows = prepared(model), torch.randn(40, 96, requires_grad=True)
    with precision.autocast():
        found = model(rows)
    gradient = torch.randn_like(found)
    found.backward(gradient)
    assert rows.grad is not None and rows.grad.dtype is torch.float32
    wanted = gradient.double() @ dequantized(layers(model)[0]).double()
    assert relative(rows.grad, wanted) < 2**-7
    assert all(one.grad is None for one in model.parameters())


@pytest.mark.parametrize("freeze", [["vision", "language"], ["vision"]])
def test_gradients_of_what_is_trained_are_those_of_the_quantised_weights(freeze: list[str]) -> None:
    torch.manual_seed(0)
    model, loss = make(ModelOptions(kind="vla", options={"freeze": freeze}))
    other = copy.deepcopy(model)
    precision = prepared(model)
    assert len(layers(model)) == (19 if "language" in freeze else 9)
    places = {name: one for name, one in model.named_modules() if isinstance(one, Fp8Linear)}
    for name, one in other.named_modules():
        if name in places:
            one.weight.data = dequantized(places[name])  # type: ignore[union-attr]
    prepared(other, frozen="compute")
    for network in (model, other):
        torch.manual_seed(1)
        with precision.autocast():
            loss(network, scene())[0].backward()
    trained = [one for one in model.parameters() if one.requires_grad]
    wanted = [one for one in other.parameters() if one.requires_grad]
    found, exact = (torch.cat([one.grad.flatten() for one in each if one.grad is not None]) for each in (trained, wanted))
    # The rounding of activations alone is left.
    assert 0 < relative(found, exact) < 0.1


def scene(rows: int = 8) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(1)
    return {
        "image": torch.randint(0, 256, (rows, 32, 32, 3), generator=made, dtype=torch.uint8),
        "tokens": torch.randint(1, 256, (rows, 6), generator=made),
        "state": torch.randn(rows, 2, generator=made),
        "action": torch.randn(rows, 8, 2, generator=made),
    }


def test_a_model_acts_and_is_near_to_what_it_was() -> None:
    torch.manual_seed(0)
    model, _ = make(ModelOptions(kind="vla", options=FROZEN))
    other, batch = copy.deepcopy(model), scene()
    found = []
    for network, frozen in ((model, "fp8"), (other, "compute")):
        precision = prepared(network, frozen=frozen)
        torch.manual_seed(2)
        with precision.autocast():
            found.append(network.act([batch["image"]], batch["tokens"], batch["state"]))
    assert found[0].shape == (8, 8, 2) and 0 < relative(*found) < 0.1


# -- which layers -----------------------------------------------------------------------------------------------------


class Own(nn.Linear):
    pass


def test_only_plain_frozen_layers_of_their_own_are_converted_and_the_others_named() -> None:
    shared, tied, patched = nn.Linear(16, 16), nn.Linear(16, 32, bias=False), nn.Linear(16, 16)
    table = nn.Embedding(32, 16)
    tied.weight = table.weight
    patched.forward = lambda input: input  # type: ignore[method-assign]
    half = nn.Linear(16, 16)
    parts = {
        "plain": nn.Linear(16, 32), "one": shared, "other": shared, "table": table, "tied": tied, "own": Own(16, 16),
        "patched": patched, "odd": nn.Linear(24, 16), "wide": nn.Linear(16, 16).double(), "biased": half,
    }  # fmt: skip
    model = nn.ModuleDict(parts).requires_grad_(False)
    half.bias.requires_grad_(True)
    model["trained"] = nn.Linear(16, 16)
    told = convert(model, torch.bfloat16, CPU)
    assert [name for name, one in model.named_modules() if isinstance(one, Fp8Linear)] == ["plain"]
    assert told == (
        "1 of 8 frozen linear layers compute in fp8; not one (shared), tied (shared), own (not a plain nn.Linear) and 4 more"
    )


def test_parameters_and_modules_stay_the_same_objects() -> None:
    model = Stack()
    before = [*model.modules()], [*model.parameters()]
    precision = prepared(model)
    assert all(one is other for one, other in zip(model.modules(), before[0], strict=True))
    after = {id(one) for one in model.parameters()}
    assert all(id(one) in after for one in before[1])
    kept = [(one.weight.clone(), one.scale.clone()) for one in layers(model)]
    precision.prepare(model)  # as data.accumulate = "auto" does before
    for one, (weight, scale) in zip(layers(model), kept, strict=True):
        assert torch.equal(one.weight, weight) and torch.equal(one.scale, scale) and one.scale.dtype is torch.float32


def test_weights_are_a_byte_each_and_nobody_else_can_take_them_for_numbers() -> None:
    model = Stack()
    prepared(model)
    layer = layers(model)[0]
    assert layer.weight.nbytes == 32 * 48 and layer.bias.dtype is torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="dtype"):
        nn.functional.linear(torch.zeros(2, 32), layer.weight)


# -- what is refused --------------------------------------------------------------------------------------------------


def test_fp32_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"precision\.mode"):
        prepared(Stack(), "fp32")


def test_a_gpu_without_float8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with pytest.raises(ConfigError, match=r"8\.9 or more .* has 8\.0"):
        convert(Stack(), torch.bfloat16, torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    assert not lacking(torch.device("cuda", 0)) and not lacking(CPU)


@pytest.mark.parametrize(("frozen", "why"), [(False, "no linear layer is frozen"), (True, r"0 \(24 x 16: sizes must be")])
def test_a_model_without_such_a_layer_is_refused(frozen: bool, why: str) -> None:
    model = nn.Sequential(nn.Linear(24, 16).requires_grad_(not frozen), nn.Linear(16, 1))
    with pytest.raises(ConfigError, match=why):
        prepared(model)


# -- runs -------------------------------------------------------------------------------------------------------------


def run(data: Path, folder: Path, steps: int, **parts: Any) -> Runtime:
    model = Stack()
    # All parameters, as people write it.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    held_out = trainkit.make_loader(data) if parts.pop("held", False) else None
    chosen = trainkit.options(folder, steps, **{"precision": FP8, "checkpoint": CheckpointOptions(every=4), **parts})
    runtime = Runtime(model, trainkit.loss, trainkit.make_loader(data), optimizer, chosen, held_out=held_out)
    runtime.run()
    return runtime


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[float]:
    """Of steps that were not skipped."""
    return [line["loss"] for line in lines(folder) if line["kind"] == "step" and line["loss"] is not None]


def same(one: Runtime, other: Runtime) -> bool:
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    return all(torch.equal(first, second) for first, second in pairs)


@pytest.mark.parametrize("mode", ["bf16", "fp16"])
def test_a_run_learns_says_what_is_in_fp8_and_is_evaluated(points: Path, tmp_path: Path, mode: str) -> None:
    found = run(points, tmp_path, 60, held=True, precision=PrecisionOptions(mode=mode, frozen="fp8"))  # type: ignore[arg-type]
    (event,) = [line for line in lines(tmp_path) if line.get("name") == "fp8"]
    assert event["message"] == "4 of 4 frozen linear layers compute in fp8"
    assert found.held_out_loss is not None and found.held_out_loss < 0.7 * losses(tmp_path)[0]
    assert found.ledger.look()["parameters"] == round(sum(one.nbytes for one in found.model.parameters()) / 1e6, 3)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_and_recomputed_blocks_train_the_same(points: Path, tmp_path: Path, backend: str) -> None:
    plain = run(points, tmp_path / "plain", 6)
    compiled = CompileOptions(blocks=True, backend=backend)
    ways = {
        "compiled": {"compile": compiled},
        "all": {"compile": compiled, "activations": ActivationOptions(mode="all")},
        "budget": {"activations": ActivationOptions(mode="budget", budget_mb=0.001)},
    }
    for name, parts in ways.items():
        found = run(points, tmp_path / name, 6, **parts)
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "plain"), rel=1e-2), name
        assert found.compiled is None or found.compiled.report()["fallbacks"] == 0
        assert found.compiled is None or name != "compiled" or found.compiled.compilations >= 1
        for one, other in zip(found.parallel.parameters, plain.parallel.parameters, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)


def test_a_resumed_run_is_the_same_to_the_bit(points: Path, tmp_path: Path) -> None:
    whole = run(points, tmp_path / "whole", 8)
    run(points, tmp_path / "parts", 4)
    assert same(run(points, tmp_path / "parts", 8), whole)


def test_a_checkpoint_holds_what_it_would_without_fp8_and_goes_both_ways(points: Path, tmp_path: Path) -> None:
    run(points, tmp_path, 4)
    plain = run(points, tmp_path, 8, precision=PrecisionOptions(mode="bf16"))
    assert plain.step == 8 and not layers(plain.model)
    for name, one in Stack().named_parameters():
        if not one.requires_grad:
            assert torch.equal(plain.model.get_parameter(name), one.bfloat16()), name
    again = run(points, tmp_path, 12)
    fresh = run(points, tmp_path / "fresh", 1)
    for one, other in zip(layers(again.model), layers(fresh.model), strict=True):
        assert torch.equal(one.weight, other.weight) and torch.equal(one.scale, other.scale)


def test_other_weights_in_a_checkpoint_are_those_that_compute(points: Path, tmp_path: Path) -> None:
    """As of a run that began from other pretrained ones."""
    first = run(points, tmp_path, 1)
    state = {name: value.clone() for name, value in first.model.state_dict().items()}
    state["layers.0.0.weight"] *= 2
    model = Stack()
    model.load_state_dict(state)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    told = {"checkpoint": CheckpointOptions(every=1), "precision": FP8}
    Runtime(model, trainkit.loss, trainkit.make_loader(points), optimizer, trainkit.options(tmp_path / "2", 1, **told)).run()
    found = run(points, tmp_path / "2", 1)
    assert torch.equal(layers(found.model)[0].scale, 2 * layers(first.model)[0].scale)
    assert torch.equal(layers(found.model)[1].scale, layers(first.model)[1].scale)


def test_a_checkpoint_of_another_model_is_refused(points: Path, tmp_path: Path) -> None:
    run(points, tmp_path, 1)
    model = nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 16).requires_grad_(False), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    chosen = trainkit.options(tmp_path, 2, precision=FP8)
    with pytest.raises(CheckpointError, match="another model"):
        Runtime(model, trainkit.loss, trainkit.make_loader(points), optimizer, chosen).run()


def test_the_export_has_the_originals_under_their_names(points: Path, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    run(points, tmp_path, 2, checkpoint=CheckpointOptions(export=True))
    found, plain = safetensors.load_file(tmp_path / "model.safetensors"), Stack()
    assert found.keys() == plain.state_dict().keys()
    for name, one in plain.named_parameters():
        assert torch.equal(found[name], one.bfloat16()) != one.requires_grad, name
    plain.load_state_dict(found)


@pytest.mark.parametrize("assign", [False, True])
def test_loading_a_state_changes_what_computes(assign: bool) -> None:
    model, other = Stack(), Stack()
    prepared(model)
    with torch.no_grad():
        other.layers[0][0].weight.mul_(3.0).add_(0.1)  # type: ignore[index, union-attr]
    assert not model.load_state_dict(other.state_dict(), assign=assign).missing_keys
    prepared(other)
    for one, wanted in zip(layers(model), layers(other), strict=True):
        assert torch.equal(one.weight, wanted.weight) and torch.equal(one.scale, wanted.scale)
        assert torch.equal(one.original, wanted.original) and one.original.dtype is torch.bfloat16
    kept = [one.weight.clone() for one in layers(model)]
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({**other.state_dict(), "layers.0.0.weight": torch.zeros(2, 2)})
    assert all(torch.equal(one.weight, before) for one, before in zip(layers(model), kept, strict=True))
    with pytest.raises(RuntimeError, match=r"Unexpected.*scale"):
        model.load_state_dict({**other.state_dict(), "layers.0.0.scale": torch.zeros(48)})


@pytest.mark.slow
def test_two_ranks_train_what_one_does(points: Path, tmp_path: Path) -> None:
    told = {"steps": 6, "frozen": True, "precision": {"mode": "bf16", "frozen": "fp8"}, "checkpoint": {"every": 3}}
    (alone,) = runkit.run(tmp_path / "one", points, **told)
    both = runkit.run(tmp_path / "two", points, 2, ddp={"checksum_every": 1}, **told)
    assert both[0]["bits"] == both[1]["bits"]
    for one, other in zip(both[0]["parameters"], alone["parameters"], strict=True):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=2e-2, atol=2e-2)
