"""MixUp, CutMix and Mosaic: partners come from the whole global batch, so the result is the same for any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from batchkit import BAD_HOW, digests, epoch_of, poisoned, same, write_pictures

import lfdata.transforms as T
from lfdata import Loader
from lfdata.errors import OptionError

FIELDS: dict[str, Any] = {"image": [T.RandomResizedCrop(20)], "label": None}
OPS = {
    "mixup": T.MixUp(alpha=0.8, labels=("label",)),
    "cutmix": T.CutMix(alpha=1.0, labels=("label",)),
    "mosaic": T.Mosaic(labels=("label",)),
}


def ranks(path: Path, world: int, op: Any, **options: Any) -> list[Loader]:
    how: dict[str, Any] = {"batch_transforms": [op], "engine": "inline", **options}
    return [poisoned(Loader(path, 8, FIELDS, rank=rank, world_size=world, **how)) for rank in range(world)]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("world", [2, 8])
def test_the_same_for_any_world(pictures: Path, op: str, world: int) -> None:
    for tail in ("drop_last", "pad"):
        expected, found = (
            epoch_of(ranks(pictures, count, OPS[op], tail=tail, where=np.arange(48) < 45)) for count in (1, world)
        )
        assert len(found) == len(expected) > 4 and all(map(same, found, expected))


@pytest.mark.parametrize("op", OPS)
def test_partners_labels_are_those_of_the_partners(pictures: Path, op: str) -> None:
    mixed, plain = epoch_of(ranks(pictures, 2, OPS[op])), epoch_of([Loader(pictures, 8, FIELDS, engine="inline")])
    for step, (batch, alone) in enumerate(zip(mixed, plain, strict=True)):
        partners = T.partners(OPS[op], 0, 0, step, np.arange(8), 8)
        assert np.array_equal(batch["label"], alone["label"])
        assert np.array_equal(batch["label.partner"], alone["label"][partners])
        assert (batch["image.lam"] >= 0).all() and (batch["image.lam"] <= 1).all()
        if op == "mixup":
            lam = batch["image.lam"][:, None, None, None]
            expected = np.rint(alone["image"] * lam + alone["image"][partners[:, 0]] * (1 - lam))
            assert np.abs(batch["image"] - expected).max() <= 1
        if op == "cutmix":
            whose = (batch["image"] == alone["image"]) | (batch["image"] == alone["image"][partners[:, 0]])
            assert whose.all()


@pytest.mark.parametrize("policy", ["replace", "mask"])
def test_partners_that_are_bad_are_the_same_on_every_rank(damaged: Path, policy: str) -> None:
    expected, *others = (epoch_of(ranks(damaged, world, OPS["mixup"], bad_samples=policy, **BAD_HOW)) for world in (1, 2, 4))
    for found in others:
        assert all(map(same, found, expected))


def test_the_same_from_every_engine(pictures: Path, decoders_alone: None) -> None:
    how: dict[str, Any] = {"batch_transforms": [OPS["mosaic"]], "rank": 1, "world_size": 2}
    plain = digests(Loader(pictures, 8, FIELDS, engine="inline", **how))
    for options in ({"engine": "thread", "threads": 3}, {"engine": "process", "processes": 2}):
        assert digests(Loader(pictures, 8, FIELDS, **how, **options)) == plain


@pytest.mark.parametrize(
    ("ops", "what"),
    [
        ([T.MixUp(field="nothing")], "nothing"),
        ([T.MixUp(labels=("caption",))], "caption"),
        ([T.MixUp(), T.CutMix()], "one batch transform a field"),
        ([T.CenterCrop(3)], "belong to a field"),
    ],
)
def test_what_cannot_be_mixed_is_refused(complete: Path, ops: Any, what: str) -> None:
    with pytest.raises(OptionError, match=what):
        Loader(complete, 8, {"image": [T.CenterCrop(20)], "caption": None}, batch_transforms=ops, engine="inline")
    with pytest.raises(OptionError, match="one size"):
        Loader(complete, 8, ["image"], batch_transforms=[T.MixUp()], engine="inline")


@pytest.mark.parametrize(
    "op", [T.MixUp(4.0, labels=["label"]), T.CutMix(4.0, labels=["label"]), T.Mosaic(labels=["label"])], ids=str
)
@pytest.mark.parametrize("world", [1, 2])
def test_nothing_of_a_bad_picture_reaches_a_good_one(tmp_path: Path, op: Any, world: int) -> None:
    good = write_pictures(tmp_path / "good", 16)
    bad = write_pictures(tmp_path / "bad", 16, bad=[3, 9])
    how: dict[str, Any] = {
        "shuffle": "sequential",
        "engine": "inline",
        "most_bad_rate": 1.0,
        "bad_samples": "mask",
        "world_size": world,
    }
    fields = {"image": [T.CenterCrop(16)], "label": None}
    partners = 0
    for rank in range(world):
        plain = next(iter(Loader(good, 16, fields, rank=rank, **how)))
        mixed = next(iter(Loader(good, 16, fields, rank=rank, batch_transforms=[op], **how)))
        found = next(iter(Loader(bad, 16, fields, rank=rank, batch_transforms=[op], **how)))
        wrong = [int(index) in (3, 9) for index in found["__index__"]]
        assert (~found["__mask__"]).tolist() == wrong
        for row in range(len(wrong)):
            if wrong[row]:
                assert not found["image"][row].any()
            elif torch.equal(found["image"][row], mixed["image"][row]):
                continue
            elif op.partners == 1:
                # Its partner is bad: it is what it was.
                partners += 1
                assert torch.equal(found["image"][row], plain["image"][row])
                assert found["label.partner"][row, 0] == found["label"][row]
            else:
                partners += 1
                assert (found["label.partner"][row] == found["label"][row]).any()
    assert partners
