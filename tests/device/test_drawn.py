"""What is random about pictures on the device: the loader's own draws, whoever decodes, on any number of ranks, after any resume."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import batchkit
import independent_order
import numpy as np
import pytest
import torch
from latedevice import LateBackend, unheld
from pixelcheck import TOLERANCES, as_float64

import lfdata.transforms as T
from lfdata import DeviceLoader, Loader
from lfdata.device import Images
from lfdata.errors import LfdataError, LimitError, OptionError, StateError
from lfdata.loader.budget import LEAST_BYTES, Budget
from lfdata.transforms.beta import quantile

Batch = dict[str, torch.Tensor]
Make = Callable[..., LateBackend]
SIDE = 24
FIELDS: dict[str, Any] = {"image": [T.RandomResizedCrop(SIDE)], "label": None}
# The pixels themselves.
PLAIN: dict[str, Any] = {"mean": (0.0,) * 3, "std": (1.0,) * 3, "dtype": "float32"}
EVERYTHING = Images(**PLAIN, crop=(17, 20), flip=0.5, mixup=0.4, cutmix=1.0)
DRAWN = ("image.crop", "image.flip", "image.partner", "image.weight", "image.box")


def on(
    path: Any,
    op: Images = EVERYTHING,
    fields: Any = FIELDS,
    batch: int = 8,
    device: dict[str, Any] | None = None,
    **options: Any,
) -> DeviceLoader:
    where = device or {"device": "cpu"}
    return DeviceLoader(Loader(path, batch, fields, **{"engine": "inline", "seed": 5} | options), ops={"image": op}, **where)


def kept(loader: Any, epochs: int = 1, most: int = 1 << 30) -> list[Batch]:
    """Copies of batches; the loader is left, or at the end of an epoch."""
    found = []
    for _ in range(epochs):
        for number, batch in enumerate(loader):
            found.append({name: value.clone() for name, value in batch.items()})
            if number + 1 == most:
                break
    return found


def looked_at_late(loader: DeviceLoader, backend: LateBackend, epochs: int) -> list[Batch]:
    """As a device sees the batches, when the host has long gone on."""
    found: list[Batch] = []
    for _ in range(epochs):
        for batch in loader:
            readers = {name: unheld(value) for name, value in batch.items()}
            backend.consumer_stream.late(lambda readers=readers: found.append({name: read() for name, read in readers.items()}))  # type: ignore[misc]
            del batch
    backend.consumer_stream.finish()
    return found


def equal(ours: list[Batch], theirs: list[Batch]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert list(one) == list(other)
        for name, value in one.items():
            assert torch.equal(value, other[name]), name


def levels(images: torch.Tensor) -> torch.Tensor:
    return (images * 255).round().to(torch.uint8).permute(0, 2, 3, 1)


# -- what is drawn --------------------------------------------------------------------------------------------------------


def test_mirroring_is_the_loaders_own(pictures: Path) -> None:
    """Bit for bit, over two epochs."""
    flips = {"image": [*FIELDS["image"], T.RandomHorizontalFlip(0.3)], "label": None}
    ours = kept(Loader(pictures, 8, flips, seed=5, engine="inline"), 2)
    theirs = kept(on(pictures, Images(**PLAIN, flip=0.3)), 2)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one["image"], levels(other["image"])) and torch.equal(one["label"], other["label"])
    found = torch.cat([one["image.flip"] for one in theirs])
    assert 0 < found.float().mean() < 0.6


@pytest.mark.parametrize("mixture", [False, True])
def test_crops_are_the_loaders_own(pictures: Path, sets: Path, mixture: bool) -> None:
    """Also of sources that repeat, each in an epoch of its own."""
    paths: Any = pictures
    options: dict[str, Any] = {}
    if mixture:
        paths = [pictures, batchkit.write_pictures(sets / "few", 7, seed=3)]
        options = {"mixture": {"weights": [1, 1]}}
    before = [T.CenterCrop(33)]
    fields = {"image": [*before, T.RandomCrop((20, 17)), T.RandomHorizontalFlip()], "label": None}
    ours = kept(Loader(paths, 8, fields, seed=5, engine="inline", **options), 2)
    op = Images(**PLAIN, crop=(20, 17), flip=0.5)
    theirs = kept(on(paths, op, {"image": before, "label": None}, **options), 2)
    for one, other in zip(ours, theirs, strict=True):
        assert other["image"].shape == (8, 3, 20, 17) and torch.equal(one["image"], levels(other["image"]))
    offsets = torch.cat([one["image.crop"] for one in theirs])
    assert offsets.amin() == 0 and offsets.amax(0).tolist() == [13, 16]


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"tail": "pad", "bad_samples": "mask", "most_bad_rate": 1}])
def test_mixing_is_what_the_page_says(sets: Path, options: dict[str, Any]) -> None:
    """docs/scheduler.md and docs/order.md, a second time. Some rows are bad, some beyond the epoch's end."""
    path = sets / f"mixed-{len(options)}"
    masks = "tail" in options
    batchkit.write_pictures(path, 45, bad=[3, 17, 18] if masks else ())
    loader = on(path, batch=12, **options)
    rows = 12 // options.get("accumulate", 1)
    cuts = mixes = 0
    for epoch in range(2):
        for number, batch in enumerate(kept(loader)):
            mask, partner, weight, box = (batch[name] for name in ("__mask__", *DRAWN[2:]))
            step, micro = divmod(number, options.get("accumulate", 1))
            good = [row for row in range(rows) if mask[row]]
            circle = [
                good[independent_order.permuted(len(good), independent_order.key(5, epoch, 9, step, micro * rows), place)]
                for place in range(len(good))
            ]
            expected = list(range(rows))
            for place, row in enumerate(circle):
                expected[row] = circle[(place + 1) % len(good)]
            assert partner.tolist() == expected
            for row, index in enumerate(batch["__index__"].tolist()):
                u = independent_order.draws(5, epoch, index, 0, "image/mix", 5)
                top, bottom, left, right = box[row].tolist()
                area = (bottom - top) * (right - left)
                if not mask[row] or expected[row] == row:
                    assert weight[row] == 1 and area == 0
                elif u[1] < 0.5:
                    assert 0 <= top <= bottom <= 17 and 0 <= left <= right <= 20
                    assert weight[row] == np.float32(1 - area / (17 * 20))
                    assert area <= (1 - quantile(1.0, u[2])) * 17 * 20 + 1e-9
                    cuts += area > 0
                else:
                    assert area == 0 and weight[row] == np.float32(quantile(0.4, u[2]))
                    mixes += 1
    assert cuts > 10 and mixes > 10
    assert not masks or loader.stats()["bad"] >= 6


