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

from benchmarks.gpu import checkpointing, costs, data, quality, rungs
from benchmarks.gpu.log import Log, no_gpu
from benchmarks.gpu.subjects import Bench
from benchmarks.record import RecordError
from lfdata.errors import LfdataError
from lftrain.compute.fp8 import lacking

PARTS = ("ladder", "checkpointing", "torch-budget", "costs", "quality", "quality-fp8")
MODULE = "benchmarks.gpu.ladder"


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {MODULE}", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="made by python -m benchmarks.gpu.data; made up with --tiny")
    parser.add_argument("--output", type=Path, required=True, help="the record; parts measured earlier stay in it")
    parser.add_argument(
        "--only", choices=[*PARTS, "deterministic"], action="append", help="a part; may be repeated (default: all)"
    )
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, help="of a round")
    parser.add_argument("--workers", help="counts that are tried for (a), as 2,4,8")
    parser.add_argument("--seeds", type=int, default=10, help="pairs of the quality test")
    parser.add_argument("--quality-steps", type=int, default=300)
    parser.add_argument(
        "--reach", type=Path, help="data of the quality test, made there if it is not (default: a temporary folder)"
    )
    parser.add_argument("--backend", help="of torch.compile (default: inductor; eager with --tiny on a CPU)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--tiny", action="store_true", help="a small model, few steps, made-up pictures: to see that all of it runs"
    )
    return parser.parse_args()


def main() -> None:
    """Measure what is asked for."""
    chosen = arguments()
    no_gpu(torch.device(chosen.device), "--device cpu --tiny")
    if chosen.data is None and not chosen.tiny:
        sys.exit("--data FOLDER is wanted: python -m benchmarks.gpu.data PICTURES FOLDER makes it")
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
    folder = chosen.data
    if folder is None:
        folder = scratch / "data"
        data.make(None, folder, samples=200, vocab=256, state=4, horizon=4, action=3)
        log.say("made up", folder.name)
    backend = chosen.backend or ("eager" if tiny and chosen.device == "cpu" else "inductor")
    batch = min(chosen.batch, 4) if tiny else chosen.batch
    bench = Bench(folder, scratch, device, "small" if tiny else "large", batch, backend)
    log.made["options"] |= {"data": _about(folder), "tiny": tiny, "backend": backend}
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


def _about(folder: Path) -> dict[str, object]:
    about = data.read(folder)
    return {name: getattr(about, name) for name in about.__struct_fields__}


if __name__ == "__main__":
    main()
