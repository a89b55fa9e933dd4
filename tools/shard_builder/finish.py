"""``finish``: what tasks have made becomes one data set, the same as one process would have made (docs/scale.md)."""

from __future__ import annotations

import os
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from lfdata.errors import LfdataError, TargetExistsError
from lfdata.format.durable import Files
from lfdata.format.meta import MANIFEST, FieldMeta, read_manifest
from shard_builder.complete import Made, complete
from shard_builder.differences import told
from shard_builder.journal import read, task_journals
from shard_builder.options import Task
from shard_builder.plan import Segment
from shard_builder.progress import Line, done_segments
from shard_builder.report import TooManyErrors
from shard_builder.target import RUN_LOG, Target

MOST_NAMED = 10


def finish(
    target: str | Path, *, allow_empty: bool = False, max_errors: int | None = None, files: Files | None = None
) -> tuple[int, int]:
    """Make one data set of all tasks' shards; gives its samples and shards. A finished one stays as it is.

    Raises:
        TargetExistsError: a task is at work.
        LfdataError: tasks that have not been run, or not to their end; tasks of different conversions.
        TooManyErrors: more bad samples in all tasks together than ``max_errors``.
    """
    path = Path(target)
    if not path.is_dir():
        raise LfdataError(f"{path}: no directory; tasks make it: shard-builder convert ... --task 0/N")
    with Target(path, files or Files()) as place:
        journals = task_journals(path)
        if not journals:
            if (path / MANIFEST).exists():
                if not place.journal.exists():
                    # Killed while it tidied up.
                    place.clean(journal=True)
                found = read_manifest(path)
                return found.rows, len(found.shards)
            raise TargetExistsError(f"{path}: no task has been run here: shard-builder convert ... --task 0/N")
        place.remove_unfinished()
        head, lines = _read(path, journals)
        if place.manifest_id() == head["conversion"]:
            # Killed between the manifest and the end.
            place.clean(journal=True)
            found = read_manifest(path)
            return found.rows, len(found.shards)
        made = _made(place, journals[0][0].count, head, lines)
        bad = sum(entry["action"] in ("skip", "quarantine") for entry in made.entries)
        if max_errors is not None and bad > max_errors:
            raise TooManyErrors(f"{bad} bad samples in all tasks together, more than --max-errors {max_errors}")
        identity = dict(head["identity"])
        fields = msgspec.convert(identity.pop("fields"), tuple[FieldMeta, ...])
        provenance = identity | {"conversion": head["conversion"]}
        complete(place, made, fields, provenance, head["segments"][-1], allow_empty)
        _log(place, head, len(journals), len(made.shards))
        place.clean(journal=True)
        return sum(shard.rows for shard in made.shards), len(made.shards)


def _read(path: Path, journals: list[tuple[Task, Path]]) -> tuple[dict[str, Any], list[Line]]:
    """The first line that all tasks have in common, and the other lines of all."""
    head: dict[str, Any] = {}
    lines: list[Line] = []
    for task, journal in journals:
        (mine, *rest), _ = read(journal)
        if task.count != journals[0][0].count or mine["conversion"] != head.get("conversion", mine["conversion"]):
            raise LfdataError(
                f"{path}: task {task.number}/{task.count} belongs to another conversion than task "
                f"{journals[0][0].number}/{journals[0][0].count} ({told(head.get('identity', {}), mine['identity'])}). "
                "Run all tasks alike, in a new target"
            )
        head = mine
        lines += rest
    return head, lines


def _made(place: Target, count: int, head: dict[str, Any], lines: list[Line]) -> Made:
    segments = [Segment(first, stop, 0, 0) for first, stop in pairwise(head["segments"])]
    place.files.sync_directory(place.path)
    done = done_segments(place, lines, segments, [])
    missing = sorted({number % count for number in range(len(segments)) if number not in done or done[number].closing is None})
    if missing:
        named = ", ".join(f"{number}/{count}" for number in missing[:MOST_NAMED])
        more = f" and {len(missing) - MOST_NAMED} more" if len(missing) > MOST_NAMED else ""
        raise LfdataError(f"{place.path}: tasks {named}{more} are not done; run them (again), then finish")
    made = Made()
    for one in done.values():
        for shard, line in one.shards:
            made.add(shard, line["statistics"], line["errors"])
        assert one.closing is not None
        made.entries += one.closing["errors"]
    return made


def _log(place: Target, head: dict[str, Any], tasks: int, shards: int) -> None:
    entry = {
        "finished": time.time(),
        "host": os.uname().nodename,
        "tasks": tasks,
        "conversion": head["conversion"],
        "shards": shards,
        "records": head["segments"][-1],
    }
    place.files.write_file(place.path / RUN_LOG, msgspec.json.encode(entry) + b"\n")