@pytest.mark.parametrize(
    ("options", "mixed", "cut"),
    [
        ({"mixup": 1.0}, True, False),
        ({"cutmix": 1.0}, True, True),
        ({"mixup": 1.0, "cutmix": 1.0, "switch_prob": 0}, True, False),
        ({"mixup": 1.0, "cutmix": 1.0, "switch_prob": 1}, True, True),
        ({"mixup": 1.0, "cutmix": 1.0, "mix_prob": 0}, False, False),
    ],
)
def test_probabilities_of_mixing(pictures: Path, options: dict[str, Any], mixed: bool, cut: bool) -> None:
    for batch in kept(on(pictures, Images(**options))):
        own = torch.arange(8)
        assert ((batch["image.partner"] != own) == mixed).all()
        assert ((batch["image.weight"] < 1).float().mean() > 0.5) == mixed and (batch["image.weight"] >= 0).all()
        assert ("image.box" in batch) == ("cutmix" in options)
        if "cutmix" in options:
            assert bool(batch["image.box"].any()) == cut


def test_rows_are_mixed_as_often_as_asked(pictures: Path) -> None:
    found = kept(on(pictures, Images(mixup=1.0, mix_prob=0.3)), 8)
    mixed = torch.cat([batch["image.partner"] != torch.arange(8) for batch in found]).float()
    assert abs(float(mixed.mean()) - 0.3) < 4 * (0.3 * 0.7 / len(mixed)) ** 0.5
    weights = torch.cat([batch["image.weight"] for batch in found])
    assert ((weights < 1) == mixed.bool()).all()


