"""The reference models: shapes, what they look at, experts, packed rows, sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lftrain.errors import ConfigError
from lftrain.models import make
from lftrain.models.layers import Experts, RMSNorm
from lftrain.options import ModelOptions, PrecisionOptions
from lftrain.runtime.precision import Precision


def vla(**options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    return make(ModelOptions(kind="vla", options=options))


def scene(rows: int = 3) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(1)
    return {
        "image": torch.randint(0, 256, (rows, 32, 32, 3), generator=made, dtype=torch.uint8),
        "tokens": torch.randint(1, 256, (rows, 6), generator=made),
        "state": torch.randn(rows, 2, generator=made),
        "action": torch.randn(rows, 8, 2, generator=made),
    }


@pytest.mark.parametrize("change", ["image", "tokens", "state"])
def test_actions_depend_on_picture_instruction_and_state(change: str) -> None:
    model, _ = vla()
    batch = scene()
    noisy, time = torch.randn(3, 8, 2), torch.full((3,), 0.5)
    before = model([batch["image"]], batch["tokens"], batch["state"], noisy, time)
    assert before.shape == (3, 8, 2)
    batch[change] = batch[change].flip(0)
    after = model([batch["image"]], batch["tokens"], batch["state"], noisy, time)
    assert not torch.allclose(before[0], after[0]) and torch.allclose(before[1], after[1], atol=1e-5)


def test_padding_of_an_instruction_is_not_looked_at() -> None:
    model, _ = vla()
    batch = scene()
    noisy, time = torch.randn(3, 8, 2), torch.full((3,), 0.5)
    short = model([batch["image"]], batch["tokens"], batch["state"], noisy, time)
    padded = nn.functional.pad(batch["tokens"], (0, 5))
    torch.testing.assert_close(model([batch["image"]], padded, batch["state"], noisy, time), short, rtol=1e-4, atol=1e-5)


def test_rows_that_are_masked_do_not_count() -> None:
    model, loss = vla()
    batch = scene(4)
    batch["__mask__"] = torch.tensor([True, True, False, False])
    torch.manual_seed(5)
    mean, count = loss(model, batch)
    batch["action"][2:] = float("nan")
    torch.manual_seed(5)
    again, _ = loss(model, batch)
    assert float(count) == 2 and float(mean) == float(again)
    batch["__mask__"][:] = False
    mean, count = loss(model, batch)
    assert float(mean) == 0.0 and float(count) == 0


def test_pictures_of_another_size_are_refused() -> None:
    model, loss = vla()
    batch = scene()
    batch["image"] = batch["image"][:, :30]
    with pytest.raises(ConfigError, match=r"\(3, 30, 32, 3\).*Resize"):
        loss(model, batch)


def test_frozen_parts_have_no_gradients_and_the_rest_has() -> None:
    model, loss = vla(freeze=["vision", "language"])
    loss(model, scene())[0].backward()
    frozen = [name for name, one in model.named_parameters() if not one.requires_grad]
    assert all(name.startswith(("vision", "project", "embedding", "language", "norm")) for name in frozen) and frozen
    assert all(one.grad is not None for one in model.parameters() if one.requires_grad)


@pytest.mark.parametrize("mode", ["bf16", "fp16"])
@pytest.mark.parametrize("freeze", [["vision"], ["language"]])
def test_what_is_frozen_in_the_compute_type_takes_what_is_not(freeze: list[str], mode: Any) -> None:
    model, loss = vla(freeze=freeze)
    exact, _ = loss(model, scene())
    precision = Precision(PrecisionOptions(mode=mode), torch.device("cpu"))
    precision.prepare(model)
    torch.manual_seed(0)
    vla()
    with precision.autocast():
        mean, _ = loss(model, scene())
    mean.backward()
    assert all(one.grad is not None for one in model.parameters() if one.requires_grad)
    assert mean.item() == pytest.approx(exact.item(), rel=0.02)


def test_acting_gives_actions_of_the_data() -> None:
    model, _ = vla()
    batch = scene()
    assert model.act([batch["image"]], batch["tokens"], batch["state"]).shape == (3, 8, 2)


def test_a_norm_of_two_types_is_that_of_the_wider(recwarn: pytest.WarningsRecorder) -> None:
    norm, x = RMSNorm(8, eps=1e-6), torch.randn(3, 8)
    assert torch.equal(norm(x.bfloat16()), norm(x.bfloat16().float())) and norm(x.bfloat16()).dtype is torch.float32
    frozen = RMSNorm(8, eps=1e-6).to(torch.bfloat16)
    assert frozen(x.bfloat16()).dtype is torch.bfloat16 and not recwarn.list


def test_experts_that_nobody_chose_have_zero_gradients() -> None:
    torch.manual_seed(0)
    layer = Experts(8, 16, 6, 1)
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[2] = 1.0
    x = torch.ones(2, 5, 8)
    layer(x).sum().backward()
    for number, expert in enumerate(layer.experts):
        gradients = [one.grad for one in expert.parameters()]
        assert all(one is not None for one in gradients)
        assert any(bool(one.any()) for one in gradients if one is not None) == (number == 2)
    assert float(layer.balance) > 1.0
    layer(torch.zeros(0, 5, 8))


def test_experts_are_what_they_are_one_by_one() -> None:
    torch.manual_seed(0)
    layer = Experts(8, 16, 4, 2)
    x = torch.randn(3, 7, 8)
    found = layer(x)
    for row, out in zip(x.view(-1, 8), found.view(-1, 8), strict=True):
        weights, chosen = layer.router(row).softmax(-1).topk(2)
        wanted = sum(
            weight / weights.sum() * layer.experts[int(number)](row) for weight, number in zip(weights, chosen, strict=True)
        )
        torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)


def lm(**options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    return make(ModelOptions(kind="lm", options={"vocab": 50, **options}))


def test_a_token_sees_none_that_comes_after() -> None:
    model, _ = lm()
    ids = torch.randint(0, 50, (2, 9))
    before = model(ids)
    ids[:, 6:] = 1
    torch.testing.assert_close(model(ids)[:, :6], before[:, :6])


def test_packed_rows_are_what_their_samples_are_alone() -> None:
    model, loss = lm()
    one, other = torch.randint(0, 50, (5,)), torch.randint(0, 50, (3,))
    packed = {
        "tokens": torch.cat([one, other, torch.zeros(2, dtype=torch.long)])[None],
        "tokens.segment": torch.tensor([[1] * 5 + [2] * 3 + [0] * 2]),
        "tokens.position": torch.tensor([[*range(5), *range(3), 0, 0]]),
    }
    logits = model(packed["tokens"], packed["tokens.position"], packed["tokens.segment"])
    torch.testing.assert_close(logits[0, :5], model(one[None])[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits[0, 5:8], model(other[None])[0], rtol=1e-4, atol=1e-5)
    mean, count = loss(model, packed)
    alone = [loss(model, {"tokens": ids[None]}) for ids in (one, other)]
    assert int(count) == sum(int(part) for _, part in alone) == 6
    torch.testing.assert_close(mean, sum(part * items for part, items in alone) / 6, rtol=1e-4, atol=1e-5)


def test_padding_does_not_count() -> None:
    model, loss = lm(pad=0)
    ids = torch.tensor([[3, 4, 5, 0, 0], [3, 4, 5, 6, 7]])
    assert int(loss(model, {"tokens": ids})[1]) == 2 + 4


@pytest.mark.parametrize("kind", ["vla", "lm"])
def test_experts_in_the_trunk_take_part_in_the_loss(kind: str) -> None:
    model, loss = vla(experts=4) if kind == "vla" else lm(experts=4)
    batch = scene() if kind == "vla" else {"tokens": torch.randint(0, 50, (2, 9))}
    loss(model, batch)[0].backward()
    routers = [one for name, one in model.named_parameters() if "router" in name]
    assert len(routers) == 2 and all(one.grad is not None and bool(one.grad.any()) for one in routers)


def test_the_large_model_has_the_shape_it_says() -> None:
    with torch.device("meta"):
        model, _ = make(ModelOptions(kind="vla", size="large"))
    assert len(model.head.layers) == 32 and len(model.vision.layers) == 24
    assert sum(one.numel() for one in model.parameters()) > 1e9


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (ModelOptions(kind="vlm"), "vla, lm"),
        (ModelOptions(kind="vla", size="larg"), "large"),
        (ModelOptions(kind="vla", options={"patc": 3}), "did you mean 'patch'"),
        (ModelOptions(kind="vla", options={"patch": 5}), "patches of 5"),
        (ModelOptions(kind="vla", options={"vision_heads": 7}), "7 heads"),
        (ModelOptions(kind="lm"), "vocab"),
        (ModelOptions(kind="no_such_module:make"), "cannot be imported"),
        (ModelOptions(kind="math:sqrt"), "model.options"),
        (ModelOptions(kind="test_models:none"), "must return"),
    ],
)
def test_what_makes_no_model_is_named(options: ModelOptions, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make(options)
    assert said in str(caught.value)


def none() -> None:
    """For a model.kind that gives nothing."""


def test_the_router_of_one_expert_a_token_learns_from_the_task() -> None:
    torch.manual_seed(0)
    layer = Experts(8, 16, 4, 1)
    layer(torch.randn(2, 5, 8)).square().sum().backward()
    assert float(layer.router.weight.grad.norm()) > 1e-3  # type: ignore[union-attr]
