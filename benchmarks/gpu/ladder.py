"""Measures training on a GPU: ``python -m benchmarks.gpu.ladder --data FOLDER --output FILE.json``. FOLDER is made by benchmarks.gpu.data.

Parts: ``ladder`` (from a plain loop to a graph of compiled blocks), ``checkpointing`` (step time against peak memory), ``torch-budget`` (the
same by torch.compile's memory budget), ``costs`` (accumulation, fp16, deterministic), ``quality`` (held-out loss over paired seeds),
``quality-fp8`` (the same with picture and language layers frozen, in float8 one way).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.gpu import checkpointing, command, costs, quality, rungs
from benchmarks.gpu.log import Log
from benchmarks.gpu.subjects import Bench
from benchmarks.record import RecordError
from lfdata.errors import LfdataError
from lftrain.compute.fp8 import lacking

PARTS = ("ladder", "checkpointing", "torch-budget", "costs", "quality", "quality-fp8")
MODULE = "benchmarks.gpu.ladder"


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = command.parser(MODULE, __doc__, [*PARTS, "deterministic"])
    parser.add_argument("--steps", type=int, help="of a round")
    parser.add_argument("--workers", help="counts that are tried for (a), as 2,4,8")
    parser.add_argument("--seeds", type=int, default=10, help="pairs of the quality test")
    parser.add_argument("--quality-steps", type=int, default=300)
    parser.add_argument(
        "--reach", type=Path, help="data of the quality test, made there if it is not (default: a temporary folder)"
    )
    parser.add_argument("--backend", help="of torch.compile (default: inductor; eager with --tiny on a CPU)")
    return command.parsed(parser)


def main() -> None:
    """Measure what is asked for."""
    chosen = arguments()
    if chosen.only == ["deterministic"]:
        # Before cuBLAS is used.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        with tempfile.TemporaryDirectory(prefix="ladder-") as scratch:
            run(chosen, Path(scratch))
    except (LfdataError, RecordError) as error:
        sys.exit(f"{type(error).__name__}: {error}")


def run(chosen: argparse.Namespace, scratch: Path) -> None:
    """The parts, one after the other."""
    device = torch.device(chosen.device, 0) if chosen.device == "cuda" else torch.device("cpu")
    log = Log(chosen.output, "gpu-ladder", MODULE, device)
    tiny = chosen.tiny
    if tiny and chosen.device == "cpu":
        torch.set_num_threads(1)  # threads that wait for each other on a busy machine take seconds
    folder, about = command.folder_of(chosen, scratch, 200)
    backend = chosen.backend or ("eager" if tiny and chosen.device == "cpu" else "inductor")
    batch = min(chosen.batch, 4) if tiny else chosen.batch
    bench = Bench(folder, scratch, device, "small" if tiny else "large", batch, backend)
    log.made["options"] |= {"data": about, "tiny": tiny, "backend": backend}
    plan = rungs.Plan(rounds=chosen.rounds)
    if tiny:
        plan = rungs.Plan(rounds=min(chosen.rounds, 2), steps=2, lead=1, workers=(1, 2), tried=2)
    if chosen.steps:
        plan = replace(plan, steps=chosen.steps)
    if chosen.workers:
        plan = replace(plan, workers=tuple(int(one) for one in chosen.workers.split(",")))
    wanted = chosen.only or PARTS
    for part in wanted:
        log.say("part", part)
        # What other parts compiled would count as too often (compile.limit).
        torch._dynamo.reset()
        if part == "ladder":
            rungs.measure(bench, log, plan)
        elif part == "checkpointing":
            checkpointing.measure(bench, log, plan)
        elif part == "torch-budget":
            checkpointing.measure_torch(bench, log, plan)
        elif part == "costs":
            costs.measure(bench, log, plan)
            costs.in_own_process(bench, chosen, log)
        elif part == "deterministic":
            costs.deterministic(bench, log, plan)
        elif part == "quality-fp8" and lacking(device):
            log.say(part, "not run: it", lacking(device))
        else:
            steps = 6 if tiny else chosen.quality_steps
            seeds = min(chosen.seeds, 3) if tiny else chosen.seeds
            where = chosen.reach or scratch / "reach"
            samples, fp8 = 128 if tiny else 4096, part == "quality-fp8"
            quality.measure(where, scratch, device, backend, log, seeds=seeds, steps=steps, samples=samples, fp8=fp8)
    log.say("done:", chosen.output)


if __name__ == "__main__":
    main()