def test_ranks_without_rows(pictures: Path) -> None:
    """More ranks than rows: some have empty batches."""
    shares = []
    for rank in range(3):
        found = kept(on(pictures, batch=2, rank=rank, world_size=3, static=False), most=3)
        shares.append(len(found[0]["image"]))
        assert all(batch["image"].shape[1:] == (3, 17, 20) and len(batch["image.partner"]) == shares[-1] for batch in found)
    assert sorted(shares) == [0, 1, 1]


def test_a_row_that_is_alone_stays_as_it_is(pictures: Path) -> None:
    for batch in kept(on(pictures, Images(mixup=1.0, cutmix=1.0), batch=1), most=5):
        assert batch["image.partner"].tolist() == [0] and batch["image.weight"].tolist() == [1] and not batch["image.box"].any()


def test_a_label_has_the_share_of_the_pixels(pictures: Path) -> None:
    """Of CutMix, counted in the result: pictures of one value each."""

    class One(Images):
        def run(self, name: str, rows: torch.Tensor, out: torch.Tensor, batch: Any) -> None:
            filled = torch.arange(len(rows), dtype=torch.uint8)[:, None, None, None].expand(rows.shape).contiguous()
            super().run(name, filled, out, batch)

    for batch in kept(on(pictures, One(**PLAIN, cutmix=1.0))):
        values, (height, width) = levels(batch["image"])[..., 0], batch["image"].shape[2:]
        own = (values == torch.arange(8)[:, None, None]).flatten(1).double().mean(1)
        assert torch.allclose(own, batch["image.weight"].double(), atol=1e-7)
        rest = (values == batch["image.partner"][:, None, None]).flatten(1).double().mean(1)
        assert torch.allclose(own + rest, torch.ones(8, dtype=torch.float64)) and height * width == SIDE * SIDE


