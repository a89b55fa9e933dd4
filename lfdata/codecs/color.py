"""From whatever a file holds to L, LA, RGB or RGBA at 8 bit, or H x W x C uint16: colour, alpha, depth, the right way up."""

from __future__ import annotations

import struct
import sys
from dataclasses import dataclass, field
from functools import lru_cache
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageChops, ImageFile

from lfdata.codecs.containers import Size
from lfdata.codecs.image_policy import ImagePolicy, blend_colour
from lfdata.codecs.pil import load_whole, open_image
from lfdata.errors import SampleError

_TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_CHANNELS = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4}
_STRETCH = {"L;2": 85, "L;4": 17}
_SCALE_LUT = ((np.arange(65536, dtype=np.uint32) * 255 + 32767) // 65535).astype(np.uint8)
_ORIENTATION = 0x0112
_NO_CACHE = 0x0040  # lcms: transforms are shared between threads


@dataclass(slots=True)
class Picture:
    """A picture in canonical form: either ``image`` (mode L, LA, RGB, RGBA) or ``deep`` (H x W x C uint16, C 1 to 4) is set."""

    image: Image.Image | None = None
    deep: NDArray[np.uint16] | None = None
    warnings: list[str] = field(default_factory=list)

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) in pixels."""
        if self.image is not None:
            return self.image.size
        assert self.deep is not None
        return self.deep.shape[1], self.deep.shape[0]

    @property
    def channels(self) -> int:
        if self.image is not None:
            return _CHANNELS[self.image.mode]
        assert self.deep is not None
        return int(self.deep.shape[2])

    @property
    def bits(self) -> int:
        return 8 if self.image is not None else 16

    def array(self) -> NDArray[Any]:
        """H x W x C, uint8 or uint16, owned and writable."""
        if self.image is not None:
            if self.image.mode != "L":
                return np.array(self.image)
            pixels = np.empty((self.image.height, self.image.width, 1), np.uint8)
            pixels[:, :, 0] = np.asarray(self.image)
            return pixels
        assert self.deep is not None
        return self.deep if self.deep.flags.owndata and self.deep.flags.c_contiguous else self.deep.copy()


def read_picture(data: bytes, fmt: str, policy: ImagePolicy, expected: tuple[Size, ...] | None = None) -> Picture:
    """Decode the first frame of ``data`` wholly and bring it upright into a canonical form, as ``policy`` says.

    ``expected``: sizes one of which the header must have. Call inside :func:`lfdata.codecs.pil.strict_pil`.
    Raises :class:`SampleError`, or what PIL raises.
    """
    image = open_image(data, fmt, policy.max_pixels, expected)
    out = Picture()
    if getattr(image, "is_animated", False):
        if policy.animation == "error":
            raise SampleError("animated", "more than one frame, and animation=error")
        if policy.animation == "first":
            out.warnings.append("more than one frame: the first is stored")
    rawmode = _rawmode(image)
    deep = _read_deep(data, fmt, image, rawmode, policy.max_pixels)
    if deep is None:
        load_whole(image, data, fmt)
        if ";16" in rawmode:
            out.warnings.append(f"16-bit samples in layout {rawmode} were cut to 8 bits by PIL")
    orientation = read_orientation(image)
    profile = image.info.get("icc_profile") if policy.icc == "srgb" else None
    if deep is not None:
        out.deep = _upright(deep, orientation)
    else:
        out.image = canonical(image, fmt, rawmode, policy, profile, out.warnings)
        if orientation != 1:
            out.image = out.image.transpose(_TRANSPOSE[orientation])
    finish(out, policy, profile)
    return out


def finish(out: Picture, policy: ImagePolicy, profile: bytes | None = None) -> None:
    """Depth and alpha of a picture in canonical form, in place; metadata is dropped so that no encoder writes it."""
    if out.deep is not None:
        if policy.bits16 == "scale":
            out.image = image_from_array(_SCALE_LUT[out.deep])
            out.deep = None
            out.image = to_srgb(out.image, profile, out.warnings)
        elif profile:
            out.warnings.append("ICC profile not applied: the picture is kept at 16 bits")
    if out.channels in (2, 4) and policy.alpha != "keep":
        _remove_alpha(out, policy.alpha)
    if out.image is not None:
        out.image.info = {}


def image_from_array(pixels: NDArray[np.uint8]) -> Image.Image:
    """A PIL image of H x W x C uint8, C 1 to 4."""
    return Image.fromarray(np.ascontiguousarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels))


def _rawmode(image: ImageFile.ImageFile) -> str:
    """PIL's name of the sample layout in the file, where the plugin states it before decoding."""
    if not image.tile:
        return ""
    args: Any = image.tile[0][3]
    first = args[0] if isinstance(args, tuple) and args else args
    return first if isinstance(first, str) else ""


