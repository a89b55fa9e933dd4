"""The process a subject runs in: ``python -m benchmarks.harness.child REQUEST.json``. Answers in one JSON line on descriptor 1.

Kept to the standard library and numpy, since subjects run in environments of their own.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.work import WORKLOADS, Batch, Settings, Workload, touch

TICK = os.sysconf("SC_CLK_TCK")


def tree_cpu() -> float:
    """User and system seconds of this process and its descendants, ended ones included."""
    children: dict[int, list[int]] = {}
    used: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdecimal():
            continue
        try:
            fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(entry))
        used[int(entry)] = sum(map(int, fields[11:15]))
    total, todo = 0, [os.getpid()]
    while todo:
        pid = todo.pop()
        total += used.get(pid, 0)
        todo += children.get(pid, [])
    return total / TICK


def chosen(key: int, keys: int, wanted: int) -> bool:
    """Whether a key is among the about ``wanted`` that are compared; the same ones for every subject."""
    digest = hashlib.sha256(b"%d" % key).digest()
    return int.from_bytes(digest[:8], "little") / 2**64 < wanted / max(1, keys)


def check(work: Workload, epochs: Iterator[Iterator[Batch]], request: dict[str, Any]) -> dict[str, Any]:
    """Some epochs: every key, shape and dtype; the arrays of chosen keys go to a file."""
    keys: list[list[int]] = []
    kinds: set[tuple[str, tuple[int, ...], str]] = set()
    kept_keys: list[int] = []
    kept: dict[str, list[Any]] = {name: [] for name in work.arrays}
    for _ in range(request["epochs"]):
        keys.append([])
        for batch in next(epochs):
            arrays = {name: np.asarray(array) for name, array in batch.arrays.items()}
            mine = np.asarray(batch.keys).reshape(-1).tolist()
            keys[-1] += mine
            kinds |= {(name, array.shape[1:], str(array.dtype)) for name, array in arrays.items()}
            if any(len(array) != len(mine) for array in arrays.values()):
                raise ValueError(f"{len(mine)} keys with arrays of {[len(array) for array in arrays.values()]} rows")
            for row, key in enumerate(mine):
                if chosen(key, request["samples"], request["wanted"]):
                    kept_keys.append(key)
                    for name in kept:
                        kept[name].append(arrays[name][row].copy())
    saved: dict[str, Any] = {"keys": np.array(kept_keys)} | {name: np.array(rows) for name, rows in kept.items()}
    np.savez(request["output"], **saved)
    return {"keys": keys, "kinds": sorted(kinds)}


def measure(epochs: Iterator[Iterator[Batch]], request: dict[str, Any], started: float) -> dict[str, Any]:
    """Whole epochs until ``seconds`` have passed since the first batch."""
    first = cpu_first = last = 0.0
    skipped = samples = count = 0
    delay = request["delay"]
    while True:
        for batch in next(epochs):
            touch(batch.arrays)
            samples += len(batch.keys)
            if delay:
                time.sleep(delay * len(batch.keys))
            last = time.perf_counter()
            if not first:
                first, skipped, cpu_first = last, samples, tree_cpu()
        count += 1
        if not samples:
            raise ValueError("the epoch had no batch")
        if last - first >= request["seconds"]:
            break
    cpu = tree_cpu() - cpu_first
    return {
        "samples_s": (samples - skipped) / (last - first),
        "cpu_s_1000": 1000 * cpu / (samples - skipped),
        "first_batch_s": first - started,
        "samples": samples,
        "epochs": count,
    }


def main() -> None:
    """Do what the request says."""
    request = json.loads(Path(sys.argv[1]).read_text())
    # Libraries that print must not spoil the answer.
    answer_to = os.dup(1)
    os.dup2(2, 1)
    work = WORKLOADS[request["workload"]]
    begin = time.perf_counter()
    subject: Any = importlib.import_module(f"benchmarks.subjects.{request['subject']}")
    for module in subject.IMPORTS:
        importlib.import_module(module)
    imported = time.perf_counter()
    answer: dict[str, Any] = {"import_s": imported - begin}
    if request["mode"] == "probe":
        answer |= {"workers": subject.workers(work, request["cores"])}
    elif request["mode"] == "prepare":
        subject.prepare(work, Path(request["source"]), Path(request["prepared"]))
        answer |= {"seconds": time.perf_counter() - imported}
    else:
        settings = Settings(request["workers"], request["seed"], Path(request["source"]))
        epochs = subject.batches(work, Path(request["prepared"]), settings)
        if request["mode"] == "check":
            answer |= check(work, epochs, request)
        else:
            answer |= measure(epochs, request, imported)
    os.write(answer_to, json.dumps(answer).encode() + b"\n")
    # Not through interpreter shutdown: what a library does there is not measured, and must not hang the harness.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
