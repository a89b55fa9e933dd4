"""Samples of the GPU benchmarks, the same as files (pictures, JSON lines) and as shards: ``python -m benchmarks.gpu.data PICTURES TARGET``.

Pictures are JPEG files as they are; instructions, states and actions follow from a seeded formula. There may be more samples than pictures,
so that no epoch ends while something is measured: a picture then belongs to several samples.
"""

from __future__ import annotations

import argparse
import io
import json
import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from PIL import Image

from lfdata.errors import OptionError
from shard_builder.convert import convert
from shard_builder.fields import make_field
from shard_builder.options import ConvertOptions
from shard_builder.sources import open_source

LENGTH = 24
"""Ids of an instruction at most; shorter ones are filled up with 0."""
PICTURES, LINES, SHARDS, ABOUT = "pictures", "samples.jsonl", "shards", "about.json"


class About(msgspec.Struct, frozen=True):
    """What the samples are; written beside them."""

    samples: int
    pictures: int
    picture_bytes: int
    size: list[int]
    vocab: int
    state: int
    horizon: int
    action: int
    seed: int


def numbers(number: int, vocab: int, state: int, horizon: int, action: int, seed: int) -> dict[str, Any]:
    """The annotation of one sample."""
    rng = np.random.default_rng([seed, number])
    goal = rng.standard_normal(action)
    way = goal * np.sin(np.pi * (np.arange(horizon) + 0.5) / horizon)[:, None] + 0.05 * rng.standard_normal((horizon, action))
    return {
        "tokens": rng.integers(1, vocab, int(rng.integers(LENGTH // 2, LENGTH + 1))).tolist(),
        "state": rng.standard_normal(state).round(5).tolist(),
        "action": way.round(5).tolist(),
    }


def make(
    source: Path | None,
    target: Path,
    *,
    samples: int,
    vocab: int,
    state: int = 64,
    horizon: int = 16,
    action: int = 32,
    seed: int = 0,
) -> About:
    """Write files and shards below ``target``, which must not be there. Without ``source`` pictures are made up (for trying things out)."""
    if target.exists():
        raise OptionError(f"{target}: is there already; name a new folder")
    (target / PICTURES).mkdir(parents=True)
    names = _linked(source, target / PICTURES) if source is not None else _made_up(target / PICTURES, seed)
    lines = []
    for number in range(samples):
        one = numbers(number, vocab, state, horizon, action, seed)
        lines.append(json.dumps({"key": f"{number:06d}", "image": f"{PICTURES}/{names[number % len(names)]}", **one}))
    (target / LINES).write_text("\n".join(lines) + "\n")
    fields = [
        make_field("image", "image", "image", "file", {"codec": "keep", "restart": "rows"}),
        make_field("tokens", "tokens", "tokens", options={"vocab": str(vocab)}),
        make_field("state", "array", "state", options={"dtype": "float32", "shape": str(state)}),
        make_field("action", "array", "action", options={"dtype": "float32", "shape": f"{horizon}x{action}"}),
    ]
    opened = open_source(str(target / LINES), fields=fields, key="key")
    convert(opened, target / SHARDS, ConvertOptions(workers=len(os.sched_getaffinity(0))))
    sizes = [(target / PICTURES / name).stat().st_size for name in names]
    with Image.open(target / PICTURES / names[0]) as first:
        size = list(first.size)
    about = About(samples, len(names), sum(sizes), size, vocab, state, horizon, action, seed)
    (target / ABOUT).write_bytes(msgspec.json.format(msgspec.json.encode(about), indent=1) + b"\n")
    return about


def read(folder: Path) -> About:
    """What :func:`make` wrote. Raises :class:`OptionError`: it did not write there, or not to the end."""
    try:
        return msgspec.json.decode((folder / ABOUT).read_bytes(), type=About)
    except (OSError, msgspec.MsgspecError) as error:
        raise OptionError(f"{folder}: no data of python -m benchmarks.gpu.data: {error}") from error


def _linked(source: Path, target: Path) -> list[str]:
    """The JPEG files of a folder, in order of their names, linked or copied."""
    names = sorted(path.name for path in source.iterdir() if path.suffix.lower() in (".jpg", ".jpeg"))
    if not names:
        raise OptionError(f"{source}: no .jpg files")
    for name in names:
        try:
            os.link(source / name, target / name)
        except OSError:
            (target / name).write_bytes((source / name).read_bytes())
    return names


def _made_up(target: Path, seed: int, count: int = 24) -> list[str]:
    rng = np.random.default_rng(seed)
    names = []
    for number in range(count):
        small = rng.integers(0, 256, (12, 16, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(small).resize((128, 96), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
        names.append(f"{number:03d}.jpg")
        (target / names[-1]).write_bytes(file.getvalue())
    return names


def main() -> None:
    """Make the data of the GPU benchmarks."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.data", description=main.__doc__)
    parser.add_argument("pictures", type=Path, help="folder of JPEG files")
    parser.add_argument("target", type=Path, help="folder to be made")
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    about = make(chosen.pictures, chosen.target, samples=chosen.samples, vocab=chosen.vocab, seed=chosen.seed)
    print(f"{chosen.target}: {about.samples} samples of {about.pictures} pictures ({about.picture_bytes / 1e6:.1f} MB)")


if __name__ == "__main__":
    main()