def _read_deep(data: bytes, fmt: str, image: ImageFile.ImageFile, rawmode: str, limit: int) -> NDArray[np.uint16] | None:
    """16-bit pixels as H x W x C uint16, or ``None`` when the file has none that can be had whole.

    PIL has no 16-bit colour: it keeps the high byte of every sample. Read with the opposite byte order it keeps the low one,
    so two decodes give all 16 bits; grey + alpha has the four bytes of an RGBA pixel.
    """
    if image.mode.startswith("I;16"):
        load_whole(image, data, fmt)
        pixels = np.array(image).astype(np.uint16, copy=False)[:, :, None]
    elif rawmode == "LA;16B":
        image.tile = [t._replace(args="RGBA") for t in image.tile]
        load_whole(image, data, fmt)
        pixels = np.array(image).view(">u2").astype(np.uint16)
    elif rawmode[:-1] in ("RGB;16", "RGBA;16") and image.mode in ("RGB", "RGBA"):
        load_whole(image, data, fmt)
        high = np.array(image)
        swapped = rawmode[:-1] + _other_order(rawmode[-1])
        again = open_image(data, fmt, limit)
        again.tile = [t._replace(args=(swapped, *t.args[1:]) if isinstance(t.args, tuple) else swapped) for t in again.tile]
        again.load()
        pixels = high.astype(np.uint16)
        pixels <<= 8
        pixels |= np.asarray(again)
    elif image.mode == "I":
        return _read_i32(image)
    else:
        return None
    return _transparent(pixels, image.info.get("transparency"))


def _other_order(order: str) -> str:
    if order == "N":
        order = "L" if sys.byteorder == "little" else "B"
    return "B" if order == "L" else "L"


def _read_i32(image: ImageFile.ImageFile) -> NDArray[np.uint16]:
    image.load()
    wide = np.asarray(image)
    if wide.size and (int(wide.min()) < 0 or int(wide.max()) > 65535):
        raise SampleError("unsupported", f"32-bit samples {wide.min()} to {wide.max()}: store them as kind array instead")
    return wide.astype(np.uint16)[:, :, None]


def _transparent(pixels: NDArray[np.uint16], key: Any) -> NDArray[np.uint16]:
    """Add the alpha that a PNG tRNS colour means."""
    if pixels.shape[2] not in (1, 3) or not isinstance(key, int | tuple):
        return pixels
    opaque = (pixels != np.array(key, dtype=np.uint16)).any(axis=2, keepdims=True)
    return np.concatenate((pixels, opaque.astype(np.uint16) * 65535), axis=2)


def _upright(pixels: NDArray[np.uint16], orientation: int) -> NDArray[np.uint16]:
    if orientation >= 5:
        pixels = pixels.transpose(1, 0, 2)
    # After the transpose of 5 to 8: 6 mirrors columns, 8 mirrors rows, 7 both.
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    return np.ascontiguousarray(pixels)


def read_orientation(image: Image.Image) -> int:
    """EXIF (or TIFF) orientation 1 to 8 of a loaded image; 1 when it is absent, damaged or out of range. XMP is not read."""
    tags = getattr(image, "tag_v2", None)
    if tags is not None:
        value = tags.get(_ORIENTATION, 1)
    else:
        exif = image.info.get("exif")
        value = _exif_orientation(exif) if isinstance(exif, bytes) else 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _exif_orientation(exif: bytes) -> int:
    tiff = exif.removeprefix(b"Exif\0\0")
    order = {b"II": "<", b"MM": ">"}.get(tiff[:2])
    if order is None or len(tiff) < 8:
        return 1
    (start,) = struct.unpack_from(order + "I", tiff, 4)
    if start + 2 > len(tiff):
        return 1
    (count,) = struct.unpack_from(order + "H", tiff, start)
    for pos in range(start + 2, min(start + 2 + 12 * count, len(tiff) - 11), 12):
        tag, kind = struct.unpack_from(order + "HH", tiff, pos)
        if tag == _ORIENTATION:
            code = {3: "H", 4: "I"}.get(kind)
            return int(struct.unpack_from(order + code, tiff, pos + 8)[0]) if code else 1
    return 1


