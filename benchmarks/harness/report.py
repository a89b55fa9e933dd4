"""Tables and comparisons, made from records alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness import by_hand, gpu_tables
from benchmarks.harness.audit import whole
from benchmarks.harness.reasons import short
from benchmarks.harness.statistics import P_LIMIT, least_p, verdict
from benchmarks.record import REPEATS, RESULTS, RecordError, read

REPO = Path(__file__).resolve().parents[2]
DOCUMENTS = (REPO / "README.md", REPO / "docs" / "benchmarks.md")
# <!-- record: NAME --> table <!-- end -->; with "brief" after the name, a table of few columns
# <!-- by hand: NAME NAME --> ratios measured by hand beside those of records <!-- end -->
_BY_HAND = re.compile(r"(<!-- by hand: ([\w. -]+?) -->\n)(?:.*?\n)??(<!-- end -->)", re.DOTALL)
# <!-- gpu: NAME PART --> a part of a record of benchmarks.gpu <!-- end -->
_GPU = re.compile(r"(<!-- gpu: ([\w.-]+) ([\w-]+) -->\n)(?:.*?\n)??(<!-- end -->)", re.DOTALL)
_MARKER = re.compile(r"(<!-- record: ([\w.-]+)( brief)? -->\n)(?:.*?\n)??(<!-- end -->)", re.DOTALL)
# A table warns of repeats with fewer samples or less time, and of a load before the run that is higher than this times the cores.
FEW_SAMPLES, SHORT_SECONDS, HIGH_LOAD = 200, 1.0, 1.0
MEMORY_DIFFERS = 1.2
# What must be equal for two records to be comparable.
_SAME = ("workload", "data_digest", "seconds", "cores", "step")
# Of the machine. Two of the same processor may still be different ones: their memory and kernel mostly tell.
_SAME_MACHINE = ("cpu", "cores", "memory_mib", "kernel", "python")


def _spread(figure: dict[str, Any]) -> str:
    return f"{_short(figure['median'])} [{_short(figure['min'])}, {_short(figure['max'])}]"


def _short(value: float) -> str:
    """Three digits, and no exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}" if value >= 0.0001 else f"{value:.4f}"


# Column, and the figure in it, of a record; a column is there where some subject has the figure.
_COLUMNS: tuple[tuple[str, Callable[[dict[str, Any]], str | None]], ...] = (
    ("samples/s", lambda found: _figure(found, "samples_s")),
    ("to the next batch, s", lambda found: _figure(found, "resume_s")),
    ("imports before that, s", lambda found: _imports(found)),
    ("loads a state", lambda found: _state(found)),
    ("waiting, % of the time", lambda found: _figure(found, "waiting", 100)),
    ("starved steps, %", lambda found: _figure(found, "starved_steps", 100)),
    ("CPU, ratio to it", lambda found: _cpu(found)),
    ("median read, us", lambda found: _figure(found, "latency_p50_us")),
    ("99 % of reads, us", lambda found: _figure(found, "latency_p99_us")),
    ("CPU-s / 1,000", lambda found: _figure(found, "cpu_s_1000")),
    ("CPU-s", lambda found: _figure(found, "cpu_s")),
    ("MiB anonymous + shared", lambda found: _memory(found)),
    ("first batch, s", lambda found: _figure(found, "first_batch_s")),
    ("prepared in, s", lambda found: _prepared(found)),
    ("KB a sample", lambda found: f"{found['bytes_sample'] / 1000:,.1f}"),
    ("PSNR, dB", lambda found: _psnr(found)),
    ("workers", lambda found: str(found["workers"])),
)


_NO_PICTURES = ("W3", "W6")
_BRIEF = ("samples/s", "to the next batch, s", "CPU-s / 1,000", "MiB anonymous + shared")


def _figure(found: dict[str, Any], name: str, times: float = 1) -> str | None:
    if name not in found:
        return None
    return _spread({key: value * times for key, value in found[name].items() if key != "repeats"})


def _memory(found: dict[str, Any]) -> str | None:
    return f"{found['memory_mib']['anonymous_shared']:,.0f}" if "memory_mib" in found else None


