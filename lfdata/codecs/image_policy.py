"""What happens to a picture between a source and a shard: options, their defaults and the reasons for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lfdata.codecs._common import OptionReader
from lfdata.codecs.base import MAX_PIXELS
from lfdata.errors import OptionError

CODECS = ("webp", "jpeg", "png", "raw", "keep")
RESAMPLERS = ("lanczos", "bicubic", "bilinear", "box", "nearest")
ROLES = ("picture", "mask", "depth")
VALID = {
    "codec": "webp|jpeg|png|raw|keep",
    "quality": "0..100 (webp, jpeg)",
    "lossless": "yes|no (webp)",
    "method": "0..6 (webp)",
    "subsampling": "420|444 (jpeg)",
    "restart": "rows|blocks (jpeg, keep)",
    "longest": "N",
    "shorter": "N",
    "exact": "WxH",
    "upscale": "yes|no",
    "resample": "lanczos|bicubic|bilinear|box|nearest",
    "role": "picture|mask|label|depth",
    "alpha": "keep|drop|blend:RRGGBB",
    "animation": "first|error|keep",
    "icc": "srgb|ignore",
    "bits16": "scale|keep",
    "max_pixels": "1..2000000000",
    "transcode": "yes|no (keep)",
}
_MAX_SIDE = 65535


@dataclass(frozen=True, slots=True)
class ImagePolicy:
    """Every decision about a picture, in the order they are applied: decode, upright, colour, alpha, depth, size, encode.

    Attributes:
        codec: ``webp``: the smallest files at equal quality; decodes slower than ``jpeg``, which suits CPU-bound training.
            Depth defaults to ``png``, since most depth maps have 16 bits and webp has 8.
        quality: 0 to 100. webp 80: visually close to JPEG 90 at about half its bytes; jpeg 90: below it, blocks show in crops;
            ``None`` where it has no meaning.
        lossless: webp without loss. Off for pictures (size), always on for masks and depth.
        method: webp effort 0 to 6. 4, libwebp's own default: 6 takes twice the time for a few per cent.
        subsampling: chroma of jpeg: ``420``, what cameras and data sets use; ``444`` for text and graphics.
        restart: a restart marker after every MCU row of a JPEG, so that a reader can start at any row. Off: 1 % more bytes. With
            codec=keep JPEG files are rewritten without loss (and as sequential), which "untouched" does not mean either.
        restart_blocks: restart=blocks: restart markers within rows too, after each of about eight groups of MCUs, so that a crop is decoded
            without what lies beside it. For pictures that are cropped at random; about the bytes of the file as it was.
        longest, shorter: side in pixels that the picture is scaled to, aspect kept; ``None``: as it is. Never enlarged
            unless ``upscale``. exact: (width, height), aspect *not* kept, enlarged where needed.
        upscale: let ``longest`` and ``shorter`` enlarge. Off: invented pixels cost bytes and teach nothing.
        resample: ``lanczos``: the sharpest when reducing. Masks and depth: ``nearest``, since labels cannot be averaged.
        role: ``picture``; ``mask`` (labels) and ``depth`` are never lossy, never colour-managed, keep 16 bits, keep palette
            *indices* instead of colours, and samples of 1, 2 and 4 bits as stored (0/1, 0..3, 0..15), not stretched to 255.
        alpha: ``keep`` (nothing is lost); ``drop``; or ``blend:RRGGBB`` over a colour. jpeg cannot keep it: default
            ``blend:ffffff`` there, what a viewer shows.
        animation: ``first`` frame (a training sample is one picture) with a note in the report; ``error``. With codec=keep
            ``keep``: the bytes hold every frame, ``decode`` gives the first. TIFF pages count as frames.
        icc: ``srgb``: an embedded profile is applied (perceptual intent), for dropping it shifts colours; ``ignore``. A broken
            profile is a warning. Not applied to 16-bit pictures that are kept at 16 bits.
        bits16: ``scale`` to 8 bit, (v * 255 + 32767) // 65535, never clipped: what models take; ``keep`` for png, raw, keep.
        max_pixels: limit of width x height, checked before anything is allocated; see :data:`lfdata.codecs.pil.MAX_PIXELS`.
        transcode: codec=keep: a progressive JPEG is rewritten as sequential without loss (decodes about 2x faster). Off:
            "untouched" should mean it.
    """

    codec: str = "webp"
    quality: int | None = 80
    lossless: bool = False
    method: int = 4
    subsampling: str = "420"
    restart: bool = False
    restart_blocks: bool = False
    longest: int | None = None
    shorter: int | None = None
    exact: tuple[int, int] | None = None
    upscale: bool = False
    resample: str = "lanczos"
    role: str = "picture"
    alpha: str = "keep"
    animation: str = "first"
    icc: str = "srgb"
    bits16: str = "scale"
    max_pixels: int = MAX_PIXELS
    transcode: bool = False

    @classmethod
    def from_options(cls, options: Mapping[str, str]) -> ImagePolicy:
        """Read textual options. Raises :class:`OptionError` (listing what is valid) for an unknown, bad or senseless one."""
        reader = OptionReader("image", options, VALID)
        role = reader.choice("role", (*ROLES, "label"), "picture")
        role = "mask" if role == "label" else role
        codec = reader.choice("codec", CODECS, "png" if role == "depth" else "webp")
        labels = role != "picture"
        lossless = _yes(reader, "lossless", labels and codec == "webp")
        restart = reader.choice("restart", ("rows", "blocks", "no"), "no")
        policy = cls(
            codec=codec,
            quality=_quality(reader, codec, lossless),
            lossless=lossless,
            method=reader.integer("method", 4, 0, 6) or 0,
            subsampling=reader.choice("subsampling", ("420", "444"), "420"),
            restart=restart == "rows",
            restart_blocks=restart == "blocks",
            longest=reader.integer("longest", None, 1, _MAX_SIDE),
            shorter=reader.integer("shorter", None, 1, _MAX_SIDE),
            exact=_exact(reader),
            upscale=_yes(reader, "upscale", False),
            resample=reader.choice("resample", RESAMPLERS, "nearest" if labels else "lanczos"),
            role=role,
            alpha=_alpha(reader, codec),
            animation=reader.choice("animation", ("first", "error", "keep"), "keep" if codec == "keep" else "first"),
            icc=reader.choice("icc", ("srgb", "ignore"), "ignore" if labels else "srgb"),
            bits16=reader.choice("bits16", ("scale", "keep"), "keep" if labels else "scale"),
            max_pixels=reader.integer("max_pixels", MAX_PIXELS, 1, 2_000_000_000) or MAX_PIXELS,
            transcode=_yes(reader, "transcode", False),
        )
        _check(policy, reader)
        return policy

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> ImagePolicy:
        """The policy stored in a shard's schema by :meth:`to_params`. Raises :class:`OptionError` when it makes no sense."""
        values: dict[str, Any] = {}
        for known in dataclasses.fields(cls):
            value = params.get(known.name, known.default)
            if isinstance(value, list):
                value = tuple(value)
            optional = known.name in ("quality", "longest", "shorter", "exact")
            wanted = tuple if known.name == "exact" else int if optional else type(known.default)
            if not (optional and value is None) and type(value) is not wanted:
                raise OptionError(f"image: stored {known.name}={value!r} is not {VALID.get(known.name, 'true or false')}")
            values[known.name] = value
        policy = cls(**values)
        for name, valid in (("codec", CODECS), ("role", ROLES), ("icc", ("srgb", "ignore")), ("bits16", ("scale", "keep"))):
            if getattr(policy, name) not in valid:
                raise OptionError(f"image: stored {name}={getattr(policy, name)!r} is none of {', '.join(valid)}")
        if policy.alpha not in ("keep", "drop") and blend_colour(policy.alpha) is None:
            raise OptionError(f"image: stored alpha={policy.alpha!r} is not {VALID['alpha']}")
        return policy

    def to_params(self) -> dict[str, Any]:
        """JSON-able form: every attribute by name, but for one that is younger than the format where it says nothing."""
        found = {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}
        if not self.restart_blocks:
            del found["restart_blocks"]
        return found


