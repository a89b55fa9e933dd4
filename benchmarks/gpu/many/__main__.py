"""Measures training on several GPUs of one machine: ``python -m benchmarks.gpu.many --data FOLDER --output FILE.json``.

FOLDER is made by benchmarks.gpu.data. Parts: ``order`` (the sequence of samples at each world size, and of runs that go on from a checkpoint
of two ranks), ``training`` (the vision-language-action model with and without the loader, threads, feedback), ``feeding`` (the loader alone,
memory, one cache), ``overlap`` (communication that nothing hides), ``faults``. ``--device cpu --tiny`` tries all of it with gloo.

Ends with 1 if something did not run, or is not as it must be.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.gpu import command
from benchmarks.gpu.log import Log
from benchmarks.gpu.many import sets
from benchmarks.gpu.many.parts import PARTS, Plan, Run
from benchmarks.record import RecordError
from lfdata.errors import LfdataError

MODULE = "benchmarks.gpu.many"


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = command.parser(MODULE, __doc__, list(PARTS))
    parser.add_argument(
        "--worlds", default="1,2,4,8", help="numbers of ranks; those beyond the GPUs are not run, and said to be"
    )
    parser.add_argument(
        "--order-batch", type=int, default=256, help="samples a step of all ranks, where sequences are compared"
    )
    parser.add_argument("--feed-batch", type=int, default=64, help="samples a step of each GPU, of the loader alone")
    parser.add_argument("--steps", type=int, default=15, help="of a round")
    parser.add_argument("--seconds", type=float, default=4.0, help="of a round of the loader alone")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds after which a group of ranks is ended")
    return command.parsed(parser)


def plan_of(chosen: argparse.Namespace) -> Plan:
    """Sizes; tiny ones mean nothing."""
    worlds = sorted({int(one) for one in chosen.worlds.split(",")})
    if not worlds or worlds[0] < 1:
        raise ValueError(chosen.worlds)
    if chosen.tiny:
        return Plan(worlds, "small", 4, 8, 4, min(chosen.rounds, 2), 2, 0.3, 1, 16, 32, chosen.limit)
    one = (chosen.batch, chosen.order_batch, chosen.feed_batch, chosen.rounds, chosen.steps, chosen.seconds)
    return Plan(worlds, "large", *one, 2, 24, 224, chosen.limit)


def main() -> None:
    """Measure what is asked for."""
    chosen = arguments()
    try:
        plan = plan_of(chosen)
    except ValueError:
        sys.exit(f"--worlds is {chosen.worlds!r}; it is numbers of ranks, as 1,2,4")
    try:
        # The ranks' GPUs are told by the ranks: this process starts no CUDA.
        log = Log(chosen.output, "gpu-many", MODULE, torch.device("cpu"))
        with tempfile.TemporaryDirectory(prefix="many-") as scratch:
            folder, about = command.folder_of(chosen, Path(scratch), 96)
            log.made["options"] |= {"data": about, "device": chosen.device, "tiny": chosen.tiny, "plan": plan.told()}
            tokens = sets.make_tokens(Path(scratch) / "tokens", 400 if chosen.tiny else 40_000)
            run = Run(plan, log, Path(scratch), folder, tokens, chosen.device, chosen.tiny)
            wrong = run.parts(chosen.only or list(PARTS))
    except (LfdataError, RecordError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    for line in wrong:
        log.say("wrong:", line)
    log.say("done:", chosen.output.name)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