def test_the_recipe_for_labels_runs_as_it_stands(sets: Path) -> None:
    """docs/scheduler.md."""
    text = (Path(__file__).parents[2] / "docs" / "scheduler.md").read_text()
    (code,) = re.findall(r"^## Pictures\n.*?^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    path, seen = batchkit.write_pictures(sets / "recipe", 64, size=40), []
    model = torch.nn.Sequential(torch.nn.AvgPool2d(16), torch.nn.Flatten(), torch.nn.Linear(3 * 14 * 14, 100))
    model.register_forward_hook(lambda _module, _given, made: seen.append(made))
    names: dict[str, Any] = {"path": path, "device": "cpu", "model": model}
    exec(code, names)
    assert [tuple(one.shape) for one in seen] == [(64, 100)] and torch.isfinite(names["loss"])
    names["loss"].backward()
    names["batches"].close()


# -- whoever, whenever ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["inline", "thread", "process"])
@pytest.mark.parametrize("ahead", [0, 4])
@pytest.mark.parametrize(("copies", "consumer"), [(0.0, 0.0), (0.004, 0.008)])
def test_batches_are_the_same_whatever_the_timing(
    pictures: Path, engine: str, ahead: int, copies: float, consumer: float, late: Make
) -> None:
    """On a device that is late; and they are what float64 makes of the loader's pictures with what is said to be drawn."""
    expected, plain = kept(on(pictures), 2), kept(Loader(pictures, 8, FIELDS, seed=5, engine="inline"), 2)
    backend = late(copies, consumer)
    loader = on(pictures, device={"_backend": backend, "ahead": ahead}, engine=engine)
    found = looked_at_late(loader, backend, 2)
    equal(expected, found)
    assert loader.stats()["device"]["grown"] == loader.stats()["device"]["extra"] == 0
    loader.close()
    for batch, source in zip(found, plain, strict=True):
        exact = as_float64(EVERYTHING, batch | {"image": source["image"]})
        assert np.abs(batch["image"].double().numpy() - exact).max() <= TOLERANCES["float32"]


def test_nothing_is_allocated_after_the_first_epoch(pictures: Path, late: Make) -> None:
    backend = late(0.001, 0.002)
    loader = on(pictures, Images(crop=17, flip=0.5, mixup=0.2, cutmix=1.0), device={"_backend": backend}, engine="process")
    looked_at_late(loader, backend, 1)
    before = backend.allocations
    looked_at_late(loader, backend, 5)
    stats = loader.stats()["device"]
    assert backend.allocations == before and stats["extra"] == stats["grown"] == 0 and backend.registrations == 1
    # uint8 travels, and some tens of bytes a row; a place has room for the crop alone.
    assert 8 * SIDE * SIDE * 3 < stats["copied_bytes"] / stats["batches"] < 8 * (SIDE * SIDE * 3 + 80)
    assert stats["pageable"] <= 1 and 8 * 17 * 17 * 3 * 2 <= stats["place_bytes"] < 8 * 17 * 17 * 3 * 2 + 16 * 256
    loader.close()


@pytest.mark.parametrize("ahead", [0, 3])
def test_a_state_goes_on_with_the_same_draws(pictures: Path, ahead: int, late: Make) -> None:
    whole = kept(on(pictures), 2)
    loader = on(pictures, device={"_backend": late(), "ahead": ahead})
    kept(loader, most=4)
    state = json.loads(json.dumps(loader.state_dict()))
    loader.close()
    backend = late()
    other = on(pictures, device={"_backend": backend, "ahead": ahead})
    other.load_state_dict(state)
    equal(whole[4:], looked_at_late(other, backend, 2))
    other.close()


def test_states_are_those_of_the_plain_loader(pictures: Path) -> None:
    plain, loader = Loader(pictures, 8, FIELDS, seed=5, engine="inline"), on(pictures)
    for ours, theirs in zip(plain, loader, strict=True):
        assert plain.state_dict() == loader.state_dict() and torch.equal(ours["__index__"], theirs["__index__"])


def test_every_number_of_ranks_draws_the_same(pictures: Path) -> None:
    """All but the partners, which are of the same rank."""

    def by_sample(world: int) -> dict[int, list[Any]]:
        found = {}
        for rank in range(world):
            for batch in kept(on(pictures, rank=rank, world_size=world)):
                assert len(batch["image"]) == 8 // world and batch["image.partner"].max() < 8 // world
                for row, index in enumerate(batch["__index__"].tolist()):
                    found[index] = [batch[name][row].tolist() for name in DRAWN if name != "image.partner"]
        return found

    assert by_sample(1) == by_sample(2) == by_sample(4)


def test_ranks_and_steps_mix_in_ways_of_their_own(pictures: Path) -> None:
    circles = {
        tuple(batch["image.partner"].tolist())
        for rank in range(2)
        for batch in kept(on(pictures, batch=24, rank=rank, world_size=2), 2)
    }
    assert len(circles) == 2 * 2 * 2


def test_epochs_differ_and_seeds_too(pictures: Path) -> None:
    def drawn(epoch: int, seed: int) -> dict[int, list[Any]]:
        loader = on(pictures, seed=seed)
        loader.set_epoch(epoch)
        return {
            index: [batch["image.crop"][row].tolist(), bool(batch["image.flip"][row]), float(batch["image.weight"][row])]
            for batch in kept(loader)
            for row, index in enumerate(batch["__index__"].tolist())
        }

    first, others = drawn(0, 5), [drawn(1, 5), drawn(0, 6)]
    for other in others:
        same = [first[index] == other[index] for index in first]
        assert len(same) == 48 and sum(same) < 10
    assert drawn(1, 5) == others[0]


def test_a_replaced_sample_has_draws_of_its_own(sets: Path) -> None:
    path = batchkit.write_pictures(sets / "replaced", 24, bad=[4, 9])
    found = kept(on(path, Images(**PLAIN, flip=0.5), bad_samples="replace", most_bad_rate=1))
    for batch in found:
        for row, index in enumerate(batch["__index__"].tolist()):
            assert index not in (4, 9)
            (u,) = independent_order.draws(5, 0, index, 0, "image/1/RandomHorizontalFlip", 1)
            assert bool(batch["image.flip"][row]) == (u < 0.5)


def test_within_a_budget(pictures: Path) -> None:
    """What is drawn counts; batches are the same."""
    with pytest.raises(LimitError) as least:
        Loader(pictures, 8, FIELDS, max_bytes=30_000)
    assert least.value
    equal(kept(on(pictures)), kept(on(pictures, max_bytes="100KB")))
    budget = on(pictures, max_bytes="100KB").loader._budget
    assert isinstance(budget, Budget) and budget._producer.drawers


SPLIT: dict[str, Any] = {"max_bytes": LEAST_BYTES, "over": "split"}
RAGGED: dict[str, Any] = {"picture": [T.Resize((18, 18))], "ids": None, "sound": None}
CROPPED = {"picture": Images(**PLAIN, crop=(17, 16), flip=0.5)}


def in_parts(path: Path, ops: Any = CROPPED, device: dict[str, Any] | None = None, **options: Any) -> DeviceLoader:
    loader = Loader(path, 8, RAGGED, **{"engine": "inline", "seed": 5} | SPLIT | options)
    return DeviceLoader(loader, ops=ops, **device or {"device": "cpu"})


def joined(parts: list[Batch]) -> list[Batch]:
    """The fixed fields of whole batches."""
    found: list[list[Batch]] = []
    for one in parts:
        if int(one["__part__"][0, 0]) == 0:
            found.append([])
        found[-1].append(one)
    assert all(len(many) == int(many[0]["__part__"][0, 1]) for many in found) and max(map(len, found)) > 1
    names = ["__index__", "picture", "picture.crop", "picture.flip"]
    return [{name: torch.cat([one[name] for one in many]) for name in names} for many in found]


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"rank": 1, "world_size": 2}, {"engine": "process", "threads": 1}])
def test_parts_are_drawn_as_the_whole(complete: Path, late: Make, options: dict[str, Any]) -> None:
    """Crops and mirroring, and so the pixels; on the host, and ahead on a device."""
    whole = kept(in_parts(complete, **options | {"over": "error", "max_bytes": None}), 2)
    flips = torch.cat([one["picture.flip"] for one in whole])
    assert 0 < flips.float().mean() < 1 and torch.cat([one["picture.crop"] for one in whole]).amax(0).tolist() == [1, 2]
    backend = late(0.001, 0.001)
    for parts in (
        kept(in_parts(complete, **options), 2),
        looked_at_late(in_parts(complete, device={"_backend": backend}, **options), backend, 2),
    ):
        for one, other in zip(joined(parts), whole, strict=True):
            for name, value in one.items():
                assert torch.equal(value, other[name]), name


