"""Every kind of field, fixed and ragged: the values of a batch are what the data set itself decodes."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import batchkit
import mapkit
import msgspec
import numpy as np
import pytest
import torch
from batchkit import NAMES, OPTIONAL, PAD, lacks, poisoned
from hypothesis import given, settings
from hypothesis import strategies as st
from shardkit import Part, write_dataset

import lfdata.transforms as T
from lfdata import Loader, ShardDataset
from lfdata.codecs.registry import make_encoder
from lfdata.errors import KeyMissingError, OptionError
from lfdata.format.meta import FieldMeta
from lfdata.loader.filler import largest_sum

MAP = {"box": [T.Map("mapkit:double", (1,), "float64")], "label": [T.Map("mapkit:noisy", (2,), "float64", random=True)]}
FIXED: dict[str, Any] = {
    "image": [T.CenterCrop(24)],
    "picture": [T.Resize((6, 5))],
    "ids": [T.Tokens(8, pad=PAD)],
    "sound": [T.AudioWindow(100, pad=-3)],
    "box": None,
    "label": None,
}
RAGGED = ("image", "picture", "ids", "sound", "points", "caption", "blob", "about")


def each(batch: dict[str, torch.Tensor], name: str) -> list[np.ndarray]:
    """A ragged field, row by row."""
    offsets = batch[f"{name}.offsets"].tolist()
    assert offsets[0] == 0 and offsets[-1] == len(batch[name])
    return [batch[name][start:stop].numpy() for start, stop in itertools.pairwise(offsets)]


@pytest.mark.parametrize("which", ["kinds", "complete"])
def test_ragged_fields_are_what_the_data_set_decodes(which: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(which)
    data, seen = ShardDataset(path), []
    for batch in poisoned(Loader(path, 7, RAGGED, tail="pad", engine="inline", seed=3)):
        rows = batch["__index__"].tolist()
        samples = data.__getitems__(rows)
        seen += [index for index, real in zip(rows, batch["__mask__"].tolist(), strict=True) if real]
        for name in RAGGED:
            assert (f"{name}.present" in batch) == (which == "kinds" and name in OPTIONAL)
            if f"{name}.present" in batch:
                assert batch[f"{name}.present"].tolist() == [sample[name] is not None for sample in samples]
            for number, (found, sample) in enumerate(zip(each(batch, name), samples, strict=True)):
                expected = sample[name]
                if expected is None:
                    assert len(found) == 0
                elif name in ("image", "picture", "points", "sound"):
                    expected = expected.samples if name == "sound" else expected
                    assert batch[f"{name}.shapes"][number].tolist() == list(expected.shape)
                    assert found.dtype == expected.dtype and np.array_equal(found, expected.reshape(-1))
                elif name == "about":
                    assert msgspec.msgpack.decode(found.tobytes()) == expected
                elif name == "caption":
                    assert found.tobytes() == expected.encode()
                elif name == "blob":
                    assert found.tobytes() == expected
                else:
                    assert found.dtype == expected.dtype and np.array_equal(found, expected)
    assert sorted(seen) == list(range(len(data)))


@pytest.mark.parametrize("which", ["kinds", "complete"])
def test_fixed_fields_have_their_declared_shape(which: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(which)
    data = ShardDataset(path)
    shapes = {"image": (24, 24, 3), "picture": (6, 5, 3), "ids": (8,), "sound": (100, 1), "box": (2, 3), "label": ()}
    dtypes = {"image": torch.uint8, "picture": torch.uint8, "ids": torch.uint16, "sound": torch.int16, "box": torch.float32}
    for batch in poisoned(Loader(path, 5, FIXED, engine="inline")):
        for name, shape in shapes.items():
            assert batch[name].shape == (5, *shape) and batch[name].dtype == dtypes.get(name, torch.int32)
            assert (f"{name}.present" in batch) == (which == "kinds" and name in OPTIONAL)
        for number, sample in enumerate(data.__getitems__(batch["__index__"].tolist())):
            for name in FIXED:
                if f"{name}.present" in batch:
                    assert bool(batch[f"{name}.present"][number]) == (sample[name] is not None)
            ids, count = batch["ids"][number].tolist(), int(batch["ids.count"][number])
            wanted = [] if sample["ids"] is None else sample["ids"].tolist()[:8]
            assert count == len(wanted) and ids == wanted + [PAD] * (8 - count)
            sound, count = batch["sound"][number, :, 0].tolist(), int(batch["sound.count"][number])
            heard = [] if sample["sound"] is None else sample["sound"].samples[:100, 0].tolist()
            assert count == len(heard) and sound == heard + [-3] * (100 - count)
            assert batch["box"][number].numpy().tobytes() == (bytes(24) if sample["box"] is None else sample["box"].tobytes())
            assert int(batch["label"][number]) == (0 if sample["label"] is None else int(sample["label"]))
            if sample["picture"] is None:
                assert not batch["picture"][number].any()
            height, width = sample["image"].shape[:2]
            top, left = round((height - 24) / 2), round((width - 24) / 2)
            assert np.array_equal(batch["image"][number].numpy(), sample["image"][top : top + 24, left : left + 24])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("truncate", ["head", "tail", "random"])
def test_tokens_are_cut_and_filled_where_asked(complete: Path, side: str, truncate: str) -> None:
    data = ShardDataset(complete)
    for batch in Loader(complete, 8, {"ids": [T.Tokens(6, PAD, side, truncate)]}, engine="inline"):
        for ids, count, index in zip(batch["ids"], batch["ids.count"].tolist(), batch["__index__"].tolist(), strict=True):
            stored = data[index]["ids"].tolist()
            assert count == min(6, len(stored))
            kept = ids[6 - count :].tolist() if side == "left" else ids[:count].tolist()
            if truncate != "random":
                assert kept == (stored[len(stored) - count :] if truncate == "head" else stored[:count])
            assert any(kept == stored[at : at + count] for at in range(len(stored) - count + 1))
            assert ids.tolist().count(PAD) >= 6 - count


def test_random_windows_of_recordings_are_parts_of_them(complete: Path) -> None:
    data, starts = ShardDataset(complete), set()
    for batch in Loader(complete, 8, {"sound": [T.AudioWindow(50, random=True)]}, engine="inline"):
        for values, count, index in zip(
            batch["sound"], batch["sound.count"].tolist(), batch["__index__"].tolist(), strict=True
        ):
            stored = data[index]["sound"].samples
            assert count == min(50, len(stored)) and not values[count:].any()
            fits = [
                at for at in range(len(stored) - count + 1) if np.array_equal(stored[at : at + count], values[:count].numpy())
            ]
            assert fits
            starts.add(fits[0])
    assert len(starts) > 3


def test_gain_changes_ragged_and_fixed_recordings_alike(complete: Path) -> None:
    loud = [T.Gain(-20, -3)]
    ragged = Loader(complete, 8, {"sound": loud}, engine="inline")
    for batch, plain in zip(ragged, Loader(complete, 8, ["sound"], engine="inline"), strict=True):
        assert torch.equal(batch["sound.offsets"], plain["sound.offsets"])
        assert batch["sound"].abs().sum() < plain["sound"].abs().sum()


def test_map_takes_decoded_values_and_draws_that_belong_to_the_sample(complete: Path) -> None:
    data, drawn = ShardDataset(complete), {}
    for world in (1, 2):
        for rank in range(world):
            for batch in Loader(complete, 8, MAP, rank=rank, world_size=world, engine="inline"):
                assert batch["box"].dtype == torch.float64 and batch["box"].shape[1:] == (1,)
                for number, index in enumerate(batch["__index__"].tolist()):
                    sample = data[index]
                    assert batch["box"][number].tolist() == mapkit.double(sample["box"]).tolist()
                    value, draw = batch["label"][number].tolist()
                    assert value == int(sample["label"]) and drawn.setdefault(index, draw) == draw
    assert len(set(drawn.values())) == len(drawn) == len(data)


def test_map_takes_the_pixels_of_a_crop(complete: Path) -> None:
    crop = [T.RandomResizedCrop(8), T.ColorJitter(0.3)]
    plain = Loader(complete, 8, {"image": crop}, engine="inline")
    mapped = Loader(complete, 8, {"image": [*crop, T.Map("mapkit:double", (1,), "float64")]}, engine="inline")
    for batch, pixels in zip(poisoned(mapped), plain, strict=True):
        assert batch["image"].tolist() == [[2.0 * float(one.sum())] for one in pixels["image"].numpy().astype(np.float64)]
    with pytest.raises(OptionError, match="fixed size"):
        Loader(complete, 8, {"image": [T.ColorJitter(0.3), T.Map("mapkit:double", (1,), "float64")]}, engine="inline")


def test_seeing_every_sample_once_does_not_go_with_replacing(complete: Path) -> None:
    with pytest.raises(OptionError, match="mask"):
        Loader(complete, 8, ["label"], tail="pad", bad_samples="replace", engine="inline")


def test_a_mixture_says_whose_each_row_is(complete: Path, other: Path) -> None:
    data = [ShardDataset(complete), ShardDataset(other)]
    loader = poisoned(
        Loader([complete, other], 6, ["ids", "label", "image"], mixture={"block": 16}, engine="inline", tail="pad")
    )
    sources = set()
    for batch in loader:
        for number, found in enumerate(each(batch, "ids")):
            source, index = int(batch["__source__"][number]), int(batch["__index__"][number])
            sample = data[source][index]
            sources.add(source)
            assert (len(found) == 0) if sample["ids"] is None else np.array_equal(found, sample["ids"])
            assert int(batch["label"][number]) == int(sample["label"] or 0)
        for number, found in enumerate(each(batch, "image")):
            sample = data[int(batch["__source__"][number])][int(batch["__index__"][number])]
            assert np.array_equal(found, sample["image"].reshape(-1))
    assert sources == {0, 1}


@pytest.mark.parametrize("batch", [3, 8, 16, 100])
@pytest.mark.parametrize("count", [1, 5, 9])
def test_padding_that_repeats_samples_has_room(tmp_path: Path, batch: int, count: int) -> None:
    """The largest samples come more than once in a slot."""
    path = batchkit.write_all_kinds(tmp_path / "d", count, complete=True, shards=1)
    for world in (1, 2) if batch % 2 == 0 else (1,):
        for rank in range(world):
            loader = Loader(path, batch, RAGGED, tail="pad", engine="inline", rank=rank, world_size=world)
            for found in loader:
                for name in RAGGED:
                    assert len(each(found, name)) == batch // world


def test_a_repeating_source_has_room(tmp_path: Path, numbers: Path) -> None:
    path = batchkit.write_numbers(tmp_path / "few", 2, seed=2, lengths=[900, 1])
    loader = Loader([numbers, path], 16, ["ids"], mixture={"weights": [1, 9], "block": 32, "n": 320}, engine="inline")
    assert sum(len(each(batch, "ids")) for batch in loader) == 320


@settings(deadline=None, max_examples=80)
@given(st.lists(st.integers(0, 30), max_size=4), st.integers(0, 5), st.integers(1, 3))
def test_the_room_of_ragged_fields_is_the_most_that_can_come(sizes: list[int], rows: int, repeats: int) -> None:
    """Against all ways to choose the rows."""
    ways = (way for way in itertools.product(range(len(sizes)), repeat=min(rows, repeats * len(sizes))))
    most = max(
        (sum(sizes[n] for n in way) for way in ways if all(way.count(n) <= repeats for n in set(way))),
        default=0,
    )
    room = largest_sum(np.array(sizes, np.int64), rows, repeats)
    assert most <= room <= max(sizes, default=0) * rows
    if repeats == 1 or rows <= repeats:
        assert room == most


def test_all_fields_are_the_default(numbers: Path) -> None:
    (batch, *_) = Loader(numbers, 4, engine="inline")
    assert batch.keys() == {"__index__", "__mask__", "label", "ids", "ids.offsets"}


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"image": [T.Resize(10)]}, "fixed size"),
        ({"image": [T.RandAugment(), T.CenterCrop(3)]}, "first"),
        ({"ids": [T.CenterCrop(3)]}, "ids"),
        ({"label": [T.Tokens(3)]}, "label"),
        ({"caption": [T.Tokens(3)]}, "Tokens"),
        ({"sound": [T.AudioWindow(3), T.AudioWindow(3)]}, "sound"),
        ({"box": [T.Map("mapkit:nothing", (1,), "uint8")]}, "mapkit:nothing"),
    ],
)
def test_transforms_that_do_not_fit_are_refused(complete: Path, fields: Any, what: str) -> None:
    with pytest.raises(OptionError, match=what):
        Loader(complete, 4, fields, engine="inline")


def test_a_field_that_is_not_there_is_named(complete: Path) -> None:
    with pytest.raises(KeyMissingError, match="nothing"):
        Loader(complete, 4, ["nothing"], engine="inline")


def test_lacks_is_what_the_data_sets_hold(kinds: Path) -> None:
    data = ShardDataset(kinds)
    for name in NAMES:
        assert data.present(name).tolist() == [not lacks(number, name) for number in range(len(data))]


def test_grey_pictures_have_one_channel_unless_there_are_others(tmp_path: Path) -> None:
    encoder = make_encoder("image", {"codec": "png"})
    grey, colour = batchkit.pixels(0, 9, 8)[:, :, :1].copy(), batchkit.pixels(1, 9, 8)
    for name, kept in (("grey", [grey, grey]), ("both", [grey, colour])):
        rows = [(b"%d" % number, {"x": encoder.encode(picture)}) for number, picture in enumerate(kept)]
        write_dataset(tmp_path / name, [FieldMeta("x", "image", encoder.params)], [Part(rows)], name=name)
        channels = max(picture.shape[2] for picture in kept)
        for ops in (None, [T.CenterCrop((9, 8))]):
            (batch,) = Loader(tmp_path / name, 2, {"x": ops}, engine="inline", shuffle="sequential")
            found = batch["x"].numpy().reshape(2, 9, 8, channels)
            assert all((mine == picture).all() for mine, picture in zip(found, kept, strict=True))
