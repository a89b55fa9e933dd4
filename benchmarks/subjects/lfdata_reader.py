"""This package's reader. Pictures: under torch's DataLoader, stored bytes of a whole batch in one call, decoded by libjpeg-turbo and OpenCV.
Tokens: a checked read of the batch, in the consumer's process. Building: ``shard-builder``."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import multimodal
from benchmarks.harness.work import SAMPLE_RATE, SEQUENCE, Batch, Settings, Workload, image_files, sequences, sweep
from benchmarks.subjects import torch_pil
from benchmarks.subjects.pixels import SIDE, anywhere, turbo, with_turbo
from benchmarks.synthetic import write_tokens_dataset

TITLE = "lfdata reader"
IMPORTS = ("torch.utils.data", "lfdata.dataset", "simplejpeg", "cv2")
FORMAT = "lfdata"
WORK = ("crop", "centre", "native", "tokens", "multimodal", "bytes", "build")
# How pictures are stored: as they are, but with restart markers where only a part of each is wanted.
_PICTURES = {"native": "codec=keep,restart=rows,icc=ignore"}


def workers(workload: Workload, cores: int) -> list[int]:
    """0: in the consumer's process."""
    if workload.work == "build":
        return sweep(cores)
    return [0] if workload.work in ("tokens", "bytes") else torch_pil.workers(workload, cores)


def prepare(workload: Workload, source: Path, target: Path) -> None:
    """Shards with the JPEG bytes (or what else a sample has), or with the ids."""
    if workload.work == "tokens":
        write_tokens_dataset(target / "shards", sequences(source))
        return
    if workload.work == "multimodal":
        tokens = f"tokens:tokens=txt@file,tokenizer={source / 'tokenizer.json'}"
        audio = f"audio:audio=ogg@file,rate={SAMPLE_RATE},channels=mono"
        rows = [{part: str(path.relative_to(source)) for part, path in parts.items()} for parts in multimodal.parts_of(source)]
        _convert(source, target, rows, ["image:image=jpg@file,codec=keep", tokens, audio, "annotation:json=json@file"])
        return
    convert_pictures(source, target, _PICTURES.get(workload.work, "codec=keep"))


def convert_pictures(source: Path, target: Path, codec: str, *options: str) -> None:
    """A folder of pictures, stored as ``codec`` says."""
    rows = [{"file": str(path.relative_to(source))} for path in image_files(source)]
    _convert(source, target, rows, [f"image:image=file@file,{codec}"], *options)


def _convert(source: Path, target: Path, rows: list[dict[str, str]], fields: list[str], *options: str) -> None:
    """``shard-builder convert`` of a table of files; the field ``n`` is the key."""
    target.mkdir(exist_ok=True)
    table = target / "table.jsonl"
    table.write_text("\n".join(json.dumps(row | {"key": f"{key:08d}", "n": key}) for key, row in enumerate(rows)))
    given = [part for field in [*fields, "n:scalar=n,dtype=int64"] for part in ("--field", field)]
    command = [sys.executable, "-m", "shard_builder.cli", "convert", str(table), str(target / "shards"), "--quiet"]
    subprocess.run([*command, *given, "-s", f"root={source}", *options], check=True)
    table.unlink()


def build(workload: Workload, source: Path, target: Path, workers: int) -> None:
    """By ``shard-builder``, start-up and all."""
    convert_pictures(source, target, "codec=jpeg,quality=90,shorter=256", "--workers", str(workers))


def stored(workload: Workload, target: Path) -> Iterator[tuple[int, bytes]]:
    """Read back a row at a time."""
    from lfdata import ShardDataset

    dataset = ShardDataset(target / "shards")
    for row in range(len(dataset)):
        found = dataset.read_many([row], decode=False)
        yield int(found["n"][0]), found["image"][0].tobytes()


class Stored:
    """Map-style data set that is asked for a batch at a time."""

    def __init__(self, work: Workload, path: Path) -> None:
        from lfdata import ShardDataset

        self.dataset = ShardDataset(path)
        self.work = work
        self.decode: Callable[[bytes], Any] | None = None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[int, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[tuple[int, Any]]:
        """Samples of a batch."""
        if self.work.work == "native":
            return [(index, self._part(index)) for index in indices]
        if self.work.work == "multimodal":
            return self._multimodal(indices)
        if self.decode is None:
            self.decode = with_turbo(self.work)
        found = self.dataset.read_many(indices, decode=False)
        images = found["image"]
        return [(int(n), self.decode(images[row])) for row, n in enumerate(found["n"])]

    def _part(self, index: int) -> Any:
        width, height = self.dataset.column("image.width")[index], self.dataset.column("image.height")[index]
        x, y = anywhere(random, int(width), int(height))
        return np.ascontiguousarray(self.dataset.read_image_rows(index, "image", y, y + SIDE)[:, x : x + SIDE])

    def _multimodal(self, indices: list[int]) -> list[tuple[int, Any]]:
        found = self.dataset.read_many(indices, ["image", "tokens", "audio", "n"], decode=False)
        annotations = self.dataset.read_many(indices, ["annotation"])["annotation"]
        images, tokens, audio = found["image"], found["tokens"], found["audio"]
        width = self.dataset.schema["tokens"].params["dtype"]
        return [
            (
                int(n),
                {
                    "image": turbo(images[row]),
                    "tokens": multimodal.padded_tokens(tokens[row].view(width)),
                    "audio": multimodal.padded_audio(audio[row].view(np.int16)),
                    "annotation": np.array(multimodal.numbers(annotations[row]), np.float32),
                },
            )
            for row, n in enumerate(found["n"])
        ]


def batches(workload: Workload, prepared: Path, settings: Settings) -> Iterator[Iterator[Batch]]:
    """Epochs without end."""
    if workload.work == "tokens":
        return _tokens(workload, prepared / "shards", settings)
    return torch_pil.epochs(Stored(workload, prepared / "shards"), workload, settings)


def resumable(workload: Workload, prepared: Path, settings: Settings, state: Any) -> tuple[Iterator[Batch], Callable[[], Any]]:
    """Through torchdata's StatefulDataLoader."""
    return torch_pil.stateful(Stored(workload, prepared / "shards"), workload, settings, state)


def reader(workload: Workload, prepared: Path, settings: Settings) -> Callable[[int], Any]:
    """Checked against its checksum."""
    from lfdata import ShardDataset

    dataset = ShardDataset(prepared / "shards", ["image"])
    return lambda key: dataset.read_many([key], decode=False)["image"].values


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