def blend_colour(alpha: str) -> tuple[int, int, int] | None:
    """(red, green, blue) of ``blend:RRGGBB``; ``None`` when ``alpha`` is not that."""
    digits = alpha.removeprefix("blend:")
    if digits == alpha or len(digits) != 6 or not all(c in "0123456789abcdefABCDEF" for c in digits):
        return None
    return int(digits[:2], 16), int(digits[2:4], 16), int(digits[4:], 16)


def _yes(reader: OptionReader, name: str, default: bool) -> bool:
    return reader.choice(name, ("yes", "no"), "yes" if default else "no") == "yes"


def _quality(reader: OptionReader, codec: str, lossless: bool) -> int | None:
    default = {"webp": 80, "jpeg": 90}.get(codec)
    if default is None:
        if "quality" in reader:
            raise reader.bad("quality", f"codec={codec} has no quality")
        return None
    # For lossless webp quality is effort, and libwebp's default of 75 is what its own tools use.
    return reader.integer("quality", 75 if lossless else default, 0, 100)


def _exact(reader: OptionReader) -> tuple[int, int] | None:
    text = reader.text("exact")
    if text is None:
        return None
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(p.isascii() and p.isdigit() and len(p) < 7 and 0 < int(p) <= _MAX_SIDE for p in parts):
        raise reader.bad("exact", f"sides are 1 to {_MAX_SIDE}")
    return int(parts[0]), int(parts[1])


