"""Recordings: whole and ragged, or a window of each."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

import lfdata.transforms as T
from lfdata.dataset import ShardDataset
from lfdata.errors import FormatError, OptionError, SampleError
from lfdata.loader.filler import COUNT, OFFSETS, SHAPES, Errors, Filler, flatten
from lfdata.loader.rows import NOT_THE_FILE, Rows, as_sample_error, retried
from lfdata.loader.slots import Layout
from lfdata.loader.spans import DECODE


class AudioFiller(Filler):
    """A window: (rows, frames, channels) int16 and counts. Otherwise samples one after the other, offsets, and shapes (frames, channels)."""

    def __init__(self, sources: Sequence[ShardDataset], name: str, rows: int, ops: Sequence[Any]) -> None:
        super().__init__(sources, name, rows)
        self._window = next((op for op in ops if isinstance(op, T.AudioWindow)), None)
        self._gains = [(place, op) for place, op in enumerate(ops) if isinstance(op, T.Gain)]
        if len(self._gains) + (self._window is not None) != len(ops):
            raise OptionError(f"field {name!r}: audio takes one AudioWindow and Gain, not {[type(op).__name__ for op in ops]}")
        self._channels = 0
        if self._window is not None:
            channels = np.unique(
                np.concatenate([source.column(f"{name}.channels")[source.present(name)] for source in sources])
            )
            if len(channels) > 1:
                raise OptionError(
                    f"field {name!r}: recordings of {channels.tolist()} channels; convert with channels=mono for windows"
                )
            self._channels = int(channels[0]) if len(channels) else 1

    def declare(self, layout: Layout) -> None:
        if self._window is None:
            self._add(layout, "", np.int16, (self._most("bytes") // 2,), self.name + OFFSETS)
            self._add(layout, OFFSETS, np.int64, (self.rows + 1,))
            self._add(layout, SHAPES, np.int64, (self.rows, 2))
        else:
            self._add(layout, "", np.int16, (self.rows, self._window.frames, self._channels))
            self._add(layout, COUNT, np.int64, (self.rows,))
        self._add_present(layout)

    def _ragged_bytes(self, rows: Rows) -> NDArray[np.int64]:
        return self._column(rows, "bytes")

    def fill(self, rows: Rows, arrays: dict[str, NDArray[Any]], threads: int) -> Errors:
        del threads
        if self._window is not None:
            with rows.spans.stage(DECODE):
                return self._windows(rows, arrays, self._window)
        found = rows.read(self.name, self._memory)
        self._set_present(arrays, found.present)
        shapes, values = arrays[self.name + SHAPES], [np.empty(0, np.int16)] * len(rows)
        shapes[:] = 0

        def one(row: int, audio: Any) -> None:
            values[row] = audio.samples.reshape(-1)
            shapes[row] = audio.samples.shape

        bad = self._decoder_calls(rows, found, one)
        flatten(values, bad, arrays[self.name], arrays[self.name + OFFSETS])
        offsets = arrays[self.name + OFFSETS]
        for place, gain in self._gains:
            u = rows.uniform(f"{self.name}/{place}/Gain", gain.draws)
            for row in range(len(rows)):
                gain.apply(arrays[self.name][offsets[row] : offsets[row + 1]], u[row])
        return bad

    def _windows(self, rows: Rows, arrays: dict[str, NDArray[Any]], window: Any) -> Errors:
        """Only the chunks that cover each window are read and checked."""
        out, counts = arrays[self.name], arrays[self.name + COUNT]
        bad: Errors = {}
        lengths = np.zeros(len(rows), np.int64)
        present = np.zeros(len(rows), bool)
        for number, where in rows.by_source():
            source, indices = self.sources[number], rows.samples.index[where]
            lengths[where] = retried(partial(source.sizes, self.name, indices))["frames"]
            present[where] = retried(partial(source.present_at, self.name, indices))
        self._set_present(arrays, present)
        starts, taken = window.window(lengths, lambda operation, count: rows.uniform(f"{self.name}/{operation}", count))
        counts[:] = taken
        for row, (start, count) in enumerate(zip(starts.tolist(), taken.tolist(), strict=True)):
            rows.spans.check()
            source = self.sources[int(rows.samples.source[row])]
            try:
                if count:
                    read = partial(source.read_audio, int(rows.samples.index[row]), self.name, start, start + count)
                    out[row, :count] = retried(read)
                out[row, count:] = window.pad
            except NOT_THE_FILE:
                raise
            except (FormatError, SampleError, ValueError) as error:
                bad[row] = as_sample_error(error, self.name, rows, row)
        for place, gain in self._gains:
            u = rows.uniform(f"{self.name}/{place}/Gain", gain.draws)
            for row in range(len(rows)):
                gain.apply(out[row], u[row])
        return bad
