"""``add-field``: a field computed from another, or taken from a table by key, written beside the shards as sidecars.

No shard is touched and no payload of another field is copied. A sidecar's part id is a digest of what determines its bytes, so a sidecar
that is there under its name is the one wanted, and a killed run is gone on with. The manifest names the sidecars only when all are there
and have been read back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import lfdata
from lfdata.codecs.registry import library_versions, make_decoder, make_encoder
from lfdata.dataset import ShardDataset
from lfdata.dataset.shard import Shard
from lfdata.errors import CorruptError, LfdataError, OptionError, SampleError
from lfdata.format.durable import Files
from lfdata.format.files import DescriptorPool, LocalFile
from lfdata.format.layout import KIND_SIDECAR
from lfdata.format.meta import (
    MANIFEST,
    FieldMeta,
    Manifest,
    ShardEntry,
    ShardMeta,
    SidecarEntry,
    encode_manifest,
    merge_statistics,
)
from lfdata.format.reader import ShardFile
from lfdata.format.verify import verify_file
from lfdata.format.writer import ShardWriter
from shard_builder.consolidate import write_consolidated
from shard_builder.operations.copying import file_digest
from shard_builder.operations.inputs import open_input, place_of
from shard_builder.operations.matching import Matched, match
from shard_builder.operations.output import identity_of
from shard_builder.operations.processes import Run, Task, default_workers, run_tasks
from shard_builder.sources import source_from_config
from shard_builder.sources.base import FieldSpec, Source
from shard_builder.target import SHARD_SUFFIX, Target

ON_ERROR = ("stop", "absent")
OPERATION = "add-field"
_BATCH = 32
_LISTED = 20
Progress = Callable[[int, int], None]
"""Called with (samples done, samples in all)."""


@dataclass(frozen=True, slots=True)
class Added:
    """What was done.

    rows, present: samples, and how many have a value. bad: values left out under ``absent``, of which ``errors`` lists some.
    unmatched: rows of the table whose key no sample has. bytes: of all sidecars.
    """

    rows: int
    present: int
    bad: int
    errors: tuple[str, ...]
    unmatched: int
    bytes: int


def add_field(
    dataset: str | Path,
    spec: FieldSpec,
    *,
    table: Source | None = None,
    replace: bool = False,
    on_error: str = "stop",
    workers: int = 0,
    progress: Progress | None = None,
    files: Files | None = None,
) -> Added:
    """Add a field to a data set in place.

    Args:
        spec: the field. Without ``table``, its column is an existing field (or, of a json field, ``FIELD.NAME``).
        table: a source whose only field is ``spec``, by key.
        replace: the field may exist already; its new values take the place of the old ones, which stay in their files.
        on_error: ``stop`` at a value that cannot be encoded, or leave it ``absent`` and count it.

    Raises:
        OptionError, SourceError: the field, the column or the table make no sense. SampleError: a bad value, under ``stop``.
    """
    if on_error not in ON_ERROR:
        raise OptionError(f"on_error is {on_error!r}; valid: {', '.join(ON_ERROR)}")
    files = files or Files()
    # Opened first: locking a directory would make one that is missing.
    with Target(place_of(open_input(dataset)), files) as target:
        data = open_input(dataset)
        if spec.name in data.schema and not replace:
            raise OptionError(
                f"{data.path}: has a field {spec.name!r} already; --replace puts new values in the place of the old ones"
            )
        if table is None:
            _column_of(data, spec.column)
        job = _Adding(data, target, spec, table, on_error, files)
        return job.run(default_workers(workers), progress or (lambda _done, _total: None))


def _column_of(data: ShardDataset, column: str) -> tuple[str, tuple[str, ...]]:
    """An existing field, and names inside its value. Raises :class:`OptionError`."""
    if column in data.schema:
        return column, ()
    field, _, inside = column.partition(".")
    if field in data.schema and data.schema[field].kind == "json" and inside:
        return field, tuple(inside.split("."))
    raise OptionError(
        f"{data.path}: no field {column!r} to compute from; there are {', '.join(data.schema)} (and FIELD.NAME inside a json field); "
        "values from elsewhere come with --table"
    )


class _Adding:
    def __init__(
        self, data: ShardDataset, target: Target, spec: FieldSpec, table: Source | None, on_error: str, files: Files
    ) -> None:
        self._data, self._target, self._spec, self._table, self._files = data, target, spec, table, files
        encoder = make_encoder(spec.kind, spec.options)
        self._field = FieldMeta(spec.name, encoder.kind, encoder.params)
        self._on_error = on_error
        self._matched: Matched | None = None

    def run(self, workers: int, progress: Progress) -> Added:
        manifest = self._data.manifest
        self._matched = match(self._data, self._table) if self._table is not None else None
        about: dict[str, Any] = {
            "operation": OPERATION,
            # Which sidecar wins, should the manifest be lost: the last.
            "order": max((len(shard.sidecars) for shard in manifest.shards), default=0),
            "library": {"lfdata": lfdata.__version__, **library_versions({self._field.kind})},
            "field": msgspec.to_builtins(self._field),
            "column": self._spec.column,
            "on_error": self._on_error,
            "table": None
            if self._matched is None
            else {"source": self._table.describe() if self._table else None, "digest": self._matched.digest},
        }
        self._remove_strays(about)
        setup = {
            "job": "field",
            "source": str(self._data.path),
            "checksum": manifest.checksum,
            "spec": msgspec.structs.asdict(self._spec),
            "table": None if self._table is None else self._table.config(),
            "on_error": self._on_error,
            "provenance": about,
        }
        sidecars: list[SidecarEntry] = []
        statistics: list[dict[str, Any]] = []
        errors: list[str] = []
        bad = done = 0
        for task, answer in run_tasks(setup, self._tasks(about), workers, self._files):
            sidecars.append(msgspec.convert(answer["sidecar"], SidecarEntry))
            statistics.append(answer["statistics"])
            bad += answer["bad"]
            errors += answer["errors"][: _LISTED - len(errors)]
            done += manifest.shards[task["shard"]].rows
            progress(done, manifest.rows)
        self._commit(sidecars, statistics, about)
        total = merge_statistics(statistics)
        present = total.get(self._spec.name, {}).get("present", 0)
        unmatched = 0 if self._matched is None else self._matched.unmatched
        return Added(manifest.rows, present, bad, tuple(errors), unmatched, sum(sidecar.bytes for sidecar in sidecars))

    def _tasks(self, about: dict[str, Any]) -> Iterator[Task]:
        for number, shard in enumerate(self._data.manifest.shards):
            part, name = _place(shard, about)
            task: Task = {"shard": number, "part": part, "name": name}
            if self._matched is not None:
                rows, locators = self._matched.of(number)
                task |= {"rows": rows.tobytes(), "locators": locators}
            yield task

    def _remove_strays(self, about: dict[str, Any]) -> None:
        """Sidecars of an add-field that was given up: no manifest names them."""
        named = {sidecar.file for shard in self._data.manifest.shards for sidecar in shard.sidecars}
        wanted = {_place(shard, about)[1] for shard in self._data.manifest.shards}
        for name in self._target.shard_files():
            if "+" not in name or name in named or name in wanted:
                continue
            try:
                found = ShardFile(LocalFile(place_of(self._data) / name, DescriptorPool(1)))
            except LfdataError:
                continue
            if found.identity.kind == KIND_SIDECAR and found.meta.provenance.get("operation") == OPERATION:
                self._files.unlink(place_of(self._data) / name)
        self._target.remove_unfinished()

    def _commit(self, sidecars: list[SidecarEntry], statistics: list[dict[str, Any]], about: dict[str, Any]) -> None:
        old = self._data.manifest
        shards = tuple(
            msgspec.structs.replace(shard, sidecars=(*shard.sidecars, sidecar))
            for shard, sidecar in zip(old.shards, sidecars, strict=True)
        )
        fields = tuple(self._field if field.name == self._field.name else field for field in old.fields)
        if self._field.name not in {field.name for field in fields}:
            fields = (*fields, self._field)
        added = [*old.provenance.get("added", []), about]
        manifest = Manifest(
            rows=old.rows,
            fields=fields,
            shards=shards,
            statistics=old.statistics | merge_statistics(statistics),
            provenance=old.provenance | {"added": added},
        )
        if manifest.rows:
            # Between the two the old manifest finds an index that is not its own, and reads the shards instead.
            write_consolidated(place_of(self._data), manifest, self._files)
        self._files.write_file(place_of(self._data) / MANIFEST, encode_manifest(manifest))


def _place(shard: ShardEntry, about: dict[str, Any]) -> tuple[str, str]:
    """Part id and file name of a shard's sidecar. What it holds depends on the shard's own files too: the field it is computed from may
    have been replaced."""
    part = identity_of({"about": about, "files": [shard.id, *(sidecar.part for sidecar in shard.sidecars)]})[:32]
    return part, f"{shard.file.removesuffix(SHARD_SUFFIX)}+{part[:8]}{SHARD_SUFFIX}"


# -- the job --------------------------------------------------------------------------------------------------------------


def open_job(setup: dict[str, Any], files: Files) -> Run:
    """The job ``field``: a task is the sidecar of one shard. See :data:`shard_builder.operations.processes.JOBS`."""
    data = open_input(setup["source"], setup["checksum"])
    spec = FieldSpec(**setup["spec"])
    table = None if setup["table"] is None else source_from_config(setup["table"], place_of(data))
    maker = _Maker(data, spec, table, setup["on_error"], setup["provenance"], files)
    return maker.run


class _Maker:
    def __init__(
        self, data: ShardDataset, spec: FieldSpec, table: Source | None, on_error: str, provenance: dict[str, Any], files: Files
    ) -> None:
        self._data, self._spec, self._table, self._files = data, spec, table, files
        self._on_error, self._provenance = on_error, provenance
        self._encoder = make_encoder(spec.kind, spec.options)

    def run(self, task: Task) -> dict[str, Any]:
        entry = self._data.manifest.shards[task["shard"]]
        path = place_of(self._data) / task["name"]
        bad: list[str] = []
        count = 0
        if not path.exists():
            count = self._write(task, entry.id, path, bad)
        opened = ShardFile(
            LocalFile(path, DescriptorPool(1)), expect=(bytes.fromhex(entry.id), bytes.fromhex(task["part"]), entry.rows)
        )
        damage = next(verify_file(path, decoders=make_decoder), None)
        if damage is not None:
            raise CorruptError(
                path, damage.offset, f"what was written reads back damaged: {damage.reason}. Remove the file and run again"
            )
        tail = min(item.offset for item in opened.entries if item.type in (b"DICT", b"META", b"BSUM"))
        names = tuple(field.name for field in opened.fields)
        sidecar = SidecarEntry(task["name"], task["part"], opened.file.size, tail, file_digest(path), names)
        recorded = opened.meta.provenance.get("bad", {})
        return {
            "sidecar": msgspec.to_builtins(sidecar),
            "statistics": opened.meta.statistics,
            "bad": recorded.get("count", count),
            "errors": recorded.get("errors", bad),
        }

    def _write(self, task: Task, shard_id: str, path: Path, errors: list[str]) -> int:
        shard = self._data.shard(task["shard"])
        field = FieldMeta(self._spec.name, self._encoder.kind, self._encoder.params)
        writer = ShardWriter(path, [field], bytes.fromhex(shard_id), bytes.fromhex(task["part"]), files=self._files)
        bad = 0
        try:
            for row, value in self._values(shard, task):
                try:
                    found = self._loaded(value)
                    encoded = {} if found is _ABSENT else {field.name: self._encoder.encode(found)}
                except SampleError as error:
                    error.field = field.name
                    error.key = error.key or shard.base.keys(np.array([row]))[0]
                    error.path = error.path or f"{shard.name}, row {row}"
                    if self._on_error == "stop":
                        raise
                    bad += 1
                    errors += [str(error)] if len(errors) < _LISTED else []
                    encoded = {}
                writer.add(b"", encoded)
            provenance = self._provenance | ({"bad": {"count": bad, "errors": errors}} if bad else {})
            writer.finish(ShardMeta((field,), shard.base.meta.position, provenance=provenance))
        except BaseException:
            writer.abort()
            raise
        return bad

    def _values(self, shard: Shard, task: Task) -> Iterator[tuple[int, Any]]:
        if self._table is None:
            yield from self._computed(shard)
            return
        records = dict(zip(np.frombuffer(task["rows"], np.int64).tolist(), task["locators"], strict=True))
        for row in range(shard.rows):
            yield row, _Locator(records[row]) if row in records else _ABSENT

    def _loaded(self, value: Any) -> Any:
        """A value, or what a record of the table holds: a column that is empty there leaves the field absent, as in ``convert``."""
        if not isinstance(value, _Locator):
            return value
        assert self._table is not None
        return self._table.load(value.data).values.get(self._spec.name, _ABSENT)

    def _computed(self, shard: Shard) -> Iterator[tuple[int, Any]]:
        name, inside = _column_of(self._data, self._spec.column)
        as_value = self._spec.kind == "json" and self._data.schema[name].kind == "json"
        first = sum(entry.rows for entry in self._data.manifest.shards[: self._data.manifest.shards.index(shard.entry)])
        for start in range(0, shard.rows, _BATCH):
            rows = range(first + start, first + min(start + _BATCH, shard.rows))
            for row, value in enumerate(self._data.read_many(rows, [name])[name], start):
                found = _inside(value, inside)
                # The encoder takes text for JSON text; here it is a value.
                yield row, msgspec.json.encode(found) if isinstance(found, str) and as_value else found


@dataclass(frozen=True, slots=True)
class _Locator:
    data: bytes


_ABSENT = object()


def _inside(value: Any, names: tuple[str, ...]) -> Any:
    for name in names:
        if not isinstance(value, dict):
            return _ABSENT
        value = value.get(name)
    return _ABSENT if value is None else value