def _alpha(reader: OptionReader, codec: str) -> str:
    value = reader.text("alpha")
    if value is None:
        return "blend:ffffff" if codec == "jpeg" else "keep"
    if value not in ("keep", "drop") and blend_colour(value) is None:
        raise reader.bad("alpha")
    if codec == "jpeg" and value == "keep":
        raise reader.bad("alpha", "jpeg cannot keep alpha")
    return value.lower()


def _check(policy: ImagePolicy, reader: OptionReader) -> None:
    """Combinations that mean nothing, or would break a promise."""
    sized = [name for name in ("longest", "shorter", "exact") if name in reader]
    if len(sized) > 1:
        raise OptionError(f"image: {' and '.join(sized)} exclude each other: give one of longest, shorter, exact")
    only = {"lossless": "webp", "method": "webp", "subsampling": "jpeg", "transcode": "keep"}
    for name, codec in only.items():
        if name in reader and policy.codec != codec:
            raise OptionError(f"image: {name} belongs to codec={codec}, not to codec={policy.codec}")
    if "restart" in reader and policy.codec not in ("jpeg", "keep"):
        raise OptionError(f"image: restart belongs to codec=jpeg and codec=keep, not to codec={policy.codec}")
    if policy.codec == "keep" and (sized or policy.upscale or "resample" in reader):
        raise OptionError("image: codec=keep leaves bytes untouched: no longest, shorter, exact, upscale, resample")
    if policy.codec == "keep" and policy.animation == "first":
        raise OptionError("image: codec=keep stores every frame: animation=keep or animation=error")
    if policy.codec != "keep" and policy.animation == "keep":
        raise OptionError("image: animation=keep needs codec=keep; else animation=first or animation=error")
    if policy.role == "picture":
        if policy.resample == "nearest":
            raise OptionError("image: resample=nearest is for masks and depth; valid here: lanczos, bicubic, bilinear, box")
        if policy.bits16 == "keep" and policy.codec in ("webp", "jpeg"):
            raise OptionError(f"image: codec={policy.codec} holds 8 bits: bits16=scale, or codec=png or codec=raw")
        return
    if policy.codec == "jpeg" or (policy.codec == "webp" and not policy.lossless):
        raise OptionError(f"image: role={policy.role} is never lossy: codec=webp (lossless), png, raw or keep")
    if policy.resample != "nearest":
        raise OptionError(f"image: role={policy.role} is resized with resample=nearest only")
    if policy.icc != "ignore" or policy.bits16 != "keep" or policy.alpha.startswith("blend:"):
        raise OptionError(f"image: role={policy.role} keeps its values: icc=ignore, bits16=keep, alpha=keep or drop")
