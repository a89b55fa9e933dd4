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

# Which sources a case reads, and how.
SOURCES = {
    "pictures": "pictures",
    "jitter": "pictures",
    "whole": "kinds",
    "numbers": "numbers",
    "one": "number",
    "block": "number",
    "sequential": "number",
    "where": "number",
    "buckets": "number",
    "mixed buckets": "numbers",
    "packed": "numbers",
    "packed alone": "number",
    "micro": "number",
}
FIELDS: dict[str, Any] = {
    "pictures": {"image": [T.RandomResizedCrop(16), T.RandomHorizontalFlip()], "label": None},
    "jitter": {"image": [T.RandomResizedCrop(16), T.ColorJitter(0.4), T.RandAugment(2, 9)], "label": None},
    "packed": {"ids": None},
    "packed alone": {"ids": None},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "pictures": {"batch_transforms": [T.MixUp(labels=("label",))], "bad_samples": "replace", "most_bad_rate": 1.0},
    "jitter": {
        "batch_transforms": [T.Mosaic()],
        "bad_samples": "replace",
        "most_bad_rate": 1.0,
        "shuffle": "block",
        "block": 16,
    },
    "whole": {"tail": "pad"},
    "numbers": {"mixture": {"weights": [0.7, 0.3], "block": 16, "n": 112}},
    "one": {"tail": "pad"},
    "block": {"shuffle": "block", "block": 10, "window": 3},
    "sequential": {"shuffle": "sequential", "tail": "pad"},
    "where": {"where": lambda data: data.column("label") % 3 != 1},
    "buckets": {"buckets": {"field": "ids", "window": 48}, "tail": "pad"},
    "mixed buckets": {"mixture": {"temperature": 2.0, "block": 16}, "buckets": {"field": "ids", "window": 48}},
    "packed": {"mixture": {"block": 16}, "packing": {"field": "ids", "window": 32, "capacity": 9}, "tail": "pad"},
    "packed alone": {"packing": {"field": "ids", "window": 24, "capacity": 4}, "shuffle": "block", "block": 12},
    "micro": {"accumulate": 2},
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


def run(name: str, sources: list[str], batch: int, steps: int, state: Any, **options: Any) -> dict[str, Any]:
    """Some steps from a state on; micro-batches of a step count as one."""
    loader = Loader(sources if len(sources) > 1 else sources[0], batch, FIELDS.get(name), seed=3, **OPTIONS[name], **options)
    if state is not None:
        loader.load_state_dict(state)
    found: list[list[str]] = []
    micro = OPTIONS[name].get("accumulate", 1)
    for number, made in enumerate(loader, 1):
        if (number - 1) % micro:
            found[-1] += rows(made)
        else:
            found.append(rows(made))
        if len(found) == steps and number % micro == 0:
            break
    result = {"steps": found, "state": loader.state_dict()}
    loader.close()
    return result


def main(task: Path) -> None:
    """Task: a list of [name, sources, batch size, steps, state]. The rank comes from the process group, then from the environment."""
    todo = json.loads(task.read_text())
    torch.distributed.init_process_group("gloo")
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    found = [run(*one, engine="process", threads=1) for one in todo]
    torch.distributed.destroy_process_group()
    found += [run(*one, engine="inline", threads=1) for one in todo]
    task.with_name(f"{task.stem}-{rank}-of-{world}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
