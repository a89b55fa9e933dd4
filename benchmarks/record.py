"""Measurement records: machine, versions, commit, command, options and every repeat. Plots and tables are made from these alone."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from lfdata.errors import StorageError
from lfdata.format.durable import Files

RESULTS = Path(__file__).parent / "results"
REPEATS = 5
LOAD_BEFORE = os.getloadavg()[0]
PACKAGES = ("lfdata", "numpy", "msgspec", "zstandard", "xxhash", "torch", "pillow", "pillow-simd", "soundfile", "webdataset")


def machine() -> dict[str, Any]:
    """What the figures depend on and cannot be changed by options."""
    model = next(
        (line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), platform.machine()
    )
    memory = next((int(line.split()[1]) // 1024 for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_mib": memory,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_before": LOAD_BEFORE,
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def versions() -> dict[str, str]:
    """Versions of the packages that are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The commit that was measured, with ``+`` if files differ from it; empty outside a checkout."""

    def git(*arguments: str) -> str:
        try:
            done = subprocess.run(["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
        except OSError:
            return ""
        return done.stdout.strip()

    return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")


def moment() -> dict[str, str]:
    """Date and commit, of now."""
    return {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "commit": commit()}


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median, extremes and quartiles of repeats."""
    ordered = sorted(values)
    quartiles = statistics.quantiles(ordered, n=4, method="inclusive") if len(ordered) > 1 else [ordered[0]] * 3
    return {"median": statistics.median(ordered), "min": ordered[0], "max": ordered[-1], "q1": quartiles[0], "q3": quartiles[2]}


def interleave(subjects: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Run every subject once a round, so that all see the same machine; the order turns round every other time."""
    results: dict[str, list[float]] = {name: [] for name in subjects}
    for number in range(repeats):
        names = list(subjects)[:: 1 if number % 2 == 0 else -1]
        for name in names:
            results[name].append(subjects[name]())
    return results


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Summary of the ratio of paired repeats."""
    return summary([a / b for a, b in zip(ours, theirs, strict=True)])


class RecordError(Exception):
    """Not a record, or one that cannot be used as asked. The message says why."""


def read(path: Path) -> dict[str, Any]:
    """A record as written by :func:`save`. Raises :class:`RecordError`."""
    try:
        found = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise RecordError(f"{path}: {error}") from error
    wanted = {"options": dict, "machine": dict, "results": dict, "date": str}
    if not isinstance(found, dict) or any(not isinstance(found.get(name), kind) for name, kind in wanted.items()):
        raise RecordError(f"{path}: not a record of lfbench")
    return found


def command_line(arguments: Sequence[str]) -> str:
    """The command of a record: without where it was written to, and with the last two parts of absolute paths, which are not of one machine."""
    kept: list[str] = []
    for argument in arguments:
        if kept and kept[-1] == "--output":
            kept.pop()
            continue
        option, sign, value = argument.partition("=")
        if option == "--output" and sign:
            continue
        if option.startswith("--") and sign and Path(value).is_absolute():
            argument = f"{option}={'/'.join(Path(value).parts[1:][-2:])}"
        path = Path(argument)
        kept.append("/".join(path.parts[1:][-2:]) if path.is_absolute() else argument)
    return " ".join(shlex.quote(part) for part in ["lfbench", *kept])


def writable(path: Path) -> str:
    """Why a record cannot be written there; empty if it can. To be asked before measuring for an hour."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        there = path.exists()
        with open(path, "ab"):
            pass
        if not there:
            path.unlink()
    except OSError as error:
        return f"{path}: {error.strerror}"
    return ""


def made(name: str, options: Mapping[str, Any], results: Any, began: Mapping[str, str] | None = None) -> dict[str, Any]:
    """One record. ``began``: commit and date as they were at the start (see :func:`moment`)."""
    return {
        "benchmark": name,
        "command": command_line(sys.argv[1:]),
        **(began or moment()),
        "machine": machine(),
        "versions": versions(),
        "options": dict(options),
        "results": results,
    }


def write(record: Mapping[str, Any], path: Path) -> Path:
    """A record as JSON, whole or not at all: what was at ``path`` stays until the new one is on the disk.

    Raises:
        RecordError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        Files().write_file(path, msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
    except (OSError, StorageError) as error:
        reason = error.strerror if isinstance(error, OSError) else os.strerror(error.errno or 0)
        kept = "; the earlier record stays" if path.exists() else ""
        raise RecordError(f"the record was not written: {path}: {reason}{kept}") from error
    return path


def save(name: str, options: Mapping[str, Any], results: Any, output: Path | None) -> Path:
    """Make a record and write it, by default to ``benchmarks/results/NAME.json``. Raises :class:`RecordError`."""
    return write(made(name, options, results), output or RESULTS / f"{name}.json")