def _cpu(found: dict[str, Any]) -> str | None:
    """CPU of this one over the first one's, where the consumer sets the pace and rates say nothing."""
    if "waiting" not in found:
        return None
    against = found.get("cpu_first_over_this")
    return f"{1 / against['median']:.2f}" if against else "1"


def _psnr(found: dict[str, Any]) -> str | None:
    """Median over the pictures that were compared with the reference."""
    value = (found.get("check") or {}).get("median_psnr_db")
    return None if value is None else f"{value:.1f}"


def _prepared(found: dict[str, Any]) -> str | None:
    """Seconds to build the subject's format; ``None`` for files that are used as they are."""
    seconds = found.get("prepare", {}).get("seconds", 0)
    return f"{seconds:,.1f}" if seconds > 0.05 else None


def _imports(found: dict[str, Any]) -> str | None:
    """Seconds that importing the subject's libraries took once; W8's time begins after that."""
    return _short(found["import_s"]) if "resume_s" in found and "import_s" in found else None


def _state(found: dict[str, Any]) -> str | None:
    if "loads_state" not in found:
        return None
    epoch = found["epoch"]
    lost = f"; {epoch['missing']} keys lost, {epoch['again']} doubled" if epoch["missing"] or epoch["again"] else ""
    return ("yes" if found["loads_state"] else "no: batches are thrown away") + lost


def table(record: dict[str, Any], *, brief: bool = False) -> str:
    """A record of ``lfbench run`` as a Markdown table: ratio first, then figures with their spread (median [min, max])."""
    ran = [found for found in record["results"].values() if found["status"] == "ok"]
    shown = [(name, figure) for name, figure in _COLUMNS if not brief or name in _BRIEF]
    columns = [(name, figure) for name, figure in shown if any(figure(found) is not None for found in ran)]
    rows = [
        f"| subject | ratio to it |{''.join(f' {name} |' for name, _ in columns)}",
        f"| --- | --- |{' --- |' * len(columns)}",
    ]
    for label, found in record["results"].items():
        if found["status"] != "ok":
            reason = short(found["reason"])
            rows.append(f"| {title_of(label, found, record)} | {found['status']}: {reason} |{' |' * len(columns)}")
            continue
        against = found.get("first_over_this")
        unsure = " (no difference shown)" if record["options"]["repeats"] >= REPEATS else " (too few repeats to tell)"
        ratio = "1" if against is None else f"{against['ratio']:.2f}{'' if against['differs'] else unsure}"
        title = title_of(label, found, record)
        rows.append(f"| {title} | {ratio} | {' | '.join(figure(found) or '' for _, figure in columns)} |")
    rows += ["", _about(record)]
    return "\n".join(rows)


def title_of(label: str, found: dict[str, Any], record: dict[str, Any]) -> str:
    """A subject's title: without its picture libraries where no picture is decoded, with its number where it ran more than once."""
    title: str = found["title"] or label
    if record["options"]["workload"] in _NO_PICTURES:
        title = title.partition(" + simplejpeg")[0]
    return f"{title} #{label.partition('#')[2]}" if "#" in label else title


def _about(record: dict[str, Any]) -> str:
    about, machine = record["options"], record["machine"]
    better = "The ratio is the first subject's rate over this one's."
    if about.get("metric") == "resume_s":
        better = "The ratio is this subject's time over the first one's."
    floor = about.get("floor_memcpy_samples_s")
    copying = f" Copying the outputs from memory to memory: {floor['median']:,.0f} samples/s." if floor else ""
    step = f" The consumer takes {about['step']:g} s a batch." if about.get("step") else ""
    cold = f" {_emptied(record)}" if any("cold" in found for found in record["results"].values()) else ""
    left = f" Not run: {'; '.join(about['not_run'])}." if about.get("not_run") else ""
    warned = "".join(f" {warning}" for warning in warnings(record))
    ended = " (interrupted)" if about.get("interrupted") else ""
    return (
        f"{about['workload']}, {about['title']}: {about['samples']:,} samples of `{about['data']}`, {about['repeats']} interleaved "
        f"repeats{ended} on {about['cores']} cores of {machine['cpu']}, {record['date'][:10]}. {better}{copying}{step}{cold}{warned}{left}"
    )


