"""Pictures whose JPEGs the device decodes (docs/scheduler.md, "GPU decode"): stored bytes with their rectangles; all others as pixels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import lfdata.transforms as T
from lfdata.codecs.base import IMAGE_CODECS, MAX_PIXELS
from lfdata.codecs.plain_jpeg import is_plain
from lfdata.dataset import ShardDataset
from lfdata.errors import OptionError
from lfdata.loader.filler import OFFSETS, Part
from lfdata.loader.images import ImageFiller
from lfdata.loader.rows import Payloads, Rows
from lfdata.loader.slots import Layout
from lfdata.loader.spans import DECODE

STORED, BOXES, SIDES, FLIPS = ".stored", ".boxes", ".sides", ".flips"
_JPEG = IMAGE_CODECS["jpeg"]


def beside(name: str) -> tuple[str, str, str, str, str]:
    """Names of the arrays beside a field's pixels: bytes, their offsets, rectangles, width and height, which of them are mirrored."""
    return name + STORED, name + STORED + OFFSETS, name + BOXES, name + SIDES, name + FLIPS


class StoredImages(ImageFiller):
    """The field's own array has the pixels of what is decoded here. A row with stored bytes is left as it is there: its rectangle is float64
    (x0, y0, x1, y1) in pixels of the picture, as :func:`lfdata.transforms.place` gives it."""

    def __init__(
        self, sources: Sequence[ShardDataset], name: str, rows: int, ops: Sequence[Any], native: bool | None = None
    ) -> None:
        if ops and isinstance(ops[0], T.Window):
            raise OptionError(f"field {name!r}: pictures of windows are not decoded on the device; take decode='cpu'")
        super().__init__(sources, name, rows, ops, native)
        if self._map is not None or self._pixels or self.size is None:
            raise OptionError(
                f"field {name!r}: what is decoded on the device is of one size, and nothing but sizes, crops and mirroring may be asked of "
                f"it here, not {[type(op).__name__ for op in ops]}: end the geometry with a crop, or take decode='cpu'"
            )
        # Where there is no room for the bytes, there is for the pixels.
        self.takes_any = True

    def declare(self, layout: Layout) -> None:
        super().declare(layout)
        stored, offsets, boxes, sides, flips = beside(self.name)
        self.parts += [
            Part(stored, layout.add(np.uint8, (self._most("bytes"),)), offsets),
            Part(offsets, layout.add(np.int64, (self.rows + 1,)), offsets=True),
            Part(boxes, layout.add(np.float64, (self.rows, 4))),
            Part(sides, layout.add(np.int64, (self.rows, 2))),
            Part(flips, layout.add(bool, (self.rows,))),
        ]

    def _ragged_bytes(self, rows: Rows) -> NDArray[np.int64]:
        found: NDArray[np.int64] = self._column(rows, "bytes") * (self._column(rows, "codec") == _JPEG)
        return found

    def _hand_on(
        self,
        rows: Rows,
        found: Payloads,
        sizes: dict[str, NDArray[Any]],
        placed: T.Placed,
        good: NDArray[np.int64],
        todo: NDArray[np.bool_],
        arrays: dict[str, NDArray[Any]],
    ) -> None:
        stored, offsets, boxes, sides, flips = (arrays[name] for name in beside(self.name))
        boxes[:], sides[:], flips[:], lengths, at = 0, 0, False, np.zeros(len(rows), np.int64), 0
        widths, heights = sizes["width"].astype(np.int64), sizes["height"].astype(np.int64)
        likely = todo & (sizes["codec"] == _JPEG) & (sizes["bits"] == 8) & (widths * heights <= MAX_PIXELS)
        with rows.spans.stage(DECODE):
            for place in np.flatnonzero(likely).tolist():
                rows.spans.check()
                row = int(good[place])
                data, decoder = found.data[row], self._decoders[int(rows.samples.source[row])]
                shape = int(widths[place]), int(heights[place]), self.channels
                if at + len(data) > len(stored) or not is_plain(data.tobytes(), *shape, decoder.refuse_icc):
                    continue
                stored[at : at + len(data)] = data
                at, lengths[row], todo[place] = at + len(data), len(data), False
                boxes[row], sides[row], flips[row] = placed.boxes[place], shape[:2], placed.flips[place]
        offsets[0] = 0
        np.cumsum(lengths, out=offsets[1:])
