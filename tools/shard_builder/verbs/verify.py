"""``shard-builder verify``: proves a data set intact, or lists what is damaged."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec

from lfdata.errors import CorruptError, FormatError, LfdataError
from lfdata.format.durable import is_temporary
from lfdata.format.layout import MAGIC, TRAILER_BYTES, TRAILER_MAGIC
from lfdata.format.meta import MANIFEST
from shard_builder.examine.check_keys import ranges
from shard_builder.examine.damage import Damage, DamageList, code_of, place, reason_of
from shard_builder.examine.opened import DataSet, is_data_set
from shard_builder.examine.pool import Failure, Pool, Task
from shard_builder.examine.report import Progress, progress_bar
from shard_builder.examine.text import visible

RANGE_BYTES = 32 << 20
RANGE_ROWS = 1024
PART_BYTES = 256 << 20
# Slower than any disk in use: a file check that takes longer hangs.
SLOWEST_BYTES_A_SECOND = 4 << 20
VALUE_SECONDS = 120.0
EXIT_DAMAGED, EXIT_UNREADABLE = 1, 2


class VerifyReport(msgspec.Struct):
    """What was checked and what was found.

    Attributes:
        path: as given. quick: whether payloads were left out. files, rows, values, bytes: checked (bytes: read for digests).
        damage: faults and warnings by file and row, at most 10,000; ``unlisted`` says how many more there are.
        damaged, warnings: number of faults and of warnings.
    """

    path: str
    quick: bool
    files: int = 0
    rows: int = 0
    values: int = 0
    bytes: int = 0
    damaged: int = 0
    warnings: int = 0
    unlisted: int = 0
    damage: list[Damage] = []

    @property
    def intact(self) -> bool:
        """Whether no fault was found (warnings are none)."""
        return not self.damaged


def verify(
    path: str | Path,
    *,
    workers: int = 0,
    quick: bool = False,
    timeout: float = VALUE_SECONDS,
    progress: Progress | None = None,
    worker_module: str = "shard_builder.examine.worker",
) -> VerifyReport:
    """Check a data set, or one file of the format.

    Args:
        path: directory, manifest, or one shard, sidecar or index file.
        workers: processes; the cores this process may use, by default.
        quick: structure, sizes and index checks only: no payload, no digest.
        timeout: seconds one value may take to decode before it counts as damage.

    Raises:
        LfdataError: there is nothing to check: no such path, or no manifest.
    """
    path = Path(path)
    report = VerifyReport(visible(str(path)), quick)
    found = DamageList()
    plan = _plan(path, quick, found)
    report.files = sum(task["op"] == "file" for task in plan.tasks)
    report.rows = plan.data.manifest.rows if plan.data else 0
    setup = {"path": os.fsencode(path), "readable": plan.data is not None}
    count = max(1, min(workers or len(os.sched_getaffinity(0)), len(plan.tasks)))
    with Pool(count, setup, timeout, worker_module) as pool:
        for done, (task, answers, failures) in enumerate(pool.run(iter(plan.tasks)), 1):
            unlisted = 0
            for answer in answers:
                for item in msgspec.convert(answer["damage"], list[Damage]):
                    found.add(item)
                unlisted += answer.get("unlisted", 0)
                report.values += answer.get("values", 0)
                report.bytes += answer.get("bytes", 0)
            found.damaged += unlisted
            for failure in failures:
                found.add(_failed(plan, task, failure))
            if progress:
                progress(done, len(plan.tasks))
    report.damaged, report.warnings, report.unlisted = found.damaged, found.warnings, found.unlisted
    report.damage = sorted(
        found.listed, key=lambda d: (d.shard if d.shard is not None else -1, d.file, -1 if d.row is None else d.row)
    )
    return report


class _Plan:
    def __init__(self, path: Path, data: DataSet | None, tasks: list[Task]) -> None:
        self.path = path
        self.data = data
        self.tasks = tasks

    def file_of(self, task: Task) -> str:
        """The file a task is about."""
        if "path" in task:
            return visible(os.fsdecode(os.path.basename(task["path"])))
        if "member" in task and self.data:
            return self.data.members[task["member"]].file
        return self.data.manifest.shards[task["shard"]].file if "shard" in task and self.data else MANIFEST


def _plan(path: Path, quick: bool, found: DamageList) -> _Plan:
    if not is_data_set(path):
        return _plan_file(path, quick)
    directory = path.parent if path.name == MANIFEST else path
    if not (directory / MANIFEST).is_file():
        DataSet.open(path)  # raises, and says what to do
    try:
        data = DataSet.open(path)
    except CorruptError as error:
        # Damaged, but there: the shards can still be checked, each by itself.
        found.add(Damage(MANIFEST, code_of(error), error.reason, offset=error.offset))
        files = sorted(
            entry.path for entry in os.scandir(directory) if entry.name.endswith(".lfd") and not is_temporary(entry.name)
        )
        return _Plan(path, None, [_file_task({"path": os.fsencode(name)}, os.path.getsize(name)) for name in files])
    _strangers(data, found)
    _order(data, found)
    return _Plan(path, data, list(_tasks(data, quick, _index_usable(data, found))))


def _plan_file(path: Path, quick: bool) -> _Plan:
    tasks = [_file_task({"path": os.fsencode(path)}, path.stat().st_size)]
    try:
        data = DataSet.open(path)
    except FormatError:
        if path.suffix not in (".lfd", ".lfi") and not _has_magic(path):
            raise CorruptError(path, 0, "neither a data set nor a file of this format") from None
        return _Plan(path, None, tasks)  # the file check says what is wrong
    return _Plan(path, data, [*tasks, *_payload_tasks(data, quick)])


def _has_magic(path: Path) -> bool:
    with open(path, "rb") as file:
        head = file.read(len(MAGIC))
        file.seek(max(0, path.stat().st_size - TRAILER_BYTES))
        return head == MAGIC or file.read(len(TRAILER_MAGIC)) == TRAILER_MAGIC


def _file_task(task: Task, size: int) -> Task:
    return {"op": "file", "seconds": VALUE_SECONDS + size / SLOWEST_BYTES_A_SECOND} | task


def _tasks(data: DataSet, quick: bool, with_index: bool) -> Iterator[Task]:
    """The long tasks first, so that no worker idles at the end."""
    for number, member in enumerate(data.members):
        if not quick:
            yield {"op": "digest", "member": number}
        yield _file_task({"member": number}, member.size)
    if with_index:
        yield _file_task({"path": os.fsencode(data.index_path)}, data.index_path.stat().st_size)
        yield from ({"op": "index", "shard": number} for number in range(len(data.manifest.shards)))
    yield from _payload_tasks(data, quick)
    for low, high in ranges(sum(data.plausible_rows(member) for member in data.members if member.sidecar is None)):
        yield {"op": "keys", "low": low, "high": high, "index": with_index}


def _payload_tasks(data: DataSet, quick: bool) -> Iterator[Task]:
    if quick:
        return
    for number, member in enumerate(data.members):
        parts = -(-member.size // PART_BYTES)
        yield from ({"op": "groups", "member": number, "part": part, "parts": parts} for part in range(parts))
        total = data.plausible_rows(member)
        step = max(1, min(RANGE_ROWS, RANGE_BYTES * total // max(1, member.size)))
        for start in range(0, total, step):
            yield {"op": "rows", "member": number, "start": start, "stop": min(start + step, total)}


def _strangers(data: DataSet, found: DamageList) -> None:
    """Files that do not belong: warnings."""
    known = {member.file for member in data.members}
    for entry in sorted(os.scandir(data.path), key=lambda entry: entry.name):
        if is_temporary(entry.name) or entry.name == ".work":
            found.add(Damage(visible(entry.name), "leftover", "left by an unfinished or running conversion", level="warning"))
        elif entry.name.endswith(".lfd") and entry.name not in known:
            found.add(
                Damage(visible(entry.name), "unknown-file", "a shard file that the manifest does not name", level="warning")
            )


def _order(data: DataSet, found: DamageList) -> None:
    """Shards in order, each once."""
    ids: dict[str, str] = {}
    last = (-1, -1)
    for number, shard in enumerate(data.manifest.shards):
        if shard.id in ids:
            found.add(Damage(shard.file, "order", f"the same shard id as {ids[shard.id]}", shard=number))
        ids[shard.id] = shard.file
        # A merged set has shards of several conversions, each with its place in its own.
        if (shard.segment, shard.ordinal) <= last and "operation" not in data.manifest.provenance:
            reason = f"segment {shard.segment}, shard {shard.ordinal} comes after segment {last[0]}, shard {last[1]}"
            found.add(Damage(shard.file, "order", reason, shard=number))
        last = (shard.segment, shard.ordinal)


def _index_usable(data: DataSet, found: DamageList) -> bool:
    """Whether there is a consolidated index to compare with; one that is damaged or of other shards is reported."""
    if not data.index_path.exists():
        return False
    try:
        data.open_index()
    except LfdataError as error:
        level = "warning" if code_of(error) == "changed" else "damage"
        reason = f"{reason_of(error)}; readers do without it, `shard-builder index` rebuilds it"
        found.add(Damage(data.index_path.name, "index" if level == "warning" else code_of(error), reason, level=level))
        return False
    return True


def _failed(plan: _Plan, task: Task, failure: Failure) -> Damage:
    """What a dead or hanging worker means."""
    item = Damage(plan.file_of(task), failure.code, f"{task['op']}: {failure.reason}")
    if plan.data and "member" in task:
        member = plan.data.members[task["member"]]
        item.shard = member.number
        if failure.row >= 0:
            where = place(plan.data, member, failure.row)
            item.row, item.index, item.key = where["row"], where["index"], where["key"]
            with contextlib.suppress(LfdataError, IndexError):
                item.field = plan.data.file(member).fields[failure.field].name
            item.reason = f"decoding this value: {failure.reason}"
        elif "start" in failure.task:
            item.row, item.rows = failure.task["start"], failure.task["stop"] - failure.task["start"]
    return item


@click.command("verify", short_help="Prove a data set intact, or list what is damaged.")
@click.argument("dataset", type=click.Path(path_type=Path))
@click.option("--workers", type=click.IntRange(0), default=0, help="Processes; 0: the cores available.")
@click.option("--quick", is_flag=True, help="Structure, sizes and index checks only: no payload, no digest.")
@click.option(
    "--timeout",
    type=click.FloatRange(0.1),
    default=VALUE_SECONDS,
    show_default=True,
    help="Seconds one value may take to decode.",
)
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def command(dataset: Path, workers: int, quick: bool, timeout: float, as_json: bool) -> None:
    """Check every checksum and decode every value of DATASET (a directory, or one shard file), in parallel.

    Exit status: 0 intact, 1 damaged, 2 nothing that could be checked.
    """
    try:
        with progress_bar("verify") as progress:
            report = verify(dataset, workers=workers, quick=quick, timeout=timeout, progress=progress)
    except LfdataError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(EXIT_UNREADABLE)
    if as_json:
        click.echo(msgspec.json.encode(to_json(report)).decode())
    else:
        _print(report)
    if not report.intact:
        sys.exit(EXIT_DAMAGED)


def to_json(report: VerifyReport) -> dict[str, Any]:
    """The report as JSON-able data."""
    raw: dict[str, Any] = msgspec.to_builtins(report)
    return {"intact": report.intact} | raw


def _print(report: VerifyReport) -> None:
    for item in report.damage:
        click.echo(item.line())
    if report.unlisted:
        click.echo(f"... and {report.unlisted} more")
    depth = "structure and index checks" if report.quick else f"every check, {report.values:,} values decoded"
    state = "intact" if report.intact else f"DAMAGED ({report.damaged} faults)"
    extra = f", {report.warnings} warnings" if report.warnings else ""
    click.echo(f"{visible(report.path)}: {state}{extra}: {report.files} files, {report.rows:,} rows; {depth}")
