"""Stored JPEGs decoded by NVIDIA DALI (extra ``dali``): on a GPU, or on the processor by the same operators."""

from __future__ import annotations

import importlib.util
import io
import logging
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.dlpack import from_dlpack

from lfdata.codecs.lazy_pil import pil
from lfdata.errors import DeviceError, MissingExtraError

log = logging.getLogger("lfdata")
INPUTS = ("stored", "start", "shape", "roi_start", "roi_end")


class Refused(Exception):
    """DALI did not decode a batch; it is made in another way."""


def version() -> str:
    """Of DALI. Raises :class:`MissingExtraError`."""
    try:
        import nvidia.dali as dali
    except ImportError as error:
        raise MissingExtraError(
            f"decode='dali' needs DALI: pip install 'lfdata[dali]', or take decode='cpu' ({error})"
        ) from error
    return str(dali.__version__)


def available() -> bool:
    """Whether it is installed."""
    try:
        return importlib.util.find_spec("nvidia.dali") is not None
    except ModuleNotFoundError:
        return False


@dataclass(eq=False, slots=True)
class Pictures:
    """What is to be decoded.

    Attributes:
        stored: bytes of each. boxes: float64 (n, 4), rectangles as (x0, y0, x1, y1). sides: int64 (n, 2), width and height.
        flips: bool (n,), which are mirrored.
    """

    stored: list[NDArray[np.uint8]]
    boxes: NDArray[np.float64]
    sides: NDArray[np.int64]
    flips: NDArray[np.bool_]


@dataclass(eq=False, slots=True)
class Ticket:
    """Some pictures that DALI works on.

    Attributes:
        count: of them.
        wanted: whether anybody still is to get them. failed: why they will not come.
    """

    count: int
    wanted: bool = True
    found: torch.Tensor | None = None
    failed: str = ""


