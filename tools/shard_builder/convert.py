"""``convert``: a source becomes shards. See docs/convert.md for the order of things and why it is so."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

import lfdata
from lfdata.codecs.registry import library_versions
from lfdata.errors import LfdataError, OptionError, SampleError, SourceError, TargetExistsError
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
from shard_builder import report
from shard_builder.consolidate import write_consolidated
from shard_builder.journal import Journal, journal_path, work_directory
from shard_builder.options import ConvertOptions
from shard_builder.plan import Plan, Planner
from shard_builder.pool import Pool
from shard_builder.progress import Done, done_segments
from shard_builder.segments import SegmentWriter
from shard_builder.sources.base import BadRecord, Source
from shard_builder.target import ERRORS, QUARANTINE, RUN_LOG, Target
from shard_builder.training import needs_training, train_dictionaries
from shard_builder.worker import encoders_of

Progress = Callable[[int, int], None]
"""Called with (records done, records in all)."""


@dataclass(slots=True)
class Summary:
    """What a conversion did."""

    samples: int
    shards: int
    resumed_shards: int
    bytes: int
    source_bytes: int
    errors: int
    dropped: int
    seconds: float
    warnings: list[str] = field(default_factory=list)


def convert(
    source: Source,
    target: str | Path,
    options: ConvertOptions | None = None,
    *,
    progress: Progress | None = None,
    files: Files | None = None,
) -> Summary:
    """Convert ``source`` into the data set directory ``target``.

    Raises:
        TargetExistsError: the target is taken, or another process writes to it.
        SourceError, StoppedError, TooManyErrors: the source, or its samples under the policy.
        StorageError: disk full or failing. What was committed stays and ``resume`` goes on from there.
    """
    options = options or ConvertOptions()
    _refuse_inside(source, Path(target))
    with Target(Path(target), files or Files()) as place:
        try:
            return _Conversion(source, place, options, progress or (lambda _done, _total: None)).run()
        except BaseException:
            # An interruption may come between a file's creation and whatever would remove it.
            with contextlib.suppress(LfdataError, OSError):
                place.remove_unfinished()
            raise


def _refuse_inside(source: Source, target: Path) -> None:
    """A target below the source's folder would be scanned as part of it."""
    location = Path(str(source.config()["location"]))
    if os.path.isdir(location) and target.resolve().is_relative_to(location.resolve()):
        raise OptionError(f"{target}: the target lies inside the source {location}; choose a directory outside it")


