"""DDP's communication beside computation: how long a step's NCCL kernels run while nothing computes, over bucket sizes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.gpu.log import summary
from benchmarks.gpu.many.rank import meet
from benchmarks.gpu.many.rates import bench_of, hold
from benchmarks.gpu.subjects import Setting, Subject, free, on_gpu, settle
from lftrain.comm.group import Group

BUCKETS_MB = (1.0, 25.0, 100.0)
NO_TRACE = "not measured: without CUDA there are no kernels to trace"
# Of names of what the device does: neither computes.
MOVES = ("Memcpy", "Memset")
Spans = list[tuple[float, float]]


def settings() -> dict[str, Setting]:
    """By name."""
    return {
        f"{size:g} MB, {'views' if view else 'copies'}": Setting(bucket_mb=size, bucket_view=view)
        for view in (True, False)
        for size in BUCKETS_MB
    }


# -- spans ------------------------------------------------------------------------------------------------------------


def union(spans: Iterable[tuple[float, float]]) -> Spans:
    """The same stretches, in order and apart."""
    found: Spans = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def length(spans: Spans) -> float:
    """Of stretches that are apart."""
    return sum(end - start for start, end in spans)


def exposed(communication: Iterable[tuple[float, float]], others: Iterable[tuple[float, float]]) -> float:
    """How long communication runs while nothing else does."""
    first, both = union(communication), union(others)
    return length(union([*first, *both])) - length(both)


def classified(events: Iterable[tuple[str, float, float]]) -> tuple[Spans, Spans]:
    """Of what the device did (name, start, end): NCCL's kernels, and all other kernels."""
    communication, others = [], []
    for name, start, end in events:
        if "nccl" in name.lower():
            communication.append((start, end))
        elif not name.startswith(MOVES):
            others.append((start, end))
    return communication, others


# -- on a rank --------------------------------------------------------------------------------------------------------


def on_rank(group: Group, told: dict[str, Any]) -> dict[str, Any]:
    """Each setting by itself, on a batch that is there."""
    bench, found = bench_of(group, told), {}
    for name, setting in settings().items():
        subject = Subject(name, bench, setting)
        try:
            hold(subject)
            subject.warm_up(told["lead"] + 1)
            ms = []
            for _ in range(told["rounds"]):
                meet(group)
                ms.append(subject.timed(told["steps"]))
            meet(group)
            found[name] = {"ms": ms, **traced(subject, group, told["traced"])}
        finally:
            subject.close()
        del subject
        free(bench.device)
    return {"settings": found}


def traced(subject: Subject, group: Group, steps: int) -> dict[str, Any]:
    """Some steps more; rank 0 looks at them. ``None`` with the reason where nothing can be seen."""
    if group.device.type != "cuda":
        subject.timed(steps)
        return {"exposed_ms": None, "why": NO_TRACE}
    from torch.autograd.profiler_util import FunctionEvent
    from torch.profiler import ProfilerActivity, profile

    if group.rank:
        subject.timed(steps)
        return {}
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        subject.runs.advance(steps)
        settle(group.device)
    events: list[FunctionEvent] = list(seen.events() or ())
    work = [(one.name, one.time_range.start, one.time_range.end) for one in events if on_gpu(one)]
    communication, others = classified(work)
    if not communication:
        return {"exposed_ms": None, "why": f"not measured: no NCCL kernel among {len(work)} events of the trace"}
    # Microseconds.
    scale = 1e3 * steps
    return {
        "exposed_ms": round(exposed(communication, others) / scale, 4),
        "communication_ms": round(length(union(communication)) / scale, 4),
        "computation_ms": round(length(union(others)) / scale, 4),
        "kernels": round(len(communication) / steps, 1),
        "traced_steps": steps,
    }


# -- what is concluded ------------------------------------------------------------------------------------------------


def concluded(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of one world size: by setting the time of a step, by the slowest rank, and what the trace of rank 0 says."""
    found = {}
    for name, first in ranks[0]["settings"].items():
        ms = [max(one) for one in zip(*(rank["settings"][name]["ms"] for rank in ranks), strict=True)]
        step = summary(ms)
        one = {"ms": step, **{key: value for key, value in first.items() if key != "ms"}}
        if one.get("exposed_ms") is not None:
            one["exposed_share"] = round(one["exposed_ms"] / step["median"], 4)
            one["hidden_share"] = round(1 - one["exposed_ms"] / max(one["communication_ms"], 1e-9), 4)
        found[name] = one
    return found
