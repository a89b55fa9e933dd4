"""Windows in the loader: what the reader gives, in the loader's order, with one draw for all frames of a window."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from batchkit import digest, digests, epoch_of, poisoned, spoil
from windowkit import LENGTHS, write_episodes

import lfdata
from lfdata import Loader
from lfdata import transforms as T
from lfdata.errors import FormatError, OptionError, SampleError, StateError

CROP = T.CenterCrop(24)
FIELDS: dict[str, Any] = {
    "state": [T.Window(range(-2, 3))],
    "on": [T.Window([0, 1])],
    "reward": [T.Window([-1, 0, 7])],
    "camera": [T.Window([-3, 0]), CROP],
    "ids": [T.Window([0, 1]), T.Tokens(3)],
    "frame_index": None,
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_episodes(tmp_path_factory.mktemp("windows") / "set")


@pytest.mark.parametrize("engine", ["inline", "process"])
def test_a_batch_holds_the_windows_that_the_reader_gives(path: Path, engine: str) -> None:
    data = lfdata.open(path)
    deltas = {name: ops[0].deltas for name, ops in FIELDS.items() if ops}
    windows = data.windows(deltas)
    seen = []
    loader = poisoned(Loader(path, 4, FIELDS, engine=engine, seed=3))
    for batch in loader:
        rows = batch["__index__"].numpy()
        seen += rows.tolist()
        wanted = windows.read(rows)
        for name in ("state", "on", "reward"):
            np.testing.assert_array_equal(batch[name].numpy(), wanted[name], err_msg=name)
        for name in deltas:
            np.testing.assert_array_equal(batch[f"{name}_is_pad"].numpy(), wanted[f"{name}_is_pad"])
        np.testing.assert_array_equal(batch["camera"].numpy(), wanted["camera"][:, :, 4:28, 8:32])
        for row, ids in zip(batch["ids"].numpy().tolist(), wanted["ids"], strict=True):
            assert row == [[*one.tolist(), 0, 0, 0][:3] for one in ids]
        assert batch["ids.count"].shape == (4, 2)
    assert len(seen) == sum(LENGTHS) // 4 * 4 == len(set(seen))
    loader.close()


def test_all_pictures_of_a_window_have_one_draw(path: Path) -> None:
    """Five times the same frame, cut, mirrored and coloured at random, is five times the same picture; other rows differ."""
    ops = [T.Window([0] * 5), T.RandomResizedCrop(20), T.RandomHorizontalFlip(), T.ColorJitter(0.5, 0.5)]
    pictures = []
    for batch in Loader(path, 4, {"camera": ops}, engine="inline"):
        found = batch["camera"].numpy()
        assert (found == found[:, :1]).all()
        pictures += list(found[:, 0])
    assert len({one.tobytes() for one in pictures}) > len(pictures) // 2


def test_a_window_of_the_row_alone_draws_as_no_window_does(path: Path) -> None:
    ops = [T.RandomResizedCrop(20), T.RandAugment()]
    plain = Loader(path, 4, {"camera": ops}, engine="inline")
    window = Loader(path, 4, {"camera": [T.Window([0]), *ops]}, engine="inline")
    for one, other in zip(plain, window, strict=True):
        np.testing.assert_array_equal(one["camera"].numpy(), other["camera"].numpy()[:, 0])


@pytest.mark.parametrize("options", [{"threads": 2}, {"processes": 2}, {"prefetch": 4, "threads": 1}, {"engine": "thread"}])
def test_bytes_do_not_depend_on_who_makes_them(path: Path, options: dict[str, Any]) -> None:
    assert digests(Loader(path, 4, FIELDS, engine="inline"), 2) == digests(Loader(path, 4, FIELDS, **options), 2)


def test_ranks_share_the_batches_of_one(path: Path) -> None:
    whole = epoch_of([Loader(path, 4, FIELDS, rank=0, world_size=1, engine="inline")])
    parts = epoch_of([Loader(path, 4, FIELDS, rank=rank, world_size=2, engine="inline") for rank in range(2)])
    for one, other in zip(whole, parts, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])


def test_a_resumed_loader_goes_on_with_the_same_bytes(path: Path) -> None:
    loader = Loader(path, 4, FIELDS, engine="inline")
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    state = loader.state_dict()
    rest = [digest(batch) for batch in batches]
    resumed = Loader(path, 4, FIELDS, engine="inline")
    resumed.load_state_dict(state)
    assert [digest(batch) for batch in resumed] == rest
    other = Loader(path, 4, FIELDS | {"state": [T.Window(range(-2, 4))]}, engine="inline")
    with pytest.raises(StateError, match="deltas"):
        other.load_state_dict(state)


def test_rows_that_a_filter_takes_out_stay_neighbours(path: Path) -> None:
    loader = Loader(
        path, 2, {"reward": [T.Window([-1, 0])]}, where=lambda data: data.column("frame_index") % 2 == 1, engine="inline"
    )
    for batch in loader:
        now = batch["__index__"].numpy()
        np.testing.assert_array_equal(batch["reward"].numpy(), np.stack([(now - 1) / 4, now / 4], axis=1))
        assert not batch["reward_is_pad"].any()


def test_several_sources_have_episodes_of_their_own(path: Path, tmp_path: Path) -> None:
    other = write_episodes(tmp_path / "other", (3, 3, 5))
    loader = Loader([path, other], 4, {"frame_index": [T.Window([0, 1])]}, mixture={}, engine="inline")
    ends = [np.cumsum(LENGTHS) - 1, np.cumsum((3, 3, 5)) - 1]
    for batch in loader:
        for row in range(4):
            last = int(batch["__index__"][row]) in ends[int(batch["__source__"][row])]
            now, after = batch["frame_index"][row].tolist()
            assert bool(batch["frame_index_is_pad"][row, 1]) == last and after == now + (not last)


def test_forecast_counts_windows(path: Path) -> None:
    loader = Loader(path, 4, FIELDS, engine="inline")
    found = loader.forecast(2).bytes
    for batch in loader:
        assert {name: value.numpy().nbytes for name, value in batch.items()} == {
            name: int(sizes[0]) for name, sizes in found.items()
        }
        break


def test_absent_values_of_a_window_are_zeros(tmp_path: Path) -> None:
    root = write_episodes(tmp_path / "set", lacking=True)
    windows = lfdata.open(root).windows({"state": [0, 1], "reward": [0, 1]})
    fields = {"state": [T.Window([0, 1])], "reward": [T.Window([0, 1])], "camera": [T.Window([0, 1]), CROP]}
    for batch in poisoned(Loader(root, 4, fields, engine="inline")):
        wanted = windows.read(batch["__index__"].numpy())
        for name, value in wanted.items():
            np.testing.assert_array_equal(batch[name].numpy(), value, err_msg=name)
        there = batch["camera.present"].numpy()
        np.testing.assert_array_equal(there, wanted["state.present"])
        assert not batch["camera"].numpy()[~there].any()


@pytest.mark.parametrize("name", ["state", "camera"])
@pytest.mark.parametrize("engine", ["inline", "process"])
def test_a_damaged_frame_makes_the_rows_that_look_at_it_bad(tmp_path: Path, name: str, engine: str) -> None:
    root = write_episodes(tmp_path / "set")
    spoil(root, [5], name)
    ops = [T.Window([0, 2]), *([CROP] if name == "camera" else [])]
    fields = {name: ops, "frame_index": None}
    with pytest.raises((FormatError, SampleError), match=r"at delta 2, index 5|at delta 0, index 5"):
        list(Loader(root, 4, fields, engine=engine))
    masked = Loader(root, 4, fields, engine=engine, bad_samples="mask", shuffle="sequential", tail="pad", most_bad_rate=1.0)
    bad = []
    for batch in masked:
        mask = batch["__mask__"].numpy()
        bad += batch["__index__"].numpy()[~mask].tolist()
        assert not batch[name].numpy()[~mask].any() and not batch[f"{name}_is_pad"].numpy()[~mask].any()
    assert bad == [3, 5]
    assert {event.index for event in masked.stats()["events"]} == {3, 5}
    replaced = Loader(root, 4, fields, engine=engine, bad_samples="replace", most_bad_rate=1.0)
    assert all(not {3, 5} & set(batch["__index__"].tolist()) for batch in replaced)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"points": [T.Window([0])]}, "field 'points': a Window needs values of one size"),
        ({"task": [T.Window([0])]}, "field 'task': a Window needs values of one size"),
        ({"camera": [T.Window([0])]}, "field 'camera': a Window needs values of one size"),
        ({"camera": [CROP, T.Window([0])]}, "one Window, and first"),
        ({"camera": [T.Window([0]), T.Window([1]), CROP]}, "one Window, and first"),
        ({"state": [T.Window([0], episode="task")]}, "windows need 'task' as a scalar field"),
        ({"state": [T.Window([0], frame="nothing")]}, "windows need 'nothing'"),
    ],
)
def test_windows_that_make_no_sense_are_refused(path: Path, fields: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Loader(path, 4, fields, engine="inline")


def test_batch_transforms_take_no_windows(path: Path) -> None:
    with pytest.raises(OptionError, match="MixUp takes uint8 pictures of one size"):
        Loader(path, 4, {"camera": [T.Window([0, 1]), CROP]}, batch_transforms=[T.MixUp(field="camera")], engine="inline")


@pytest.mark.parametrize(
    "options", [{"deltas": []}, {"deltas": [0.5]}, {"deltas": [0], "episode": ""}, {"deltas": [0], "frame": 3}]
)
def test_a_window_checks_its_options(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        T.Window(**options)
    spec = T.to_spec([T.Window([-1, 0], frame=None)])
    assert spec == [{"transform": "Window", "deltas": [-1, 0], "episode": "episode_index", "frame": None}]
    assert T.from_spec(spec) == [T.Window((-1, 0), frame=None)]
