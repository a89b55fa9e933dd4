"""Windows of a field: the filler of the field, over the rows of all windows."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import lfdata.transforms as T
from lfdata.dataset import ShardDataset
from lfdata.dataset.windows import PAD
from lfdata.errors import FormatError, OptionError, SampleError
from lfdata.loader.filler import Errors, Filler
from lfdata.loader.rows import Rows, as_sample_error
from lfdata.loader.slots import Layout
from lfdata.order.samples import Samples


class WindowFiller(Filler):
    """(rows, deltas, ...) of what the field's own filler makes of one sample, and ``NAME_is_pad`` (rows, deltas).

    Args:
        make: the field's own filler, for a number of rows.
    """

    def __init__(
        self, sources: Sequence[ShardDataset], name: str, rows: int, window: T.Window, make: Callable[[int], Filler]
    ) -> None:
        super().__init__(sources, name, rows)
        self._deltas = np.array(window.deltas, np.int64)
        self._episodes = [source.episodes(window.episode, window.frame) for source in sources]
        self.inner = make(rows * len(self._deltas))
        self.calls_user, self.augments = self.inner.calls_user, self.inner.augments

    def declare(self, layout: Layout) -> None:
        self.inner.declare(Layout())
        if any(part.by or part.offsets for part in self.inner.parts):
            raise OptionError(
                f"field {self.name!r}: a Window needs values of one size: pictures that end in a crop, Tokens or AudioWindow, arrays of a "
                "declared shape without *"
            )
        for part in self.inner.parts:
            shape = (self.rows, len(self._deltas), *part.place.shape[1:])
            self._add(layout, part.name.removeprefix(self.name), part.place.dtype, shape)
        self._add(layout, PAD, bool, (self.rows, len(self._deltas)))

    def fill(self, rows: Rows, arrays: dict[str, NDArray[Any]], threads: int) -> Errors:
        samples, padding = self._expanded(rows.samples)
        arrays[self.name + PAD][:] = padding
        count = len(self._deltas)
        anchors = np.repeat(np.arange(len(rows)), count)
        frames = Rows(self.sources, samples, rows.seed, turn=rows.turn, spans=rows.spans, anchors=rows.anchors.take(anchors))
        inner = {}
        for part in self.inner.parts:
            # A view: what the field's own filler writes is in its place.
            whole = arrays[part.name]
            inner[part.name] = whole.reshape(len(rows) * count, *whole.shape[2:])
        rows.kept[self.name] = frames, inner
        return self._of_windows(self.inner.fill(frames, inner, threads), frames)

    def augment(self, rows: Rows, arrays: dict[str, NDArray[Any]], bad: Container[int]) -> Errors:
        del arrays
        if not self.augments:
            return {}
        frames, inner = rows.kept[self.name]
        count = len(self._deltas)
        spoilt = {row for row in range(len(frames)) if row // count in bad}
        return self._of_windows(self.inner.augment(frames, inner, spoilt), frames)

    def _of_windows(self, found: Errors, frames: Rows) -> Errors:
        """The first bad frame of each window that has one."""
        bad: Errors = {}
        for row, error in sorted(found.items()):
            bad.setdefault(row // len(self._deltas), self._named(error, frames, row))
        return bad

    def _expanded(self, samples: Samples) -> tuple[Samples, NDArray[np.bool_]]:
        """The samples of all windows, window by window, and which are padding."""
        places = np.empty((len(samples), len(self._deltas)), np.int64)
        padding = np.empty(places.shape, bool)
        for number, episodes in enumerate(self._episodes):
            where = slice(None) if len(self._episodes) == 1 else np.flatnonzero(samples.source == number)
            places[where], padding[where] = episodes.window(samples.index[where], self._deltas)
        spread = samples.take(np.repeat(np.arange(len(samples)), len(self._deltas)))
        return Samples(spread.source, spread.epoch, places.reshape(-1), spread.occurrence), padding

    def _named(self, error: Exception, frames: Rows, row: int) -> Exception:
        """The error with the frame it is about: the row that is reported is the window's."""
        about = f"at delta {int(self._deltas[row % len(self._deltas)])}, index {int(frames.samples.index[row])}"
        if isinstance(error, SampleError):
            found = as_sample_error(SampleError(error.code, f"{error.reason} ({about})"), self.name, frames, row)
            return found
        if isinstance(error, FormatError):
            return type(error)(error.file, error.offset, f"{error.reason} ({about})")
        return error
