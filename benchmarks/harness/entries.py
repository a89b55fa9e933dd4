"""The subjects of a run: what each is, what it said, and how that goes into the record."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.statistics import median_bounds, verdict

SUBJECTS = (
    "lfdata_loader",
    "lfdata_reader",
    "bare_calls",
    "native_calls",
    "torch_memmap",
    "torch_pil",
    "torch_pillow",
    "torch_simplejpeg",
    "webdataset_",
    "streaming_",
    "litdata_",
    "spdl_",
    "spdl_simplejpeg",
    "dali_cpu",
    "dali_gpu",
    "grain_",
    "ffcv_",
    "lfdata_threads",
    "lfdata_numpy",
    "lfdata_blocks",
    "lfdata_webp",
    "ffcv_raw",
    "grain_defaults",
)


@dataclass(slots=True)
class Entry:
    """One subject of a run. ``label`` tells two runs of one subject apart."""

    label: str
    subject: str
    title: str = ""
    status: str = "ok"
    reason: str = ""
    slowed: float = 0.0
    prepared: Path = Path()
    state: Path = Path()
    position: int = 0
    repeats: list[dict[str, Any]] = field(default_factory=list)
    result: dict[str, Any] = field(default_factory=dict)


def uses_package(subject: str) -> bool:
    """Whether a subject is made of this package."""
    return subject.startswith(("lfdata", "native"))


def subject_module(name: str) -> Any:
    """A subject's module; importing it imports no peer."""
    return importlib.import_module(f"benchmarks.subjects.{name}")


def counts_of(offered: Sequence[int], asked: Sequence[int]) -> list[int]:
    """Worker counts to try: those asked for, as far as a subject has a choice; 0 only where it has a way to work without."""
    if len(offered) == 1:
        return list(offered)
    return [workers for workers in asked if workers or 0 in offered] or list(offered)


def entries_of(names: Sequence[str], slow: float = 0.0) -> list[Entry]:
    """Entries for subject names; a name given again gets a number. ``slow``: the share of its time that the last one is kept stopped."""
    entries: list[Entry] = []
    for name in names:
        again = sum(entry.subject == name for entry in entries)
        entries.append(Entry(f"{name}#{again + 1}" if again else name, name))
    if slow:
        entries[-1].slowed = slow
    return entries


def as_record(entries: Sequence[Entry], metric: str) -> dict[str, Any]:
    """Results for the record, with ratios to the first subject that ran: above 1 where the first is better."""
    first = next((entry for entry in entries if entry.status == "ok"), None)
    results: dict[str, Any] = {}
    for entry in entries:
        about = {"subject": entry.subject, "title": entry.title, "status": entry.status, "reason": entry.reason}
        results[entry.label] = about | {"planted_slowdown": entry.slowed} | entry.result
        if entry.status == "ok" and first is not None and entry is not first:
            pair = [first.result[metric]["repeats"], entry.result[metric]["repeats"]]
            ratio, p, differs = verdict(*(pair[::-1] if metric == "resume_s" else pair), paired=True)
            results[entry.label]["first_over_this"] = {"of": first.label, "ratio": ratio, "p": p, "differs": differs}
            cpu = [found.result.get("cpu_s_1000", {}).get("repeats", [0.0]) for found in (first, entry)]
            if min(map(min, cpu)) > 0:
                results[entry.label]["cpu_first_over_this"] = median_bounds([a / b for a, b in zip(*cpu, strict=True)])
    return results
