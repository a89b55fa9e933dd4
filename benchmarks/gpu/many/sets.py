"""What the ranks read: pictures, token sequences and multimodal samples in shards, and loaders over them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu import data
from lfdata import Loader
from lfdata import transforms as T
from shard_builder.convert import convert
from shard_builder.fields import make_field
from shard_builder.options import ConvertOptions
from shard_builder.sources import open_source

KINDS = ("image", "tokens", "multimodal")
SEED = 5
# Of the token sequences: ids, longest, and what a packed row holds.
VOCAB, LONGEST, CAPACITY, WINDOW = 32_000, 256, 512, 128


def make_tokens(target: Path, rows: int) -> Path:
    """Shards of token sequences of many lengths, by a seeded formula."""
    target.mkdir(parents=True)
    rng = np.random.default_rng(SEED)
    lines = []
    for number in range(rows):
        length = int(np.clip(rng.lognormal(4, 1), 1, LONGEST))
        lines.append(json.dumps({"key": f"text-{number:06d}", "tokens": rng.integers(0, VOCAB, length).tolist()}))
    (target / "lines.jsonl").write_text("\n".join(lines) + "\n")
    fields = [make_field("tokens", "tokens", "tokens", options={"vocab": str(VOCAB)})]
    opened = open_source(str(target / "lines.jsonl"), fields=fields, key="key")
    convert(opened, target / data.SHARDS, ConvertOptions(workers=len(os.sched_getaffinity(0))))
    return target


def loader(kind: str, folder: Path, tokens: Path, batch: int, side: int) -> Loader:
    """``batch`` is that of all ranks. Token sequences are packed, so a row holds several samples; pictures are cropped at random."""
    crop = [T.RandomResizedCrop(side), T.RandomHorizontalFlip()]
    if kind == "image":
        return Loader(folder / data.SHARDS, batch, {"image": crop}, seed=SEED)
    if kind == "tokens":
        packing = {"field": "tokens", "window": WINDOW, "capacity": CAPACITY}
        return Loader(tokens / data.SHARDS, batch, {"tokens": None}, seed=SEED, packing=packing)
    fields: dict[str, Any] = {"image": crop, "tokens": [T.Tokens(data.LENGTH)], "state": None, "action": None}
    return Loader(folder / data.SHARDS, batch, fields, seed=SEED)
