"""Ranks on this machine, started by torchrun: what each wrote, or why it wrote nothing. Nothing that was started outlives its time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.gpu.many import node

RANK = "benchmarks.gpu.many.rank"
# Of a rank's output, what is kept of one that failed.
TAIL = 1500


@dataclass
class Launched:
    """What came of a group of ranks.

    Attributes:
        ranks: by rank what it found; ``{}`` of one that wrote nothing. output: what each printed.
        error: empty if all went well: who failed, or that the time was over.
    """

    world: int
    ranks: list[dict[str, Any]] = field(default_factory=list)
    output: list[str] = field(default_factory=list)
    error: str = ""
    seconds: float = 0.0


def environment() -> dict[str, str]:
    """Of all ranks: one thread for torch's own operators on the host, no NVLink multicast, and this process's modules."""
    paths = os.pathsep.join(dict.fromkeys(path or os.getcwd() for path in sys.path))
    one = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "NCCL_NVLS_ENABLE": "0", "PYTHONPATH": paths}
    return {**os.environ, **one}


def launch(scratch: Path, name: str, world: int, limit: float, told: dict[str, Any], module: str = RANK) -> Launched:
    """Run a part on so many ranks, for ``limit`` seconds at most.

    Args:
        scratch: for its files. name: of these. told: what :mod:`benchmarks.gpu.many.rank` is to do.
    """
    task = scratch / f"{name}.json"
    task.write_bytes(msgspec.json.encode(told))
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}", "-m", module, str(task)]
    began, over = time.monotonic(), False
    with open(scratch / f"{name}.log", "wb") as file:
        process = subprocess.Popen(
            [sys.executable, *command], stdout=file, stderr=subprocess.STDOUT, env=environment(), start_new_session=True
        )
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            over = True
        finally:
            _end(process)
    found = Launched(world, seconds=round(time.monotonic() - began, 1))
    for rank in range(world):
        found.ranks.append(_read(written(task, rank)))
        log = log_of(task, rank)
        found.output.append(log.read_text("utf-8", "replace") if log.exists() else "")
    found.error = _why(found, process.returncode, (scratch / f"{name}.log").read_text("utf-8", "replace"))
    if over:
        found.error = f"not done after {limit:.0f} s, ended. " + found.error
    return found


def written(task: Path, rank: int) -> Path:
    """Where a rank writes what it found."""
    return task.with_name(f"{task.stem}-{rank}.json")


def log_of(task: Path, rank: int) -> Path:
    """Where what a rank prints goes."""
    return task.with_name(f"{task.stem}-{rank}.log")


def _read(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError):
        return {}


def _end(process: subprocess.Popen[bytes]) -> None:
    """The launcher with everything below it; decoders may have a process group of their own."""
    below = node.family(process.pid) if process.poll() is None else []
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    for one in below:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(one, signal.SIGKILL)
    process.wait()


def _why(found: Launched, status: int, launcher: str) -> str:
    """What went wrong, by rank."""
    if status == 0 and all(found.ranks):
        return ""
    said = []
    for rank, facts in enumerate(found.ranks):
        if "error" in facts:
            said.append(f"rank {rank}: {facts['error']}")
        elif not facts:
            said.append(f"rank {rank} wrote nothing: {found.output[rank][-TAIL:].strip() or 'nor did it print anything'}")
    return "; ".join(said) or f"the launcher ended with status {status}: {launcher[-TAIL:].strip()}"
