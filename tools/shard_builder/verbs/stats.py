"""``shard-builder stats``: distributions of every field, and samples that look wrong."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np

from lfdata.errors import OptionError
from shard_builder.examine.check_keys import member_of
from shard_builder.examine.content import SAMPLE
from shard_builder.examine.duplicates import Buckets
from shard_builder.examine.opened import DataSet, Member, is_data_set
from shard_builder.examine.pool import Failure, Pool, Task
from shard_builder.examine.report import Progress, print_stats, progress_bar
from shard_builder.examine.text import key_text, visible

RANGE_BYTES = 32 << 20
RANGE_ROWS = 1024
LISTED = 100
MAX_TEXTS = 10_000
TOP_TEXTS = 50
VALUE_SECONDS = 120.0
WHOLE_SAMPLE = "(whole sample)"


def stats(
    path: str | Path,
    *,
    workers: int = 0,
    content: bool = True,
    limit: int | None = None,
    listed: int = LISTED,
    timeout: float = VALUE_SECONDS,
    progress: Progress | None = None,
    worker_module: str = "shard_builder.examine.worker",
) -> dict[str, Any]:
    """Statistics of a data set.

    Args:
        path: directory or manifest.
        content: decode values and look at them. limit: only so many samples, chosen by their keys (the same for any order of
            samples).
        listed: examples kept of each finding; all are counted.
        workers: processes; the cores this process may use, by default. timeout: seconds one value may take.

    Returns:
        JSON-able: ``rows``, ``shards``, ``fields`` (by name: kind, present, absent, columns, counts), ``content`` (``None``
        without: ``samples`` looked at, ``findings`` by check and field with ``count`` and ``examples``, ``texts`` by field,
        ``duplicates`` by field), ``errors``.

    Raises:
        FormatError: no data set. OptionError: a path to a single file.
    """
    if not is_data_set(Path(path)):
        raise OptionError(f"{path}: statistics are of a data set; give its directory")
    data = DataSet.open(Path(path))
    count = workers or len(os.sched_getaffinity(0))
    setup = {"path": os.fsencode(path), "readable": True}
    result: dict[str, Any] = {
        "path": visible(str(path)),
        "rows": data.manifest.rows,
        "shards": len(data.manifest.shards),
        "fields": {},
        "content": None,
    }
    errors: list[str] = []
    with Pool(count, setup, timeout, worker_module) as pool:
        for task, answers, failures in pool.run({"op": "columns", "field": name} for name in data.schema):
            for answer in answers:
                errors += answer.pop("errors")
                result["fields"][task["field"]] = answer
            errors += [f"field {task['field']!r}: {failure.reason}" for failure in failures]
        if content:
            with Buckets() as buckets:
                result["content"] = _Content(data, pool, buckets, limit, listed, errors).run(progress)
    return result | {"errors": [visible(error) for error in dict.fromkeys(errors)]}


class _Content:
    """The pass over values."""

    def __init__(self, data: DataSet, pool: Pool, buckets: Buckets, limit: int | None, listed: int, errors: list[str]) -> None:
        self.data = data
        self.pool = pool
        self.buckets = buckets
        self.limit = limit
        self.listed = listed
        self.errors = errors
        self.samples = 0
        self.values = 0
        self.findings: dict[tuple[str, str], dict[str, Any]] = {}
        self.texts: dict[str, dict[str, int] | None] = {}

    def run(self, progress: Progress | None) -> dict[str, Any]:
        tasks = list(self._tasks())
        for done, (task, answers, failures) in enumerate(self.pool.run(iter(tasks)), 1):
            for answer in answers:
                self._take(answer)
            for failure in failures:
                self._failed(task, failure)
            if progress:
                progress(done, len(tasks))
        return {
            "samples": self.samples,
            "values": self.values,
            "findings": [{"check": check, "field": field, **found} for (check, field), found in sorted(self.findings.items())],
            "texts": {name: _top(table) for name, table in self.texts.items()},
            "duplicates": self._duplicates(),
        }

    def _tasks(self) -> Iterator[Task]:
        chosen = None
        if self.limit is not None and self.limit < self.data.manifest.rows:
            for _, answers, failures in self.pool.run(iter([{"op": "subset", "limit": self.limit}])):
                chosen = np.array(answers[0]["indices"] if answers else [], np.int64)
                self.errors += [*(e for a in answers for e in a["errors"]), *(failure.reason for failure in failures)]
        self.samples = self.data.manifest.rows if chosen is None else len(chosen)
        for number, shard in enumerate(self.data.manifest.shards):
            size = shard.bytes + sum(sidecar.bytes for sidecar in shard.sidecars)
            rows = self.data.plausible_rows(Member(number, shard))
            if rows < shard.rows:
                self.errors.append(f"shard {number}: {shard.file}: missing, or too small for its {shard.rows} rows")
            step = max(1, min(RANGE_ROWS, RANGE_BYTES * rows // max(1, size)))
            for start in range(0, rows, step):
                task: Task = {"op": "content", "shard": number, "start": start, "stop": min(start + step, rows)}
                if chosen is None:
                    yield task
                    continue
                base = self.data.starts[number]
                mine = chosen[np.searchsorted(chosen, base + start) : np.searchsorted(chosen, base + task["stop"])] - base
                if len(mine):
                    yield task | {"rows": mine.tolist()}

    def _take(self, answer: dict[str, Any]) -> None:
        self.errors += answer["errors"]
        self.values += answer["values"]
        self.buckets.add(answer["digests"])
        for found in answer["findings"]:
            self._find(found.pop("check"), found.pop("field"), found)
        for name, table in answer["texts"].items():
            mine = self.texts.setdefault(name, {})
            if mine is None:
                continue
            for text, number in table.items():
                mine[text] = mine.get(text, 0) + number
            if len(mine) > MAX_TEXTS:
                self.texts[name] = None  # these are no class names

    def _find(self, check: str, field: str, example: dict[str, Any]) -> None:
        found = self.findings.setdefault((check, field), {"count": 0, "examples": []})
        found["count"] += 1
        if len(found["examples"]) < self.listed:
            found["examples"].append(example)

    def _failed(self, task: Task, failure: Failure) -> None:
        if failure.row < 0:
            part = failure.task
            self.errors.append(f"shard {task['shard']}, rows {part['start']} to {part['stop'] - 1}: {failure.reason}")
            return
        field = list(self.data.schema)[failure.field] if failure.field < len(self.data.schema) else "?"
        self._find(
            "undecodable",
            field,
            self._place(self.data.starts[task["shard"]] + failure.row) | {"detail": f"{failure.reason} [{failure.code}]"},
        )

    def _place(self, index: int) -> dict[str, Any]:
        member = member_of(self.data, index)
        row = index - self.data.starts[member.number]
        key = self.data.key_of(member, row)
        return {
            "shard": member.number,
            "file": member.file,
            "row": row,
            "index": index,
            "key": None if key is None else key_text(key),
        }

    def _duplicates(self) -> list[dict[str, Any]]:
        """By field: groups of equal values, how many values are redundant, and the groups that begin first."""
        names = list(self.data.schema)
        found: dict[int, dict[str, Any]] = {}
        for ordinal, indices in self.buckets.groups():
            entry = found.setdefault(ordinal, {"groups": 0, "redundant": 0, "examples": []})
            entry["groups"] += 1
            entry["redundant"] += len(indices) - 1
            examples = entry["examples"]
            examples.append((int(indices[0]), len(indices), indices[: self.listed].tolist()))
            if len(examples) > 2 * self.listed:
                examples.sort()
                del examples[self.listed :]
        result = []
        for ordinal, entry in sorted(found.items()):
            examples = sorted(entry["examples"])[: self.listed]
            shown = [{"count": number, "samples": [self._place(index) for index in some]} for _, number, some in examples]
            result.append({"field": WHOLE_SAMPLE if ordinal == SAMPLE else names[ordinal], **entry, "examples": shown})
        return result


def _top(table: dict[str, int] | None) -> dict[str, Any]:
    if table is None:
        return {"distinct": f"more than {MAX_TEXTS}", "top": []}
    return {
        "distinct": len(table),
        "top": [list(pair) for pair in sorted(table.items(), key=lambda pair: (-pair[1], pair[0]))[:TOP_TEXTS]],
    }


@click.command("stats", short_help="Distributions of every field, and samples that look wrong.")
@click.argument("dataset", type=click.Path(path_type=Path))
@click.option("--content/--no-content", default=True, show_default=True, help="Decode values and look at them.")
@click.option("--limit", type=click.IntRange(1), default=None, help="Look at so many samples only, chosen by their keys.")
@click.option("--list", "listed", type=click.IntRange(0), default=LISTED, show_default=True, help="Examples of each finding.")
@click.option("--workers", type=click.IntRange(0), default=0, help="Processes; 0: the cores available.")
@click.option(
    "--timeout",
    type=click.FloatRange(0.1),
    default=VALUE_SECONDS,
    show_default=True,
    help="Seconds one value may take to decode.",
)
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def command(
    dataset: Path,
    content: bool,
    limit: int | None,
    listed: int,
    workers: int,
    timeout: float,
    as_json: bool,
) -> None:
    """Show distributions of sizes and scalars of DATASET (from its index columns), and look through its values for black,
    white, constant,
    silent, clipped, empty, NaN, undecodable and duplicate ones.

    Exit status: 0, or 1 if part of the data set could not be read or decoded (`shard-builder verify` says more).
    """
    with progress_bar("stats") as progress:
        options: dict[str, Any] = {"content": content, "limit": limit, "listed": listed, "timeout": timeout}
        result = stats(dataset, workers=workers, progress=progress, **options)
    if as_json:
        click.echo(msgspec.json.encode(result).decode())
    else:
        print_stats(result, click.echo)
    findings = (result["content"] or {}).get("findings", ())
    if result["errors"] or any(found["check"] == "undecodable" for found in findings):
        sys.exit(1)
