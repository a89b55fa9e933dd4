"""The end of a conversion: index, list of bad samples, manifest, in this order (docs/convert.md)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lfdata.errors import LfdataError
from lfdata.format.meta import INDEX, MANIFEST, FieldMeta, Manifest, ShardEntry, encode_manifest, merge_statistics
from shard_builder import report
from shard_builder.consolidate import write_consolidated
from shard_builder.target import ERRORS, Target


@dataclass(slots=True)
class Made:
    """What has been made so far: shards with their statistics, and entries of the report."""

    shards: list[ShardEntry] = field(default_factory=list)
    statistics: list[dict[str, Any]] = field(default_factory=list)
    entries: list[dict[str, Any]] = field(default_factory=list)

    def add(self, shard: ShardEntry, statistics: dict[str, Any], entries: list[dict[str, Any]]) -> None:
        """Take a committed shard into the data set."""
        self.shards.append(shard)
        self.statistics.append(statistics)
        self.entries += entries

    def sort(self) -> None:
        """Into the order of the source: resume and tasks make shards in other orders."""
        made = sorted(zip(self.shards, self.statistics, strict=True), key=lambda pair: (pair[0].segment, pair[0].ordinal))
        self.shards, self.statistics = [shard for shard, _ in made], [statistics for _, statistics in made]
        self.entries.sort(key=lambda entry: entry["record"])


def complete(
    target: Target, made: Made, fields: tuple[FieldMeta, ...], provenance: dict[str, Any], records: int, allow_empty: bool
) -> None:
    """Write what makes a data set of shards. ``records``: of the source.

    Raises:
        LfdataError: no sample at all.
    """
    made.sort()
    path, files = target.path, target.files
    rows = sum(shard.rows for shard in made.shards)
    if rows == 0 and not allow_empty:
        raise LfdataError(_nothing_stored(target, made, records))
    manifest = Manifest(
        rows=rows,
        fields=fields,
        shards=tuple(made.shards),
        statistics=merge_statistics(made.statistics),
        provenance=provenance,
    )
    if rows:
        write_consolidated(path, manifest, files)
    else:
        files.unlink(path / INDEX)
    if made.entries:
        files.write_file(path / ERRORS, report.lines(made.entries))
    else:
        files.unlink(path / ERRORS)
    files.write_file(path / MANIFEST, encode_manifest(manifest))
    target.remove_old({shard.file for shard in made.shards})


def _nothing_stored(target: Target, made: Made, records: int) -> str:
    """Write the report all the same, and say where it is."""
    path = target.path / ERRORS
    target.files.write_file(path, report.lines(made.entries))
    bad = next((entry for entry in made.entries if entry["action"] != "dropped"), None)
    first = f"; the first: {bad['path']}: key {bad['key']!r}: {bad['reason']} [{bad['code']}]" if bad else ""
    return (
        f"none of {records} samples could be stored{first}. All are listed in {path}. --allow-empty accepts an empty data set"
    )
