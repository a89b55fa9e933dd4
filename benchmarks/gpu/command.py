"""What the command lines of the benchmarks of training have in common."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import data
from benchmarks.gpu.log import no_gpu


def parser(module: str, about: str | None, parts: Sequence[str]) -> argparse.ArgumentParser:
    """With the options that all of them have. ``about``: of the module."""
    found = argparse.ArgumentParser(
        prog=f"python -m {module}", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--data", type=Path, help="made by python -m benchmarks.gpu.data; made up with --tiny")
    found.add_argument("--output", type=Path, required=True, help="the record; parts measured earlier stay in it")
    found.add_argument("--only", choices=parts, action="append", help="a part; may be repeated (default: all)")
    found.add_argument("--batch", type=int, default=16, help="samples a step of each GPU, in training")
    found.add_argument("--rounds", type=int, default=5)
    found.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    found.add_argument(
        "--tiny", action="store_true", help="a small model, few steps, made-up pictures: to see that all of it runs"
    )
    return found


def parsed(given: argparse.ArgumentParser) -> argparse.Namespace:
    """The options of this run. Exits where there is no GPU, or no data."""
    chosen = given.parse_args()
    no_gpu(torch.device(chosen.device), "--device cpu --tiny")
    if chosen.data is None and not chosen.tiny:
        sys.exit("--data FOLDER is wanted: python -m benchmarks.gpu.data PICTURES FOLDER makes it")
    return chosen


def folder_of(chosen: argparse.Namespace, scratch: Path, samples: int) -> tuple[Path, dict[str, Any]]:
    """The data, and what a record says of them; so many samples are made up where there are none."""
    folder = chosen.data
    if folder is None:
        folder = scratch / "data"
        data.make(None, folder, samples=samples, vocab=256, state=4, horizon=4, action=3)
    about = data.read(folder)
    return folder, {name: getattr(about, name) for name in about.__struct_fields__}
