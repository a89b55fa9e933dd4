"""Makes the data of the example: ``python examples/reach/data.py FOLDER`` writes train.jsonl, held_out.jsonl and control.jsonl.

A picture holds three blocks of different colours; the instruction names one; the state is where the gripper is; the label is the way from
there to the block that is named. So it takes picture, instruction and state together to know it. In control.jsonl the labels belong to
other samples: nothing can be learned from them but how actions look on the whole.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

SIZE, BLOCK, HORIZON = 32, 8, 8
COLOURS = {"red": (210, 50, 45), "green": (60, 170, 75), "blue": (50, 90, 200), "yellow": (225, 200, 60)}
ORDERS = ("reach the {} block", "go to the {} block", "touch the {} block")
# How a way is spent over its actions: slow, fast, slow. They add up to 1.
PACE = np.sin(np.pi * (np.arange(HORIZON) + 0.5) / HORIZON)
PACE = PACE / PACE.sum()


def sample(number: int, seed: int) -> dict[str, Any]:
    """One sample: key, picture (PNG, base64), instruction as UTF-8 bytes, state (2,), action (HORIZON, 2)."""
    rng = np.random.default_rng([seed, number])
    picture = rng.integers(90, 130, (SIZE, SIZE, 3), dtype=np.uint8)
    names = rng.permutation(list(COLOURS))[:3]
    cells = rng.permutation(16)[:3]
    places = []
    for name, cell in zip(names, cells, strict=True):
        # A cell of four by four, and a jitter within that keeps blocks apart.
        corner = np.array(divmod(int(cell), 4)) * (SIZE // 4)
        low = np.clip(corner + rng.integers(-1, 2, 2), 0, SIZE - BLOCK)
        shade = np.array(COLOURS[name]) + rng.integers(-15, 16, 3)
        picture[low[0] : low[0] + BLOCK, low[1] : low[1] + BLOCK] = np.clip(shade, 0, 255)
        places.append((low + BLOCK / 2) / SIZE * 2 - 1)
    state = rng.uniform(-1, 1, 2)
    action = (places[0] - state)[None] * PACE[:, None] * HORIZON
    text = ORDERS[int(rng.integers(len(ORDERS)))].format(names[0])
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "PNG")
    return {
        "key": f"{seed}-{number}",
        "image": base64.b64encode(file.getvalue()).decode(),
        "tokens": list(text.encode()),
        "state": state.round(6).tolist(),
        "action": action.round(6).tolist(),
    }


def write(path: Path, samples: list[dict[str, Any]]) -> None:
    """As JSON lines."""
    path.write_text("".join(json.dumps(one) + "\n" for one in samples))


def main() -> None:
    """Write the three sets."""
    parser = argparse.ArgumentParser(description="data of the example: blocks, instructions, ways")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--samples", type=int, default=4096, help="of the training data")
    parser.add_argument("--held-out", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    train = [sample(number, chosen.seed) for number in range(chosen.samples)]
    write(chosen.folder / "train.jsonl", train)
    write(chosen.folder / "held_out.jsonl", [sample(number, chosen.seed + 1) for number in range(chosen.held_out)])
    others = np.random.default_rng(chosen.seed).permutation(len(train))
    write(
        chosen.folder / "control.jsonl",
        [{**one, "action": train[other]["action"]} for one, other in zip(train, others, strict=True)],
    )


if __name__ == "__main__":
    main()