def test_a_resume_between_parts_with_draws(complete: Path) -> None:
    loader, found, states = in_parts(complete), [], []
    for batch in loader:
        found.append({name: value.clone() for name, value in batch.items()})
        states.append(json.loads(json.dumps(loader.state_dict())))
    between = [number for number, state in enumerate(states) if "parts" in state]
    assert between and all(states[number]["drawn"] == ["picture.crop", "picture.flip"] for number in between)
    for number in (between[0], between[-1]):
        again = in_parts(complete)
        again.load_state_dict(states[number])
        assert again.state_dict() == states[number]
        equal(found[number + 1 :], kept(again))
        # Elsewhere batches are cut elsewhere.
        plain = Loader(complete, 8, RAGGED, seed=5, engine="inline", **SPLIT)
        for other in (plain, in_parts(complete, {"picture": Images(flip=0.5)})):
            with pytest.raises(StateError, match=r"same draws of Images \(\['picture.crop', 'picture.flip'\] in the state"):
                other.load_state_dict(states[number])
    # Between batches any ops will do.
    number = next(number for number, state in enumerate(states) if number > 3 and "parts" not in state)
    other = in_parts(complete, {"picture": Images()})
    other.load_state_dict(states[number])
    assert next(iter(other))["__index__"].tolist()[0] == found[number + 1]["__index__"].tolist()[0]


