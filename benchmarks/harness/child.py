"""The process a subject runs in: ``python -m benchmarks.harness.child REQUEST.json``. Answers in one JSON line on descriptor 1.

Kept to the standard library and numpy, since subjects run in environments of their own.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import importlib.metadata
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.environments import PACKAGES, SAME
from benchmarks.harness.kept import Kept, Picked, chosen, host
from benchmarks.harness.work import WORKLOADS, Batch, Settings, Workload, folder_bytes, key_faults, touch

TICK = os.sysconf("SC_CLK_TCK")
# A consumer that waits longer than this for a batch was not fed.
STARVED_SECONDS = 0.001
# Packages whose versions are recorded where they are installed, whatever the subject.
COMMON = (
    "torch", "numpy", "pillow", "pillow-simd", "torchdata", "simplejpeg", "opencv-python-headless", "tokenizers", "soxr", "soundfile",
)  # fmt: skip


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


def cpu_now(started: float) -> tuple[float, float]:
    """:func:`tree_cpu`, and the moment things started, later by as long as looking took."""
    begin = time.perf_counter()
    return tree_cpu(), started + time.perf_counter() - begin


def versions(subject: str) -> dict[str, str]:
    """Versions of what a subject is made of, as its environment has them."""
    found = {}
    pins = PACKAGES.get(SAME.get(subject, subject), ())
    names = [pin.partition("==")[0] for pin in pins]
    # DALI's package is called after the CUDA version.
    names += [
        one.metadata["Name"] for one in importlib.metadata.distributions() if one.metadata["Name"].startswith("nvidia-dali")
    ]
    for name in dict.fromkeys((*names, *COMMON)):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    if {"pillow", "pillow-simd"} <= found.keys():
        # Both may be in reach, one in each of two environments; the module is that of one of them.
        import PIL

        found.pop("pillow" if "post" in PIL.__version__ else "pillow-simd")
    return found


def check(work: Workload, epochs: Iterator[Iterator[Batch]], request: dict[str, Any]) -> dict[str, Any]:
    """Some epochs: every key, shape and dtype; the arrays of chosen keys go to a file. With ``later``, so many samples of the last are
    enough."""
    keys: list[list[int]] = []
    kinds: set[tuple[str, tuple[int, ...], str]] = set()
    kept = Kept(work, request)
    later, cut = request.get("later", 0), False
    for number in range(request["epochs"]):
        keys.append([])
        for batch in next(epochs):
            arrays = {name: host(array) for name, array in batch.arrays.items()}
            mine = host(batch.keys).reshape(-1).tolist()
            keys[-1] += mine
            kinds |= {(name, array.shape[1:], str(array.dtype)) for name, array in arrays.items()}
            if any(len(array) != len(mine) for array in arrays.values()):
                raise ValueError(f"{len(mine)} keys with arrays of {[len(array) for array in arrays.values()]} rows")
            kept.add(number, mine, arrays)
            cut = bool(later) and number == request["epochs"] - 1 > 0 and later <= len(keys[-1]) < request["samples"]
            if cut:
                break
    kept.save(request["output"])
    return {"keys": keys, "kinds": sorted(kinds), "cut": cut}


def copied(keys: Any) -> Any:
    """Keys of a batch that stay what they are when its memory is used again."""
    return keys if isinstance(keys, list) else host(keys).copy()


def wrong_keys(epochs: list[list[Any]], samples: int) -> str:
    """What is wrong with the keys of measured epochs; empty if nothing."""
    for number, epoch in enumerate(epochs):
        faults = key_faults(np.concatenate([np.asarray(keys, np.int64).reshape(-1) for keys in epoch]), samples)
        if faults:
            return f"epoch {number} of {len(epochs)} that were measured: {faults}"
    return ""


def measure(work: Workload, epochs: Iterator[Iterator[Batch]], request: dict[str, Any], started: float) -> dict[str, Any]:
    """Whole epochs until ``seconds`` have passed since the first batch; cold: one epoch, from before the first batch on."""
    cold, paced = work.measure == "cold", work.measure == "paced"
    step = request["step"] if paced else 0.0
    first, skipped, cpu_first = 0.0, 0, 0.0
    if cold:
        cpu_first, started = cpu_now(started)
        first = started
    arrived = last = waited = 0.0
    samples = count = batches = starved = 0
    came: list[list[Any]] = []
    picked = Picked(work, request.get("picked", 0))
    while True:
        came.append([])
        asked = time.perf_counter()
        for batch in next(epochs):
            wait = time.perf_counter() - asked
            touch(batch.arrays)
            samples += len(batch.keys)
            came[-1].append(copied(batch.keys))
            if picked.wanted and len(batch.keys):
                picked.offer(batch)
            if step:
                time.sleep(step)
            last = time.perf_counter()
            arrived = arrived or last
            if not first:
                first, skipped, cpu_first = last, samples, tree_cpu()
            else:
                waited, batches, starved = waited + wait, batches + 1, starved + (wait > STARVED_SECONDS)
            asked = time.perf_counter()
        count += 1
        if not samples:
            raise ValueError("the epoch had no batch")
        if cold or last - first >= request["seconds"]:
            break
    cpu = tree_cpu() - cpu_first
    if samples == skipped:
        raise ValueError("one batch is all there is: nothing to measure between the first and the last")
    if picked.wanted:
        picked.save(request["output"])
    answer = {
        "samples_s": (samples - skipped) / (last - first),
        "cpu_s_1000": 1000 * cpu / (samples - skipped),
        "first_batch_s": arrived - step - started,
        "samples": samples,
        "epochs": count,
        "measured_samples": samples - skipped,
        "measured_s": last - first,
        "wrong_keys": wrong_keys(came, request["samples"]),
    }
    return answer | ({"waiting": waited / (last - first), "starved_steps": starved / batches} if paced else {})


def read_keys(read: Callable[[int], Any], request: dict[str, Any], started: float) -> dict[str, Any]:
    """Single reads at random for ``seconds``: reads/s and the distribution of their latency."""
    rng = np.random.default_rng(request["seed"])
    times: list[float] = []
    total = 0
    first, cpu = 0.0, tree_cpu()
    begin = time.perf_counter()
    while True:
        for key in rng.integers(0, request["samples"], 1000).tolist():
            asked = time.perf_counter()
            data = np.frombuffer(read(key), np.uint8)
            total += int(data[::4096].sum())
            done = time.perf_counter()
            first = first or done
            times.append(done - asked)
        if done - begin >= request["seconds"]:
            break
    cpu = tree_cpu() - cpu
    p50, p99 = np.quantile(times, [0.5, 0.99]).tolist()
    return {
        "samples_s": len(times) / (done - begin),
        "cpu_s_1000": 1000 * cpu / len(times),
        "first_batch_s": first - started,
        "samples": len(times),
        "measured_samples": len(times),
        "measured_s": done - begin,
        "latency_p50_us": p50 * 1e6,
        "latency_p99_us": p99 * 1e6,
    }


def read_digests(read: Callable[[int], Any], request: dict[str, Any]) -> dict[str, Any]:
    """Digests of what chosen keys read as."""
    keys = [key for key in range(request["samples"]) if chosen(key, request["samples"], request["wanted"][0])]
    return {"digests": {str(key): hashlib.sha256(bytes(read(key))).hexdigest() for key in keys}}


def no_state() -> None:
    """The state of a subject that has none to load."""


def save_state(subject: Any, work: Workload, request: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """Consume ``position`` batches of an epoch and keep the state after the last; gives the keys consumed."""
    if not hasattr(subject, "resumable"):
        epoch = next(subject.batches(work, Path(request["prepared"]), settings))
        state: Callable[[], Any] = no_state
    else:
        epoch, state = subject.resumable(work, Path(request["prepared"]), settings, None)
    keys: list[int] = []
    for number, batch in enumerate(epoch, 1):
        keys += np.asarray(batch.keys).reshape(-1).tolist()
        if number == request["position"]:
            Path(request["output"]).write_text(json.dumps(state()))
            return {"keys": keys, "loads_state": hasattr(subject, "resumable")}
    raise ValueError(f"the epoch ended before batch {request['position']}")


def resume(subject: Any, work: Workload, request: dict[str, Any], settings: Settings, started: float) -> dict[str, Any]:
    """Seconds from nothing to the batch after a saved state, and the keys from there to the end of the epoch."""
    cpu, started = cpu_now(started)
    if not hasattr(subject, "resumable"):
        epoch = next(subject.batches(work, Path(request["prepared"]), settings))
        for _ in range(request["position"]):
            next(epoch)
    else:
        state = json.loads(Path(request["state"]).read_text())
        epoch, _ = subject.resumable(work, Path(request["prepared"]), settings, state)
    batch = next(epoch)
    touch(batch.arrays)
    seconds, cpu = time.perf_counter() - started, tree_cpu() - cpu
    keys = np.asarray(batch.keys).reshape(-1).tolist()
    if request["rest"]:
        for batch in epoch:
            keys += np.asarray(batch.keys).reshape(-1).tolist()
    return {"resume_s": seconds, "cpu_s": cpu, "keys": keys}


def build(subject: Any, work: Workload, request: dict[str, Any], started: float) -> dict[str, Any]:
    """The source's pictures into the subject's format, at the directory ``prepared``."""
    target = Path(request["prepared"])
    cpu, started = cpu_now(started)
    subject.build(work, Path(request["source"]), target, request["workers"])
    seconds = time.perf_counter() - started
    return {
        "samples_s": request["samples"] / seconds,
        "cpu_s_1000": 1000 * (tree_cpu() - cpu) / request["samples"],
        "bytes": folder_bytes(target),
        "measured_samples": request["samples"],
        "measured_s": seconds,
    }


def check_built(subject: Any, work: Workload, request: dict[str, Any]) -> dict[str, Any]:
    """Build once; every key and size, and the bytes of chosen keys, go back."""
    target = Path(request["prepared"])
    subject.build(work, Path(request["source"]), target, request["workers"])
    keys, kept_keys, kept = [], [], []
    for key, data in subject.stored(work, target):
        keys.append(key)
        if chosen(key, request["samples"], request["wanted"][0]):
            kept_keys.append(key)
            kept.append(np.frombuffer(data, np.uint8))
    ends = np.cumsum([len(data) for data in kept])
    np.savez(request["output"], keys=np.array(kept_keys), ends=ends, data=np.concatenate([*kept, np.zeros(0, np.uint8)]))
    return {"keys": [keys], "kinds": []}


def act(subject: Any, work: Workload, request: dict[str, Any], settings: Settings, started: float) -> dict[str, Any]:
    """Modes ``check`` and ``measure``, for each way of measuring; ``state`` for the one that resumes."""
    checking = request["mode"] == "check"
    prepared = Path(request["prepared"])
    if request["mode"] == "state":
        return save_state(subject, work, request, settings)
    if work.measure == "build":
        return check_built(subject, work, request) if checking else build(subject, work, request, started)
    if work.measure == "reads":
        read = subject.reader(work, prepared, settings)
        return read_digests(read, request) if checking else read_keys(read, request, started)
    if work.measure == "resume" and not checking:
        return resume(subject, work, request, settings, started)
    epochs = subject.batches(work, prepared, settings)
    return check(work, epochs, request) if checking else measure(work, epochs, request, started)


def end_with_parent() -> None:
    """Have the kernel end this process with the harness, however that ends."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def main() -> None:
    """Do what the request says."""
    end_with_parent()
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
        own = subject.versions() if hasattr(subject, "versions") else {}
        answer |= {"workers": subject.workers(work, request["cores"]), "versions": versions(request["subject"]) | own}
    elif request["mode"] == "prepare":
        subject.prepare(work, Path(request["source"]), Path(request["prepared"]))
        answer |= {"seconds": time.perf_counter() - imported}
    else:
        settings = Settings(request["workers"], request["seed"], Path(request["source"]))
        answer |= act(subject, work, request, settings, imported)
    os.write(answer_to, json.dumps(answer).encode() + b"\n")
    # Not through interpreter shutdown: what a library does there is not measured, and must not hang the harness.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
