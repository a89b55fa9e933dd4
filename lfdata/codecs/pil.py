"""The only door to PIL's decoders: strict, bounded, one error type, the same through pillow and pillow-simd.

Plugins are called directly, not through ``PIL.Image.open``: the format is known from the content, PIL's own pixel limit (a
process-wide setting that only warns up to twice its value) is left alone and not relied upon (a few plugins apply it by
themselves: WebP since Pillow 13, so that more than twice its value is refused there whatever the policy allows), and the reason
a plugin gives ("bad header checksum") is not replaced by "cannot identify image file".
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from io import BytesIO

import PIL
from PIL import (
    BmpImagePlugin,
    GifImagePlugin,
    IcoImagePlugin,
    Image,
    ImageFile,
    JpegImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
    features,
)

from lfdata.codecs import jpeg
from lfdata.codecs.base import MAX_PIXELS, Buffer
from lfdata.codecs.containers import Size, check_pixels, check_png_pixels, damaged_png, walk
from lfdata.codecs.sniff import IMAGE_FORMATS, LFS_ADVICE, is_lfs_pointer, sniff
from lfdata.errors import LfdataError, SampleError

_PLUGINS: dict[str, Callable[[BytesIO, str], ImageFile.ImageFile]] = {
    "jpeg": JpegImagePlugin.JpegImageFile,  # not jpeg_factory: an MPO is read as the JPEG it begins with
    "png": PngImagePlugin.PngImageFile,
    "webp": WebPImagePlugin.WebPImageFile,
    "gif": GifImagePlugin.GifImageFile,
    "tiff": TiffImagePlugin.TiffImageFile,
    "bmp": BmpImagePlugin.BmpImageFile,
    "ico": IcoImagePlugin.IcoImageFile,
}

_strict_lock = threading.Lock()
_strict_users = 0
_strict_saved = False


@cache
def supported_formats() -> tuple[str, ...]:
    """Formats this PIL decodes, of :data:`lfdata.codecs.sniff.IMAGE_FORMATS`."""
    have = {
        "jpeg": features.check("jpg"),
        "webp": features.check("webp"),
        "avif": features.check("avif"),
        "png": features.check("zlib"),
    }
    return tuple(f for f in IMAGE_FORMATS if have.get(f, True))


@contextmanager
def strict_pil(action: str = "decoded") -> Iterator[None]:
    """Run PIL with ``LOAD_TRUNCATED_IMAGES`` off and every exception as :class:`SampleError`.

    A program may have set that flag for its own use: it is off while at least one thread is inside, then as it was.
    """
    global _strict_users, _strict_saved
    with _strict_lock:
        if _strict_users == 0:
            _strict_saved = ImageFile.LOAD_TRUNCATED_IMAGES
        ImageFile.LOAD_TRUNCATED_IMAGES = False
        _strict_users += 1
    try:
        yield
    except LfdataError:
        raise
    except Exception as error:
        raise _translate(error, action) from error
    finally:
        with _strict_lock:
            _strict_users -= 1
            if _strict_users == 0:
                ImageFile.LOAD_TRUNCATED_IMAGES = _strict_saved


def _translate(error: Exception, action: str) -> SampleError:
    """PIL and its plugins raise OSError, SyntaxError, ValueError, struct.error, ZeroDivisionError, MemoryError and more."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, MemoryError):
        return SampleError("memory", f"no memory for a picture to be {action}: {text}")
    if isinstance(error, (Image.DecompressionBombError, Image.DecompressionBombWarning)):
        return SampleError("pixel-limit", text)
    if isinstance(error, EOFError) or "truncated" in text.lower() or "not enough image data" in text.lower():
        return SampleError("truncated", text if "truncated" in text.lower() else f"truncated: {text}")
    return SampleError("corrupt", f"cannot be {action}: {text}")


