"""Whether anything asks for memory in steady state: ``python -m benchmarks.gpu.steady --data SHARDS --output FILE.json``.

A thousand steps of the device path, after some that warm up, in a process under strace, which follows all processes and threads: calls for
memory, between two marks. From within: torch's segments and calls of cudaMalloc and cudaHostAlloc, page faults of every process of the run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.log import Log, no_gpu
from benchmarks.record import RecordError
from lfdata import DeviceLoader, Loader
from lfdata import transforms as T
from lfdata.device import Images
from lfdata.errors import LfdataError

CALLS = ("mmap", "munmap", "mremap", "brk", "memfd_create", "shmget", "shmat", "clone", "clone3")
WARM, STEPS = 300, 1000
CASES = ("crops", "native", "kept")


def loader(case: str, data: Path, batch: int, device: torch.device) -> DeviceLoader:
    """``crops``: of one size, made into what a model takes; ``native``: pictures of their own size, tokens of any length, within a budget."""
    if case == "native":
        fields: dict[str, Any] = {"image": None, "tokens": None, "state": None}
        return DeviceLoader(Loader(data, batch, fields, max_bytes=1 << 30, threads=4, engine="process"), device)
    fields = {"image": [T.RandomResizedCrop(224), T.RandomHorizontalFlip()], "tokens": [T.Tokens(24)], "state": None}
    ops = {"image": Images(channels_last=True)}
    return DeviceLoader(Loader(data, batch, fields, threads=4, engine="process"), device, ops=ops)


def within(case: str, data: Path, batch: int, device: torch.device, warm: int, steps: int) -> dict[str, Any]:
    """The steps, seen from within. ``kept``, the control: a consumer that keeps what it gets."""
    made, kept = loader(case, data, batch, device), []
    if not len(made):
        raise RecordError(f"{data.name} has no whole batch of {batch} rows: take a smaller --batch")
    out = torch.zeros((), device=device)
    before: dict[str, int] = {}
    after: dict[str, int] = {}
    number = 0
    while number < warm + steps:
        for found in made:
            if number == warm:
                before = counted(device)
                mark("begin")
            # In place, so that the consumer asks for nothing either.
            torch.sum(found["state"], (0, 1), out=out) if case != "kept" else kept.append(
                {name: one.clone() for name, one in found.items()}
            )
            number += 1
            if number == warm + steps:
                mark("end")
                after = counted(device)
                break
    stats = made.stats()
    del found
    made.close()
    return {
        **{name: after[name] - before[name] for name in after},
        "copied": stats["copied"],
        "device": {
            name: value for name, value in (stats["device"] or {}).items() if name in ("grown", "extra", "places", "bytes")
        },
    }


def counted(device: torch.device) -> dict[str, int]:
    """So far: of torch, and page faults without reading of this process and of its children."""
    found = {"minor_faults": faults(os.getpid()), "minor_faults_of_children": sum(map(faults, children()))}
    if device.type == "cuda":
        stats, host = torch.cuda.memory_stats(device), torch.cuda.host_memory_stats()
        found |= {
            "segments": stats["segment.all.allocated"],
            "cuda_mallocs": stats["num_device_alloc"],
            "cuda_frees": stats["num_device_free"],
            "host_allocs": host["num_host_alloc"],
        }
    return found


def faults(process: int) -> int:
    """Minor page faults of a process."""
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[7])


def children() -> list[int]:
    """Processes of this one."""
    return [int(one) for task in Path("/proc/self/task").iterdir() for one in (task / "children").read_text().split()]


def traced(case: str, chosen: argparse.Namespace, strace: str | None) -> dict[str, Any]:
    """One case in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        trace, out = Path(folder, "trace"), Path(folder, "out")
        words = [
            sys.executable,
            "-m",
            "benchmarks.gpu.steady",
            "--within",
            case,
            "--data",
            str(chosen.data),
            "--output",
            str(out),
        ]
        words += [
            "--batch",
            str(chosen.batch),
            "--device",
            chosen.device,
            "--warm",
            str(chosen.warm),
            "--steps",
            str(chosen.steps),
        ]
        if strace is not None:
            seen = ",".join((*CALLS, "readlink"))
            words = [strace, "-f", "-qq", "--seccomp-bpf", "-e", f"trace={seen}", "-o", str(trace), *words]
        subprocess.run(words, check=True, timeout=chosen.timeout)
        found: dict[str, Any] = json.loads(out.read_text())
        if strace is not None:
            found["calls"] = calls(trace.read_text())
        return found


def mark(name: str) -> None:
    """A call of the system that nothing else makes, for the trace."""
    with contextlib.suppress(OSError):
        os.readlink(f"/steady-{name}")


def calls(trace: str) -> dict[str, int]:
    """Calls between the two marks, by name, of all processes."""
    found, inside = Counter[str](), False
    for line in trace.splitlines():
        if (call := re.match(r"\d+\s+(\w+)\(", line)) is None:
            continue
        if "/steady-" in line:
            inside = "/steady-begin" in line
        elif inside and call[1] in CALLS:
            found[call[1]] += 1
    if "/steady-end" not in trace:
        raise RecordError("the trace has no end: strace saw other processes than those of the run")
    return dict(found)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="made by benchmarks.gpu.data: its folder shards")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--warm", type=int, default=WARM)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--timeout", type=float, default=240)
    parser.add_argument("--within", choices=CASES, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    no_gpu(torch.device(chosen.device), "--device cpu")
    try:
        run(chosen)
    except (LfdataError, RecordError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    except subprocess.CalledProcessError as error:
        # The case's own process has said why.
        sys.exit(error.returncode)


def run(chosen: argparse.Namespace) -> None:
    """All cases; or one, in this process."""
    device = torch.device(chosen.device)
    if chosen.within:
        found = within(chosen.within, chosen.data, chosen.batch, device, chosen.warm, chosen.steps)
        chosen.output.write_text(json.dumps(found))
        return
    log = Log(chosen.output, "gpu-steady", "benchmarks.gpu.steady", device)
    strace = shutil.which("strace")
    if strace is None:
        log.say("strace is not installed: calls of the system are not counted")
    for case in CASES:
        log.fresh(case)
        found = traced(case, chosen, strace)
        log.put(case, warm=chosen.warm, steps=chosen.steps, batch=chosen.batch, **found)
        log.say(case, found)


if __name__ == "__main__":
    main()
