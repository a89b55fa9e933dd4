"""The sequence of samples at each world size: digests of keys and of contents of what each rank consumed, taken from the device."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.gpu.many import sets
from lfdata import Loader
from lftrain import CheckpointOptions, MetricsOptions, Options, RunOptions, Runtime
from lftrain.comm.group import Group

# Digits of a digest: 64 bits.
DIGITS = 16
KEYS, CONTENTS = 0, 1
WHAT = ("keys", "contents")
Steps = list[list[str]]


class Consumer:
    """A loss that writes down what it is given.

    Attributes:
        steps: of each step, of each row, the digests of its keys and of all that the batch has of it.
    """

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self.steps: list[list[tuple[str, str]]] = []

    def __call__(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        """Something that can be trained."""
        self.steps.append(rows(batch, self._loader))
        mask = batch["__mask__"]
        return model(mask.float().mean()[None, None]).square().mean(), len(mask)


def rows(batch: Mapping[str, torch.Tensor], loader: Loader) -> list[tuple[str, str]]:
    """Digests of the rows of a batch, from the tensors where they are: of the samples' keys, and of all values."""
    values = {name: value.cpu().numpy() for name, value in batch.items()}
    found = []
    for row in range(len(values["__mask__"])):
        contents = hashlib.sha256()
        for name in sorted(values):
            if not name.endswith(".offsets"):
                one = _row(values, name, row)
                contents.update(f"{name} {one.dtype.str} {one.shape} ".encode() + one.tobytes())
        indices = _row(values, "__index__", row).reshape(-1).tolist()
        keys = loader.sources[0].keys([index for index in indices if index >= 0])
        found.append((_digest(b"\0".join(keys)), contents.hexdigest()[:DIGITS]))
    return found


def _row(values: Mapping[str, Any], name: str, row: int) -> Any:
    offsets = values.get({"__source__": "__index__"}.get(name, name) + ".offsets")
    return values[name][row] if offsets is None else values[name][offsets[row] : offsets[row + 1]]


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:DIGITS]


# -- on a rank --------------------------------------------------------------------------------------------------------


def on_rank(group: Group, told: dict[str, Any]) -> dict[str, Any]:
    """All runs of the task: whole ones, halves that end with a checkpoint, and those that go on from one."""
    return {"runs": {one["name"]: consume(group, told, one) for one in told["runs"]}}


def consume(group: Group, told: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    """One run by the runtime, to the step that is asked for."""
    loader = sets.loader(run["kind"], Path(told["data"]), Path(told["tokens"]), told["batch"], told["side"])
    whole, half = extent(len(loader), told["most"])
    steps = half if run["half"] else whole
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    seen = Consumer(loader)
    options = Options(
        run=RunOptions(folder=run["folder"], steps=steps, device=told["device"]),
        checkpoint=CheckpointOptions(every=0, resume="must" if run["resumed"] else "never"),
        metrics=MetricsOptions(live="off", memory_every=0),
    )
    runtime = Runtime(model, seen, loader, torch.optim.SGD(model.parameters(), lr=1e-3), options)
    runtime.run()
    per_epoch = len(loader)
    loader.close()
    return {"steps": seen.steps, "per_epoch": per_epoch, "whole": whole, "half": half, "world": group.world}


def extent(epoch: int, most: int) -> tuple[int, int]:
    """Steps of a whole run, beyond the end of the first epoch if that is not too far, and of the half after which another goes on."""
    whole = min(epoch + max(2, epoch // 4), most)
    return whole, max(1, min(whole - 1, epoch // 2))


# -- what is concluded ------------------------------------------------------------------------------------------------


def runs(scratch: Path, world: int, resumed_from: int | None) -> list[dict[str, Any]]:
    """What a group of ranks is to run; the checkpoints of the halves are copied for those that go on."""
    found = []
    for kind in sets.KINDS:
        whole = {"name": f"{kind} whole", "kind": kind, "half": False, "resumed": False}
        found.append({**whole, "folder": str(scratch / f"whole-{kind}-{world}")})
        if resumed_from == world:
            found.append({**whole, "name": f"{kind} half", "half": True, "folder": str(scratch / f"half-{kind}")})
        elif resumed_from is not None and (scratch / f"half-{kind}").is_dir():
            folder = scratch / f"resumed-{kind}-{world}"
            shutil.copytree(scratch / f"half-{kind}", folder)
            found.append({**whole, "name": f"{kind} resumed", "resumed": True, "folder": str(folder)})
    return found


def joined(ranks: Sequence[Mapping[str, Any]], name: str) -> Steps:
    """Digests (keys, contents) of the global batch of each step of a run: the rows of all ranks, one rank after the other."""
    parts = [rank["runs"][name]["steps"] for rank in ranks]
    steps = []
    for number in range(max(len(part) for part in parts)):
        rows = [row for part in parts for row in (part[number] if number < len(part) else [("missing", "missing")])]
        steps.append([_digest("".join(row[what] for row in rows).encode()) for what in (KEYS, CONTENTS)])
    return steps


def differences(found: Mapping[str, Steps], wanted: Steps, first: int = 0) -> list[str]:
    """Where sequences are not the one that is wanted from step ``first`` on; at most one line each."""
    said = []
    for name, steps in found.items():
        expected = wanted[first:]
        if len(steps) != len(expected):
            said.append(f"{name}: {len(steps)} steps, not {len(expected)}")
            continue
        for number, (one, other) in enumerate(zip(steps, expected, strict=True)):
            if one != other:
                what = " and ".join(WHAT[place] for place in (KEYS, CONTENTS) if one[place] != other[place])
                said.append(f"{name}: other {what} from step {first + number} on")
                break
    return said


def compared(kind: str, groups: Mapping[int, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """The whole runs of a kind of shards at all world sizes, by world."""
    name = f"{kind} whole"
    found = {str(world): joined(ranks, name) for world, ranks in groups.items()}
    first = next(iter(groups.values()))[0]["runs"][name]
    said = differences({f"{world} ranks": steps for world, steps in found.items()}, next(iter(found.values())))
    steps, epoch = first["whole"], first["per_epoch"]
    # One world alone has nothing to be compared with.
    same = not said if len(found) > 1 else None
    return {"steps": steps, "steps_an_epoch": epoch, "same": same, "differences": said, "digests": found}


def resumed(kind: str, groups: Mapping[int, Sequence[Mapping[str, Any]]], origin: int) -> dict[str, Any]:
    """Runs that went on from a checkpoint of ``origin`` ranks, against the whole run of these."""
    wanted = joined(groups[origin], f"{kind} whole")
    half = joined(groups[origin], f"{kind} half")
    after = len(half)
    found = {
        str(world): joined(ranks, f"{kind} resumed") for world, ranks in groups.items() if f"{kind} resumed" in ranks[0]["runs"]
    }
    said = differences({f"{origin} ranks, the first half": half}, wanted[:after])
    said += differences({f"{origin} ranks, gone on with {world}": steps for world, steps in found.items()}, wanted, after)
    same = not said if found else None
    return {"after": after, "of": len(wanted), "from_ranks": origin, "same": same, "differences": said, "digests": found}
