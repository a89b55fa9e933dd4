"""The ladder: from torch's DataLoader with its defaults to compiled blocks in a graph of the whole step, one change a rung; (f) computes
other numbers."""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.gpu.log import Log, ratios, summary
from benchmarks.gpu.subjects import Bench, Setting, Subject, busy_ms, free
from lftrain.compute.fp8 import lacking

GRAPH_WARMUP = 3
"""Eager steps before a capture (graph.warmup)."""
FIRST = GRAPH_WARMUP + 2
PROFILED = 3
REFERENCE = "a"


@dataclass(frozen=True)
class Plan:
    """How long things are measured: rounds, steps of a round that count, steps before them, worker counts that are tried and steps of a try."""

    rounds: int = 5
    steps: int = 15
    lead: int = 2
    workers: tuple[int, ...] = (2, 4, 8, 16)
    tried: int = 10


def rungs(workers: int) -> dict[str, Setting]:
    """By name, in order. ``loop`` is (a) without the runtime, ``graph`` is (d) in a graph without compiled blocks, ``e32`` is (e) with trained
    weights cast anew each step, as all before have it: the numbers are the same. (f) goes beyond (a) to (e), which all compute in bf16: its
    frozen layers do in float8."""
    plain = Setting(loader="torch", workers=workers, fused=False)
    return {
        "a0": Setting(loader="torch-defaults", fused=False),
        "loop": Setting(loader="torch", workers=workers, fused=False, runtime=False),
        "a": plain,
        "b": Setting(fused=False),
        "c": Setting(),
        "d": Setting(compiled=True),
        "graph": Setting(graph=True),
        "e32": Setting(compiled=True, graph=True),
        "e": Setting(compiled=True, graph=True, weights="compute"),
        "f": Setting(compiled=True, graph=True, weights="compute", frozen="fp8"),
    }


def measure(bench: Bench, log: Log, plan: Plan) -> None:
    """All rungs, interleaved; written after each round."""
    part = f"ladder-{bench.batch}"
    log.fresh(part)
    workers = best_workers(bench, log, plan, part)
    wanted = rungs(workers)
    if why := lacking(bench.device):
        del wanted["f"]
        log.say(part, "f is not run: it", why)
    subjects: dict[str, Subject] = {}
    with contextlib.ExitStack() as stack:
        # What is compiled and captured first: no other loader is at work then.
        order = sorted(wanted.items(), key=lambda one: (not one[1].compiled, one[1].loader != "lfdata"))
        for name, setting in order:
            subjects[name] = subject = Subject(name, bench, setting)
            stack.callback(subject.close)
            subject.warm_up(FIRST)
            log.put(part, warmed={one.name: warmed(one) for one in subjects.values()})
            log.say(part, name, "first steps, ms:", *(f"{value:.0f}" for value in subject.first_ms), hindrance(subject))
        times: dict[str, list[float]] = {name: [] for name in wanted}
        parts: dict[str, list[dict[str, float]]] = {name: [] for name in times}
        for number in range(plan.rounds):
            for name in list(times)[:: 1 if number % 2 == 0 else -1]:
                subject = subjects[name]
                subject.timed(plan.lead)
                subject.parts()
                times[name].append(subject.timed(plan.steps))
                parts[name].append(subject.parts())
            log.put(part, rungs={name: result(bench, subjects[name], times, parts[name]) for name in times})
            log.say(part, f"round {number + 1}, ms:", *(f"{name} {found[-1]:.1f}" for name, found in times.items()))
        busy = {name: profiled(subjects[name]) for name in times}
        found = {name: result(bench, subjects[name], times, parts[name], busy[name]) for name in times}
        log.put(part, rungs=found)
    del subjects, subject
    bench.frozen.clear()
    free(bench.device)
    for name, one in found.items():
        log.say(
            part,
            f"{name:5} {one['ms']['median']:8.2f} ms {one['samples_per_s']:8.1f}/s  x{one['times_a']['median']:.2f}",
            idle(one),
        )


def best_workers(bench: Bench, log: Log, plan: Plan, part: str) -> int:
    """Worker processes with which (a) is fastest."""
    found: dict[int, list[float]] = {}
    for count in plan.workers:
        subject = Subject(f"{count} workers", bench, Setting(loader="torch", workers=count, fused=False))
        try:
            subject.warm_up(3)
            found[count] = [subject.timed(plan.tried) for _ in range(2)]
        finally:
            subject.close()
        del subject
        free(bench.device)
        log.put(part, workers={str(number): values for number, values in found.items()})
        log.say(part, f"(a) with {count} workers:", *(f"{value:.1f} ms" for value in found[count]))
    return min(found, key=lambda count: min(found[count]))


def warmed(subject: Subject) -> dict[str, Any]:
    """What it took until the steps were alike."""
    return {
        "setting": asdict(subject.setting),
        "built_s": round(subject.built_s, 3),
        "first_ms": [round(value, 2) for value in subject.first_ms],
        **subject.told(),
    }


def hindrance(subject: Subject) -> str:
    """Why something asked for is not so."""
    return "; ".join(one for one in subject.told().get("events", []) if one.startswith(("no graph", "eager block")))


def result(
    bench: Bench,
    subject: Subject,
    times: dict[str, list[float]],
    parts: list[dict[str, float]],
    busy: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Of a rung so far: ``waiting_share`` is the device's wait for data and copies by the runtime's own events, ``idle_share`` all time in
    which it did nothing."""
    found = times[subject.name]
    ms = summary(found)
    values: dict[str, Any] = {
        "setting": asdict(subject.setting),
        "rounds_ms": [round(value, 3) for value in found],
        "ms": ms,
        "samples_per_s": round(1e3 * bench.batch / ms["median"], 2),
        "times_a": ratios(times[REFERENCE], found),
        "parts_ms": parts,
        "waiting_share": waiting(parts),
        "loss": subject.loss(),
        **subject.told(),
    }
    if busy is not None:
        values |= busy
        if (device := busy.get("busy_ms")) is not None:
            values["idle_share"] = round(max(0.0, 1 - device / ms["median"]), 4)
    return values


def waiting(parts: list[dict[str, float]]) -> float | None:
    """Of the time of steps, the part in which the device waited for data."""
    total = sum(sum(one.values()) for one in parts)
    return round(sum(one.get("data", 0.0) + one.get("copy", 0.0) for one in parts) / total, 4) if total else None


def profiled(subject: Subject) -> dict[str, Any]:
    """Busy time of some steps, or why it is not known."""
    try:
        subject.timed(1)
        found = busy_ms(lambda: subject.runs.advance(PROFILED), subject.bench.device, PROFILED)
    except RuntimeError as error:
        return {"busy_ms": None, "busy_why": str(error).splitlines()[0]}
    return {"busy_ms": None if found is None else round(found, 3)}


def idle(found: dict[str, Any]) -> str:
    """For the terminal."""
    share = found.get("idle_share")
    return f"idle {share:.0%}" if share is not None else ""
