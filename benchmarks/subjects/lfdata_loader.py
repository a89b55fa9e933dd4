"""This package's loader: order, decoding and memory of its own, in one decoder process with threads."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness.work import NUMBERS, SAMPLE_RATE, SECONDS, SEQUENCE, SIDE, TOKENS, Batch, Settings, Workload, sweep
from benchmarks.subjects import lfdata_reader

TITLE = "lfdata loader"
IMPORTS = ("torch", "lfdata.loader.loader")
FORMAT = "lfdata"
WORK = ("crop", "centre", "native", "tokens", "multimodal")
prepare = lfdata_reader.prepare


def workers(workload: Workload, cores: int) -> list[int]:
    """Threads for decoding, in the decoder process; for reading tokens, in the consumer's own."""
    return sweep(cores)


def fields_of(workload: Workload) -> dict[str, Any]:
    """Fields and their transforms."""
    from lfdata import transforms as T

    match workload.work:
        case "crop":
            image = [T.RandomResizedCrop(224), T.RandomHorizontalFlip()]
        case "centre":
            image = [T.Resize(256), T.CenterCrop(224)]
        case "native":
            image = [T.RandomCrop(224)]
        case "tokens":
            return {"tokens": [T.Tokens(SEQUENCE)]}
        case _:
            return {
                "image": [T.CenterCrop(SIDE)],
                "tokens": [T.Tokens(TOKENS)],
                "audio": [T.AudioWindow(SAMPLE_RATE * SECONDS)],
                "annotation": [T.Map("benchmarks.harness.multimodal:annotation", (NUMBERS,), "float32")],
                "n": None,
            }
    return {"image": image, "n": None}


def _loader(workload: Workload, prepared: Path, settings: Settings, numpy: bool = False, **options: Any) -> Any:
    if numpy:
        from lfdata import NumpyLoader as Loader
    else:
        from lfdata import Loader  # type: ignore[assignment]

    return Loader(
        prepared / "shards",
        workload.batch,
        fields_of(workload),
        seed=settings.seed,
        tail="pad",
        threads=settings.workers,
        **options,
    )


def _epoch(workload: Workload, loader: Any) -> Iterator[Batch]:
    # A loader that goes on from a state counts from there.
    last = len(loader) - 1
    done = loader.state_dict()["samples"] // workload.batch
    return (_batch(workload, found, number == last) for number, found in enumerate(loader, done))


def _batch(workload: Workload, found: dict[str, Any], last: bool) -> Batch:
    if last:
        # Without the rows that fill it up: the last ones.
        mask = found["__mask__"]
        rows = int(mask.sum())
        found = {name: array[:rows] for name, array in found.items() if len(array) == len(mask)}
    if workload.work == "tokens":
        return Batch(found["__index__"].numpy(), {"tokens": found["tokens"].numpy()})
    arrays = {"image": found["image"]}
    if workload.work == "multimodal":
        import torch

        arrays |= {
            "tokens": found["tokens"].to(torch.int32),
            "audio": found["audio"][:, :, 0],
            "annotation": found["annotation"],
        }
    return Batch(found["n"], arrays)


def batches(workload: Workload, prepared: Path, settings: Settings, **options: Any) -> Iterator[Iterator[Batch]]:
    """Epochs without end."""
    loader = _loader(workload, prepared, settings, **options)
    while True:
        yield _epoch(workload, loader)


def resumable(workload: Workload, prepared: Path, settings: Settings, state: Any) -> tuple[Iterator[Batch], Callable[[], Any]]:
    """By the loader's own state."""
    loader = _loader(workload, prepared, settings)
    if state is not None:
        loader.load_state_dict(json.loads(json.dumps(state)))
    return _epoch(workload, loader), loader.state_dict
