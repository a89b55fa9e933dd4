"""What all processes below one take: processor time, memory, threads. From /proc, so on Linux only."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

PROC = Path("/proc")
# Of smaps_rollup, by what they are called here. Proportional: a page that k processes map is 1/k in each, so it is counted once in all.
PARTS = {"Rss": "resident", "Pss": "all", "Pss_Anon": "own", "Pss_Shmem": "shared", "Pss_File": "files"}


def family(root: int) -> list[int]:
    """A process and all its descendants that live."""
    parents: dict[int, int] = {}
    for entry in os.listdir(PROC):
        if entry.isdecimal():
            with suppress(OSError, IndexError):
                parents[int(entry)] = int(_stat(int(entry))[1])
    found = [root] if root in parents else []
    for process in parents:
        above = parents[process]
        while above not in (0, root):
            above = parents.get(above, 0)
        if above == root and process != root:
            found.append(process)
    return found


def cpu_seconds(root: int) -> float:
    """Processor time so far of all that live."""
    tick, total = os.sysconf("SC_CLK_TCK"), 0.0
    for process in family(root):
        with suppress(OSError, IndexError):
            fields = _stat(process)
            total += (int(fields[11]) + int(fields[12])) / tick
    return total


def memory(root: int) -> dict[str, Any]:
    """MiB by :data:`PARTS`: ``resident`` counts shared pages once a process, the others once in all. ``why`` if the system does not tell."""
    total, processes, why = dict.fromkeys(PARTS.values(), 0.0), 0, ""
    for process in family(root):
        try:
            lines = (PROC / str(process) / "smaps_rollup").read_text().splitlines()
        except OSError as error:
            why = f"{error.filename}: {error.strerror}"
            continue
        processes += 1
        for line in lines:
            name, _, rest = line.partition(":")
            if name in PARTS:
                total[PARTS[name]] += int(rest.split()[0]) / 1024
    if not processes:
        return {"why": why or "no process"}
    return {"processes": processes, **{name: round(value, 1) for name, value in total.items()}, **({"why": why} if why else {})}


def threads(root: int) -> dict[str, int]:
    """How many threads the processes below one (itself left out) have, by process."""
    found = {}
    for process in family(root):
        if process != root:
            with suppress(OSError):
                name = (PROC / str(process) / "comm").read_text().strip()
                found[f"{name} {process}"] = len(os.listdir(PROC / str(process) / "task"))
    return found


def _stat(process: int) -> list[str]:
    """Fields of stat from the state on."""
    return (PROC / str(process) / "stat").read_text().rpartition(")")[2].split()
