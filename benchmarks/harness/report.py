"""Tables and comparisons, made from records alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from benchmarks.harness.statistics import verdict
from benchmarks.record import RESULTS, RecordError, read

REPO = Path(__file__).resolve().parents[2]
DOCUMENTS = (REPO / "README.md", REPO / "docs" / "benchmarks.md")
# <!-- record: NAME --> table <!-- end -->
_MARKER = re.compile(r"(<!-- record: ([\w.-]+) -->\n)(?:.*?\n)?(<!-- end -->)", re.DOTALL)
# What must be equal for two records to be comparable.
_SAME = ("workload", "data_digest", "seconds", "cores")


def _spread(figure: dict[str, Any]) -> str:
    return f"{_short(figure['median'])} [{_short(figure['min'])}, {_short(figure['max'])}]"


def _short(value: float) -> str:
    """Three digits, and no exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}" if value >= 0.0001 else f"{value:.4f}"


def table(record: dict[str, Any]) -> str:
    """A record of ``lfbench run`` as a Markdown table: ratio first, then figures with their spread (median [min, max])."""
    rows = [
        "| subject | ratio to it | samples/s | CPU-s / 1,000 | MiB anonymous + shared | first batch, s | KB a sample | workers |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for label, found in record["results"].items():
        if found["status"] != "ok":
            reason = found["reason"].splitlines()[-1].replace("|", "/") if found["reason"] else ""
            rows.append(f"| {found['title'] or label} | {found['status']}: {reason} | | | | | | |")
            continue
        against = found.get("first_over_this")
        ratio = "1" if against is None else f"{against['ratio']:.2f}{'' if against['differs'] else ' (no difference shown)'}"
        rows.append(
            f"| {found['title']}{' #' + label.split('#')[1] if '#' in label else ''} | {ratio} | {_spread(found['samples_s'])} "
            f"| {_spread(found['cpu_s_1000'])} | {found['memory_mib']['anonymous_shared']:,.0f} "
            f"| {_spread(found['first_batch_s'])} | {found['bytes_sample'] / 1000:,.1f} | {found['workers']} |"
        )
    about, machine = record["options"], record["machine"]
    rows.append("")
    floor = about["floor_memcpy_samples_s"]["median"]
    rows.append(
        f"{about['workload']}, {about['title']}: {about['samples']:,} samples of `{about['data']}`, {about['repeats']} interleaved "
        f"repeats on {about['cores']} cores of {machine['cpu']}, {record['date'][:10]}. The ratio is the first subject's rate over "
        f"this one's. Copying the outputs from memory to memory: {floor:,.0f} samples/s."
    )
    return "\n".join(rows)


def compare(before: dict[str, Any], after: dict[str, Any], *, any_machine: bool = False) -> tuple[list[str], list[str]]:
    """Lines to print, and the subjects that became slower.

    Raises:
        RecordError: the records are not of the same workload, data, options and machine, or share no subject.
    """
    differing = [name for name in _SAME if before["options"].get(name) != after["options"].get(name)]
    differing += [name for name in ("cpu", "cores") if before["machine"][name] != after["machine"][name]]
    if "workload" in differing or (differing and not any_machine):
        raise RecordError(f"the records differ in {', '.join(dict.fromkeys(differing))}; such figures cannot be compared")
    lines, slower = [], []
    for label, old in before["results"].items():
        new = after["results"].get(label)
        if new is None or "ok" not in (old["status"], new["status"]):
            continue
        if old["status"] != new["status"]:
            lines.append(f"{label}: was {old['status']}, is {new['status']}: {new['reason'] or old['reason']}")
            continue
        ratio, p, differs = verdict(new["samples_s"]["repeats"], old["samples_s"]["repeats"])
        word = "no difference shown" if not differs else "FASTER" if ratio > 1 else "SLOWER"
        lines.append(f"{label}: {ratio:.3f} of the samples/s before (p {p:.3g}): {word}")
        if differs and ratio < 1:
            slower.append(label)
    if not lines:
        raise RecordError("the records share no subject that ran")
    return lines, slower


def updated(text: str) -> str:
    """A document with the table of every record it has a marker for."""

    def one(match: re.Match[str]) -> str:
        return f"{match[1]}{table(read(RESULTS / f'{match[2]}.json'))}\n{match[3]}"

    return _MARKER.sub(one, text)