def identify(data: Buffer) -> str:
    """Format of a picture file by content.

    Raises :class:`SampleError`: ``empty``, ``lfs-pointer``, ``not-image``, ``unsupported``, or what is wrong with a
    PNG whose signature is damaged.
    """
    if len(data) == 0:
        raise SampleError("empty", "the file is empty")
    if is_lfs_pointer(data):
        raise SampleError("lfs-pointer", LFS_ADVICE)
    fmt = sniff(data)
    if fmt not in IMAGE_FORMATS:
        if damaged := damaged_png(bytes(data), MAX_PIXELS):
            raise damaged
        what = f"content is {fmt}" if fmt else f"content begins with {bytes(memoryview(data)[:8]).hex(' ')}"
        raise SampleError("not-image", f"not a picture this package reads ({what}; known: {', '.join(IMAGE_FORMATS)})")
    if fmt not in supported_formats():
        raise SampleError("unsupported", f"this PIL ({PIL.__version__}) was built without {fmt.upper()}")
    return fmt


def open_image(
    data: bytes, fmt: str, max_pixels: int = MAX_PIXELS, expected: tuple[Size, ...] | None = None
) -> ImageFile.ImageFile:
    """Open ``data`` as ``fmt`` (from :func:`identify`), its first frame not yet decoded; call inside :func:`strict_pil`.

    Structure and size are checked before PIL allocates: at most ``max_pixels``, and one of ``expected`` where that is given.
    Raises :class:`SampleError` ``pixel-limit``, ``size-mismatch``, ``truncated``, ``crc``, ``corrupt``.
    """
    claimed: Size | None
    if fmt == "jpeg":
        info = jpeg.parse(data)
        claimed = check_pixels(info.width, info.height, max_pixels)
        data = jpeg.guard(data, info)
    else:
        claimed = walk(data, fmt, max_pixels)
    _check_expected(claimed, expected)
    image = _plugin(fmt)(BytesIO(data), "")
    check_pixels(image.width, image.height, max_pixels)
    _check_expected(image.size, expected)
    return image


def _check_expected(claimed: Size | None, expected: tuple[Size, ...] | None) -> None:
    if claimed is not None and expected is not None and claimed not in expected:
        wanted = f"{expected[0][0]}x{expected[0][1]}"
        raise SampleError("size-mismatch", f"the payload's header says {claimed[0]}x{claimed[1]}, the index says {wanted}")


def _plugin(fmt: str) -> Callable[[BytesIO, str], ImageFile.ImageFile]:
    if fmt == "avif":
        from PIL import AvifImagePlugin  # absent from older PILs: the rest must still work there

        return AvifImagePlugin.AvifImageFile
    return _PLUGINS[fmt]


def load_whole(image: ImageFile.ImageFile, data: bytes, fmt: str) -> None:
    """Decode the current frame, and make sure that all of it came out of the file; call inside :func:`strict_pil`."""
    image.load()
    # A PNG that ran out of rows has zeros in its last row (interlaced: in one of the last two): only then look closer.
    if fmt == "png" and (image.height < 2 or _has_zero_row(image)):
        check_png_pixels(data)


def _has_zero_row(image: Image.Image) -> bool:
    rows = image.crop((0, image.height - 2, image.width, image.height)).tobytes()
    half = len(rows) // 2
    return not any(rows[half:]) or not any(rows[:half])


def check_all_frames(data: bytes, fmt: str, max_pixels: int) -> int:
    """Decode every frame (page, of a TIFF) of a file with more than one; returns their number; call in :func:`strict_pil`.

    The pixels of all frames together may not exceed ``max_pixels``: time is bounded as memory is.
    """
    image = open_image(data, fmt, max_pixels)
    frames = int(getattr(image, "n_frames", 1))
    if frames == 1:
        return 1  # whoever asks has decoded the first
    total = 0
    for index in range(frames):
        if index:
            image.seek(index)
        total += image.width * image.height
        if total > max_pixels:
            raise SampleError("pixel-limit", f"{frames} frames have more than {max_pixels} pixels together")
        image.load()
    return frames
