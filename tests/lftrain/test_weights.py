"""Weights in bf16 beside fp32 masters: the numbers of fp32 weights to the bit, checkpoints that go both ways, what is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import runkit
import torch
import trainkit
from torch import nn

from lftrain import ActivationOptions, AdamW, CheckpointOptions, DdpOptions, PrecisionOptions, Runtime
from lftrain.comm.checksum import checksum
from lftrain.compute.adamw import master_of
from lftrain.compute.masters import HalfLinear, convert
from lftrain.errors import ConfigError
from lftrain.models import make
from lftrain.options import ModelOptions
from lftrain.runtime.precision import Precision

CPU = torch.device("cpu")
KINDS = ("vla", "lm")


def precision(weights: str, clip: float | None = None, mode: str = "bf16") -> PrecisionOptions:
    return PrecisionOptions(mode=mode, weights=weights, clip=clip)  # type: ignore[arg-type]


def batches(kind: str, count: int) -> list[dict[str, torch.Tensor]]:
    made = torch.Generator().manual_seed(1)
    found = []
    for _ in range(count):
        batch = {"tokens": torch.randint(1, 256, (4, 6), generator=made)}
        if kind == "vla":
            batch["image"] = torch.randint(0, 256, (4, 32, 32, 3), generator=made, dtype=torch.uint8)
            batch |= {"state": torch.randn(4, 2, generator=made), "action": torch.randn(4, 8, 2, generator=made)}
        found.append(batch)
    return found


def trained(folder: Path, weights: str, steps: int, kind: str = "vla", clip: float | None = None, **parts: Any) -> Runtime:
    torch.manual_seed(0)
    model, loss = make(ModelOptions(kind=kind, options={"vocab": 256} if kind == "lm" else {}))
    loss = parts.pop("loss", loss)
    # All that is trained, as people write it; weights decay.
    optimizer = AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2, fused=True)
    chosen = trainkit.options(
        folder, steps, **{"precision": precision(weights, clip), "checkpoint": CheckpointOptions(every=4), **parts}
    )
    runtime = Runtime(model, loss, trainkit.Batches(batches(kind, 16)), optimizer, chosen)
    runtime.run()
    return runtime


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "step"]


def halves(model: nn.Module) -> list[nn.Parameter]:
    return [one.weight for one in model.modules() if isinstance(one, HalfLinear)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_are_those_of_fp32_weights_to_the_bit(tmp_path: Path, kind: str) -> None:
    plain, found = (trained(tmp_path / weights, weights, 12, kind) for weights in ("fp32", "compute"))
    assert losses(tmp_path / "compute") == losses(tmp_path / "fp32") and len(losses(tmp_path / "fp32")) == 12
    assert trainkit.bits(found.model) == trainkit.bits(plain.model)
    assert len(halves(found.model)) > 5 and not halves(plain.model)
    for weight in halves(found.model):
        assert weight.dtype is torch.bfloat16 and torch.equal(weight, weight.master.bfloat16())  # type: ignore[attr-defined]
        assert not torch.equal(weight.float(), weight.master)  # type: ignore[attr-defined]


def test_clipping_is_that_of_fp32_within_rounding(tmp_path: Path) -> None:
    for weights in ("fp32", "compute"):
        trained(tmp_path / weights, weights, 12, clip=0.1)
    assert losses(tmp_path / "compute") == pytest.approx(losses(tmp_path / "fp32"), rel=1e-3)


@pytest.mark.parametrize(("first", "second"), [("compute", "compute"), ("compute", "fp32"), ("fp32", "compute")])
def test_a_checkpoint_goes_on_with_either(tmp_path: Path, first: str, second: str) -> None:
    whole = trained(tmp_path / "whole", "fp32", 12)
    trained(tmp_path / "run", first, 8)
    found = trained(tmp_path / "run", second, 12)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert trainkit.bits(found.model) == trainkit.bits(whole.model)
    averages = [one for state in found.optimizer.state.values() for name, one in state.items() if name != "step"]
    assert averages and all(one.dtype is torch.float32 for one in averages)


def test_an_export_holds_the_masters(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    from safetensors.torch import load_file

    found = trained(tmp_path, "compute", 4, checkpoint=CheckpointOptions(every=0, export=True))
    stored = load_file(tmp_path / "model.safetensors")
    names = {id(one): name for name, one in found.model.named_parameters()}
    for weight in halves(found.model):
        assert torch.equal(stored[names[id(weight)]], weight.master)  # type: ignore[attr-defined]


def test_a_step_that_is_not_finite_changes_nothing(tmp_path: Path) -> None:
    def late(folder: Path, bad: bool) -> Runtime:
        torch.manual_seed(0)
        _, loss = make(ModelOptions(kind="vla"))
        seen = []

        def found(model: nn.Module, batch: Any) -> Any:
            seen.append(0)
            mean, count = loss(model, batch)
            return mean * (float("inf") if bad and len(seen) == 4 else 1.0), count

        return trained(folder, "compute", 4 if bad else 3, loss=found)

    kept, skipped = late(tmp_path / "three", False), late(tmp_path / "four", True)
    assert skipped.watch.skipped == 1 and trainkit.bits(kept.model) == trainkit.bits(skipped.model)
    for one, other in zip(kept.optimizer.state.values(), skipped.optimizer.state.values(), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    for one, other in zip(halves(kept.model), halves(skipped.model), strict=True):
        assert torch.equal(one, other)


def test_the_state_of_the_optimiser_alone_stays_float32() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    convert(model, torch.bfloat16)
    optimizer = AdamW(model.parameters(), lr=1e-2, fused=True)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 8, dtype=torch.bfloat16)).float().square().mean()
        loss.backward()
        return loss

    with torch.autocast("cpu", torch.bfloat16):
        first = [float(optimizer.step(closure)) for _ in range(20)]
    assert first[-1] < 0.5 * first[0]
    other = copy.deepcopy(optimizer.state_dict())
    again = AdamW(model.parameters(), lr=1e-2, fused=True)
    again.load_state_dict(other)
    for one in model.parameters():
        for name, value in optimizer.state[one].items():
            assert torch.equal(again.state[one][name], value) and again.state[one][name].dtype is torch.float32
            assert again.state[one][name] is not value


def test_only_plain_trained_layers_of_their_own_are_converted_once() -> None:
    class Own(nn.Linear):
        pass

    tied, shared = nn.Linear(4, 8, bias=False), nn.Linear(4, 4)
    table = nn.Embedding(8, 4)
    tied.weight = table.weight
    model = nn.ModuleDict({
        "plain": nn.Linear(4, 4), "tied": tied, "table": table, "one": shared, "other": shared, "own": Own(4, 4),
        "frozen": nn.Linear(4, 4).requires_grad_(False), "wide": nn.Linear(4, 4).double(), "norm": nn.LayerNorm(4),
    })  # fmt: skip
    weight: Any = model["plain"].weight
    value = weight.detach().clone()
    assert convert(model, torch.bfloat16) == [weight] and model["plain"].weight is weight
    master = weight.master
    assert torch.equal(master, value) and torch.equal(weight, value.bfloat16()) and weight.requires_grad
    assert convert(model, torch.bfloat16) == [weight] and weight.master is master
    assert all(master_of(one) is None for one in model.parameters() if one is not weight)


def test_loading_a_state_dict_sets_both() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    convert(model, torch.bfloat16)
    state = {"0.weight": torch.randn(4, 4), "0.bias": torch.randn(4)}
    for assign in (False, True):
        model.load_state_dict({name: value + assign for name, value in state.items()}, assign=assign)
        weight: Any = model[0].weight
        assert torch.equal(weight.master, state["0.weight"] + assign)
        assert weight.dtype is torch.bfloat16 and torch.equal(weight, (state["0.weight"] + assign).bfloat16())
    assert torch.equal(model.state_dict()["0.weight"], state["0.weight"] + 1)
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({**state, "0.weight": torch.zeros(2, 4)})


def made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4))


def test_a_copy_of_the_model_has_masters_of_its_own() -> None:
    model, plain = made(), made().state_dict()
    convert(model, torch.bfloat16)
    other = copy.deepcopy(model)
    assert trainkit.bits(other) == trainkit.bits(model) and len(halves(other)) == 2
    other.load_state_dict({name: value + 1 for name, value in plain.items()})
    for name, value in model.state_dict().items():
        assert torch.equal(value, plain[name]) and torch.equal(other.state_dict()[name], plain[name] + 1)
    for weight in halves(other):
        assert torch.equal(weight, weight.master.bfloat16())  # type: ignore[attr-defined]


def test_masters_go_where_their_weights_go() -> None:
    model = made()
    convert(model, torch.bfloat16)
    model.to("meta")
    assert {one.device.type for one in model.state_dict().values()} == {"meta"} and len(halves(model)) == 2
    model.to_empty(device="cpu").load_state_dict(made().state_dict())
    assert trainkit.bits(model) == trainkit.bits(made())
    model.bfloat16()
    assert torch.equal(model.state_dict()["0.weight"], made()[0].weight) and len(halves(model)) == 2


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.float16])
def test_cast_to_another_type_a_layer_is_plain_again_and_nothing_is_lost(kind: torch.dtype) -> None:
    model = made()
    convert(model, torch.bfloat16)
    held = list(model.parameters())
    model.to(kind)
    assert not halves(model) and all(one is other for one, other in zip(model.parameters(), held, strict=True))
    assert all(master_of(one) is None and one.dtype is kind for one in held)
    for name, value in made().to(kind).state_dict().items():
        assert torch.equal(model.state_dict()[name], value)


def test_a_later_run_with_the_same_model_and_fp32_weights_is_that_of_fp32() -> None:
    model = trainkit.make_model()
    plain = trainkit.bits(model)
    convert(model, torch.bfloat16)
    precise = Precision(precision("fp32"), CPU)
    precise.prepare(model)
    assert not halves(model) and not precise.masters and trainkit.bits(model) == plain
    assert {one.dtype for one in model.parameters()} == {torch.float32}


def test_masters_that_differ_show_where_their_copies_do_not() -> None:
    model = made()
    convert(model, torch.bfloat16)
    before, weight = checksum(model), halves(model)[1]
    master: Any = weight.master  # type: ignore[attr-defined]
    master[0, 0] = torch.nextafter(master[0, 0], torch.tensor(9.0))
    names = [name for name, _ in model.named_parameters()]
    assert torch.equal(weight, master.bfloat16())
    assert [name for name, differs in zip(names, checksum(model) != before, strict=True) if differs] == ["2.weight"]


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ({"precision": precision("compute", mode="fp32")}, r'precision\.mode = "bf16", and this is "fp32"'),
        ({"precision": precision("compute", mode="fp16")}, r'precision\.mode = "bf16", and this is "fp16"'),
        ({"activations": ActivationOptions(admit_mb=10.0)}, "admit_mb cuts a step into micro-batches"),
        ({"ddp": DdpOptions(hook="powersgd")}, "powersgd"),
    ],
)
def test_what_does_not_go_with_it_is_refused(tmp_path: Path, parts: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        trained(tmp_path, "compute", 1, **parts)


def test_other_optimisers_and_micro_batches_are_refused(points: Path, tmp_path: Path) -> None:
    for kind, accumulate, why in (
        (torch.optim.AdamW, 1, r"lftrain\.AdamW with fused=True"),
        (AdamW, 2, "a step has 2 micro-batches"),
    ):
        model = trainkit.make_model()
        optimizer = kind(model.parameters(), lr=1e-2, fused=True)
        loader, chosen = (
            trainkit.make_loader(points, accumulate=accumulate),
            trainkit.options(tmp_path, 1, precision=precision("compute")),
        )
        with pytest.raises(ConfigError, match=why):
            Runtime(model, trainkit.loss, loader, optimizer, chosen, accumulate=accumulate)
    with pytest.raises(ConfigError, match="fits no layer"):
        convert(nn.Sequential(nn.Linear(4, 4).requires_grad_(False)), torch.bfloat16)


def test_two_ranks_train_alike(points: Path, tmp_path: Path) -> None:
    found = {}
    for weights in ("fp32", "compute"):
        told = {"precision": {"mode": "bf16", "weights": weights, "clip": None}, "ddp": {"checksum_every": 1}}
        ranks = runkit.run(tmp_path / weights, points, world=2, steps=8, **told)
        assert len({one["bits"] for one in ranks}) == 1 and ranks[0]["finished"]
        found[weights] = losses(tmp_path / weights / "run")
    assert found["compute"] == pytest.approx(found["fp32"], rel=2e-2) and len(found["compute"]) == 8
