"""A small W4 source: pictures, captions, recordings and annotations made here."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import data, multimodal


def write_stamp(folder: Path, number: int, rate: int) -> None:
    """A stamp as in the package: PNG with alpha, captions, speech, tags."""
    import soundfile
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(number).integers(0, 256, (12, 16, 4), dtype=np.uint8)
    pixels[..., 3] = np.arange(16) * 16
    picture: Any = Image.fromarray(pixels).resize((160, 120))
    picture.save(folder / f"stamp {number}[x].png")
    stem = folder / f"stamp {number}[x]"
    stem.with_name(stem.name + ".txt").write_text(f"A stamp.\nde.utf8=Ein Stempel {number}.\nfr.utf8=Un timbre.\n")
    stem.with_name(stem.name + ".dat").write_text("red animal\n")
    seconds = 1 + 2 * number
    sound = 0.4 * np.sin(np.arange(rate * seconds) * 2 * math.pi * (300 + 40 * number) / rate)
    out = io.BytesIO()
    soundfile.write(out, sound, rate, format="OGG", subtype="VORBIS")
    stem.with_name(stem.name + "_desc_de.ogg").write_bytes(out.getvalue())


def write_source(folder: Path) -> Path:
    """A source of three samples, as ``lfbench data stamps`` makes it."""
    unpacked, source = folder / "unpacked", folder / "source"
    for number, rate in enumerate((44100, 16000, 22050)):
        write_stamp(unpacked / "usr" / "animals", number, rate)
    source.mkdir()
    data._stamps(unpacked, source)
    assert len(multimodal.parts_of(source)) == 3
    return source
