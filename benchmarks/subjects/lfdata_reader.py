"""This package's reader. Pictures: under torch's DataLoader, stored bytes of a whole batch in one call, decoded by libjpeg-turbo and OpenCV.
Tokens: a checked read of the batch, in the consumer's process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.work import SEQUENCE, Batch, Settings, Workload, image_files, sequences
from benchmarks.subjects import torch_pil
from benchmarks.subjects.pixels import with_turbo
from benchmarks.synthetic import write_tokens_dataset

TITLE = "lfdata reader"
IMPORTS = ("torch.utils.data", "lfdata.dataset", "simplejpeg", "cv2")
FORMAT = "lfdata-keep"
WORKLOADS = ("W1", "W2", "W3")


def workers(workload: Workload, cores: int) -> list[int]:
    """0: in the consumer's process."""
    return [0] if workload.source == "tokens" else torch_pil.workers(workload, cores)


def prepare(workload: Workload, source: Path, target: Path) -> None:
    """Shards with the JPEG bytes as they are, or with the ids."""
    if workload.source == "tokens":
        write_tokens_dataset(target / "shards", sequences(source))
        return
    table = target / "table.jsonl"
    rows = (
        json.dumps({"key": f"{key:08d}", "file": str(path.relative_to(source)), "n": key})
        for key, path in enumerate(image_files(source))
    )
    table.write_text("\n".join(rows))
    fields = ["--field", "image:image=file@file,codec=keep", "--field", "n:scalar=n,dtype=int64", "-s", f"root={source}"]
    subprocess.run(
        [sys.executable, "-m", "shard_builder.cli", "convert", str(table), str(target / "shards"), "--quiet", *fields],
        check=True,
    )
    table.unlink()


class Stored:
    """Map-style data set that is asked for a batch at a time."""

    def __init__(self, work: Workload, path: Path) -> None:
        from lfdata import ShardDataset

        self.dataset = ShardDataset(path, ["image", "n"])
        self.work = work
        self.decode: Callable[[bytes], Any] | None = None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, indices: list[int]) -> list[tuple[int, Any]]:
        """Samples of a batch."""
        if self.decode is None:
            self.decode = with_turbo(self.work)
        found = self.dataset.read_many(indices, decode=False)
        images = found["image"]
        return [(int(n), self.decode(images[row])) for row, n in enumerate(found["n"])]


def batches(workload: Workload, prepared: Path, settings: Settings) -> Iterator[Iterator[Batch]]:
    """Epochs without end."""
    if workload.source == "tokens":
        return _tokens(workload, prepared / "shards", settings)
    return torch_pil.epochs(Stored(workload, prepared / "shards"), workload, settings)


def _tokens(workload: Workload, path: Path, settings: Settings) -> Iterator[Iterator[Batch]]:
    from lfdata import ShardDataset

    dataset = ShardDataset(path, ["tokens"])
    rng = np.random.default_rng(settings.seed)

    def read(rows: Any) -> Batch:
        stored = dataset.read_many(rows, decode=False)["tokens"]
        return Batch(rows, {"tokens": stored.values.view(np.uint16).reshape(len(rows), SEQUENCE)})

    while True:
        order = rng.permutation(len(dataset))
        yield (read(order[start : start + workload.batch]) for start in range(0, len(order), workload.batch))
