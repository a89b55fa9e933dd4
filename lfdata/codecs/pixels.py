"""Rectangles of stored pictures, decoded only where and as large as they are needed, into given memory.

The result is defined as: the whole upright picture, its rectangle brought to the output's size by a triangle filter with antialiasing
(PIL's BILINEAR with ``box``), then mirrored if asked. The native module (libjpeg-turbo, libwebp) gives the same up to rounding, and where
it decodes at a half, a quarter or an eighth of the size up to that filter's difference. What it does not do, what it finds fault with
(errors are those of :class:`ImageDecoder`), and everything where it is not built, goes through PIL. Data behind the rectangle it does
not look at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lfdata.codecs.base import IMAGE_CODECS, MAX_PIXELS, PackedPayloads
from lfdata.codecs.image_policy import ImagePolicy
from lfdata.codecs.lazy_pil import pil
from lfdata.errors import OptionError, SampleError
from lfdata.format.forking import importing

if TYPE_CHECKING:
    from PIL import Image

    from lfdata.codecs.image import ImageDecoder

try:
    from lfdata.codecs import _pixels as _built

    native_module: ModuleType | None = _built
except ImportError:
    native_module = None

_OK, _FALLBACK, _SIZE, _MEMORY = range(4)
_FAILURES = {
    _SIZE: ("size-mismatch", "the payload's header and the index disagree about its size"),
    _MEMORY: ("memory", "not enough memory to decode it"),
}
_WEBP, _JPEG = IMAGE_CODECS["webp"], IMAGE_CODECS["jpeg"]
# No JPEG or WebP has a longer side, and no longer one is made natively.
_LONGEST_SIDE = 65535


def native_report() -> dict[str, Any]:
    """Whether the native decoder is there, with its libraries and their versions, or why not."""
    if native_module is None:
        return {"native": False, "why": "lfdata.codecs._pixels is not built: it needs a C compiler, libjpeg-turbo and libwebp"}
    return {"native": True, **native_module.report()}


def watch_width(width: NDArray[np.int64]) -> None:
    """Let one number limit the threads that decode at a time in this process, from now on and whenever it changes; 0: no limit."""
    if native_module is not None:
        native_module.watch_width(width)


class CropDecoder:
    """Decodes rectangles of the pictures of one field.

    Args:
        params: of the field, as its schema holds them.
        channels: of the output: 3, or 1 for grey.
        max_pixels: a picture with more is refused.
        native: ``False``: PIL only; ``None``: native where it can.

    Raises:
        OptionError: ``native=True`` without the module; channels other than 1 and 3.
    """

    def __init__(
        self, params: Mapping[str, Any], *, channels: int = 3, max_pixels: int = MAX_PIXELS, native: bool | None = None
    ) -> None:
        if channels not in (1, 3):
            raise OptionError(f"{channels} channels; rectangles are decoded to 1 or 3")
        if native and native_module is None:
            raise OptionError(native_report()["why"])
        self._native = None if native is False else native_module
        policy = ImagePolicy.from_params(params)
        self._params, self._portable_decoder = params, None if self._native is not None else image_decoder(params, max_pixels)
        self._channels, self._max_pixels = channels, max_pixels
        # A profile must be applied, which the native decoder does not.
        self.refuse_icc = policy.codec == "keep" and policy.icc == "srgb"

    def crop_resize(
        self,
        payloads: Sequence[Any] | PackedPayloads,
        sizes: Mapping[str, NDArray[Any]],
        boxes: NDArray[np.float64],
        flips: NDArray[np.bool_],
        out: NDArray[np.uint8],
        *,
        threads: int = 0,
        turn: int = 0,
        places: NDArray[np.int64] | None = None,
        spent: Callable[[float], None] | None = None,
    ) -> dict[int, SampleError]:
        """Decode into ``out``.

        Args:
            payloads: stored bytes, n of them.
            sizes: index columns ``width``, ``height``, ``channels``, ``codec``, ``bits``, n elements each.
            boxes: float64 (n, 4): x0, y0, x1, y1 in pixels of the upright picture, inside it.
            flips: bool (n,): mirror the result.
            out: uint8 (rows, height, width, channels), C-contiguous.
            threads: that the native part may use, kept and shared by all calls of the process; 0: the caller's own.
            turn: of several calls at a time the one with the smallest gets the threads first.
            spent: is told the seconds that all threads of the native part took together.
            places: row of ``out`` for each picture; 0 to n - 1 by default.

        Returns:
            Errors of those that failed, by number; their rows of ``out`` hold anything.

        Raises:
            OptionError: arrays of the wrong shape or layout, places outside ``out``, boxes outside their pictures.
        """
        count = len(payloads)
        rows = np.arange(count, dtype=np.int64) if places is None else np.ascontiguousarray(places, np.int64)
        width, height = np.asarray(sizes["width"]).astype(np.int64), np.asarray(sizes["height"]).astype(np.int64)
        boxes = np.ascontiguousarray(boxes, np.float64)
        failed = self._refused(width, height, np.asarray(sizes["bits"]))
        self._check(count, width, height, boxes, flips, out, rows, failed)
        status = np.full(count, _FALLBACK, np.int32)
        if self._native is not None and count and max(out.shape[1:3]) <= _LONGEST_SIDE:
            given: Any = (
                (payloads.values, payloads.starts, payloads.stops) if isinstance(payloads, PackedPayloads) else list(payloads)
            )
            shown, at, codecs = boxes, np.stack([width, height], axis=1), np.asarray(sizes["codec"])
            other = (codecs != _WEBP) & (codecs != _JPEG) | (np.maximum(width, height) > _LONGEST_SIDE)
            other[list(failed)] = True
            codecs = codecs.astype(np.uint8)
            if other.any():
                shown = boxes.copy()
                codecs[other], at[other], shown[other] = 0, 1, (0, 0, 1, 1)
            seconds = self._native.decode(
                given,
                codecs,
                at,
                shown,
                np.ascontiguousarray(flips, np.uint8),
                out,
                rows,
                out.shape[1:],
                int(self.refuse_icc),
                threads,
                turn,
                status,
            )
            if spent is not None:
                spent(seconds)
            # Grey is stored by webp as three channels, of which the first is the grey.
            grey = (codecs == _WEBP) & (np.asarray(sizes["channels"]) == 1)
            for row in rows[grey & (status == _OK)].tolist():
                out[row] = out[row][:, :, :1]
        for number in np.flatnonzero(status).tolist():
            if number in failed:
                continue
            if status[number] != _FALLBACK:
                code, reason = _FAILURES[int(status[number])]
                failed[number] = SampleError(code, reason)
                continue
            try:
                mine = {
                    role: int(data[number])
                    for role, data in sizes.items()
                    if role in ("width", "height", "channels", "codec", "bits")
                }
                self._portable(payloads[number], mine, boxes[number], bool(flips[number]), out[rows[number]])
            except SampleError as error:
                failed[number] = error
        return failed

    def _check(
        self,
        count: int,
        width: NDArray[np.int64],
        height: NDArray[np.int64],
        boxes: NDArray[np.float64],
        flips: NDArray[np.bool_],
        out: NDArray[np.uint8],
        rows: NDArray[np.int64],
        failed: Mapping[int, SampleError],
    ) -> None:
        if out.dtype != np.uint8 or out.ndim != 4 or out.shape[3] != self._channels or 0 in out.shape[1:3]:
            raise OptionError(f"out is uint8 (rows, height, width, {self._channels}), not {out.dtype} {out.shape}")
        if not out.flags.c_contiguous or not out.flags.writeable:
            raise OptionError("out must be C-contiguous and writable")
        shapes = (width.shape, height.shape, boxes.shape, np.shape(flips), rows.shape)
        if shapes != ((count,), (count,), (count, 4), (count,), (count,)):
            raise OptionError(f"{count} payloads, but sizes, boxes, flips and places have the shapes {shapes}")
        if count and (rows.min() < 0 or rows.max() >= len(out)):
            raise OptionError(f"places {rows.min()} to {rows.max()} are not all inside an output of {len(out)} rows")
        x0, y0, x1, y1 = boxes.T
        inside = (x0 >= 0) & (y0 >= 0) & (x1 > x0) & (y1 > y0) & (x1 <= width) & (y1 <= height)
        inside[list(failed)] = True
        if not inside.all():
            number = int(np.argmin(inside))
            raise OptionError(
                f"picture {number}: the box {boxes[number].tolist()} is not inside its {width[number]} x {height[number]} pixels"
            )

    def _refused(self, width: NDArray[np.int64], height: NDArray[np.int64], bits: NDArray[Any]) -> dict[int, SampleError]:
        failed = {}
        for number in np.flatnonzero((width < 1) | (height < 1) | (width * height > self._max_pixels) | (bits != 8)).tolist():
            if bits[number] == 16:
                failed[number] = SampleError("bits16", "16-bit pictures are not cropped and resized; convert with bits16=scale")
            else:
                failed[number] = SampleError(
                    "pixel-limit", f"{width[number]} x {height[number]} pixels; the limit is {self._max_pixels}"
                )
        return failed

    def _portable(
        self, payload: Any, sizes: Mapping[str, int], box: NDArray[np.float64], flip: bool, out: NDArray[np.uint8]
    ) -> None:
        if self._portable_decoder is None:
            self._portable_decoder = image_decoder(self._params, self._max_pixels)
        pixels = self._portable_decoder.decode(payload, sizes)
        out[:] = resized(pixels, box, out.shape[:2], self._channels, flip)


def image_decoder(params: Mapping[str, Any], max_pixels: int) -> ImageDecoder:
    """The decoder through PIL, which takes a decoder process a tenth of its start to import and which it may never need."""
    with importing:
        from lfdata.codecs.image import ImageDecoder

    return ImageDecoder(params, max_pixels=max_pixels)


def resized(pixels: NDArray[np.uint8], box: Any, size: tuple[int, int], channels: int, flip: bool) -> NDArray[np.uint8]:
    """The definition: a rectangle of a decoded picture (height, width, 1 to 4 channels) at ``size`` (height, width), in PIL."""
    picture = _as_rgb(pixels, channels)
    made = picture.resize(
        (size[1], size[0]), pil().Image.Resampling.BILINEAR, box=(float(box[0]), float(box[1]), float(box[2]), float(box[3]))
    )
    found = np.asarray(made, np.uint8).reshape(*size, channels)
    return found[:, ::-1] if flip else found


def _as_rgb(pixels: NDArray[np.uint8], channels: int) -> Image.Image:
    """Grey is repeated, alpha dropped; colour to grey as PIL does it."""
    colour = pixels[:, :, :3] if pixels.shape[2] >= 3 else pixels[:, :, 0]
    picture: Image.Image = pil().Image.fromarray(np.ascontiguousarray(colour))
    wanted = "RGB" if channels == 3 else "L"
    return picture if picture.mode == wanted else picture.convert(wanted)
