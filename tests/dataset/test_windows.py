"""Windows read what reading row by row reads, and never over the end of an episode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from batchkit import spoil
from windowkit import LENGTHS, write_episodes

import lfdata
from lfdata.errors import CorruptError, KeyMissingError, OptionError

DELTAS: dict[str, Any] = {
    "state": range(-2, 3),
    "grid": [0],
    "on": [-1, 0],
    "reward": [-1, 0, 7],
    "camera": [-3, 0],
    "task": [0, 40],
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_episodes(tmp_path_factory.mktemp("windows") / "set")


def by_row(data: list[dict[str, Any]], name: str, row: int, delta: int) -> tuple[Any, bool]:
    """A value of a window, from single rows."""
    episode = data[row]["episode_index"]
    mine = [at for at in range(len(data)) if data[at]["episode_index"] == episode]
    wanted = row + delta
    return data[min(max(wanted, mine[0]), mine[-1])][name], wanted not in mine


def test_every_window_of_every_row_is_what_single_rows_are(path: Path) -> None:
    data = lfdata.open(path)
    rows = [*range(len(data)), -1, 3, 3]
    found, single = data.windows(DELTAS).read(rows), list(data)
    assert list(found) == [name + suffix for name in DELTAS for suffix in ("", "_is_pad")]
    for name, deltas in DELTAS.items():
        for at, row in enumerate(rows):
            for step, delta in enumerate(deltas):
                value, padding = by_row(single, name, row % len(data), delta)
                np.testing.assert_array_equal(found[name][at][step], value)
                assert found[f"{name}_is_pad"][at, step] == padding


def test_dtypes_and_shapes(path: Path) -> None:
    data = lfdata.open(path)
    found = data.windows(DELTAS).read([5, 0])
    shapes = {name: (value.dtype.name, value.shape) for name, value in found.items() if isinstance(value, np.ndarray)}
    assert shapes["state"] == ("float32", (2, 5, 3)) and shapes["grid"] == ("int16", (2, 1, 2, 2))
    assert shapes["on"] == ("bool", (2, 2, 2)) and shapes["reward"] == ("float64", (2, 3))
    assert shapes["camera"] == ("uint8", (2, 2, 32, 40, 3)) and shapes["state_is_pad"] == ("bool", (2, 5))
    assert all(value.flags.writeable for value in found.values() if isinstance(value, np.ndarray))


def test_no_rows_give_empty_windows(path: Path) -> None:
    found = lfdata.open(path).windows(DELTAS).read([])
    assert found["state"].shape == (0, 5, 3) and found["camera"].shape[:2] == (0, 2) and found["task"] == []


def test_a_frame_that_is_missing_is_padding(tmp_path: Path) -> None:
    data = lfdata.open(write_episodes(tmp_path / "set", skip={(0, 3), (0, 4), (3, 0)}))
    found = data.windows({"frame_index": range(-3, 4), "episode_index": range(-3, 4)}).read([2, 3, 17 - 3 + 0])
    assert found["frame_index"][0].tolist() == [0, 0, 1, 2, 2, 2, 5]
    assert found["frame_index_is_pad"][0].tolist() == [True, False, False, False, True, True, False]
    assert found["frame_index"][1].tolist() == [2, 2, 2, 5, 6, 7, 8]
    assert found["frame_index_is_pad"][1].tolist() == [False, True, True, False, False, False, False]
    assert (found["episode_index"] == found["episode_index"][:, :1]).all()


def test_absent_values_are_zeros_and_said_to_be(tmp_path: Path) -> None:
    data = lfdata.open(write_episodes(tmp_path / "set", lacking=True))
    found = data.windows({"state": [0, 1], "reward": [0, 1], "camera": [0, 1], "task": [0]}).read(range(8))
    assert "task.present" not in found
    for name in ("state", "reward", "camera"):
        there = np.array([[number % 5 != 2, (number + 1) % 5 != 2] for number in range(8)])
        np.testing.assert_array_equal(found[f"{name}.present"], there)
        assert not found[name][~there].any()
        assert found[name][there].any()
    assert data.windows({"state": [0]}).read([2])["state"].tolist() == [[[0, 0, 0]]]


def test_values_without_a_fixed_shape_are_lists(path: Path) -> None:
    found = lfdata.open(path).windows({"points": [0, 1], "ids": [-1]}).read([0, 1])
    assert [[value.shape for value in row] for row in found["points"]] == [[(0, 2), (1, 2)], [(1, 2), (2, 2)]]
    assert [[value.tolist() for value in row] for row in found["ids"]] == [[[0]], [[0]]]


def test_pictures_of_several_sizes_are_refused_with_advice(tmp_path: Path) -> None:
    data = lfdata.open(write_episodes(tmp_path / "set", same_size=False))
    with pytest.raises(OptionError, match="shapes .* Loader with a crop"):
        data.windows({"camera": [0, 1]}).read([0])


@pytest.mark.parametrize(
    ("deltas", "options", "error", "message"),
    [
        ({"nothing": [0]}, {}, KeyMissingError, "no field 'nothing'"),
        ({"state": []}, {}, OptionError, "field 'state': deltas"),
        ({"state": [0]}, {"episode": "nothing"}, OptionError, "windows need 'nothing' .* there is no such field"),
        ({"state": [0]}, {"episode": "task"}, OptionError, "of kind text"),
        ({"state": [0]}, {"frame": "reward"}, OptionError, "of kind scalar, float64"),
    ],
)
def test_what_makes_no_sense_is_refused(path: Path, deltas: Any, options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        lfdata.open(path).windows(deltas, **options)


def test_an_index_out_of_range_is_an_error(path: Path) -> None:
    windows = lfdata.open(path).windows({"state": [0]})
    with pytest.raises(IndexError):
        windows.read([sum(LENGTHS)])


@pytest.mark.parametrize("name", ["state", "camera"])
def test_damage_in_a_neighbour_is_found(tmp_path: Path, name: str) -> None:
    root = write_episodes(tmp_path / "set")
    spoil(root, [5], name)
    windows = lfdata.open(root).windows({name: [0, 1]})
    with pytest.raises(CorruptError, match=name):
        windows.read([4])
    windows.read([6, 3])
