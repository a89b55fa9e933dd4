"""Whether the whole stack trains as well as plain eager steps: the example ``reach``, both ways for every seed, by held-out loss."""

from __future__ import annotations

import gc
import math
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.log import Log
from benchmarks.gpu.subjects import TOLERANCE
from lftrain.build import build
from lftrain.config import load

REACH = Path(__file__).resolve().parent.parent.parent / "examples" / "reach"
MARGIN = 0.05
"""Of the plain loss: what would be worse by no more than that counts as equal."""
MOST_SEEDS = 20
HELD_OUT = 512


def measure(
    folder: Path,
    scratch: Path,
    device: torch.device,
    backend: str,
    log: Log,
    *,
    seeds: int,
    steps: int,
    samples: int,
    fp8: bool = False,
) -> None:
    """Train both ways over ``seeds`` pairs, and test. ``fp8``: both with picture and language layers frozen, the stack's in float8."""
    if not 2 <= seeds <= MOST_SEEDS:
        raise ValueError(f"{seeds} seeds; the exact test takes 2 to {MOST_SEEDS}")
    made(folder, samples)
    part = "quality-fp8" if fp8 else "quality"
    log.say(f"{part}: data in", folder.name)
    log.fresh(part)
    pairs: list[dict[str, Any]] = []
    for seed in range(seeds):
        found: dict[str, Any] = {"seed": seed}
        # In turn, so that what changes with time is in both.
        for way in ("plain", "stack")[:: 1 if seed % 2 == 0 else -1]:
            found[way] = trained(folder, scratch, device, backend, way, seed, steps, fp8)
            log.say(
                part,
                f"seed {seed}",
                way,
                f"{found[way]['held_out']:.5f}",
                f"in {found[way]['seconds']:.1f} s",
                found[way]["why"],
            )
        pairs.append(found)
        log.put(part, steps=steps, samples=samples, margin=MARGIN, pairs=pairs, **verdict(pairs))
    log.say(part, verdict(pairs))


def made(folder: Path, samples: int) -> None:
    """The data of the example as shards, unless it is there."""
    if (folder / "held_out" / "manifest.json").exists():
        return
    call(str(REACH / "data.py"), str(folder), "--samples", str(samples), "--held-out", str(min(samples, HELD_OUT)))
    for name in ("train", "held_out"):
        source, target = folder / f"{name}.jsonl", folder / name
        call("-m", "shard_builder.cli", "convert", str(source), str(target), "--map", str(REACH / "fields.toml"), "--quiet")


def call(*words: str) -> None:
    """This Python with some arguments; its errors are shown."""
    subprocess.run([sys.executable, *words], check=True)


def trained(
    folder: Path, scratch: Path, device: torch.device, backend: str, way: str, seed: int, steps: int, fp8: bool
) -> dict[str, Any]:
    """One run: held-out loss at its end, seconds, and why something asked for was not to be had."""
    run = scratch / f"quality-{way}-{seed}"
    chosen = {
        "run.folder": f'"{run}"', "run.steps": steps, "run.seed": seed, "run.device": f'"{device.type}"',
        "data.path": f'"{folder / "train"}"', "held_out.path": f'"{folder / "held_out"}"', "held_out.every": 0,
        "checkpoint.every": 0, "metrics.every": 50, "metrics.live": '"off"', "precision.mode": '"bf16"',
    }  # fmt: skip
    if fp8:
        chosen["model.options.freeze"] = '["vision", "language"]'
    if way == "stack":
        chosen |= {
            "compile.blocks": "true",
            "compile.backend": f'"{backend}"',
            "graph.enabled": "true",
            "graph.tolerance": TOLERANCE["fp8" if fp8 else "compute"],
            "precision.frozen": '"fp8"' if fp8 else '"compute"',
            "precision.weights": '"compute"',
        }
    else:
        chosen |= {"optimizer.fused": "false"}
    began = time.perf_counter()
    runtime = build(load(REACH / "train.toml", [f"{name}={value}" for name, value in chosen.items()]))
    result = runtime.run()
    reasons = [runtime.graphed.reason] if runtime.graphed is not None else []
    reasons += list(runtime.compiled.fallbacks.values()) if runtime.compiled is not None else []
    found = {
        "held_out": result.held_out,
        "loss": result.loss,
        "skipped": result.skipped,
        "seconds": round(time.perf_counter() - began, 2),
        "why": "; ".join(one for one in reasons if one),
        **{name: report() for name, report in runtime.watch.extra.items()},
    }
    del runtime
    gc.collect()
    shutil.rmtree(run, ignore_errors=True)
    return found


def verdict(pairs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Mean difference (stack less plain) and two exact one-sided tests over all signs of the differences.

    ``worse_p``: of differences at least so high if both ways were alike; small means that the stack is worse. ``not_worse_p``: of
    differences at least so low if the stack were worse by the margin; small means that it is not.
    """
    plain = [float(pair["plain"]["held_out"]) for pair in pairs]
    differences = [float(pair["stack"]["held_out"]) - one for pair, one in zip(pairs, plain, strict=True)]
    margin = MARGIN * statistics.fmean(plain)
    return {
        "plain_mean": statistics.fmean(plain),
        "difference_mean": statistics.fmean(differences),
        "difference_share": statistics.fmean(differences) / statistics.fmean(plain),
        "worse_p": sign_flips(differences),
        "not_worse_p": sign_flips([margin - one for one in differences]),
    }


def sign_flips(values: Sequence[float]) -> float:
    """Exact one-sided permutation test: the share of all choices of signs whose sum is at least that of ``values``."""
    absolute = np.abs(np.asarray(values, np.float64))
    if not np.isfinite(absolute).all():
        return math.nan
    wanted = math.fsum(values)
    # Ties count, whatever the rounding.
    slack = 1e-12 * float(absolute.sum())
    number = np.arange(1 << len(values), dtype=np.int64)
    sums = np.zeros(len(number))
    for place, one in enumerate(absolute):
        sums += np.where(number >> place & 1, one, -one)
    return float((sums >= wanted - slack).mean())