@dataclass(eq=False)
class Decoder:
    """One field's pictures, batch after batch.

    Attributes:
        rows: pictures at a time, at most. size: (height, width) of the result; channels: 3, or 1 for grey.
        device: where the result is. ahead: batches under way at a time. threads: of the processor, DALI's own.
        failures: pipelines that ended with an error.
    """

    rows: int
    size: tuple[int, int]
    channels: int
    device: torch.device
    ahead: int
    threads: int
    failures: int = 0
    _pipe: Any = None
    _flying: deque[Ticket] = field(default_factory=deque)

    def start(self) -> None:
        """Make the pipeline, and have it decode a small picture, so that what is missing is known at once. Raises :class:`DeviceError`."""
        if self._pipe is not None:
            return
        version()
        try:
            self._pipe = self._made()
            for _ in range(self.ahead):
                self._feed(_small())
            # The first call runs as often as there are batches ahead.
            self._pipe.schedule_run()
            for _ in range(self.ahead):
                self._output()
        except Exception as error:
            self._pipe = None
            raise DeviceError(f"DALI {version()} does not decode on {self.device}: {error}. Take decode='cpu'") from error

    def submit(self, pictures: Pictures) -> Ticket:
        """Begin with some pictures, one at least; their bytes are copied."""
        ticket = Ticket(len(pictures.stored))
        while len(self._flying) >= self.ahead:
            self._take()
        self.start()
        self._flying.append(ticket)
        try:
            self._feed(pictures)
            self._pipe.schedule_run()
        except Exception as error:
            self._end(error)
        return ticket

    def collect(self, ticket: Ticket) -> torch.Tensor:
        """Wait for pictures: uint8 (n, height, width, channels). Its memory may be used again once the tensor is gone.

        Raises:
            Refused: DALI ended with an error, over these or those before them.
        """
        while ticket.found is None and not ticket.failed:
            self._take()
        if ticket.failed:
            raise Refused(ticket.failed)
        assert ticket.found is not None
        found, ticket.found = ticket.found, None
        return found

    def close(self) -> None:
        """Let go of everything."""
        self._flying.clear()
        self._pipe = None

    # -- the pipeline -------------------------------------------------------------------------------------------------

    def _made(self) -> Any:
        from nvidia.dali import Pipeline, fn, types

        gpu = self.device.type == "cuda"
        pipe: Any = Pipeline(
            batch_size=self.rows,
            num_threads=self.threads,
            device_id=self.device.index if gpu else None,
            prefetch_queue_depth=self.ahead,
            # Results stay as they are for as long as somebody has them.
            exec_dynamic=True,
        )
        kinds = (types.UINT8, types.INT32, types.INT32, types.FLOAT, types.FLOAT)
        with pipe:
            stored, start, shape, roi_start, roi_end = (
                fn.external_source(name=name, dtype=kind, ndim=1) for name, kind in zip(INPUTS, kinds, strict=True)
            )
            images = fn.decoders.image_slice(
                stored,
                device="mixed" if gpu else "cpu",
                start=start,
                shape=shape,
                axis_names="HW",
                output_type=types.RGB if self.channels == 3 else types.GRAY,
                # Those that are not upright do not come here.
                adjust_orientation=False,
                # Other ranks of the machine would have theirs on the same cores.
                **({"affine": False} if gpu else {}),
                # Chroma as libjpeg makes it, which is what our own decoder uses. On a GPU nvJPEG (before 13.2) has that
                # for whole pictures only, and says so for every part that is asked of it.
                jpeg_fancy_upsampling=not gpu,
            )
            # A triangle filter, widened where pictures become smaller. Where an end lies before its start it mirrors.
            images = fn.resize(
                images,
                size=[float(side) for side in self.size],
                roi_start=roi_start,
                roi_end=roi_end,
                interp_type=types.INTERP_LINEAR,
                antialias=True,
            )
            pipe.set_outputs(images)
        pipe.build()
        return pipe

    def _feed(self, pictures: Pictures) -> None:
        for name, values in zip(INPUTS, (pictures.stored, *regions(pictures, self.size)), strict=True):
            self._pipe.feed_input(name, values)

    def _output(self) -> torch.Tensor:
        (found,) = self._pipe.share_outputs()
        self._pipe.release_outputs()
        if found.is_dense_tensor():
            return from_dlpack(found.as_tensor())
        return torch.stack([from_dlpack(found[row]) for row in range(len(found))])

    def _take(self) -> None:
        """What was begun first."""
        ticket = self._flying[0]
        try:
            found = self._output()
            if found.shape != (ticket.count, *self.size, self.channels) or found.dtype != torch.uint8:
                raise AssertionError(f"{ticket.count} pictures asked for, {found.dtype} {tuple(found.shape)} came")
        except Exception as error:
            self._end(error)
            return
        self._flying.popleft()
        if ticket.wanted:
            ticket.found = found

    def _end(self, error: Exception) -> None:
        """A pipeline in which one picture failed is of no use any more: nothing that is under way comes."""
        self.failures += 1
        reason = " ".join(str(error).split())[:300]
        log.warning("DALI ended with an error; the batches that it had are decoded on the processor: %s", reason)
        for ticket in self._flying:
            ticket.failed = reason or type(error).__name__
        self._flying.clear()
        self._pipe = None


def regions(pictures: Pictures, size: tuple[int, int]) -> tuple[NDArray[Any], ...]:
    """Whole pixels that are decoded, as start and shape, int32 (n, 2), and each rectangle in them as start and end, float32 (n, 2), turned
    round where it is mirrored. Rows are y and x.

    What the filter of an output pixel at the rectangle's edge sees beyond it is decoded too.
    """
    first, last = pictures.boxes[:, :2], pictures.boxes[:, 2:]
    reach = np.ceil(np.maximum(1.0, (last - first) / (size[1], size[0]))) + 1
    low = np.maximum(0, np.floor(first) - reach)
    high = np.minimum(pictures.sides, np.ceil(last) + reach)
    start, end = first - low, last - low
    flips = pictures.flips
    start[flips, 0], end[flips, 0] = end[flips, 0], start[flips, 0]

    def by_rows(values: Any, dtype: Any) -> NDArray[Any]:
        return np.ascontiguousarray(values[:, ::-1], dtype)

    return by_rows(low, np.int32), by_rows(high - low, np.int32), by_rows(start, np.float32), by_rows(end, np.float32)


def _small() -> Pictures:
    file = io.BytesIO()
    pil().Image.new("RGB", (8, 8)).save(file, "JPEG")
    stored = [np.frombuffer(file.getvalue(), np.uint8)]
    return Pictures(stored, np.array([[0.0, 0.0, 8.0, 8.0]]), np.full((1, 2), 8), np.zeros(1, bool))
