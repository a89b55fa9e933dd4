"""Size and bytes: a canonical picture scaled to its stored size and written by one codec."""

from __future__ import annotations

import struct
import zlib
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from lfdata.codecs.color import Picture
from lfdata.codecs.containers import check_pixels
from lfdata.codecs.image_policy import ImagePolicy
from lfdata.codecs.jpeg import restart_group
from lfdata.errors import SampleError

_RESAMPLE = {
    "lanczos": Image.Resampling.LANCZOS,
    "bicubic": Image.Resampling.BICUBIC,
    "bilinear": Image.Resampling.BILINEAR,
    "box": Image.Resampling.BOX,
    "nearest": Image.Resampling.NEAREST,
}
_MAX_SIDE = {"webp": 16383, "jpeg": 65535}
_PNG_LEVEL = 6


def target_size(width: int, height: int, policy: ImagePolicy) -> tuple[int, int]:
    """(width, height) in pixels that a picture is stored at; halves are rounded up, no side becomes 0."""
    if policy.exact is not None:
        return policy.exact
    if policy.longest is not None:
        wanted, side = policy.longest, max(width, height)
    elif policy.shorter is not None:
        wanted, side = policy.shorter, min(width, height)
    else:
        return width, height
    if wanted >= side and not policy.upscale:
        return width, height
    return max(1, (2 * width * wanted + side) // (2 * side)), max(1, (2 * height * wanted + side) // (2 * side))


def resize(picture: Picture, policy: ImagePolicy) -> None:
    """Scale ``picture`` in place. PIL weighs colour by alpha; 16-bit channels are filtered as float32, rounded and clipped."""
    size = target_size(*picture.size, policy)
    if size == picture.size:
        return
    check_pixels(*size, policy.max_pixels)
    how = _RESAMPLE[policy.resample]
    if picture.image is not None:
        picture.image = picture.image.resize(size, how)
        return
    assert picture.deep is not None
    deep = picture.deep
    weigh = deep.shape[2] in (2, 4) and policy.resample != "nearest"
    opacity = deep[:, :, -1].astype(np.float32) / np.float32(65535) if weigh else None
    planes: list[NDArray[Any]] = [deep[:, :, c].astype(np.float32) for c in range(deep.shape[2])]
    if opacity is not None:
        planes[:-1] = [p * opacity for p in planes[:-1]]
    planes = [np.asarray(Image.fromarray(p).resize(size, how)) for p in planes]
    if opacity is not None:
        weight = np.maximum(planes[-1], np.float32(0.5)) / np.float32(65535)
        planes[:-1] = [p / weight for p in planes[:-1]]
    picture.deep = np.clip(np.rint(np.stack(planes, axis=2)), 0, 65535).astype(np.uint16)


def write(picture: Picture, policy: ImagePolicy) -> bytes:
    """The bytes to store for a canonical, scaled picture. Raises :class:`SampleError` when the codec cannot hold it."""
    codec = policy.codec
    limit = _MAX_SIDE.get(codec)
    if limit is not None and max(picture.size) > limit:
        raise SampleError(
            "codec-limit", f"{picture.size[0]}x{picture.size[1]}: {codec} holds sides up to {limit}; use longest={limit}"
        )
    if picture.deep is not None and codec in ("webp", "jpeg"):
        raise SampleError("bits16", f"16-bit samples do not fit codec={codec}: codec=png or codec=raw")
    if codec == "raw":
        pixels = picture.array()
        return pixels.astype(pixels.dtype.newbyteorder("<"), copy=False).tobytes()
    if picture.deep is not None:
        return write_png16(picture.deep)
    assert picture.image is not None
    return _save(picture.image, policy)


def _save(image: Image.Image, policy: ImagePolicy) -> bytes:
    out = BytesIO()
    if policy.codec == "webp":
        image = image.convert({"L": "RGB", "LA": "RGBA"}.get(image.mode, image.mode))
        image.save(
            out, "WEBP", quality=policy.quality, method=policy.method, lossless=policy.lossless, exact=policy.lossless
        )  # exact: colour under full transparency is kept too
    elif policy.codec == "jpeg":
        restart = {"restart_marker_rows": 1} if policy.restart else {}
        if policy.restart_blocks:
            mcu = 16 if policy.subsampling == "420" and image.mode != "L" else 8
            restart = {"restart_marker_blocks": restart_group(-(-image.width // mcu))}
        image.save(
            out, "JPEG", quality=policy.quality, subsampling=f"4:{policy.subsampling[1]}:{policy.subsampling[2]}", **restart
        )
    else:
        image.save(out, "PNG", compress_level=_PNG_LEVEL)
    return out.getvalue()


def write_png16(pixels: NDArray[np.uint16]) -> bytes:
    """A 16-bit PNG of H x W x C uint16, C 1 to 4 (PIL writes only grey ones). Each row takes the filter of least sum."""
    height, width, channels = pixels.shape
    row_bytes = width * channels * 2
    raw = pixels.astype(">u2").reshape(height, -1).view(np.uint8).reshape(height, row_bytes)
    left, above = np.zeros_like(raw), np.zeros_like(raw)
    left[:, 2 * channels :] = raw[:, : -2 * channels]
    above[1:] = raw[:-1]
    filtered = np.stack((raw, raw - left, raw - above))
    cost = np.abs(filtered.view(np.int8).astype(np.int16)).sum(axis=2, dtype=np.int64)
    best = cost.argmin(axis=0)
    rows = np.empty((height, 1 + row_bytes), dtype=np.uint8)
    rows[:, 0] = best
    rows[:, 1:] = filtered[best, np.arange(height)]
    colour = {1: 0, 2: 4, 3: 2, 4: 6}[channels]
    header = struct.pack(">IIBBBBB", width, height, 16, colour, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), _PNG_LEVEL)), (b"IEND", b""))
    parts = [b"\x89PNG\r\n\x1a\n"]
    for name, body in chunks:
        parts += (struct.pack(">I", len(body)), name, body, struct.pack(">I", zlib.crc32(body, zlib.crc32(name))))
    return b"".join(parts)
