"""Pictures: any file PIL reads (or an array) -> webp, jpeg, png, raw pixels, or the untouched file -> H x W x C.

What is stored, decoded with the shard's own parameters, is the upright picture exactly once: re-encoded pictures carry no
orientation; kept files keep their EXIF tag, their width and height are recorded as seen upright, and the decoder turns them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from lfdata.codecs import jpeg
from lfdata.codecs.base import IMAGE_CODECS, MAX_PIXELS, Buffer, Encoded
from lfdata.codecs.color import Picture, finish, image_from_array, read_orientation, read_picture
from lfdata.codecs.containers import check_pixels, truncated
from lfdata.codecs.image_policy import ImagePolicy
from lfdata.codecs.image_store import resize, write
from lfdata.codecs.pil import check_all_frames, identify, open_image, strict_pil
from lfdata.codecs.pil_versions import pil_report
from lfdata.codecs.sniff import sniff
from lfdata.errors import OptionError, SampleError

__all__ = ["IMAGE_CODECS", "ImageDecoder", "ImageEncoder", "ImagePolicy", "make_image_encoder"]

_CODEC_NAMES = {number: name for name, number in IMAGE_CODECS.items()}


class ImageEncoder:
    """Encodes pictures by one policy. ``params``: the policy, the PIL distribution and its libraries, the jpegtran used."""

    kind = "image"

    def __init__(self, policy: ImagePolicy) -> None:
        self.policy = policy
        self.params: dict[str, Any] = {**policy.to_params(), "pil": pil_report()}
        if policy.transcode or ((policy.restart or policy.restart_blocks) and policy.codec == "keep"):
            self.params["jpegtran"] = jpeg.jpegtran_version()

    def encode(self, raw: Buffer | NDArray[Any]) -> Encoded:
        """Encode the bytes of a picture file, or an array (H x W or H x W x C, C 1 to 4, uint8 or uint16, upright).

        ``sizes`` describe the array that :meth:`ImageDecoder.decode` returns. Raises :class:`SampleError`: ``truncated``,
        ``crc``, ``corrupt``, ``pixel-limit``, ``not-image``, ``empty``, ``lfs-pointer``, ``unsupported``, ``animated``,
        ``lossy-mask``, ``bits16``, ``codec-limit``, ``transcode``, ``memory``, ``type``.
        """
        policy = self.policy
        if isinstance(raw, np.ndarray):
            picture = _from_array(raw, policy)
        else:
            if not isinstance(raw, bytes | bytearray | memoryview):
                raise SampleError("type", f"a picture is given as bytes or as an array, not as {type(raw).__name__}")
            data = bytes(raw)
            fmt = identify(data)
            with strict_pil():
                picture = read_picture(data, fmt, policy)
            if policy.role != "picture" and _is_lossy(data, fmt):
                if policy.codec == "keep":
                    raise SampleError("lossy-mask", f"role={policy.role}, but this {fmt} file is lossy")
                picture.warnings.append(f"role={policy.role}, but the source file is a lossy {fmt}")
            if policy.codec == "keep":
                return self._keep(data, fmt, picture)
        with strict_pil("encoded"):
            resize(picture, policy)
            payload = write(picture, policy)
        aux = jpeg.row_offsets(payload) if policy.restart else None
        return Encoded(payload, _sizes(picture, policy.codec), aux, tuple(picture.warnings))

    def _keep(self, data: bytes, fmt: str, picture: Picture) -> Encoded:
        if fmt not in IMAGE_CODECS:
            raise SampleError("unsupported", f"{fmt} files cannot be kept as they are: use codec=webp or codec=png")
        with strict_pil():
            if fmt not in ("jpeg", "bmp"):
                check_all_frames(data, fmt, self.policy.max_pixels)
            policy = self.policy
            restart = "" if fmt != "jpeg" else "rows" if policy.restart else "blocks" if policy.restart_blocks else ""
            if restart or (self.policy.transcode and fmt == "jpeg" and jpeg.parse(data).progressive):
                before, data = picture.array(), jpeg.to_baseline(data, restart)
                if not np.array_equal(read_picture(data, fmt, self.policy).array(), before):
                    raise SampleError("transcode", "jpegtran changed pixels: the file is not what it seems")
        aux = jpeg.row_offsets(data) if restart == "rows" else None
        return Encoded(data, _sizes(picture, fmt), aux, tuple(picture.warnings))


def make_image_encoder(options: Mapping[str, str]) -> ImageEncoder:
    """An encoder for textual options (see :class:`ImagePolicy`). Raises :class:`OptionError`."""
    return ImageEncoder(ImagePolicy.from_options(options))


def _sizes(picture: Picture, codec: str) -> dict[str, Any]:
    width, height = picture.size
    return {
        "width": width,
        "height": height,
        "channels": picture.channels,
        "codec": IMAGE_CODECS[codec],
        "bits": picture.bits,
    }


def _from_array(pixels: NDArray[Any], policy: ImagePolicy) -> Picture:
    if policy.codec == "keep":
        raise SampleError("type", "codec=keep keeps files; an array needs codec=webp, jpeg, png or raw")
    if pixels.dtype not in (np.uint8, np.uint16):
        raise SampleError("type", f"a picture array is uint8 or uint16, not {pixels.dtype}")
    if pixels.ndim == 2:
        pixels = pixels[:, :, None]
    if pixels.ndim != 3 or not 1 <= pixels.shape[2] <= 4 or 0 in pixels.shape:
        raise SampleError("type", f"a picture array is H x W or H x W x C with C 1 to 4, not {pixels.shape}")
    check_pixels(pixels.shape[1], pixels.shape[0], policy.max_pixels)
    picture = Picture()
    if pixels.dtype == np.uint8:
        picture.image = image_from_array(pixels)
    else:
        picture.deep = np.ascontiguousarray(pixels, dtype=np.uint16)
    with strict_pil("encoded"):
        finish(picture, policy)
    return picture


def _is_lossy(data: bytes, fmt: str) -> bool:
    """Whether the file's samples went through a lossy codec (AVIF always counts as lossy)."""
    if fmt == "webp":
        pos = 12
        while pos + 8 <= len(data):
            if data[pos : pos + 4] in (b"VP8 ", b"ANMF"):
                return data[pos : pos + 4] == b"VP8 " or b"VP8 " in data[pos : pos + 64]
            pos += 8 + (int.from_bytes(data[pos + 4 : pos + 8], "little") + 1 & ~1)
        return False
    if fmt == "tiff":
        with strict_pil():
            return str(open_image(data, fmt, MAX_PIXELS).info.get("compression")) in ("jpeg", "tiff_jpeg", "webp")
    return fmt in ("jpeg", "avif")