def test_ops_over_a_loaded_state_keep_its_place(complete: Path) -> None:
    """Batches are cut elsewhere, so it is another number of them; between two parts there is no such place."""
    plain, found, states = Loader(complete, 8, RAGGED, seed=5, engine="inline", **SPLIT), [], []
    for batch in plain:
        found.append(batch["__index__"])
        states.append(plain.state_dict())
    between = 0
    for number, state in enumerate(states[:-1], 1):
        inner = Loader(complete, 8, RAGGED, seed=5, engine="inline", **SPLIT)
        inner.load_state_dict(state)
        if "parts" in state:
            with pytest.raises(OptionError, match="make the DeviceLoader first"):
                DeviceLoader(inner, "cpu", ops=CROPPED)
            assert torch.equal(next(iter(inner))["__index__"], found[number])
            between += 1
            continue
        rest = kept(DeviceLoader(inner, "cpu", ops=CROPPED))
        assert torch.equal(torch.cat([one["__index__"] for one in rest]), torch.cat(found[number:]))
    assert 0 < between < len(states) - 2


# -- what is refused ------------------------------------------------------------------------------------------------------


def test_loaders_that_do_not_go_with_it(pictures: Path, complete: Path) -> None:
    """They are as they were before."""
    loader = Loader(complete, 8, RAGGED, engine="inline", **SPLIT)
    before = batchkit.digests(loader)
    for mixing in ({"mixup": 0.2}, {"cutmix": 1.0}):
        with pytest.raises(OptionError, match=r"would depend on max_bytes\. Leave the mixing of 'picture' out"):
            DeviceLoader(loader, "cpu", ops={"picture": Images(flip=0.5, **mixing)})
    loader.set_epoch(0)
    assert batchkit.digests(loader) == before
    loader = Loader(pictures, 8, FIELDS, engine="inline")
    with pytest.raises(OptionError, match=f"a crop of 25 x 3 does not fit into pictures of {SIDE} x {SIDE}"):
        DeviceLoader(loader, "cpu", ops={"image": Images(crop=(25, 3))})
    with pytest.raises(OptionError):
        DeviceLoader(loader, "cpu", ops={"image": Images(flip=0.5)}, decode="nobody")
    assert list(next(iter(loader))) == ["__index__", "__mask__", "image", "label"]


def test_a_field_of_such_a_name_is_not_hidden(sets: Path) -> None:
    from shardkit import Part, scalar, write_dataset

    from lfdata.codecs.registry import make_encoder
    from lfdata.format.meta import FieldMeta

    encoder = make_encoder("image", {"codec": "png"})
    fields = (FieldMeta("image", "image", encoder.params), FieldMeta("image.flip", "scalar", {"dtype": "int64"}))
    rows: list[Any] = [
        (b"%d" % n, {"image": encoder.encode(batchkit.pixels(n, 8, 8)), "image.flip": scalar(n % 2, "int64")}) for n in range(4)
    ]
    write_dataset(sets / "named", fields, [Part(rows)], name="named")
    wanted = {"image": [T.CenterCrop(8)], "image.flip": None}
    with pytest.raises(OptionError, match=r"'image\.flip'.*rename"):
        on(sets / "named", Images(flip=0.5), wanted, 4)
    (batch,) = kept(on(sets / "named", Images(**PLAIN, flip="image.flip"), wanted, 4))
    (plain,) = kept(Loader(sets / "named", 4, wanted, seed=5))
    turned = plain["image"].flip(2)
    for row, flip in enumerate(batch["image.flip"].tolist()):
        assert torch.equal(levels(batch["image"])[row], (turned if flip else plain["image"])[row])


