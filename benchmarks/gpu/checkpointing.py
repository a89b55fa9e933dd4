"""Activation checkpointing: milliseconds of a step against the peak of memory. The whole model is trained: frozen layers keep nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.gpu.log import Log, summary
from benchmarks.gpu.rungs import Plan
from benchmarks.gpu.subjects import Bench, Setting, Subject, free, settle
from lftrain import Runtime
from lftrain.memory.activations import MB, choose, recompute
from lftrain.memory.activations import measure as measured_blocks

BUDGETS = (0.75, 0.5, 0.25)
"""Parts of what all blocks would keep."""
TORCH_BUDGETS = (1.0, 0.5)
STEPS = 6


def measure(bench: Bench, log: Log, plan: Plan) -> None:
    """None, all, and the knapsack under three budgets, on one model, interleaved."""
    part = f"checkpointing-{bench.batch}"
    log.fresh(part)
    subject = Subject("checkpointing", bench, Setting(trunk=True))
    runtime = subject.runtime
    assert runtime is not None
    try:
        subject.warm_up(2)
        blocks = runtime.blocks
        found = measured_blocks(blocks, runtime._forward)
        whole = sum(one.bytes for one in found)
        places: dict[str, Sequence[int]] = {"none": (), "all": range(len(blocks))}
        places |= {f"budget {share:.0%}": choose(found, share * whole) for share in BUDGETS}
        log.put(part, blocks=[{"name": one.name, "mb": round(one.bytes / MB, 3), "ms": round(one.ms, 3)} for one in found])
        log.say(part, f"{len(blocks)} blocks keep {whole / MB:.0f} MB")
        times: dict[str, list[float]] = {name: [] for name in places}
        peaks: dict[str, list[float]] = {name: [] for name in places}
        plain = [block.forward for block in blocks]
        for number in range(plan.rounds):
            for name in list(places)[:: 1 if number % 2 == 0 else -1]:
                recompute(blocks, places[name])
                try:
                    subject.timed(1)
                    begin_peak(bench.device)
                    times[name].append(subject.timed(min(plan.steps, STEPS)))
                    peaks[name].append(peak_mb(bench.device))
                finally:
                    for block, forward in zip(blocks, plain, strict=True):
                        block.forward = forward
            curve = {name: point(times[name], peaks[name], places[name], found) for name in places}
            log.put(part, curve=curve, kept_by_all_mb=round(whole / MB, 1), still_mb=still(runtime))
            log.say(
                part, f"round {number + 1}:", *(f"{name} {times[name][-1]:.1f} ms {peaks[name][-1]:.0f} MB," for name in places)
            )
    finally:
        subject.close()
    del subject, runtime, blocks, plain
    free(bench.device)


def measure_torch(bench: Bench, log: Log, plan: Plan) -> None:
    """torch.compile's own budget, beside compiled blocks that keep everything. Each is compiled anew, so one after the other."""
    part = f"torch-budget-{bench.batch}"
    log.fresh(part)
    curve: dict[str, Any] = {}
    before = torch._functorch.config.activation_memory_budget
    try:
        for budget in TORCH_BUDGETS:
            subject = Subject(f"torch {budget:.0%}", bench, Setting(trunk=True, compiled=True, torch_budget=budget))
            try:
                subject.warm_up(3)
                times, peaks = [], []
                for _ in range(plan.rounds):
                    begin_peak(bench.device)
                    times.append(subject.timed(min(plan.steps, STEPS)))
                    peaks.append(peak_mb(bench.device))
                first = [round(value, 1) for value in subject.first_ms]
                curve[f"{budget:.0%}"] = {**point(times, peaks, None, ()), "first_ms": first, **subject.told()}
            finally:
                subject.close()
            del subject
            free(bench.device)
            log.put(part, curve=curve)
            log.say(part, f"{budget:.0%}: {times[-1]:.1f} ms {peaks[-1]:.0f} MB")
    finally:
        torch._functorch.config.activation_memory_budget = before


def point(times: list[float], peaks: list[float], places: Sequence[int] | None, found: Sequence[Any]) -> dict[str, Any]:
    """One place on the curve."""
    values: dict[str, Any] = {"ms": summary(times), "rounds_ms": times, "peak_mb": summary(peaks), "rounds_peak_mb": peaks}
    if places is not None:
        values["recomputed"] = len(places)
        values["kept_mb"] = round(sum(one.bytes for number, one in enumerate(found) if number not in places) / MB, 1)
    return values


def begin_peak(device: torch.device) -> None:
    """From here on."""
    if device.type == "cuda":
        settle(device)
        torch.cuda.reset_peak_memory_stats(device)


def peak_mb(device: torch.device) -> float:
    """Since :func:`begin_peak`; 0 without a GPU, where nobody counts."""
    return round(torch.cuda.max_memory_allocated(device) / MB, 1) if device.type == "cuda" else 0.0


def still(runtime: Runtime) -> float:
    """MB of parameters and of what the optimiser keeps: there whatever is recomputed."""
    states = [one for state in runtime.optimizer.state.values() for one in state.values() if isinstance(one, torch.Tensor)]
    return round(float(sum(one.nbytes for one in (*runtime.model.parameters(), *states))) / MB, 1)
