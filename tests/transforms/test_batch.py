"""Mixing across the global batch: the same for every split into ranks; lam from Beta; pixels by plain references."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lfdata import transforms as T
from lfdata.errors import OptionError
from lfdata.order.permutation import Permutation, make_key
from lfdata.transforms.beta import quantile

OPS = [T.MixUp(0.4), T.CutMix(1.0), T.Mosaic(0.7)]
SIZE = 24


def batch(channels: int = 3, height: int = 13, width: int = 17, count: int = SIZE) -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, (count, height, width, channels)).astype(np.uint8)


def mix(
    op: Any, rows: NDArray[np.int64], step: int = 5, channels: int = 3
) -> tuple[NDArray[np.uint8], dict[str, NDArray[Any]]]:
    """What a rank with these rows of the global batch gets."""
    whole = batch(channels)
    u = np.random.default_rng(step).random((SIZE, op.draws))[rows]
    images = whole[rows]
    return images, op.apply(images, whole[T.partners(op, 1, 2, step, rows, SIZE)], u)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("ranks", [2, 3, 5, 24])
def test_any_split_gives_the_same(op: Any, channels: int, ranks: int) -> None:
    images, extras = mix(op, np.arange(SIZE), channels=channels)
    parts = [mix(op, np.arange(SIZE * r // ranks, SIZE * (r + 1) // ranks), channels=channels) for r in range(ranks)]
    assert (np.concatenate([part for part, _ in parts]) == images).all()
    assert (images != batch(channels)).any()
    assert list(extras) == list(op.extras())
    for name, like in op.extras().items():
        assert (np.concatenate([part[name] for _, part in parts]) == extras[name]).all()
        assert extras[name].dtype == like.dtype and extras[name].shape == (SIZE, *like.shape)


def test_partners_are_keyed_permutations() -> None:
    found = T.partners(T.Mosaic(), 3, 4, 9, np.arange(100), 100)
    assert found.shape == (100, 3) and found.dtype == np.int64
    for number in range(3):
        assert (found[:, number] == Permutation(100, make_key(3, 4, 7, 9, number))(np.arange(100))).all()
        assert sorted(found[:, number].tolist()) == list(range(100))
    assert (T.partners(T.MixUp(), 3, 4, 9, [17, 3], 100)[:, 0] == found[[17, 3], 0]).all()
    others = [T.partners(T.MixUp(), *key, np.arange(100), 100) for key in ((3, 4, 10), (3, 5, 9), (4, 4, 9))]
    assert all((other[:, 0] != found[:, 0]).any() for other in others)
    with pytest.raises(IndexError):
        T.partners(T.MixUp(), 0, 0, 0, [8], 8)


def test_quantiles_by_closed_forms() -> None:
    u = np.concatenate([np.random.default_rng(0).random(20_000), [0.0, 0.5, 1 - 2**-53, 2**-53, 1e-300]])
    assert np.abs(quantile(1.0, u) - u).max() < 1e-14
    assert np.abs(quantile(0.5, u) - np.sin(np.pi * u / 2) ** 2).max() < 1e-14
    x = quantile(2.0, u)
    assert np.abs(x * x * (3 - 2 * x) - u).max() < 1e-12
    x = quantile(10.0, u)
    assert np.abs(sum(math.comb(19, j) * x**j * (1 - x) ** (19 - j) for j in range(10, 20)) - u).max() < 1e-11
    for alpha in (0.001, 0.03, 0.2, 1.7, 10.0):
        x = quantile(alpha, np.sort(u))
        assert (np.diff(x) >= -1e-15).all() and x.min() >= 0 and x.max() <= 1
        fine = np.round(u * 2**40) / 2**40
        assert np.abs(quantile(alpha, 1 - fine) - (1 - quantile(alpha, fine)))[fine > 0].max() <= 2**-53


@pytest.mark.parametrize("alpha", [0.05, 0.2, 0.4, 1.0, 3.0, 9.5])
def test_lam_is_distributed_as_beta(alpha: float) -> None:
    n, rng = 40_000, np.random.default_rng(5)
    ours, theirs = np.sort(quantile(alpha, rng.random(n))), np.sort(rng.beta(alpha, alpha, n))
    both = np.concatenate([ours, theirs])
    gap = np.abs(np.searchsorted(ours, both, "right") - np.searchsorted(theirs, both, "right")).max() / n
    assert gap < 1.95 * math.sqrt(2 / n)


def test_mixup_rounds_to_the_nearest() -> None:
    op, rng = T.MixUp(1.0), np.random.default_rng(3)
    images, others, u = batch(), batch()[::-1, None].copy(), rng.random((SIZE, 1))
    lam = op.apply(images, others, u)["lam"]
    assert np.allclose(lam, u[:, 0], atol=1e-7)
    part = lam.astype(np.float64)[:, None, None, None]
    exact = batch() * part + others[:, 0] * (1 - part)
    assert np.abs(images - exact).max() < 0.5001
    again = batch()
    assert (op.apply(again, others, np.full((1, 1), 0.25))["lam"] == np.float32(0.25)).all()
    assert np.abs(again - (batch() * 0.25 + others[:, 0] * 0.75)).max() <= 0.5
    same = batch()
    op.apply(same, batch()[:, None].copy(), u)
    assert (same == batch()).all()


def test_cutmix_is_a_rectangle_and_lam_its_true_share() -> None:
    op, rng = T.CutMix(1.0), np.random.default_rng(3)
    height, width, count = 40, 30, 300
    images = np.zeros((count, height, width, 1), np.uint8)
    u = rng.random((count, 3))
    u[0], u[1] = (0.0, 0.5, 0.5), (1 - 2**-53, 0.5, 0.5)
    lam = op.apply(images, np.ones((count, 1, height, width, 1), np.uint8), u)["lam"]
    for row in range(count):
        half = 0.5 * math.sqrt(1 - u[row, 0])
        x, y, a, b = int(u[row, 1] * width), int(u[row, 2] * height), int(half * width), int(half * height)
        wanted = np.zeros((height, width))
        wanted[max(0, y - b) : min(height, y + b), max(0, x - a) : min(width, x + a)] = 1
        assert (images[row, :, :, 0] == wanted).all()
        assert lam[row] == pytest.approx(1 - wanted.mean(), abs=1e-7)
    assert lam[0] == 0 and lam[1] == 1


def test_mosaic_puts_each_into_its_quarter() -> None:
    count, height, width = 50, 24, 36
    images = np.full((count, height, width, 3), 10, np.uint8)
    others = np.stack([np.full_like(images, value) for value in (20, 30, 40)], axis=1)
    u = np.random.default_rng(1).random((count, 3))
    found = T.Mosaic(0.6).apply(images, others, u)
    for row in range(count):
        y, x = found["centre"][row]
        if u[row, 0] >= 0.6:
            assert (images[row] == 10).all() and (y, x) == (height, width) and found["areas"][row].tolist() == [1, 0, 0, 0]
            continue
        assert (y, x) == (round(height * (0.25 + u[row, 2] / 2)), round(width * (0.25 + u[row, 1] / 2)))
        for value, part in zip(
            (10, 20, 30, 40), (images[row, :y, :x], images[row, :y, x:], images[row, y:, :x], images[row, y:, x:]), strict=True
        ):
            assert (part == value).all() and part.size
            assert found["areas"][row, value // 10 - 1] == pytest.approx(part[:, :, 0].size / (height * width))
    assert (found["lam"] == found["areas"][:, 0]).all() and 0 < (u[:, 0] < 0.6).sum() < count
    for shape in ((1, 1), (1, 9), (9, 1), (2, 2)):  # quarters that have no pixels
        tiny = np.full((4, *shape, 3), 10, np.uint8)
        areas = T.Mosaic(1.0, (0.0, 1.0)).apply(
            tiny, np.full((4, 3, *shape, 3), 20, np.uint8), np.random.default_rng(0).random((4, 3))
        )["areas"]
        assert areas.sum(axis=1) == pytest.approx(np.ones(4)) and (areas[:, 0] > 0).all()


def test_mosaic_keeps_what_its_pictures_show() -> None:
    ramp = np.broadcast_to(np.linspace(0, 255, 64).astype(np.uint8)[None, None, :, None], (1, 64, 64, 3)).copy()
    T.Mosaic(1.0, (0.5, 0.5)).apply(ramp, np.broadcast_to(ramp[:, None], (1, 3, 64, 64, 3)).copy(), np.full((1, 3), 0.5))
    assert np.abs(ramp[0, 40, :32, 0] - np.linspace(0, 255, 32)).max() < 6 and (ramp[0, :, :32] == ramp[0, :, 32:]).all()


def test_declarations_and_refusals() -> None:
    fixed = T.Declared((8, 8, 3), "uint8")
    for op in OPS:
        assert T.declared([T.CenterCrop(8), op], "image", T.Declared((None, None, 3), "uint8")) == fixed
        with pytest.raises(OptionError, match="takes uint8 pictures of one size"):
            T.declared([T.Resize(8), op], "image", T.Declared((None, None, 3), "uint8"))
        with pytest.raises(ValueError, match="partners"):
            op.apply(batch(), batch()[:, None].repeat(op.partners + 1, 1), np.zeros((SIZE, op.draws)))
    for make, message in (
        (lambda: T.MixUp(0), "MixUp: alpha is 0; it must be a number from 0.001 to 10"),
        (lambda: T.CutMix(11), "CutMix: alpha is 11"),
        (lambda: T.Mosaic(2), "Mosaic: p is 2; it must be a number from 0 to 1"),
        (lambda: T.MixUp(field=""), "MixUp: field is ''; it must be the name of a field"),
        (lambda: T.MixUp(labels="label"), "MixUp: labels is 'label'; it must be a tuple of names of other fields"),
        (lambda: T.CutMix(labels=("image",)), "names of other fields"),
    ):
        with pytest.raises(OptionError) as caught:
            make()
        assert message in str(caught.value)