def warnings(record: dict[str, Any]) -> list[str]:
    """Sentences on what makes figures of a record less sure, or less alike."""
    found = []
    ran = {title_of(label, one, record): one for label, one in record["results"].items() if one["status"] == "ok"}
    few = [
        f"{title} ({one['measured']['samples']:,} samples in {_short(one['measured']['s'])} s)"
        for title, one in ran.items()
        if "measured" in one and (one["measured"]["samples"] < FEW_SAMPLES or one["measured"]["s"] < SHORT_SECONDS)
    ]
    if few:
        found.append(f"**Rates that rest on few samples a repeat**: {', '.join(few)}.")
    load, cores = record["machine"].get("load_before", 0.0), record["options"]["cores"]
    if load > HIGH_LOAD * cores:
        found.append(f"**The load was high before the run**: {load:.1f} on {cores} cores.")
    anew = [f"{title} ({one['reencodes']})" for title, one in ran.items() if one.get("reencodes")]
    if anew:
        found.append(f"Pictures encoded anew by the format, checked with wider limits: {', '.join(anew)}.")
    return found


def _emptied(record: dict[str, Any]) -> str:
    """How the page cache was emptied, and the most that stayed."""
    found = [result["cold"] for result in record["results"].values() if "cold" in result]
    most = max(cold["resident"] for cold in found)
    ways = sorted({cold["how"] for cold in found})
    limit = next((f" (limit {cold['limit_mib']:,} MiB)" for cold in found if "limit_mib" in cold), "")
    return f"Page cache before each run: {', '.join(ways)}{limit}; at most {most:.1%} of the files stayed in it."


def compare(
    before: dict[str, Any], after: dict[str, Any], *, any_machine: bool = False, beside: str | None = None
) -> tuple[list[str], list[str]]:
    """Lines to print, and the subjects that became slower. ``beside``: a subject of both records; the others are taken as ratios to
    it, round by round, so that a machine that is slower today does not count.

    Raises:
        RecordError: the records are not of the same workload, data, options and machine, or share no subject.
    """
    if "workload" not in before["options"] or "workload" not in after["options"]:
        raise RecordError("only records of `lfbench run` can be compared")
    differing = [name for name in _SAME if before["options"].get(name) != after["options"].get(name)]
    differing += [name for name in _SAME_MACHINE if before["machine"].get(name) != after["machine"].get(name)]
    if "workload" in differing or (differing and not any_machine):
        raise RecordError(f"the records differ in {', '.join(dict.fromkeys(differing))}; such figures cannot be compared")
    if beside is not None and beside not in before["results"] and f"{beside}_" in before["results"]:
        beside = f"{beside}_"
    if beside is not None and any(record["results"].get(beside, {}).get("status") != "ok" for record in (before, after)):
        raise RecordError(f"{beside} did not run in both records; take one that did")
    seeds = [record["options"].get("seed") for record in (before, after)]
    lines = [f"the seeds differ: {seeds[0]} and {seeds[1]}"] if seeds[0] != seeds[1] else []
    slower: list[str] = []
    for label, old in before["results"].items():
        if label == beside:
            continue
        new = after["results"].get(label)
        if new is None:
            lines.append(f"{label}: only in the first record")
            continue
        if old.get("status") != "ok" and new.get("status") != "ok":
            lines.append(f"{label}: {new.get('status')} in both")
            continue
        if old.get("status") != new.get("status"):
            lines.append(f"{label}: was {_said(old)}, is {_said(new)}")
            if old.get("status") == "ok":
                slower.append(label)
            continue
        metric = before["options"].get("metric", "samples_s")
        if any(not _repeats(record, label, metric) for record in (before, after)):
            lines.append(f"{label}: a record lacks repeats of {metric}")
            continue
        pair = [_series(record, label, metric, beside) for record in (after, before)]
        ratio, p, differs = verdict(*(pair[::-1] if metric == "resume_s" else pair))
        word = "no difference shown" if not differs else "FASTER" if ratio > 1 else "SLOWER"
        if not differs and least_p(len(pair[0]), len(pair[1])) >= P_LIMIT:
            word = f"too few repeats to tell ({len(pair[1])} and {len(pair[0])})"
        notes = [*_otherwise(old, new), *_dearer(before, after, label)]
        slowed = [
            f"{name} was kept stopped"
            for name, found in (("the first", old), ("the second", new))
            if found.get("planted_slowdown")
        ]
        lines.append(f"{label}: {ratio:.3f} of the speed before (p {p:.3g}): {'; '.join([word, *slowed, *notes])}")
        if differs and ratio < 1:
            slower.append(label)
    lines += [f"{label}: only in the second record" for label in after["results"] if label not in before["results"]]
    if not any(label in before["results"] and found.get("status") == "ok" for label, found in after["results"].items()):
        raise RecordError("the records share no subject that ran")
    return lines, slower


