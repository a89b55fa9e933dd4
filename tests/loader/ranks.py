"""A rank of a torchrun job: writes digests of what it gets, and the state it ends with, as JSON."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch.distributed

import lfdata.transforms as T
from lfdata import Loader

FIELDS: dict[str, dict[str, Any] | None] = {
    "pictures": {"image": [T.RandomResizedCrop(16), T.RandomHorizontalFlip()], "label": None},
    "numbers": None,
    "packed": {"ids": None},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "pictures": {"batch_transforms": [T.MixUp(labels=("label",))], "bad_samples": "replace", "most_bad_rate": 1.0},
    "numbers": {"mixture": {"weights": [0.7, 0.3], "block": 16, "n": 112}},
    "packed": {"mixture": {"block": 16}, "packing": {"field": "ids", "window": 32, "capacity": 9}, "tail": "pad"},
}


def rows(batch: dict[str, Any]) -> list[str]:
    """Keys and bytes of each row of a batch, as digests."""
    count, found = len(batch["__mask__"]), []
    for number in range(count):
        made = hashlib.sha256()
        for name in sorted(batch):
            value = batch[name].numpy()
            if name.endswith(".offsets"):
                continue
            by = {"__source__": "__index__"}.get(name, name) + ".offsets"
            part = value[batch[by][number] : batch[by][number + 1]] if by in batch else value[number]
            made.update(repr((name, part.dtype.str, part.shape)).encode() + part.tobytes())
        found.append(made.hexdigest())
    return found


def run(name: str, sources: list[str], steps: int, state: Any, **options: Any) -> dict[str, Any]:
    """Some steps from a state on."""
    loader = Loader(sources if len(sources) > 1 else sources[0], 8, FIELDS[name], seed=3, **OPTIONS[name], **options)
    if state is not None:
        loader.load_state_dict(state)
    found: list[list[str]] = []
    for batch in loader:
        found.append(rows(batch))
        if len(found) == steps:
            break
    result = {"steps": found, "state": loader.state_dict()}
    loader.close()
    return result


def main(task: Path) -> None:
    """Task: a list of [name, sources, steps, state]. The rank comes from the process group, then from the environment."""
    todo = json.loads(task.read_text())
    torch.distributed.init_process_group("gloo")
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    found = [run(*one, engine="process", threads=1) for one in todo]
    torch.distributed.destroy_process_group()
    found += [run(*one, engine="inline", threads=1) for one in todo]
    task.with_name(f"{task.stem}-{rank}-of-{world}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