def canonical(
    image: Image.Image, fmt: str, rawmode: str, policy: ImagePolicy, profile: bytes | None, warnings: list[str]
) -> Image.Image:
    """An 8-bit ``image`` of any mode as L, LA, RGB or RGBA; colour-managed when ``profile`` is given."""
    mode, clear = image.mode, image.info.get("transparency")
    if policy.role != "picture":
        return _labels(image, rawmode)
    if mode == "CMYK":
        if fmt == "jpeg" and "adobe" not in image.info:
            image = ImageChops.invert(image)  # PIL takes every CMYK JPEG for an inverted (Adobe) one
        return to_srgb(image, profile, warnings).convert("RGB")
    if mode in ("P", "PA"):
        alpha = mode == "PA" or clear is not None or (image.palette is not None and "A" in image.palette.mode)
        image = image.convert("RGBA" if alpha else "RGB")
    elif mode in ("1", "L", "RGB") and clear is not None:
        if mode == "L" and isinstance(clear, int):
            image.info["transparency"] = clear * _STRETCH.get(rawmode, 1)
        image = image.convert("RGBA" if mode == "RGB" else "LA")
    elif mode not in _CHANNELS:
        to = {"1": "L", "La": "LA", "RGBa": "RGBA", "RGBX": "RGB", "YCbCr": "RGB", "HSV": "RGB"}.get(mode)
        if to is None:
            raise SampleError("unsupported", f"pixels of PIL mode {mode} are not 8 or 16 bits: kind array stores such values")
        image = image.convert(to)
    return to_srgb(image, profile, warnings)


def _labels(image: Image.Image, rawmode: str) -> Image.Image:
    """Stored sample values, not colours."""
    if image.mode in _CHANNELS:
        stretch = _STRETCH.get(rawmode)
        return image.point(lambda v: v // stretch) if stretch else image
    if image.mode in ("P", "PA", "1"):
        values = np.asarray(image)
        return image_from_array((values if values.ndim == 2 else values[:, :, 0]).astype(np.uint8)[:, :, None])
    raise SampleError("unsupported", f"pixels of PIL mode {image.mode} are neither labels nor depth")


def to_srgb(image: Image.Image, profile: bytes | None, warnings: list[str]) -> Image.Image:
    """Apply an ICC ``profile``; alpha is left alone. A profile that is broken or not of the image's kind is a warning."""
    if not profile:
        return image
    alpha = image.getchannel("A") if image.mode in ("LA", "RGBA") else None
    base = image.convert(image.mode[:-1]) if alpha is not None else image
    transform = _transform(bytes(profile), base.mode)
    if transform is None or isinstance(transform, str):
        if transform:
            warnings.append(f"ICC profile ignored: {transform}")
        return image
    done: Image.Image = transform.apply(base)
    if base.mode == "L":
        done = done.getchannel(0)  # grey in, neutral out: the three channels agree
    if alpha is not None:
        done.putalpha(alpha)
    return done


@lru_cache(maxsize=32)
def _transform(profile: bytes, mode: str) -> Any:
    """A transform from ``profile`` to sRGB; ``None`` when it is sRGB already; a text saying why it cannot be used."""
    try:
        from PIL import ImageCms

        source = ImageCms.ImageCmsProfile(BytesIO(profile))
        space = source.profile.xcolor_space.strip()
        if space != {"L": "GRAY"}.get(mode, mode):
            return f"it is for {space}, the picture is {mode}"
        name = ImageCms.getProfileDescription(source).lower()
        if mode == "RGB" and "srgb" in name and "linear" not in name:
            return None
        target = ImageCms.createProfile("sRGB")
        return ImageCms.buildTransform(source, target, mode, "RGB", ImageCms.Intent.PERCEPTUAL, ImageCms.Flags(_NO_CACHE))
    except Exception as error:
        return " ".join(str(error).split()) or type(error).__name__


def _remove_alpha(out: Picture, alpha: str) -> None:
    colour = blend_colour(alpha)
    if out.image is not None:
        base = "L" if out.image.mode == "LA" else "RGB"
        if colour is None:
            out.image = out.image.convert(base)
            return
        grey = colour[0] == colour[1] == colour[2]
        ground = Image.new("RGBA", out.image.size, (*colour, 255))
        out.image = Image.alpha_composite(ground, out.image.convert("RGBA")).convert(base if grey else "RGB")
        return
    assert out.deep is not None
    rgb, opacity = out.deep[:, :, :-1], out.deep[:, :, -1:].astype(np.float64) / 65535
    if colour is not None:
        ink = np.array(colour, dtype=np.float64) * 257
        rgb = np.rint(rgb * opacity + ink * (1 - opacity)).astype(np.uint16)
        if out.channels == 2 and colour[0] == colour[1] == colour[2]:
            rgb = rgb[:, :, :1]
    out.deep = np.ascontiguousarray(rgb)