class ImageDecoder:
    """Decodes what an :class:`ImageEncoder` with the same ``params`` stored.

    Args:
        params: the encoder's ``params`` as the shard's schema holds them; they are not trusted.
        max_pixels: this reader's own limit of width x height; a picture over it is refused before allocation.
    """

    def __init__(self, params: Mapping[str, Any], *, max_pixels: int = MAX_PIXELS) -> None:
        stored = ImagePolicy.from_params(params)
        self.max_pixels = max_pixels
        self.params = dict(params)
        # A kept file is brought into form now, by the stored policy; any other was when it was encoded.
        neutral = ImagePolicy(codec=stored.codec, icc="ignore", bits16="keep", animation="keep")
        self._policy = dataclasses.replace(
            stored if stored.codec == "keep" else neutral, max_pixels=max_pixels, animation="keep"
        )
        self._kept = stored.codec == "keep"
        self._restart = stored.restart

    def decode(self, payload: Buffer, sizes: Mapping[str, Any]) -> NDArray[Any]:
        """Decode to an owned, writable H x W x C array, C 1 to 4, uint8 or uint16 (``sizes["bits"]``).

        Raises :class:`SampleError`: ``pixel-limit``; ``size-mismatch`` when the payload's header and ``sizes`` disagree;
        ``truncated``, ``crc``, ``corrupt``, ``memory``.
        """
        width, height, channels, bits, codec = self._checked(sizes)
        if codec == "raw":
            return _decode_raw(payload, (height, width, channels), bits)
        data = bytes(payload)
        if (found := sniff(data)) != codec:
            raise SampleError("codec", f"the payload is {found or 'not a picture'}, the index says {codec}")
        expected = ((width, height), (height, width)) if self._kept else ((width, height),)  # a kept file may lie on its side
        with strict_pil():
            picture = read_picture(data, codec, self._policy, expected)
            _fit_channels(picture, channels, codec)
        if picture.size != (width, height) or picture.channels != channels or picture.bits != bits:
            raise _mismatch(f"{picture.size[0]}x{picture.size[1]}x{picture.channels} at {picture.bits} bits", sizes)
        return picture.array()

    def decode_rows(
        self, payload: Buffer, sizes: Mapping[str, Any], aux: NDArray[np.uint64] | Sequence[int], y0: int, y1: int
    ) -> NDArray[Any]:
        """Rows [``y0``, ``y1``) of a JPEG stored with ``restart=rows``: (y1 - y0) x W x C uint8, owned and writable.

        ``aux``: the stored byte offsets of the MCU rows. Equals ``decode(...)[y0:y1]`` exactly, 4:2:0 included: chroma is
        interpolated across MCU rows, so one more MCU row is decoded above and below and dropped. Only these rows
        are decoded. Raises :class:`SampleError`; :class:`OptionError` for a field without restart markers or
        rows outside the picture.
        """
        width, height, channels, _, codec = self._checked(sizes)
        if not self._restart or codec != "jpeg":
            raise OptionError("decode_rows needs JPEGs stored with restart=rows")
        if not 0 <= y0 < y1 <= height:
            raise OptionError(f"rows {y0} to {y1} are not inside a picture of {height} rows")
        data = bytes(payload)
        with strict_pil():
            turned = read_orientation(Image.open(BytesIO(data))) != 1
        if turned:
            # Rows of the upright picture are other rows of the file, or its columns.
            return self.decode(data, sizes)[y0:y1].copy()
        info = jpeg.parse(data)
        if (info.width, info.height) != (width, height):
            raise _mismatch(f"{info.width}x{info.height}", sizes)
        mcu = info.mcu[1]
        first, last = max(0, y0 // mcu - 1), min(info.mcu_rows, -(-y1 // mcu) + 1)
        part = jpeg.rows_jpeg(data, [int(o) for o in aux], first, last)
        with strict_pil():
            picture = read_picture(part, "jpeg", self._policy)
        if picture.channels != channels or picture.size[0] != width:
            raise _mismatch(f"{picture.size[0]} columns of {picture.channels} channels", sizes)
        pixels = picture.array()[y0 - first * mcu : y1 - first * mcu]
        return pixels.copy()

    def _checked(self, sizes: Mapping[str, Any]) -> tuple[int, int, int, int, str]:
        width, height, channels, bits = (int(sizes[name]) for name in ("width", "height", "channels", "bits"))
        codec = _CODEC_NAMES.get(int(sizes["codec"]))
        if codec is None:
            raise SampleError("codec", f"codec number {sizes['codec']} is unknown to this version")
        if width < 1 or height < 1 or not 1 <= channels <= 4 or bits not in (8, 16):
            raise SampleError("size-mismatch", f"no picture has {width}x{height} pixels, {channels} channels, {bits} bits")
        check_pixels(width, height, self.max_pixels)
        return width, height, channels, bits, codec


def _decode_raw(payload: Buffer, shape: tuple[int, int, int], bits: int) -> NDArray[Any]:
    dtype = np.dtype("u1" if bits == 8 else "<u2")
    need = shape[0] * shape[1] * shape[2] * dtype.itemsize
    if len(payload) != need:
        reason = f"raw pixels of {shape[1]}x{shape[0]}x{shape[2]} take {need} bytes, {len(payload)} are there"
        raise truncated(reason) if len(payload) < need else SampleError("size-mismatch", reason)
    return np.frombuffer(payload, dtype=dtype).reshape(shape).astype(dtype.newbyteorder("="), copy=True)


def _fit_channels(picture: Picture, channels: int, codec: str) -> None:
    """webp has neither grey (stored as three equal channels) nor alpha that is opaque everywhere (left out)."""
    if codec != "webp" or picture.image is None or picture.channels == channels:
        return
    if channels in (2, 4) and picture.channels == 3:
        picture.image = picture.image.convert("RGBA")
    if channels == 1 and picture.channels == 3:
        picture.image = picture.image.getchannel(0)
    elif channels == 2 and picture.channels == 4:
        picture.image = Image.merge("LA", (picture.image.getchannel(0), picture.image.getchannel(3)))


def _mismatch(found: str, sizes: Mapping[str, Any]) -> SampleError:
    wanted = f"{sizes['width']}x{sizes['height']}x{sizes['channels']} at {sizes['bits']} bits"
    return SampleError("size-mismatch", f"the payload decodes to {found}, the index says {wanted}")