def _repeats(record: dict[str, Any], label: str, metric: str) -> list[float]:
    found: list[float] = (record["results"][label].get(metric) or {}).get("repeats") or []
    return found


def _dearer(before: dict[str, Any], after: dict[str, Any], label: str) -> list[str]:
    """What beside the speed is shown to differ: CPU time by its repeats, memory by a fifth (it is measured once)."""
    notes = []
    old, new = (_repeats(record, label, "cpu_s_1000") for record in (before, after))
    if old and new:
        ratio, p, differs = verdict(new, old)
        if differs:
            notes.append(f"CPU time {ratio:.2f} of that before (p {p:.3g})")
    one, other = ((record["results"][label].get("memory_mib") or {}).get("anonymous_shared") for record in (before, after))
    if one and other and not 1 / MEMORY_DIFFERS < other / one < MEMORY_DIFFERS:
        notes.append(f"memory {other:,.0f} MiB, before {one:,.0f}")
    return notes


def _said(found: dict[str, Any]) -> str:
    """A status, with its reason where there is one."""
    reason = short(found.get("reason") or "") if found.get("status") != "ok" else ""
    return f"{found.get('status')} ({reason})" if reason else str(found.get("status"))


def _otherwise(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Workers and versions that differ."""
    found = []
    if old.get("workers") != new.get("workers"):
        found.append(f"workers {old.get('workers')} then {new.get('workers')}")
    versions = [one.get("versions") or {} for one in (old, new)]
    for name in dict.fromkeys((*versions[0], *versions[1])):
        a, b = (one.get(name, "none") for one in versions)
        if a != b:
            found.append(f"{name} {a} then {b}")
    return found


def _series(record: dict[str, Any], label: str, metric: str, beside: str | None) -> list[float]:
    values: list[float] = record["results"][label][metric]["repeats"]
    if beside is None:
        return values
    others = _repeats(record, beside, metric)
    if len(values) != len(others):
        raise RecordError(
            f"{label} has {len(values)} repeats of {metric} and {beside} {len(others)}: they are not of the same rounds"
        )
    return [value / other for value, other in zip(values, others, strict=True)]


def updated(text: str) -> str:
    """A document with the table of every record it has a marker for."""

    def one(match: re.Match[str]) -> str:
        return f"{match[1]}{table(run_record(RESULTS / f'{match[2]}.json'), brief=bool(match[3]))}\n{match[4]}"

    def by_hand_one(match: re.Match[str]) -> str:
        records = {name: run_record(RESULTS / f"{name}.json") for name in match[2].split()}
        return f"{match[1]}{by_hand.table(records)}\n{match[3]}"

    def gpu_one(match: re.Match[str]) -> str:
        record = read(RESULTS / f"{match[2]}.json")
        try:
            made = gpu_tables.table(record, match[3])
        except KeyError as error:
            raise RecordError(f"{match[2]}.json: {error}") from error
        return f"{match[1]}{made}\n{match[4]}"

    return _GPU.sub(gpu_one, _BY_HAND.sub(by_hand_one, _MARKER.sub(one, text)))


def run_record(path: Path) -> dict[str, Any]:
    """A record of ``lfbench run``, whole. Raises :class:`RecordError`."""
    record = read(path)
    whole(record, path.name)
    return record


def shown(text: str) -> set[str]:
    """Names of the records that a document has a table of."""
    return {match[2] for marker in (_MARKER, _GPU) for match in marker.finditer(text)}
