"""Makes a data set of samples kept from others: plan, files, index, manifest last."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import lfdata
from lfdata.dataset import ShardDataset
from lfdata.errors import LfdataError
from lfdata.format.durable import Files
from lfdata.format.layout import MAJOR, MINOR
from lfdata.format.meta import (
    INDEX,
    MANIFEST,
    FieldMeta,
    Manifest,
    ShardEntry,
    encode_manifest,
    merge_statistics,
    read_manifest,
)
from shard_builder.consolidate import write_consolidated
from shard_builder.operations.inputs import describe_input, place_of, refuse_overlap
from shard_builder.operations.output import Output, identity_of
from shard_builder.operations.processes import Task, default_workers, run_tasks
from shard_builder.operations.selecting import Mask, Planned, ShardSizes, plan, starts_of

Progress = Callable[[int, int], None]
"""Called with (samples done, samples in all)."""


@dataclass(frozen=True)
class BuildOptions:
    """How a result is written.

    sizes: of new shards. copy: copy whole shards rather than link them. workers: processes; the cores, by default.
    allow_empty: accept a result of no samples.
    """

    sizes: ShardSizes = field(default_factory=ShardSizes)
    copy: bool = False
    workers: int = 0
    allow_empty: bool = False


@dataclass(frozen=True, slots=True)
class Built:
    """What was made: samples, files, how many of them were taken over whole, and bytes."""

    path: Path
    rows: int
    shards: int
    whole: int
    bytes: int


class Build:
    """One result.

    Args:
        operation: name of the verb. options: what of it determines which samples are kept (JSON-able).
        inputs: data sets, in order. fields: the schema of the result.
    """

    def __init__(
        self,
        operation: str,
        options: dict[str, Any],
        inputs: Sequence[ShardDataset],
        fields: Sequence[FieldMeta],
        build: BuildOptions,
        files: Files,
    ) -> None:
        self._inputs, self._fields, self._build, self._files = list(inputs), tuple(fields), build, files
        self._names = [field.name for field in fields]
        self.about: dict[str, Any] = {
            "operation": operation,
            "format": [MAJOR, MINOR],
            "library": {"lfdata": lfdata.__version__},
            "options": options | asdict(build.sizes),
            "inputs": [describe_input(data.manifest) for data in inputs],
        }
        self.identity = identity_of(self.about | {"fields": msgspec.to_builtins(self._fields)})
        self.about["conversion"] = self.identity

    def run(self, path: Path, masks: Callable[[Path], Sequence[Mask]], progress: Progress | None = None) -> Built:
        """Write the result into ``path``.

        Args:
            masks: gives, for every input, which samples are kept; called with a directory for scratch files.

        Raises:
            TargetExistsError: the directory holds anything but this very operation.
            LfdataError: nothing is kept, an input is damaged, a write failed.
        """
        refuse_overlap(path, [place_of(data) for data in self._inputs])
        with Output(path, self.identity, MANIFEST, _finished, self._files) as out:
            if out.finished:
                return self._summary(path, read_manifest(path))
            kept = masks(path / ".work")
            total = sum(int(mask.sum()) for mask in kept)
            if not total and not self._build.allow_empty:
                raise LfdataError(f"{path}: no sample is kept; --allow-empty makes a data set of 0 samples")
            planned = plan(self._inputs, kept, self._names, self._build.sizes)
            manifest = self._write(path, planned, kept, total, progress or (lambda _done, _total: None))
            if manifest.rows:
                write_consolidated(path, manifest, self._files)
            else:
                self._files.unlink(path / INDEX)
            out.finish(encode_manifest(manifest))
        return self._summary(path, read_manifest(path))

    def _write(self, path: Path, planned: list[Planned], kept: Sequence[Mask], total: int, progress: Progress) -> Manifest:
        setup = {
            "job": "copy",
            "inputs": [[str(data.path), data.manifest.checksum] for data in self._inputs],
            "target": str(path),
            "fields": self._names,
            "copy": self._build.copy,
            "group_bytes": self._build.sizes.group_bytes,
            "provenance": self.about,
        }
        shards: list[ShardEntry] = []
        statistics = []
        done = 0
        tasks = self._tasks(planned, kept)
        for _, answer in run_tasks(setup, tasks, default_workers(self._build.workers), self._files):
            shards.append(msgspec.convert(answer["shard"], ShardEntry))
            statistics.append(answer["statistics"])
            done += shards[-1].rows
            progress(done, total)
        provenance = self.about | {"origins": [data.manifest.provenance for data in self._inputs]}
        return Manifest(done, self._fields, tuple(shards), merge_statistics(statistics), provenance)

    def _tasks(self, planned: list[Planned], kept: Sequence[Mask]) -> Iterator[Task]:
        starts = [starts_of(data) for data in self._inputs]
        for number, item in enumerate(planned):
            first = item.pieces[0]
            identity = hashlib.sha256(f"{self.identity} {number}".encode()).digest()[:16].hex()
            if item.whole:
                identity = self._inputs[first.input].manifest.shards[first.shard].id
            task: Task = {
                "name": file_name(number, len(planned), identity),
                "whole": item.whole,
                "id": identity,
                "number": number,
                "total": len(planned),
                "input": first.input,
                "shard": first.shard,
                "fields": self._names,
            }
            if not item.whole:
                task["pieces"] = []
                for piece in item.pieces:
                    begin = int(starts[piece.input][piece.shard])
                    rows = np.flatnonzero(kept[piece.input][begin + piece.first : begin + piece.stop]) + piece.first
                    task["pieces"].append([piece.input, piece.shard, rows.astype("<i8").tobytes()])
            yield task

    def _summary(self, path: Path, manifest: Manifest) -> Built:
        own = {shard.id for data in self._inputs for shard in data.manifest.shards}
        whole = sum(shard.id in own for shard in manifest.shards)
        return Built(path, manifest.rows, len(manifest.shards), whole, sum(shard.bytes for shard in manifest.shards))


def file_name(number: int, total: int, identity: str) -> str:
    """Name of a base shard of a result: its place, of how many, and the start of its id. Files sort in the order of the samples."""
    return f"m{number:06d}of{total:06d}-{identity[:8]}.lfd"


def _finished(path: Path) -> str | None:
    try:
        found = read_manifest(path).provenance.get("conversion")
    except LfdataError:
        return None
    return found if isinstance(found, str) else None
