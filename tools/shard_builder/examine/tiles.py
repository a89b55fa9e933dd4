"""Pictures of single values: what a tile of a contact sheet shows. Everything here is bounded by the size of the tile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont, features

from shard_builder.examine.sample import Sample, Value
from shard_builder.examine.text import key_text, shorten, visible

INK, PAPER, FAULT, WAVE = (24, 24, 28), (250, 250, 248), (176, 32, 32), (40, 96, 168)
_CHECKS = ((255, 255, 255), (208, 208, 208))
_CHECK_PIXELS = 8
_TEXT_LIMIT = 2000
_SYSTEM_FONTS = ("DejaVuSans.ttf", "NotoSans-Regular.ttf", "LiberationSans-Regular.ttf")
_LARGEST_GROWTH = 8


class Font:
    """A font that covers much of Unicode if the system has one, else PIL's own.

    Args:
        size: pixels. path: a font file of the user's choice.

    Raises:
        OSError: ``path`` is no font.
    """

    def __init__(self, size: int, path: Path | None = None) -> None:
        self._latin_only = False
        self.font: Any = None
        if features.check("freetype2"):
            for name in (str(path),) if path else _SYSTEM_FONTS:
                try:
                    self.font = ImageFont.truetype(name, size)
                    break
                except OSError:
                    if path:
                        raise
        if self.font is None:
            self.font = ImageFont.load_default(size) if features.check("freetype2") else ImageFont.load_default()
            self._latin_only = not features.check("freetype2")
        self.line = max(8, round(size * 1.25))

    def safe(self, text: str) -> str:
        """Text that this font can be given: what would be obeyed or hidden is escaped."""
        text = visible(text)
        return text.encode("latin-1", "backslashreplace").decode("latin-1") if self._latin_only else text

    def wrap(self, text: str, width: int, lines: int) -> list[str]:
        """At most ``lines`` lines no wider than ``width`` pixels; broken at spaces where possible, inside words where not."""
        result: list[str] = []
        for paragraph in text[:_TEXT_LIMIT].splitlines() or [""]:
            rest = " ".join(self.safe(paragraph.replace("\t", " ")).split())
            while rest and len(result) <= lines:
                fitting = self._fitting(rest, width)
                cut = rest.rfind(" ", 0, fitting + 1) if fitting < len(rest) else fitting
                cut = cut if cut > 0 else fitting
                result.append(rest[:cut].rstrip())
                rest = rest[cut:].lstrip()
        if len(result) > lines:
            result = result[:lines]
            last, more = result[-1], self.safe("\u2026")
            while last and self._length(last + more) > width:
                last = last[:-1]
            result[-1] = last + more
        return result

    def _fitting(self, text: str, width: int) -> int:
        """How many characters fit: at least one."""
        low, high = 1, min(len(text), width)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._length(text[:middle]) <= width else (low, middle - 1)
        return low

    def _length(self, text: str) -> float:
        return float(self.font.getlength(text))


def draw_tile(sample: Sample, size: int, font: Font, field: str | None = None) -> Image.Image:
    """A picture of a sample, ``size`` x ``size`` RGB: its image, else waveform, text, json, or whatever it has; a red tile
    for a fault."""
    if sample.error:
        return fault_tile(f"index {sample.index}: {sample.error}", size, font)
    value = _chosen(sample, field)
    if value is None:
        return text_tile(["no value"] if field is None else [f"no {field!r}"], size, font)
    if value.error:
        return fault_tile(
            f"index {sample.index}, {sample.file} row {sample.row}, field {value.name!r}: {value.error}", size, font
        )
    match value.kind:
        case "image":
            return picture_tile(value.value, size)
        case "audio":
            return wave_tile(value.value.samples, size)
    return text_tile(_lines(value), size, font)


def _chosen(sample: Sample, field: str | None) -> Value | None:
    if field is not None:
        return next((value for value in sample.values if value.name == field and value.present), None)
    order = (("image",), ("audio",), ("text",), ("json",), ("array", "tokens", "bytes", "scalar"))
    return next((value for kinds in order if (value := sample.first(*kinds)) is not None), None)


def _lines(value: Value) -> list[str]:
    data = value.value
    match value.kind:
        case "text":
            return str(data).splitlines() or ["(empty text)"]
        case "json":
            if isinstance(data, dict):
                return [f"{name}: {_brief(item)}" for name, item in list(data.items())[:20]] or ["{}"]
            return [_brief(data)]
        case "tokens":
            return [f"{len(data)} tokens", " ".join(map(str, data[:64].tolist()))]
        case "bytes":
            return [f"{len(data)} bytes", bytes(data[:64]).hex(" ")]
        case "array":
            return [
                f"{data.dtype.name} {'x'.join(map(str, data.shape))}",
                " ".join(f"{x:.4g}" for x in data.ravel()[:32].tolist()),
            ]
    return [f"{value.name}: {data}"]


def _brief(item: Any, *, inside: bool = False) -> str:
    if isinstance(item, list):
        return f"[{len(item)}]" + (
            "" if inside else " " + shorten(", ".join(_brief(part, inside=True) for part in item[:4]), 60)
        )
    if isinstance(item, dict):
        return f"{{{len(item)}}}" + ("" if inside else " " + shorten(", ".join(map(str, list(item)[:4])), 60))
    return shorten(item if isinstance(item, str) else msgspec.json.encode(item).decode(), 80)


def caption(sample: Sample) -> str:
    """What stands under a tile: the first text, else the first label or class, else another scalar, else the key."""
    text = next((v for v in sample.values if v.kind == "text" and v.present and not v.error and v.value.strip()), None)
    if text is not None:
        return str(text.value)
    scalars = [v for v in sample.values if v.kind == "scalar" and v.present and not v.error]
    scalars.sort(key=lambda v: not any(word in v.name.lower() for word in ("label", "class", "category")))
    if scalars:
        return f"{scalars[0].name}: {scalars[0].value}"
    return "(key unreadable)" if sample.key is None else key_text(sample.key)


def text_tile(
    lines: list[str], size: int, font: Font, paper: tuple[int, int, int] = PAPER, ink: tuple[int, int, int] = INK
) -> Image.Image:
    """Text on a tile."""
    tile = Image.new("RGB", (size, size), paper)
    draw = ImageDraw.Draw(tile)
    margin = max(2, size // 24)
    room = max(1, (size - 2 * margin) // font.line)
    wrapped = [part for line in lines[:room] for part in (font.wrap(line, size - 2 * margin, room) or [""])]
    for number, line in enumerate(wrapped[:room]):
        draw.text((margin, margin + number * font.line), line, fill=ink, font=font.font)
    return tile


def fault_tile(reason: str, size: int, font: Font) -> Image.Image:
    """A red tile that says what is wrong."""
    return text_tile(["BAD SAMPLE", reason], size, font, FAULT, (255, 255, 255))


def picture_tile(pixels: NDArray[Any], size: int) -> Image.Image:
    """A picture (H x W x C, uint8 or uint16) fitted into a tile; 16 bit stretched over its own range, alpha over a
    checkerboard."""
    # Far more pixels than the tile shows are thinned out first: the work is bounded by the tile.
    step = max(1, min(pixels.shape[:2]) // (8 * size))
    pixels = pixels[::step, ::step]
    channels = pixels.shape[2]
    alpha = pixels[..., -1] if channels in (2, 4) else None
    colour = pixels[..., : channels - 1] if alpha is not None else pixels
    image = Image.fromarray(_rgb(_eight(colour, stretch=True)))
    scale = min(size / image.width, size / image.height, _LARGEST_GROWTH)
    target = (max(1, min(size, round(image.width * scale))), max(1, min(size, round(image.height * scale))))
    method = Image.Resampling.NEAREST if scale > 2 else Image.Resampling.BICUBIC
    tile = Image.new("RGB", (size, size), PAPER)
    place = ((size - target[0]) // 2, (size - target[1]) // 2)
    if alpha is None:
        tile.paste(image.resize(target, method), place)
    else:
        mask = Image.fromarray(np.ascontiguousarray(_eight(alpha, stretch=False))).resize(target, method)
        tile.paste(checkerboard(target), place)
        tile.paste(image.resize(target, method), place, mask)
    return tile


def _eight(values: NDArray[Any], *, stretch: bool) -> NDArray[np.uint8]:
    if values.dtype == np.uint8:
        return values
    low, high = (int(values.min()), int(values.max())) if stretch else (0, 65535)
    if high == low:
        low, high = 0, 65535
    scaled: NDArray[np.uint8] = np.rint((values.astype(np.float32) - low) * (255.0 / (high - low))).astype(np.uint8)
    return scaled


def _rgb(values: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(np.repeat(values, 3, axis=2) if values.shape[2] == 1 else values)


def checkerboard(size: tuple[int, int]) -> Image.Image:
    """What shows through transparent pixels."""
    x, y = np.arange(size[0]) // _CHECK_PIXELS, np.arange(size[1]) // _CHECK_PIXELS
    return Image.fromarray(np.array(_CHECKS, np.uint8)[(x[None, :] + y[:, None]) % 2])


def wave_tile(samples: NDArray[np.int16], size: int) -> Image.Image:
    """The waveform of a recording (frames x channels): the range of the samples at every pixel column, channels one below the
    other."""
    tile = Image.new("RGB", (size, size), PAPER)
    draw = ImageDraw.Draw(tile)
    shown = samples[:, : max(1, size // 16)]
    if not shown.size:
        return tile
    height = size / shown.shape[1]
    edges = np.unique(np.linspace(0, len(shown), min(size, len(shown)), endpoint=False).astype(np.int64))
    lows, highs = np.minimum.reduceat(shown, edges, axis=0), np.maximum.reduceat(shown, edges, axis=0)
    for channel in range(shown.shape[1]):
        middle = (channel + 0.5) * height
        for number in range(len(edges)):
            x = int(number * size / len(edges))
            top, bottom = (
                middle - highs[number, channel] / 32768 * height / 2,
                middle - lows[number, channel] / 32768 * height / 2,
            )
            draw.line([(x, top), (x, max(bottom, top + 1))], fill=WAVE)
    return tile
