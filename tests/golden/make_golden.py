"""Makes the golden data sets of format version 1.0. They are kept for ever: an existing folder is never touched.

    PYTHONPATH=. python tests/golden/make_golden.py

Run once per version of the format; afterwards the committed files are the reference, not this script.
"""

from __future__ import annotations

import hashlib
import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from PIL import Image

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "format"), str(HERE.parents[1])]

from shardkit import AUDIO_PARAMS, Part, Side, array, audio, plain, raw_image, scalar, tokens, write_dataset  # noqa: E402

from lfdata.codecs.base import Encoded  # noqa: E402
from lfdata.codecs.registry import make_encoder  # noqa: E402
from lfdata.format.meta import FieldMeta  # noqa: E402

DTYPES = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64")


def picture(seed: int, width: int, height: int, mode: str = "RGB") -> bytes:
    """A PNG of smooth colours with a little noise."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    planes = [(x * (3 + k) + y * (5 - k) + rng.integers(0, 8, x.shape)) % 256 for k in range(len(mode))]
    out = io.BytesIO()
    pixels = np.stack(planes, -1).astype(np.uint8)
    Image.fromarray(pixels[..., 0] if len(mode) == 1 else pixels, mode).save(out, "PNG")
    return out.getvalue()


def annotation(n: int) -> dict[str, Any]:
    """A structured value of every MessagePack type, repetitive enough for a dictionary."""
    return {
        "boxes": [
            {"label": f"object-{k % 3}", "xyxy": [k, n + k, 2.5 * k, 70_000 * n], "score": 1 / (k + 1)} for k in range(n % 5)
        ],
        "caption": f"A picture of number {n}, taken on a Tuesday." + " Long." * (n * 40 % 130),
        "flags": [True, False, None, -1, -33, -200, -40_000, -(2**40), 200, 2**33, 2**64 - 1],
        "unicode": "Grüße, 世界 \N{RAINBOW}",
    }


def dictionary() -> bytes:
    """A small raw-content dictionary: zstandard takes any bytes, and these do not depend on a training algorithm."""
    encoder = make_encoder("json", {})
    frames = [zstandard.ZstdDecompressor().decompress(encoder.encode(annotation(n)).payload) for n in range(6)]
    return b"".join(frames)[:2048]


def mixed(root: Path) -> None:
    """Every kind, absent and zero-length values, duplicates, sidecars, an empty shard, an index."""
    shared = dictionary()
    encoders = {
        "picture": make_encoder("image", {"codec": "webp", "quality": "60"}),
        "rows": make_encoder("image", {"codec": "jpeg", "restart": "rows"}),
        "mask": make_encoder("image", {"codec": "png"}),
        "note": make_encoder("json", {}, dictionary=shared),
        "caption": make_encoder("text", {}),
        "blob": make_encoder("bytes", {}),
    }
    fields = [FieldMeta(name, encoder.kind, encoder.params) for name, encoder in encoders.items()]
    fields += [
        FieldMeta("thumb", "image", make_encoder("image", {"codec": "raw"}).params),
        FieldMeta("sound", "audio", AUDIO_PARAMS),
        FieldMeta("ids", "tokens", {"dtype": "uint16", "vocab": 5000}),
        FieldMeta("pose", "array", {"dtype": "float32", "ndim": 2}),
        FieldMeta("label", "scalar", {"dtype": "int64"}),
    ]
    rng = np.random.default_rng(1)

    def row(n: int) -> tuple[bytes, dict[str, Encoded]]:
        values = {
            # Rows 2k and 2k+1 share a picture, and rows 0, 4, 8... share one across groups.
            "picture": encoders["picture"].encode(picture(n // 2 % 2, 40, 30)),
            "rows": encoders["rows"].encode(picture(n, 50, 41)),
            "mask": encoders["mask"].encode(picture(n, 9, 7, "L")),
            "note": encoders["note"].encode(annotation(n)),
            "caption": encoders["caption"].encode("" if n % 5 == 3 else f"caption {n} – Grüße"),
            "blob": plain(bytes(range(n, n + 20)) if n % 4 else b""),
            "thumb": raw_image(rng.integers(0, 60_000, (3, 4, 1 + n % 4)).astype(np.uint16 if n % 2 else np.uint8)),
            "sound": audio(rng.integers(-32768, 32767, ((n * 37) % 200, 1 + n % 2))),
            "ids": tokens(rng.integers(0, 5000, n * 7 % 23).tolist(), "uint16"),
            "pose": array(rng.standard_normal((n % 3, 4)).astype(np.float32)),
            "label": scalar(n - 3, "int64"),
        }
        for number, name in enumerate(values.copy()):
            if (n * 7 + number * 3) % 11 == 0:
                del values[name]
        return (b"" if n == 2 else f"{n:03d}/ke\u0301y".encode() if n % 2 else bytes([0xFF, 0, n])), values

    better, score = make_encoder("text", {}), FieldMeta("score", "scalar", {"dtype": "float32"})
    side_fields = [
        FieldMeta("caption", "text", better.params),
        score,
        FieldMeta("note", "json", make_encoder("json", {}).params),
    ]
    own = make_encoder("json", {})

    def side(n: int) -> dict[str, Encoded]:
        values = {
            "caption": better.encode(f"better {n}"),
            "score": scalar(n / 4, "float32"),
            "note": own.encode([n, {"side": True}]),
        }
        return values if n % 6 else {}

    parts, first = [], 0
    for count in (14, 0, 5):
        numbers = range(first, first + count)
        parts.append(Part([row(n) for n in numbers], [Side(side_fields, [side(n) for n in numbers])]))
        first += count
    write_dataset(root, fields, parts, name="golden mixed", dictionaries={"note": shared}, with_index=True)


def numeric(root: Path) -> None:
    """Scalars of every dtype with their extremes, arrays of every dtype and 1 to 4 dimensions, tokens of every width."""
    fields = [FieldMeta(f"scalar-{d}", "scalar", {"dtype": d}) for d in DTYPES]
    fields += [FieldMeta(f"array-{d}", "array", {"dtype": d, "ndim": 1 + n % 4}) for n, d in enumerate(DTYPES)]
    vocab = {"uint8": 256, "uint16": 65_536, "uint32": 100_000, "uint64": 2**40}
    fields += [FieldMeta(f"tokens-{d}", "tokens", {"dtype": d, "vocab": v}) for d, v in vocab.items()]
    rng = np.random.default_rng(2)
    rows = []
    for n in range(9):
        values: dict[str, Encoded] = {}
        for k, dtype in enumerate(DTYPES):
            info = np.iinfo(dtype) if dtype[0] in "iu" else None
            extremes = (info.min, info.max, 1) if info else (0, 1, 1) if dtype == "bool" else (np.nan, -np.inf, 0.5)
            values[f"scalar-{dtype}"] = scalar(extremes[n % 3], dtype)
            shape = [(n + axis + k) % 4 for axis in range(1 + k % 4)]
            values[f"array-{dtype}"] = array(rng.integers(0, 2, shape).astype(dtype))
        for dtype, size in vocab.items():
            values[f"tokens-{dtype}"] = tokens([size - 1, *rng.integers(0, size, n * 3).tolist()][: n * 3], dtype)
        if n == 4:
            values = {}
        rows.append((f"row-{n}".encode(), values))
    write_dataset(root, fields, [Part(rows[:6]), Part(rows[6:])], name="golden numeric")


def scalars(root: Path) -> None:
    """No payload at all: one shard without row groups."""
    fields = [FieldMeta("x", "scalar", {"dtype": "float64"}), FieldMeta("y", "scalar", {"dtype": "bool"})]
    rows = [
        (f"{n}".encode(), {"x": scalar(n / 3, "float64")} | ({"y": scalar(n % 2, "bool")} if n % 3 else {})) for n in range(300)
    ]
    write_dataset(root, fields, [Part(rows)], name="golden scalars", with_index=True)


def large(root: Path) -> None:
    """Columns and keys of more than one block of 65,536 bytes."""
    fields = [FieldMeta("ids", "tokens", {"dtype": "uint8", "vocab": 200}), FieldMeta("n", "scalar", {"dtype": "uint32"})]
    rows = [
        (b"k" * (n % 25) + str(n).encode(), {"ids": tokens([n % 200] * (n % 8), "uint8"), "n": scalar(n, "uint32")})
        for n in range(4300)
    ]
    write_dataset(root, fields, [Part(rows)], name="golden large")


def main() -> None:
    """Write every set and the list of digests."""
    root = HERE / "v1.0"
    if root.exists():
        sys.exit(f"{root} exists: golden files are never made anew")
    for make in (mixed, numeric, scalars, large):
        make(root / make.__name__)
    lines = [
        f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.relative_to(root)}\n" for p in sorted(root.rglob("*")) if p.is_file()
    ]
    (root / "SHA256SUMS").write_text("".join(lines))


if __name__ == "__main__":
    main()
