"""What of a record does not follow from its own repeats."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from benchmarks.harness.statistics import median_bounds, verdict
from benchmarks.record import RecordError, summary


def whole(record: dict[str, Any], name: str) -> None:
    """Raise :class:`RecordError` where a result of a record of ``lfbench run`` lacks what tables and plots are made of."""
    options = record["options"]
    lacking = [key for key in ("workload", "title", "data", "samples", "repeats", "cores") if key not in options]
    if lacking:
        raise RecordError(f"{name}: not a record of `lfbench run`: its options lack {', '.join(lacking)}")
    metric = options.get("metric") or "samples_s"
    for label, found in record["results"].items():
        if not isinstance(found, dict) or not isinstance(found.get("status"), str):
            raise RecordError(f"{name}: the result of {label} is empty or has no status")
        wanted = ("title", metric, "bytes_sample", "workers") if found["status"] == "ok" else ("reason",)
        lacking = [key for key in wanted if key not in found]
        if lacking:
            raise RecordError(f"{name}: the result of {label} lacks {', '.join(lacking)}")
        if found["status"] == "ok" and not (isinstance(found[metric], dict) and found[metric].get("repeats")):
            raise RecordError(f"{name}: the result of {label} has no repeats of {metric}")


def edited(record: dict[str, Any]) -> Iterator[str]:
    """Figures that are not what the repeats give: medians and extremes, and ratios to the first subject."""
    metric = record["options"].get("metric") or "samples_s"
    results = record["results"]
    for label, found in results.items():
        for name, figure in found.items():
            if isinstance(figure, dict) and figure.get("repeats"):
                again = summary(figure["repeats"])
                for part, value in again.items():
                    if part in figure and not _same(figure[part], value):
                        yield f"{label}: the {part} of {name} is {figure[part]:g}; its repeats give {value:g}"
        against = found.get("first_over_this")
        first = results.get((against or {}).get("of"), {})
        if against and metric not in first:
            yield f"{label}: its ratio is to {against.get('of')!r}, of which the record has no {metric}"
        if not against or metric not in first or metric not in found:
            continue
        pair = [first[metric]["repeats"], found[metric]["repeats"]]
        ratios = [verdict(*(pair[::-1] if metric == "resume_s" else pair), paired=paired)[0] for paired in (True, False)]
        # Records from before rounds were paired have the ratio of the medians.
        if not any(_same(against["ratio"], ratio) for ratio in ratios):
            yield f"{label}: its ratio is {against['ratio']:g}; the repeats give {ratios[0]:g}"
        said = [verdict(*(pair[::-1] if metric == "resume_s" else pair), paired=paired)[2] for paired in (True, False)]
        if against.get("differs") not in said:
            yield f"{label}: differs is {against.get('differs')}; the repeats say otherwise"
        cpu = found.get("cpu_first_over_this")
        if cpu and "cpu_s_1000" in first and "cpu_s_1000" in found:
            both = zip(first["cpu_s_1000"]["repeats"], found["cpu_s_1000"]["repeats"], strict=False)
            value = median_bounds([a / b for a, b in both])["median"]
            if not _same(cpu["median"], value):
                yield f"{label}: its ratio of CPU time is {cpu['median']:g}; the repeats give {value:g}"


def _same(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12)
