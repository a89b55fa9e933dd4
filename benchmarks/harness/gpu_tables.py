"""Tables of the records of ``benchmarks.gpu``: ``<!-- gpu: NAME PART -->`` table ``<!-- end -->``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Columns = dict[str, Callable[[dict[str, Any]], str]]


def spread(figure: dict[str, Any] | None, form: str, times: float = 1.0) -> str:
    """Median [least, most]."""
    if figure is None:
        return ""
    return f"{times * figure['median']:{form}} [{times * figure['min']:{form}}, {times * figure['max']:{form}}]"


FEED: Columns = {
    "ms a step": lambda found: spread(found["ms"], ".1f"),
    "rows/s": lambda found: f"{found['rows_per_s']['median']:,.0f}",
    "device idle for data, %": lambda found: spread(
        found.get("idle_against_resident_uint8") or found.get("idle_against_resident"), ".1f", 100
    ),
    "host waits, ms": lambda found: f"{found['waited_ms']['median']:.2f}",
    "99 % / median of a step": lambda found: f"{found['p99_over_p50']['median']:.2f}",
    "CPU-s / 1,000 beside the consumer's": lambda found: f"{found['cpu_others_s_per_1000']['median']:.2f}",
}
LADDER: Columns = {
    "times as fast as (a)": lambda found: spread(found["times_a"], ".2f"),
    "ms a step": lambda found: spread(found["ms"], ".1f"),
    "samples/s": lambda found: f"{found['samples_per_s']:,.0f}",
    "device idle, %": lambda found: f"{100 * found['idle_share']:.0f}" if "idle_share" in found else "",
}
CURVE: Columns = {
    "ms a step": lambda found: spread(found["ms"], ".0f"),
    "peak, GB": lambda found: f"{found['peak_mb']['median'] / 1000:.1f}",
    "blocks recomputed": lambda found: str(found.get("recomputed", "by torch")),
}
COSTS: Columns = {
    "ms a step": lambda found: spread(found["ms"], ".1f"),
    "times as fast as the first of its kind": lambda found: spread(found["times_as_fast"], ".2f"),
}
ACTIVATIONS: Columns = {
    "error of the model, %": lambda found: spread(found["error"]["model"], ".1f", 100),
    "of the largest so far, %": lambda found: spread(found["error"]["max_so_far"], ",.0f", 100),
    "beyond the band": lambda found: f"{found['beyond_the_band']} of {found['held_out']}",
}
STEADY: Columns = {
    "steps": lambda found: str(found["steps"]),
    "calls for memory": lambda found: ", ".join(f"{name} {count}" for name, count in found["calls"].items()) or "0",
    "segments": lambda found: str(found["segments"]),
    "cudaMalloc": lambda found: str(found["cuda_mallocs"]),
    "cudaHostAlloc": lambda found: str(found["host_allocs"]),
    "minor faults": lambda found: str(found["minor_faults"] + found["minor_faults_of_children"]),
}

QUALITY: Columns = {
    "pairs": lambda found: str(len(found["pairs"])),
    "held-out loss, plain": lambda found: f"{found['plain_mean']:.4f}",
    "difference, %": lambda found: f"{100 * found['difference_share']:+.2f}",
    "p: worse": lambda found: f"{found['worse_p']:.3f}",
    "p: not worse by 5 %": lambda found: f"{found['not_worse_p']:.4f}",
}

RANKS: Columns = {
    "samples/s, one batch": lambda found: spread(found["resident"]["samples_per_s"], ".0f"),
    "with the loader": lambda found: spread(found["loader"]["samples_per_s"], ".0f"),
    "and feedback": lambda found: spread(found["feedback"]["samples_per_s"], ".0f"),
    "efficiency with the loader": lambda found: f"{found['efficiency']['loader']:.2f}",
    "CPU-s / 1,000": lambda found: f"{found['loader']['cpu_s_per_1000']['median']:.2f}",
}

# Records whose parts are the rows of one table, by what each of them has: ``<!-- gpu: NAME all -->``.
WHOLE = {"beyond_the_band": ("model", ACTIVATIONS), "calls": ("batches", STEADY), "not_worse_p": ("all of it", QUALITY)}
# By the name that the rows have in a part of a record.
KINDS = {
    "summary": ("fed by", FEED),
    "rungs": ("rung", LADDER),
    "curve": ("recomputed", CURVE),
    "settings": ("step", COSTS),
    "worlds": ("GPUs", RANKS),
}


def table(record: dict[str, Any], part: str) -> str:
    """One part of a record as a Markdown table, with what it was measured on below.

    Raises:
        KeyError: the record has no such part.
    """
    if part == "all":
        return _whole(record)
    made = record["results"][part]
    if worlds := {name: one for name, one in made.items() if name.isdigit()}:
        made = {**made, "worlds": worlds}
    key = next((key for key in KINDS if key in made), None)
    if key is None:
        raise KeyError(f"{part}: nothing that is known")
    name, columns = KINDS[key]
    lines = [f"| {name} | {' | '.join(columns)} |", f"|{' --- |' * (1 + len(columns))}"]
    lines += [f"| {row} | {' | '.join(one(found) for one in columns.values())} |" for row, found in made[key].items()]
    return "\n".join([*lines, "", about(record, made)])


def _whole(record: dict[str, Any]) -> str:
    results = record["results"]
    first = next(iter(results.values()))
    name, columns = next(found for key, found in WHOLE.items() if key in first)
    lines = [f"| {name} | {' | '.join(columns)} |", f"|{' --- |' * (1 + len(columns))}"]
    lines += [f"| {row} | {' | '.join(one(found) for one in columns.values())} |" for row, found in results.items()]
    gpu = (record["machine"].get("gpu") or {}).get("name", "no GPU")
    return "\n".join([*lines, "", f"{record['machine']['cores']} cores, {gpu}, {record['date'][:10]}."])


def about(record: dict[str, Any], made: dict[str, Any]) -> str:
    """The line below."""
    machine = record["machine"]
    several = machine.get("gpus") or [{}]
    gpu = (record.get("gpu") or machine.get("gpu") or several[0]).get("name", "")
    rows = [row for key in ("rungs", "curve", "settings") for row in made.get(key, {}).values()]
    repeats = min((len(row["rounds_ms"]) for row in rows), default=0)
    rounds = [way["parts_ms"]["0"] for one in made.get("worlds", {}).values() for way in (one["resident"], one["loader"])]
    repeats = repeats or min(map(len, rounds), default=0)
    # A way that failed has none, and no row.
    repeats = repeats or min((len(one) for one in made.get("repeats", {}).values() if one), default=0)
    date = (made.get("date") or record["date"])[:10]
    return f"{repeats} interleaved repeats, {machine['cores']} cores{f', {gpu}' if gpu else ''}, {date}."