NAMES = ["__index__", "__mask__", "image", "label"]


def test_another_device_loader_asks_anew(pictures: Path) -> None:
    """Once the first one is closed, or nobody has it any more; that says so if it is used again."""
    inner = Loader(pictures, 8, FIELDS, seed=5, engine="inline")
    first = DeviceLoader(inner, "cpu", ops={"image": EVERYTHING})
    assert set(DRAWN) <= set(next(iter(first)))
    first.close()
    inner.set_epoch(0)
    second = DeviceLoader(inner, "cpu", ops={"image": Images()})
    assert list(next(iter(second))) == NAMES
    with pytest.raises(OptionError, match="was made over this Loader since this one was closed"):
        iter(first)
    del second
    inner.set_epoch(0)
    third = DeviceLoader(inner, "cpu", ops={"image": Images(flip=0.5)})
    assert list(next(iter(third))) == [*NAMES, "image.flip"]
    third.close()
    assert list(next(iter(third))) == [*NAMES, "image.flip"]


def test_one_device_loader_a_loader(pictures: Path, late: Make) -> None:
    """The first one goes on as if nobody had tried."""
    for where in ({"device": "cpu"}, {"_backend": late()}):
        whole = kept(on(pictures, Images(**PLAIN, flip=0.5)))
        inner = Loader(pictures, 8, FIELDS, seed=5, engine="inline")
        first = DeviceLoader(inner, ops={"image": Images(**PLAIN, flip=0.5)}, **where)  # type: ignore[arg-type]
        for ops in (None, {"image": EVERYTHING}):
            with pytest.raises(OptionError, match=r"another DeviceLoader over this Loader.*make a Loader for each"):
                DeviceLoader(inner, "cpu", ops=ops)
        batches, found = iter(first), []
        for batch in batches:
            if (backend := where.get("_backend")) is not None:
                backend.copies.finish()  # type: ignore[attr-defined]
            found.append({name: value.clone() for name, value in batch.items()})
            with pytest.raises(OptionError, match="another DeviceLoader"):
                DeviceLoader(inner, "cpu")
        equal(whole, found)
        first.close()


def test_an_epoch_under_way_is_not_ended(pictures: Path) -> None:
    inner = Loader(pictures, 8, FIELDS, seed=5, engine="inline")
    expected = batchkit.digests(Loader(pictures, 8, FIELDS, seed=5, engine="inline"))
    found = []
    for batch in inner:
        found.append(batchkit.digest(batch))
        with pytest.raises(
            OptionError, match=rf"in the middle of an epoch \({len(found)} batches of epoch 0.*before iterating"
        ):
            DeviceLoader(inner, "cpu", ops={"image": Images(flip=0.5)})
    assert found == expected
    next(iter(inner))
    state = inner.state_dict()
    next(iter(inner))
    inner.load_state_dict(state)
    assert len(kept(DeviceLoader(inner, "cpu", ops={"image": Images(flip=0.5)}))) == 5


def test_an_iteration_of_which_nothing_is_taken_yet_is_told(pictures: Path) -> None:
    inner = Loader(pictures, 8, FIELDS, engine="inline")
    batches = iter(inner)
    loader = DeviceLoader(inner, "cpu", ops={"image": Images(flip=0.5)})
    with pytest.raises(LfdataError, match="was made over this Loader after this iteration was begun"):
        next(batches)
    assert len(kept(loader)) == 6


def test_what_fails_leaves_the_draws_of_others(pictures: Path) -> None:
    inner = Loader(pictures, 8, FIELDS, seed=5, engine="inline")
    first = DeviceLoader(inner, "cpu", ops={"image": Images(flip=0.5)})
    with pytest.raises(OptionError, match="decode is one of"):
        DeviceLoader(inner, "cpu", ops={"image": Images(flip=0.5)}, decode="nobody")
    assert "image.flip" in next(iter(first))
