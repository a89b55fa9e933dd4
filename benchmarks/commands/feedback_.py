"""``lfbench feedback``: what the controller does when the consumer's pace changes, batch by batch."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import click

from benchmarks.record import RecordError, save, summary
from lfdata import Loader
from lfdata import transforms as T

PACES = "0.2x60,0x80,0.2x100,0.02x200,0.2x100"


def paces(text: str) -> list[tuple[float, int]]:
    """Seconds of a step, and how many steps: ``0.2x60,0x80``."""
    try:
        found = [(float(one.partition("x")[0]), int(one.partition("x")[2])) for one in text.split(",")]
    except ValueError as error:
        raise click.BadParameter(f"{text!r}: SECONDSxSTEPS,... is wanted, as {PACES}") from error
    if any(seconds < 0 or steps < 1 for seconds, steps in found):
        raise click.BadParameter(f"{text!r}: seconds from 0, steps from 1 on")
    return found


def traced(loader: Loader, steps: list[tuple[float, int]]) -> list[dict[str, Any]]:
    """Every step: when, at what pace, how long it waited, and what the controller had set by then."""
    found: list[dict[str, Any]] = []
    if not len(loader):
        raise RecordError("the data set has no whole batch: take a smaller --batch")
    batches = iter(loader)
    began = time.perf_counter()
    for pace, count in steps:
        for _ in range(count):
            asked = time.perf_counter()
            batch = next(batches, None)
            if batch is None:
                batches = iter(loader)
                batch = next(batches)
            waited = time.perf_counter() - asked
            del batch
            stats = loader.stats()
            told = stats["feedback"] or {"width": stats["width"], "ahead": None, "verdict": None}
            found.append(
                {
                    "s": round(asked - began, 4),
                    "pace": pace,
                    "waited_ms": round(1e3 * waited, 3),
                    **{name: told[name] for name in ("width", "ahead", "verdict")},
                }
            )
            time.sleep(max(0.0, pace - waited))
    return found


def phases(trace: list[dict[str, Any]], steps: list[tuple[float, int]]) -> list[dict[str, Any]]:
    """Of each pace: waits, widths it came to in its second half, and how often the width changed there."""
    found, first = [], 0
    for pace, count in steps:
        part = trace[first : first + count]
        late = part[count // 2 :]
        widths = [one["width"] for one in late]
        found.append(
            {
                "pace": pace,
                "steps": count,
                "waited_ms": summary([one["waited_ms"] for one in part]),
                "settled": {
                    "waited_ms": summary([one["waited_ms"] for one in late]),
                    "width": [min(widths), max(widths)],
                    "changes": sum(one != other for one, other in itertools.pairwise(widths)),
                    "verdicts": sorted({str(one["verdict"]) for one in late}),
                },
            }
        )
        first += count
    return found


@click.command("feedback")
@click.argument("data", type=click.Path(exists=True, path_type=Path))
@click.option("--field", default="image", show_default=True, help="Of pictures.")
@click.option("--batch", default=64, show_default=True)
@click.option("--threads", default=8, show_default=True)
@click.option("--paces", "text", default=PACES, show_default=True, help="SECONDSxSTEPS of the consumer, one after the other.")
@click.option("--output", type=click.Path(path_type=Path))
def command(data: Path, field: str, batch: int, threads: int, text: str, output: Path | None) -> None:
    """A consumer of pictures in DATA that changes its pace at once: with feedback, and with all threads at all times."""
    steps, results = paces(text), {}
    for name, feedback in (("feedback", "wait"), ("none", False)):
        fields = {field: [T.RandomResizedCrop(224), T.RandomHorizontalFlip()]}
        loader = Loader(data, batch, fields, threads=threads, engine="process", feedback=feedback)
        try:
            trace = traced(loader, steps)
        finally:
            loader.close()
        results[name] = {"phases": phases(trace, steps), "trace": trace}
        for one in results[name]["phases"]:
            settled = one["settled"]
            click.echo(
                f"{name}: {one['pace']} s a step: width {settled['width']}, {settled['changes']} changes, waited "
                f"{settled['waited_ms']['median']:.1f} ms, {', '.join(settled['verdicts'])}"
            )
    options = {"data": data.name, "field": field, "batch": batch, "threads": threads, "paces": text}
    click.echo(f"wrote {save('feedback', options, results, output)}")
