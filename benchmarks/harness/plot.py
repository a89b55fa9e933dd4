"""Plots of records, and of nothing else: one horizontal bar a subject, whiskers from the slowest to the fastest repeat."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.harness.report import title_of
from benchmarks.record import read

# Title of the axis, and factor, by the figure a record's subjects are compared by.
_AXES = {"samples_s": "samples/s (longer is better)", "resume_s": "seconds to the next batch (shorter is better)"}


def bars(record: dict[str, Any]) -> list[tuple[str, float, float, float]]:
    """Title, median, smallest and largest repeat of every subject that ran, in the record's order."""
    metric = record["options"].get("metric") or "samples_s"
    found = []
    for label, result in record["results"].items():
        if result["status"] == "ok":
            figure = result[metric]
            found.append((title_of(label, result, record), figure["median"], figure["min"], figure["max"]))
    return found


def digest_of(record: dict[str, Any]) -> str:
    """What a plot shows, as a digest that is written into it."""
    about, machine = record["options"], record["machine"]
    shown = [bars(record), *(about[name] for name in ("workload", "title", "data", "cores")), machine["cpu"]]
    return hashlib.sha256(msgspec.json.encode(shown)).hexdigest()


def stale(records: Iterable[Path], folder: Path) -> list[str]:
    """Plots in a folder that are missing or do not show what their record says."""
    found = []
    for path in records:
        plot = folder / f"{path.stem}.svg"
        if not plot.exists() or digest_of(read(path)) not in plot.read_text():
            found.append(plot.name)
    return found


def surplus(records: Iterable[Path], folder: Path) -> list[str]:
    """Plots in a folder that no record is shown by."""
    known = {f"{path.stem}.svg" for path in records}
    return sorted(path.name for path in folder.glob("*.svg") if path.name not in known)


def draw(record: dict[str, Any], path: Path) -> None:
    """Write the plot of a record as SVG (or what else the path ends in).

    Raises:
        ModuleNotFoundError: matplotlib is not installed; ``pip install 'lfdata[plots]'``.
    """
    import matplotlib

    matplotlib.use("Agg")
    # Text as text, and no date or random ids: the same record gives the same file.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "lfbench", "font.size": 9})
    from matplotlib.figure import Figure

    rows = bars(record)
    figure = Figure(figsize=(7.5, 0.9 + 0.32 * len(rows)), layout="constrained")
    axes: Any = figure.subplots()
    places = range(len(rows))
    medians = [median for _, median, _, _ in rows]
    spread = [[median - low for _, median, low, _ in rows], [high - median for _, median, _, high in rows]]
    colours = ["#c44e52" if place == 0 else "#8c8c8c" for place in places]
    axes.barh(places, medians, xerr=spread, color=colours, height=0.7, error_kw={"elinewidth": 1, "capsize": 2})
    axes.set_yticks(places, [title for title, *_ in rows])
    axes.invert_yaxis()
    axes.set_xlabel(_AXES[record["options"].get("metric") or "samples_s"])
    about, machine = record["options"], record["machine"]
    axes.set_title(
        f"{about['workload']}: {about['title']}\n{about['data']}, {about['cores']} cores of {machine['cpu']}", fontsize=9
    )
    axes.spines[["top", "right"]].set_visible(False)
    metadata = {"Date": None, "Description": digest_of(record)} if path.suffix == ".svg" else None
    figure.savefig(path, metadata=metadata)
