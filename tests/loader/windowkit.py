"""A data set of episodes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
from batchkit import pixels
from shardkit import Part, array, plain, scalar, tokens, write_dataset

from lfdata.codecs.base import Encoded
from lfdata.codecs.registry import make_encoder
from lfdata.format.meta import FieldMeta

LENGTHS = (9, 4, 1, 12, 6)
FIELDS = (
    FieldMeta("episode_index", "scalar", {"dtype": "int64"}),
    FieldMeta("frame_index", "scalar", {"dtype": "int64"}),
    FieldMeta("state", "array", {"dtype": "float32", "ndim": 1, "shape": [3]}),
    FieldMeta("grid", "array", {"dtype": "int16", "ndim": 2, "shape": [2, 2]}),
    FieldMeta("on", "array", {"dtype": "bool", "ndim": 1, "shape": [2]}),
    FieldMeta("points", "array", {"dtype": "int16", "ndim": 2}),
    FieldMeta("reward", "scalar", {"dtype": "float64"}),
    FieldMeta("camera", "image", make_encoder("image", {"codec": "png"}).params),
    FieldMeta("task", "text", {}),
    FieldMeta("ids", "tokens", {"dtype": "uint16", "vocab": 60_000}),
)


def frame(number: int, episode: int, at: int, *, same_size: bool = True, lacking: bool = False) -> dict[str, Encoded]:
    """A row."""
    found = {
        "episode_index": scalar(episode, "int64"),
        "frame_index": scalar(at, "int64"),
        "state": array(np.array([number, at, -number], np.float32)),
        "grid": array(np.full((2, 2), number, np.int16)),
        "on": array(np.array([at % 2 == 0, True])),
        "points": array(np.full((number % 3, 2), number, np.int16)),
        "reward": scalar(number / 4, "float64"),
        "camera": make_encoder("image", {"codec": "png"}).encode(pixels(number, 32, 40 if same_size else 40 + number % 3)),
        "task": plain(f"task of {episode}".encode()),
        "ids": tokens(list(range(number % 4 + 1)), "uint16"),
    }
    if lacking and number % 5 == 2:
        del found["state"], found["reward"], found["camera"]
    return found


def write_episodes(
    root: Path,
    lengths: Sequence[int] = LENGTHS,
    *,
    skip: Collection[tuple[int, int]] = (),
    same_size: bool = True,
    lacking: bool = False,
) -> Path:
    """Three shards, cut without regard to episodes; ``skip``: frames that are left out."""
    rows = []
    for episode, length in enumerate(lengths):
        for at in range(length):
            if (episode, at) not in skip:
                number = sum(lengths[:episode]) + at
                key = b"%d/%d" % (episode, at)
                rows.append((key, frame(number, episode, at, same_size=same_size, lacking=lacking)))
    third = -(-len(rows) // 3)
    write_dataset(root, FIELDS, [Part(rows[at : at + third]) for at in range(0, len(rows), third)], name=root.name)
    return root
