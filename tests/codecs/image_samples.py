"""Pictures of every awkward kind, made here so that the tests need no files."""

from __future__ import annotations

import struct
import zlib
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image

SHARED = Path(__file__).resolve().parents[2].parent / "shared"
ODD = SHARED / "data" / "odd"


def options(text: str) -> dict[str, str]:
    """``"codec=png,alpha=drop"`` as a mapping."""
    return dict(part.split("=", 1) for part in text.split(",")) if text else {}


def photo(width: int = 96, height: int = 64, seed: int = 0) -> np.ndarray:
    """A smooth picture with edges and colour, H x W x 3 uint8."""
    y, x = np.mgrid[0:height, 0:width].astype(np.float64)
    rng = np.random.default_rng(seed)
    planes = [np.sin(x / (5 + 3 * c)) * 60 + np.cos(y / (7 + c)) * 50 + 128 + (x > width / 2) * 20 * c for c in range(3)]
    return np.clip(np.stack(planes, 2) + rng.normal(0, 4, (height, width, 3)), 0, 255).astype(np.uint8)


def asymmetric() -> np.ndarray:
    """A 24 x 16 (W x H) picture with a different colour in every corner, in 8 x 8 blocks that JPEG keeps apart."""
    pixels = np.full((16, 24, 3), 128, np.uint8)
    pixels[:8, :8], pixels[:8, 16:], pixels[8:, :8], pixels[8:, 16:] = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0)
    return pixels


def save(pixels: np.ndarray | Image.Image, fmt: str, **how: object) -> bytes:
    """Bytes of a picture file written by PIL."""
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    out = BytesIO()
    image.save(out, fmt, **how)
    return out.getvalue()


def exif(orientation: int) -> bytes:
    """An EXIF block that holds nothing but an orientation."""
    made = Image.Exif()
    made[0x0112] = orientation
    return made.tobytes()


def chunk(name: bytes, body: bytes) -> bytes:
    """One PNG chunk."""
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def png(width: int, height: int, bits: int, colour: int, rows: bytes, *extra: bytes, idat: bytes | None = None) -> bytes:
    """A PNG from filtered rows; ``extra`` chunks go before the pixel data."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0))
    body = chunk(b"IDAT", zlib.compress(rows) if idat is None else idat)
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(extra) + body + chunk(b"IEND", b"")


def png16(pixels: np.ndarray, *extra: bytes) -> bytes:
    """A 16-bit PNG of H x W x C, unfiltered, written without the package."""
    height, width, channels = pixels.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    return png(width, height, 16, {1: 0, 2: 4, 3: 2, 4: 6}[channels], rows, *extra)


def scaled(pixels: np.ndarray) -> np.ndarray:
    """The stated rule from 16 to 8 bits, in exact integers."""
    return ((pixels.astype(np.uint64) * 255 + 32767) // 65535).astype(np.uint8)
