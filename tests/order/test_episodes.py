"""Windows stay in their episode and say what is padding, whatever the episodes and gaps are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lfdata.errors import OptionError
from lfdata.order.episodes import Episodes, checked_deltas

# Frames of each episode; missing ones leave gaps.
EPISODES = st.lists(st.sets(st.integers(0, 12), min_size=1, max_size=8), min_size=1, max_size=6)
DELTAS = st.lists(st.integers(-15, 15), min_size=1, max_size=5)


def rows_of(frames: list[set[int]], numbers: list[int] | None = None) -> tuple[list[int], list[int]]:
    """Episode and frame of every row."""
    pairs = [(numbers[at] if numbers else at, frame) for at, episode in enumerate(frames) for frame in sorted(episode)]
    return [one for one, _ in pairs], [frame for _, frame in pairs]


def plainly(episodes: list[int], frames: list[int], row: int, delta: int) -> tuple[int, bool]:
    """The same by looking at every row."""
    mine = [at for at in range(len(episodes)) if episodes[at] == episodes[row]]
    wanted = frames[row] + delta
    for at in mine:
        if frames[at] == wanted:
            return at, False
    return max([at for at in mine if frames[at] < wanted], default=mine[0]), True


@settings(max_examples=200, deadline=None)
@given(EPISODES, DELTAS)
def test_a_window_is_what_a_search_through_all_rows_finds(frames: list[set[int]], deltas: list[int]) -> None:
    episodes, numbers = rows_of(frames)
    found, padding = Episodes(np.array(episodes), np.array(numbers)).window(np.arange(len(episodes)), deltas)
    for row in range(len(episodes)):
        for at, delta in enumerate(deltas):
            assert (found[row, at], padding[row, at]) == plainly(episodes, numbers, row, delta)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), DELTAS, st.randoms(use_true_random=False))
def test_without_gaps_the_numbers_of_frames_do_not_matter(lengths: list[int], deltas: list[int], random: Any) -> None:
    episodes = np.repeat(random.sample(range(-50, 50), len(lengths)), lengths)
    frames = np.concatenate([np.arange(length) + random.randrange(5) for length in lengths])
    rows = np.arange(len(episodes))
    for mine, theirs in zip(
        Episodes(episodes, frames).window(rows, deltas), Episodes(episodes, None).window(rows, deltas), strict=True
    ):
        np.testing.assert_array_equal(mine, theirs)


def test_bounds_are_the_ends_of_the_row_s_episode() -> None:
    first, stop = Episodes(np.array([4, 4, 4, 1, 9, 9]), None).bounds([0, 2, 3, 5])
    assert (first.tolist(), stop.tolist()) == ([0, 0, 3, 4], [3, 3, 4, 6])


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int64, np.uint64])
def test_frames_of_any_integer_type(dtype: Any) -> None:
    found, padding = Episodes(np.array([1, 1, 2], dtype), np.array([0, 2, 0], dtype)).window([0, 1, 2], [-1, 0, 1])
    assert found.tolist() == [[0, 0, 0], [0, 1, 1], [2, 2, 2]]
    assert padding.tolist() == [[True, False, True], [True, False, True], [True, False, True]]


def test_no_rows_have_no_episodes() -> None:
    empty = np.zeros(0, np.int64)
    found, padding = Episodes(empty, empty).window(empty, [0])
    assert len(Episodes(empty, empty)) == 0 and found.shape == padding.shape == (0, 1)


@pytest.mark.parametrize(
    ("episodes", "frames", "message"),
    [
        ([0, 0, 1, 0], None, "episode 0 lies in two places, at rows 0 and 3"),
        ([0, 0, 1, 1], [0, 1, 1, 0], "frame 1 at row 2 is followed by 0"),
        ([0, 0], [3, 3], "frame 3 at row 0 is followed by 3"),
        ([0, 0], [-(1 << 62), 1 << 62], "too far apart"),
    ],
)
def test_rows_that_are_no_episodes_are_refused_by_number(episodes: list[int], frames: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Episodes(np.array(episodes), None if frames is None else np.array(frames))


@pytest.mark.parametrize("deltas", [[], 3, [0.5], ["a"], [True], None, [1 << 40]])
def test_deltas_that_are_none_are_refused(deltas: Any) -> None:
    with pytest.raises(OptionError, match="deltas are one or more integers"):
        checked_deltas(deltas)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([1, 1, 2, 3, 40, 300, 5000]), min_size=1, max_size=60))
def test_bounds_are_those_of_the_lengths_however_unequal_they_are(lengths: list[int]) -> None:
    episodes = np.repeat(np.arange(len(lengths)), lengths)
    first, stop = Episodes(episodes, None).bounds(np.arange(len(episodes)))
    ends = np.cumsum(lengths)
    assert np.array_equal(stop, np.repeat(ends, lengths))
    assert np.array_equal(first, np.repeat(ends - lengths, lengths))


def test_the_way_from_a_row_to_its_episode_is_bounded_for_episodes_of_usual_lengths() -> None:
    lengths = np.random.default_rng(0).integers(100, 1000, 20_000)
    found = Episodes(np.repeat(np.arange(len(lengths)), lengths), None)
    assert 0 < len(found._heads) <= 8 * len(lengths) and found._steps <= 2
    unequal = Episodes(np.repeat(np.arange(1001), [*[1] * 1000, 100_000]), None)
    assert not len(unequal._heads)
