"""A run of its own process, alone or under torchrun: ``train_points.py TASK.json``; writes what came of it beside the task, rank by rank."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import trainkit
from torch import nn

from lfdata.errors import LfdataError
from lftrain import ActivationOptions, AdamW, CheckpointOptions, DdpOptions, PrecisionOptions, RunOptions
from lftrain.models.layers import Experts


class Task:
    """What the task says, and a loss that remembers whose samples it saw and does harm where it is asked to."""

    def __init__(self, told: dict[str, Any]) -> None:
        self.told = told
        self.rank = int(os.environ.get("RANK", 0))
        self.seen: list[list[int]] = []
        self.ends: list[bool] = []
        self.model: Any = None
        self.log = Path(told["folder"] + f"-seen-{self.rank}.jsonl")

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
        told, step = self.told, len(self.seen)
        indices = batch["__index__"].tolist()
        self.seen.append(indices)
        number, parts = batch["__part__"][0].tolist() if "__part__" in batch else (0, 1)
        self.ends.append(number + 1 == parts)
        with open(self.log, "a") as file:
            file.write(json.dumps(indices) + "\n")
        if pause := told.get("pause"):
            time.sleep(pause)
        if "unused" in told:
            last = (step + 1) % told["accumulate"] == 0
            model = partial(model, spare=self.rank not in told["unused"] or not last)  # type: ignore[assignment]
        if told.get("past"):
            model = self.model
        mean, rows = (trainkit.ragged_loss if told.get("ragged") else trainkit.loss)(model, batch)
        rows *= told.get("unit", 1)
        harm, rank, at = told.get("harm", ("", -1, -1))
        if rank in (self.rank, "all") and at == step:
            if harm == "inf":
                mean = mean * float("inf")
            elif harm == "nothing":
                mean, rows = mean * 0, 0
            elif harm == "odd":
                rows = -rows
            elif harm == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif harm == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif harm == "raise":
                raise RuntimeError("this rank's own trouble")
            elif harm == "drift":
                with torch.no_grad():
                    next(model.parameters()).add_(1e-3)
        return mean, rows


class Mixed(nn.Module):
    """Experts of which a batch uses few."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into, self.experts, self.out = nn.Linear(4, 8), Experts(8, 16, 8, 1), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, 4) -> (B, 1)."""
        return self.out(self.experts(self.into(x)[:, None])[:, 0])  # type: ignore[no-any-return]


class Spare(nn.Module):
    """A layer that not every forward pass uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.spare = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, spare: bool) -> torch.Tensor:
        """(B, 4) -> (B, 1)."""
        return self.used(x) + self.spare(x) if spare else self.used(x)  # type: ignore[no-any-return]


def main(path: Path) -> None:
    """Run the task; exit status 1 for a typed error, which is written down."""
    told = json.loads(path.read_text())
    task = Task(told)
    parts: dict[str, Any] = {}
    if "device" in told:
        limits = {"peer_seconds": 8.0, "collective_seconds": 60.0}
        parts["run"] = RunOptions(folder=told["folder"], steps=told["steps"], seed=3, device=told["device"], **limits)
    if "checkpoint" in told:
        parts["checkpoint"] = CheckpointOptions(**told["checkpoint"])
    if "precision" in told:
        parts["precision"] = PrecisionOptions(**told["precision"])
    if "ddp" in told:
        parts["ddp"] = DdpOptions(**told["ddp"])
    if "activations" in told:
        parts["activations"] = ActivationOptions(**told["activations"])
    chosen = trainkit.options(Path(told["folder"]), told["steps"], **parts)
    make = trainkit.make_ragged_model if told.get("ragged") else trainkit.make_model
    model = Mixed() if told.get("experts") else make(dropout=told.get("dropout", 0.25))
    model = trainkit.make_frozen_model() if told.get("frozen") else model
    model = Spare() if "unused" in told else model
    task.model = model
    kind = AdamW if told.get("precision", {}).get("weights") == "compute" else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=1e-2, fused=True)
    accumulate = told.get("accumulate", 1)
    loader = trainkit.make_loader(Path(told["data"]), accumulate=accumulate, **told.get("loader", {}))
    found: dict[str, Any] = {"rank": task.rank}
    status = 0
    try:
        runtime = trainkit.Runtime(model, task.loss, loader, optimizer, chosen)
        result = runtime.run()
        found |= {"step": result.step, "finished": result.finished, "skipped": result.skipped, "loss": result.loss}
        found["admission"] = runtime.admission.report() if runtime.admission is not None else {}
    except LfdataError as error:
        found |= {"error": type(error).__name__, "message": str(error)}
        status = 1
    found["bits"] = hashlib.sha256(trainkit.bits(model)).hexdigest()
    found["parameters"] = [value.flatten().tolist() for value in model.state_dict().values()]
    found["none"] = [name for name, one in model.named_parameters() if one.grad is None]
    found["seen"], found["ends"] = task.seen, task.ends
    path.with_name(f"{path.stem}-{task.rank}.json").write_text(json.dumps(found))
    if status and dist.is_initialized():
        # What is left of a broken group is not worth waiting for.
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
