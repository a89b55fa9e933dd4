"""A small task for tests: points and their labels in shards, a model with dropout, and runs of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from shardkit import Part, array, scalar, write_dataset
from torch import nn

from lfdata import Loader
from lfdata.format.meta import FieldMeta
from lftrain import CheckpointOptions, DdpOptions, MetricsOptions, Options, PrecisionOptions, RunOptions, Runtime

FIELDS = (
    FieldMeta("x", "array", {"dtype": "float32", "ndim": 1, "shape": [4]}),
    FieldMeta("y", "scalar", {"dtype": "float32"}),
)


def write_points(root: Path, count: int = 64) -> Path:
    """Rows of four numbers and a label that follows from them; keys are point-0, point-1, ..."""
    rng = np.random.default_rng(5)
    rows = []
    for number in range(count):
        x = rng.standard_normal(4).astype(np.float32)
        y = float(np.float32(x[0] * x[1] - x[2]))
        rows.append((b"point-%d" % number, {"x": array(x), "y": scalar(y, "float32")}))
    write_dataset(root, FIELDS, [Part(rows)])
    return root


def write_lengths(root: Path, lengths: Sequence[int]) -> Path:
    """Rows of so many numbers each; keys as above."""
    rng = np.random.default_rng(6)
    rows = [
        (b"point-%d" % number, {"x": array(rng.standard_normal(length).astype(np.float32))})
        for number, length in enumerate(lengths)
    ]
    write_dataset(root, (FieldMeta("x", "array", {"dtype": "float32", "ndim": 1, "shape": [None]}),), [Part(rows)])
    return root


def make_model(seed: int = 0, dropout: float = 0.25) -> nn.Module:
    """Four numbers to one. Dropout makes what comes out depend on the random state."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 1))


def loss(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """Mean squared error and rows."""
    return (model(batch["x"]).squeeze(1) - batch["y"]).square().mean(), len(batch["y"])


def make_frozen_model(seed: int = 0) -> nn.Module:
    """Four numbers to one, through a layer that is not trained."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 32), nn.Linear(32, 32).requires_grad_(False), nn.Tanh(), nn.Linear(32, 1))


def make_ragged_model(seed: int = 0, dropout: float = 0.25) -> nn.Module:
    """One number to one, for rows of any length."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 1))


def ragged_loss(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """Mean squared error and values: rows weigh what they hold."""
    x = batch["x"]
    return (model(x[:, None]).squeeze(1) - torch.sin(2 * x)).square().mean(), len(x)


def ragged() -> tuple[nn.Module, Any]:
    """As ``model.kind`` takes it."""
    return make_ragged_model(dropout=0.0), ragged_loss


def options(folder: Path, steps: int, **parts: Any) -> Options:
    """Quiet options; ``every``, ``keep``, ... go to the checkpoint, the rest by component."""
    chosen = {
        "run": RunOptions(folder=str(folder), steps=steps, seed=3, device="cpu", peer_seconds=8.0, collective_seconds=20.0)
    }
    chosen["metrics"] = MetricsOptions(every=1, live="off", memory_every=0)
    chosen["checkpoint"] = CheckpointOptions(every=0)
    chosen["precision"] = PrecisionOptions()
    chosen["ddp"] = DdpOptions(checksum_every=0)
    return Options(**{**chosen, **parts})


def make_loader(data: Path, batch: int = 8, accumulate: int = 1, **more: Any) -> Loader:
    """Points in shuffled order, read in this process."""
    return Loader(data, batch, seed=3, accumulate=accumulate, engine="inline", threads=1, **more)


def make_runtime(
    data: Path, chosen: Options, *, accumulate: int = 1, the_loss: Any = loss, dropout: float = 0.25, **more: Any
) -> Runtime:
    """Everything of a run, made anew."""
    model = make_model(dropout=dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    return Runtime(model, the_loss, make_loader(data, accumulate=accumulate), optimizer, chosen, **more)


def bits(model: nn.Module) -> bytes:
    """All parameters, to the bit."""
    flat = [value.detach().cpu().flatten().view(torch.uint8) for value in model.state_dict().values()]
    return b"".join(value.numpy().tobytes() for value in flat)


class Batches:
    """A loader from ready batches, over and over."""

    def __init__(self, batches: list[dict[str, torch.Tensor]], accumulate: int = 1) -> None:
        self.batches, self.accumulate, self.done = batches, accumulate, 0

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while self.done < len(self.batches):
            self.done += 1
            yield self.batches[self.done - 1]
        self.done = 0

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done, "accumulate": self.accumulate}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.done = state["done"]


def points() -> tuple[nn.Module, Any]:
    """As ``model.kind`` takes it."""
    return make_model(dropout=0.0), loss


def hopeless() -> tuple[nn.Module, Any]:
    """As ``model.kind`` takes it; no step of it can be taken."""
    return make_model(dropout=0.0), lambda model, batch: (model(batch["x"]).mean() * float("inf"), len(batch["y"]))
