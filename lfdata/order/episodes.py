"""Which rows belong together, from two columns: episodes, and from a row and deltas to rows of its episode (docs/windows.md)."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfdata.errors import OptionError

EPISODE, FRAME = "episode_index", "frame_index"
_FURTHEST, _MOST = 1 << 60, 1 << 62
# The table of beginnings has so many entries an episode, so that few episodes begin between two; where more do than so many steps
# could pass, episodes are too unequal for it, and a binary search is made.
_TABLE_SHARE, _MOST_STEPS = 4, 8
Indices = NDArray[np.int64]


class Episodes:
    """Runs of rows.

    Args:
        episodes: number of each row's episode: integers, shape (n,); rows of an episode follow each other.
        frames: number of each row in its episode, ascending there; ``None``: rows follow each other without gaps.
        name: how messages call the data set.

    Attributes:
        starts: int64 (episodes + 1,): the first row of each, and n at the end.

    Raises:
        OptionError: rows of an episode in two places, or frames that do not ascend; the message names the rows.
    """

    def __init__(self, episodes: NDArray[Any], frames: NDArray[Any] | None, name: str = "") -> None:
        count = len(episodes)
        edges = np.flatnonzero(episodes[1:] != episodes[:-1]) + 1
        self.starts: Indices = np.concatenate([[0], edges, [count]]).astype(np.int64) if count else np.zeros(1, np.int64)
        self._refuse_split(episodes, name)
        self._heads, self._shift, self._steps = self._table()
        # Where frames are missing: places that go up by more than one at a gap and between episodes.
        self._places: Indices | None = None
        if frames is not None and count:
            self._check_frames(frames, name)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def _table(self) -> tuple[Indices, int, int]:
        """The run of every 2^shift-th row, and how many runs may begin between two of them: so many steps lead from there to a row's."""
        count, runs = int(self.starts[-1]), len(self)
        shift = max(0, (count // (_TABLE_SHARE * max(1, runs))).bit_length() - 1)
        heads = self.starts.searchsorted(np.arange(0, count, 1 << shift), side="right") - 1
        steps = int(np.diff(heads, append=runs - 1).max(initial=0)) if runs else 0
        return (heads, shift, steps) if steps <= _MOST_STEPS else (heads[:0], 0, 0)

    def _runs(self, rows: Indices) -> Indices:
        if not len(self._heads):
            found: Indices = self.starts.searchsorted(rows, side="right") - 1
            return found
        found = self._heads[rows >> self._shift]
        for _ in range(self._steps):
            # The run after the last begins at n, which is no row.
            found = found + (rows >= self.starts[found + 1])
        return found

    def _refuse_split(self, episodes: NDArray[Any], name: str) -> None:
        heads = episodes[self.starts[:-1]]
        order = np.argsort(heads, kind="stable")
        again = np.flatnonzero(heads[order[1:]] == heads[order[:-1]])
        if len(again):
            first, second = (int(self.starts[order[again[0] + n]]) for n in (0, 1))
            raise OptionError(
                f"{name}: episode {int(heads[order[again[0]]])} lies in two places, at rows {first} and {second}: windows need the rows of "
                "an episode to follow each other"
            )

    def _check_frames(self, frames: NDArray[Any], name: str) -> None:
        if int(frames.min()) <= -_FURTHEST or int(frames.max()) >= _FURTHEST:
            raise OptionError(f"{name}: frames from {int(frames.min())} to {int(frames.max())} are too far apart for windows")
        steps = np.diff(frames.astype(np.int64))
        steps[self.starts[1:-1] - 1] = 1
        if (steps <= 0).any():
            row = int(np.flatnonzero(steps <= 0)[0])
            raise OptionError(
                f"{name}: frame {int(frames[row])} at row {row} is followed by {int(frames[row + 1])} in one episode"
            )
        if (steps == 1).all():
            return
        if float(steps.astype(np.float64).sum()) >= _MOST:
            raise OptionError(f"{name}: frames are numbered too far apart for windows")
        self._places = np.concatenate([[0], np.cumsum(steps)]).astype(np.int64)

    def bounds(self, rows: Any) -> tuple[Indices, Indices]:
        """First row, and row after the last, of the episodes of some rows: int64, one element a row."""
        run = self._runs(np.asarray(rows, np.int64))
        return self.starts[run], self.starts[run + 1]

    def window(self, rows: Any, deltas: Any) -> tuple[Indices, NDArray[np.bool_]]:
        """Rows of windows.

        Args:
            rows: row numbers, shape (n,). deltas: frames before or after, shape (T,).

        Returns:
            Rows, int64 (n, T), all in the episode of their row; and what of them is padding, bool (n, T): frames beyond the ends (the first
            or last row stands for them) or missing (the row before).
        """
        at, steps = np.asarray(rows, np.int64), np.asarray(deltas, np.int64)
        first, stop = (bound[:, None] for bound in self.bounds(at))
        if self._places is None:
            wanted = at[:, None] + steps
            found = np.clip(wanted, first, stop - 1)
            return found, found != wanted
        places = self._places[at][:, None] + steps
        found = np.clip(self._places.searchsorted(places, side="right") - 1, first, stop - 1)
        return found, self._places[found] != places


def checked_deltas(deltas: Any, name: str = "") -> tuple[int, ...]:
    """Deltas as a tuple of integers, at least one. Raises :class:`OptionError`."""
    try:
        given = list(deltas)
        found = tuple(operator.index(delta) for delta in given)
    except TypeError:
        given, found = [], ()
    if not found or any(isinstance(delta, bool) or abs(int(delta)) >= 1 << 31 for delta in given):
        about = f"field {name!r}: " if name else ""
        raise OptionError(f"{about}deltas are one or more integers (frames), such as [-1, 0] or range(16), not {deltas!r:.200}")
    return found
