"""One rank of a part: ``rank.py TASK.json``, under torchrun. Writes what it found beside the task."""

from __future__ import annotations

import importlib
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.gpu.many.launch import log_of, written
from lfdata.errors import LfdataError
from lftrain import RunOptions
from lftrain.comm.group import Group, join
from lftrain.runtime.environment import gpu

PEER_SECONDS = 8.0


def main(task: Path) -> None:
    """Do what the task says."""
    rank = int(os.environ["RANK"])
    output = os.open(log_of(task, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(output, 1)
    os.dup2(output, 2)
    told = msgspec.json.decode(task.read_bytes())
    found: dict[str, Any] = {}
    try:
        group = join(RunOptions(folder=told["scratch"], steps=1, device=told["device"], collective_seconds=told["limit"]))
        if group.device.type == "cuda":
            torch.cuda.set_device(group.device)
        elif told["tiny"]:
            torch.set_num_threads(1)
        found = {"rank": rank, **about(group)}
        part = importlib.import_module(f"benchmarks.gpu.many.{told['part']}")
        found |= part.on_rank(group, told)
        group.leave()
    except Exception as error:
        traceback.print_exc()
        found |= {"error": f"{type(error).__name__}: {error}", "kind": type(error).__name__, "at": time.time()}
        if not isinstance(error, LfdataError):
            found["trace"] = traceback.format_exc(limit=-3)
    temporary = written(task, rank).with_suffix(".tmp")
    temporary.write_bytes(msgspec.json.encode(found))
    temporary.replace(written(task, rank))
    sys.stdout.flush()
    sys.stderr.flush()
    if "error" in found:
        # What is left of a broken group is not worth waiting for.
        os._exit(1)


def about(group: Group) -> dict[str, Any]:
    """Which GPU this rank has."""
    if group.device.type != "cuda":
        return {"device": "cpu", "uuid": None}
    uuid = f"GPU-{torch.cuda.get_device_properties(group.device).uuid}"
    return {"device": str(group.device), "uuid": uuid, "gpu": gpu(group.device)}


def meet(group: Group) -> None:
    """Wait until all ranks are here, on the host."""
    group.gather(torch.zeros(1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
