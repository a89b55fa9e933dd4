"""What options cost: accumulation and fp16 beside the plain step, eager and as a graph; ``deterministic`` in a process of its own."""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
from dataclasses import asdict, replace
from typing import Any

import torch

from benchmarks.gpu.log import Log, ratios, summary
from benchmarks.gpu.rungs import FIRST, Plan, hindrance
from benchmarks.gpu.subjects import Bench, Setting, Subject, free

STEPS = 10
SECONDS = 400


def settings(batch: int) -> dict[str, Setting]:
    """By name; the first of each kind is what the others are compared with."""
    micro = min(4, batch)
    one = Setting()
    eager = {
        f"bf16 1x{batch}": one,
        f"bf16 {micro}x{batch // micro}": replace(one, accumulate=micro),
        f"fp16 1x{batch}": replace(one, precision="fp16"),
    }
    return {
        f"{kind} {name}": replace(each, graph=kind == "graph") for kind in ("eager", "graph") for name, each in eager.items()
    }


def measure(bench: Bench, log: Log, plan: Plan) -> None:
    """All of them, interleaved."""
    part = f"costs-{bench.batch}"
    log.fresh(part)
    interleaved(bench, log, plan, part, settings(bench.batch))


def deterministic(bench: Bench, log: Log, plan: Plan) -> None:
    """Only algorithms that give the same bits, eager and as a graph. For the whole process, so nothing else is measured in it."""
    part = f"deterministic-{bench.batch}"
    log.fresh(part)
    wanted = {f"{kind} deterministic": Setting(graph=kind == "graph", deterministic=True) for kind in ("eager", "graph")}
    try:
        interleaved(bench, log, plan, part, wanted)
    except RuntimeError as error:
        # An operation without such an algorithm: torch names it.
        log.put(part, failed=str(error).splitlines()[0])
        log.say(part, "failed:", str(error).splitlines()[0])
    finally:
        torch.use_deterministic_algorithms(False)


def in_own_process(bench: Bench, chosen: argparse.Namespace, log: Log) -> None:
    """:func:`deterministic`, with the same options, into the same record."""
    words = [sys.executable, "-m", "benchmarks.gpu.ladder", "--only", "deterministic", "--data", str(bench.folder)]
    words += ["--output", str(chosen.output), "--batch", str(chosen.batch), "--rounds", str(chosen.rounds)]
    words += ["--device", chosen.device, "--backend", bench.backend]
    words += [*(["--tiny"] if chosen.tiny else []), *(["--steps", str(chosen.steps)] if chosen.steps else [])]
    part = f"deterministic-{bench.batch}"
    try:
        done = subprocess.run(words, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        log.put(part, failed=f"not done after {SECONDS} s")
        return
    if done.returncode:
        log.put(part, failed=f"exit status {done.returncode}")
        return
    log.adopt()
    plain = log.results[f"costs-{bench.batch}"]["settings"]
    costs = {}
    for name, one in log.results[part].get("settings", {}).items():
        other = next(found for key, found in plain.items() if key.startswith(name.partition(" ")[0]))
        costs[name] = round(one["ms"]["median"] / other["ms"]["median"], 4)
    log.put(part, times_as_slow=costs)
    log.say(part, "times as slow:", costs)


def interleaved(bench: Bench, log: Log, plan: Plan, part: str, wanted: dict[str, Setting]) -> None:
    """Times of settings, in rounds."""
    times: dict[str, list[float]] = {name: [] for name in wanted}
    with contextlib.ExitStack() as stack:
        subjects = {}
        for name, setting in wanted.items():
            subjects[name] = subject = Subject(name, bench, setting)
            stack.callback(subject.close)
            subject.warm_up(FIRST)
            log.say(part, name, "first steps, ms:", *(f"{value:.0f}" for value in subject.first_ms), hindrance(subject))
        for number in range(plan.rounds):
            for name in list(wanted)[:: 1 if number % 2 == 0 else -1]:
                subjects[name].timed(1)
                times[name].append(subjects[name].timed(min(plan.steps, STEPS)))
            log.put(part, settings={name: _result(subjects[name], times) for name in wanted})
            log.say(part, f"round {number + 1}, ms:", *(f"{name} {found[-1]:.1f}," for name, found in times.items()))
    del subjects, subject
    bench.frozen.clear()
    free(bench.device)


def _result(subject: Subject, times: dict[str, list[float]]) -> dict[str, Any]:
    kind = subject.name.partition(" ")[0]
    first = next(name for name in times if name.startswith(kind))
    found = times[subject.name]
    return {
        "setting": asdict(subject.setting),
        "first_ms": [round(value, 2) for value in subject.first_ms],
        "rounds_ms": [round(value, 3) for value in found],
        "ms": summary(found),
        "times_as_fast": ratios(times[first], found),
        "as": first,
        "loss": subject.loss(),
        **subject.told(),
    }