class _Conversion:
    def __init__(self, source: Source, target: Target, options: ConvertOptions, progress: Progress) -> None:
        self.source, self.target, self.options, self.progress = source, target, options, progress
        self.files = target.files
        self.started = time.time()
        self.clock = time.monotonic()
        self.report = report.Report(options)
        self.shards: list[ShardEntry] = []
        self.statistics: list[dict[str, Any]] = []
        self.entries: list[dict[str, Any]] = []
        self.resumed = 0

    def run(self) -> Summary:
        """The whole conversion."""
        options, target = self.options, self.target
        fresh = not (journal_path(target.path).exists() or (target.path / MANIFEST).exists())
        if not options.overwrite and (fresh or not options.resume):
            target.refuse_existing()
        # Options of the fields are checked before anything is touched.
        encoders_of(list(self.source.fields), {})
        finished = options.resume and not journal_path(target.path).exists() and target.manifest_id() is not None
        target.clean(journal=not options.resume)
        work = work_directory(target.path)
        self.files.make_directory(work)
        try:
            # The workers import their libraries while the source is scanned.
            with Pool(options.worker_count, self._setup({}), options.sample_timeout) as self.pool:
                plan = self._plan(work)
                try:
                    if plan.records - plan.bad == 0 and not options.allow_empty:
                        raise SourceError(self._nothing(plan))
                    return self._with_plan(plan, finished)
                finally:
                    plan.close()
        finally:
            self._leave_no_empty_work(work)

    def _plan(self, work: Path) -> Plan:
        options = self.options
        planner = Planner(self.files, work, options.segment_bytes, options.segment_rows, options.duplicates)
        try:
            return planner.run(self.source)
        except BaseException:
            planner.close()
            raise

    def _nothing(self, plan: Plan) -> str:
        if plan.bad:
            first = next(item for segment in plan.segments for _, item in plan.items(segment, segment.first))
            assert isinstance(first, BadRecord)
            error = SampleError(first.code, first.reason, key=first.key, path=first.path)
            return f"all {plan.bad} samples of the source are bad; the first: {error}"
        skipped = self.source.notes().get("skipped") or {}
        found = ", ".join(f"{count} {what}" for what, count in skipped.items())
        left = f" (left out: {found})" if found else ""
        return f"no samples found in the source{left}; --allow-empty makes a data set of 0 samples"

    def _leave_no_empty_work(self, work: Path) -> None:
        if work.is_dir() and not os.listdir(work):
            self.files.remove_directory(work)

    def _with_plan(self, plan: Plan, finished: bool) -> Summary:
        journal, done = self._journal(plan, finished)
        if journal is None:
            return self._summary(plan)
        try:
            self._encode(plan, journal, done)
            self._finish(plan)
        finally:
            journal.close()
        self.target.clean(journal=True)
        return self._summary(plan)

    # -- identity -----------------------------------------------------------------------------------------------------

    def _provenance(self, plan: Plan) -> dict[str, Any]:
        dictionaries = {name: hashlib.sha256(data).hexdigest() for name, data in self.dictionaries.items()}
        return {
            "format": [MAJOR, MINOR],
            "library": {"lfdata": lfdata.__version__, **library_versions({spec.kind for spec in self.source.fields})},
            "options": self.options.layout(),
            "source": self.source.describe() | {"fingerprint": plan.fingerprint, "records": plan.records},
            "notes": self.source.notes(),
            "dictionaries": dictionaries,
        }

    def _journal(self, plan: Plan, finished: bool) -> tuple[Journal | None, list[dict[str, Any]]]:
        path = journal_path(self.target.path)
        resuming = self.options.resume and path.exists()
        journal, entries = Journal.resume(self.files, self.target.path) if resuming else (None, [])
        if entries:
            self.dictionaries = {name: base64.b64decode(data) for name, data in entries[0]["dictionaries"].items()}
        else:
            self.dictionaries = self._train(plan)
        encoders = encoders_of(list(self.source.fields), self.dictionaries)
        self.fields = tuple(FieldMeta(name, encoder.kind, encoder.params) for name, encoder in encoders.items())
        self.provenance = self._provenance(plan)
        identity = self.provenance | {"fields": msgspec.to_builtins(self.fields)}
        self.conversion = hashlib.sha256(msgspec.json.encode(identity, order="sorted")).hexdigest()
        self.provenance["conversion"] = self.conversion
        if journal is not None:
            self._same(entries[0], identity)
            self.replaced = entries[0]["replaced"]
            return journal, entries[1:]
        if finished:
            if self.target.manifest_id() == self.conversion:
                return None, []
            raise TargetExistsError(
                f"{self.target.path}: holds a finished data set made otherwise; use --overwrite to replace it"
            )
        if self.options.resume and (self.target.path / MANIFEST).exists():
            raise TargetExistsError(f"{self.target.path}: its manifest cannot be read; use --overwrite to start again")
        encoded = {name: base64.b64encode(data).decode() for name, data in self.dictionaries.items()}
        self.replaced = self.target.shard_files()
        head = {"conversion": self.conversion, "identity": identity, "dictionaries": encoded, "replaced": self.replaced}
        return Journal.create(self.files, self.target.path, head), []

    def _same(self, head: dict[str, Any], identity: dict[str, Any]) -> None:
        if head.get("conversion") == self.conversion:
            return
        before, now = head.get("identity", {}), msgspec.json.decode(msgspec.json.encode(identity))
        changed = sorted(_differences(before, now))
        raise TargetExistsError(
            f"{self.target.path}: the unfinished conversion was another one ({'; '.join(changed[:8])}). "
            "Repeat it exactly to resume, or start again with --overwrite"
        )

    def _train(self, plan: Plan) -> dict[str, bytes]:
        if not needs_training(self.source, plan):
            return {}
        self.pool.set_up(self._setup({}))
        return train_dictionaries(self.source, plan, work_directory(self.target.path), self.pool)

    def _setup(self, dictionaries: dict[str, bytes]) -> dict[str, Any]:
        """What a worker is told before its first record. What a scan finds out may change it."""
        return {
            "source": self.source.config(),
            "stage": str(work_directory(self.target.path)),
            "fields": [msgspec.structs.asdict(spec) for spec in self.source.fields],
            "dictionaries": dictionaries,
            "keep_bad": self.options.on_error == "quarantine",
        }

    # -- encoding -----------------------------------------------------------------------------------------------------

    def _encode(self, plan: Plan, journal: Journal, done: list[dict[str, Any]]) -> None:
        segments = self._restore(plan, done)
        todo = [(n, s, segments.get(n) or Done(s.first)) for n, s in enumerate(plan.segments)]
        todo = [(n, s, at) for n, s, at in todo if at.closing is None]
        self.progress(plan.records - sum(segment.stop - at.record for _, segment, at in todo), plan.records)
        if not todo:
            return
        self.pool.set_up(self._setup(self.dictionaries))
        for number, segment, at in todo:
            self.source.stage(segment.unit, work_directory(self.target.path))
            SegmentWriter(self, plan, journal, number, len(at.shards)).run(self.pool, segment, at.record)
            self.source.unstage(segment.unit, work_directory(self.target.path))

    def _restore(self, plan: Plan, lines: list[dict[str, Any]]) -> dict[int, Done]:
        if lines:
            # A shard renamed by the killed run may have a name that is not durable yet.
            self.files.sync_directory(self.target.path)
        segments = done_segments(self.target, lines, plan.segments, self.replaced)
        for done in segments.values():
            for shard, line in done.shards:
                self.add_shard(shard, line["statistics"], line["errors"])
                self.report.restore(line["errors"])
                self.resumed += 1
            if done.closing is not None:
                self.entries += done.closing["errors"]
                self.report.restore(done.closing["errors"])
        return segments

    def add_shard(self, shard: ShardEntry, statistics: dict[str, Any], entries: list[dict[str, Any]]) -> None:
        """Take a committed shard into the data set."""
        self.shards.append(shard)
        self.statistics.append(statistics)
        self.entries += entries

    # -- end ----------------------------------------------------------------------------------------------------------

    def _sort(self) -> None:
        """Into the order of the source: where a shard was missing, resume has made an earlier one after later ones."""
        made = sorted(zip(self.shards, self.statistics, strict=True), key=lambda pair: (pair[0].segment, pair[0].ordinal))
        self.shards, self.statistics = [shard for shard, _ in made], [statistics for _, statistics in made]
        self.entries.sort(key=lambda entry: entry["record"])

    def _finish(self, plan: Plan) -> None:
        self._sort()
        rows = sum(shard.rows for shard in self.shards)
        if rows == 0 and not self.options.allow_empty:
            raise LfdataError(self._nothing_stored(plan))
        manifest = Manifest(
            rows=rows,
            fields=self.fields,
            shards=tuple(self.shards),
            statistics=merge_statistics(self.statistics),
            provenance=self.provenance,
        )
        path = self.target.path
        if rows:
            write_consolidated(path, manifest, self.files)
        else:
            self.files.unlink(path / INDEX)
        if self.entries:
            self.files.write_file(path / ERRORS, report.lines(self.entries))
        else:
            self.files.unlink(path / ERRORS)
        self.files.write_file(path / MANIFEST, encode_manifest(manifest))
        self.target.remove_old({shard.file for shard in self.shards})
        self._log(plan)

    def _remarks(self) -> list[str]:
        count = sum(entry["action"] == "stored" for entry in self.entries)
        return [f"{count} values were stored with a remark: see {self.target.path / ERRORS}"] if count else []

    def _nothing_stored(self, plan: Plan) -> str:
        """Write the report all the same, and say where it is."""
        path = self.target.path / ERRORS
        self.files.write_file(path, report.lines(self.entries))
        bad = next((entry for entry in self.entries if entry["action"] != "dropped"), None)
        first = f"; the first: {bad['path']}: key {bad['key']!r}: {bad['reason']} [{bad['code']}]" if bad else ""
        return f"none of {plan.records} samples could be stored{first}. All are listed in {path}. --allow-empty accepts an empty data set"

    def _log(self, plan: Plan) -> None:
        """The run log: what must not be in the manifest, since it determines no bytes."""
        entry = {
            "started": self.started,
            "seconds": time.monotonic() - self.clock,
            "host": os.uname().nodename,
            "workers": self.options.worker_count,
            "source": self.source.config(),
            "conversion": self.conversion,
            "resumed_shards": self.resumed,
            "shards": len(self.shards),
            "records": plan.records,
        }
        path = self.target.path / RUN_LOG
        before = path.read_bytes() if path.exists() else b""
        self.files.write_file(path, before + msgspec.json.encode(entry, enc_hook=str) + b"\n")

    def _summary(self, plan: Plan) -> Summary:
        if not self.shards:
            self.shards = list(_manifest_shards(self.target.path))
            self.resumed = len(self.shards)
        return Summary(
            samples=sum(shard.rows for shard in self.shards),
            shards=len(self.shards),
            resumed_shards=self.resumed,
            bytes=sum(shard.bytes for shard in self.shards),
            source_bytes=plan.bytes,
            errors=self.report.count,
            dropped=len(plan.dropped),
            seconds=time.monotonic() - self.clock,
            warnings=plan.warnings + self._remarks(),
        )

    @property
    def quarantine(self) -> Path:
        """Where bad samples are kept under ``--on-error quarantine``."""
        return self.target.path / QUARANTINE


def _manifest_shards(path: Path) -> Iterator[ShardEntry]:
    yield from read_manifest(path).shards


def _differences(before: Any, now: Any, path: str = "") -> Iterator[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        for name in before.keys() | now.keys():
            if name != "conversion":
                yield from _differences(before.get(name), now.get(name), f"{path}.{name}" if path else name)
    elif before != now:
        yield f"{path}: {str(before)[:60]} -> {str(now)[:60]}"
