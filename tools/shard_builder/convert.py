"""``convert``: a source becomes shards. See docs/convert.md for the order of things and why it is so."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

import lfdata
from lfdata.codecs.registry import library_versions
from lfdata.errors import LfdataError, OptionError, SampleError, SourceError, TargetExistsError
from lfdata.format.durable import Files
from lfdata.format.layout import MAJOR, MINOR
from lfdata.format.meta import MANIFEST, FieldMeta, ShardEntry, read_manifest
from shard_builder import report
from shard_builder.complete import Made, complete
from shard_builder.differences import told
from shard_builder.journal import Journal, task_journals
from shard_builder.journal import read as read_journal
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
    if options.task is not None:
        # A scheduler that runs a task again wants the rest of it.
        options = replace(options, resume=True)
    _refuse_inside(source, Path(target))
    with Target(Path(target), files or Files(), options.task) as place:
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
    if os.path.isdir(location) and location.resolve().is_relative_to(target.resolve()):
        raise OptionError(f"{target}: the source {location} lies inside the target; choose a directory beside it")


class _Conversion:
    def __init__(self, source: Source, target: Target, options: ConvertOptions, progress: Progress) -> None:
        self.source, self.target, self.options, self.progress = source, target, options, progress
        self.files = target.files
        self.started = time.time()
        self.clock = time.monotonic()
        self.report = report.Report(options)
        self.made = Made()
        self.resumed = 0

    def run(self) -> Summary:
        """The whole conversion."""
        options, target = self.options, self.target
        fresh = not (target.journal.exists() or (target.path / MANIFEST).exists())
        if not options.overwrite and (fresh or not options.resume):
            target.refuse_existing()
        # Options of the fields are checked before anything is touched.
        encoders_of(list(self.source.fields), {})
        finished = options.resume and not target.journal.exists() and target.manifest_id() is not None
        target.clean(journal=not options.resume)
        work = target.work
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
        for path in (work, *([work.parent] if self.options.task is not None else [])):
            if path.is_dir() and not os.listdir(path):
                self.files.remove_directory(path)

    def _with_plan(self, plan: Plan, finished: bool) -> Summary:
        journal, done = self._journal(plan, finished)
        if journal is None:
            return self._summary(plan)
        try:
            self._encode(plan, journal, done)
            if self.options.task is None:
                complete(self.target, self.made, self.fields, self.provenance, plan.records, self.options.allow_empty)
                self._log(plan)
        finally:
            journal.close()
        if self.options.task is None:
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
        resuming = self.options.resume and self.target.journal.exists()
        journal, entries = Journal.resume(self.files, self.target.path, self.options.task) if resuming else (None, [])
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
        self._same_as_other_tasks(identity)
        encoded = {name: base64.b64encode(data).decode() for name, data in self.dictionaries.items()}
        task = self.options.task
        self.replaced = self.target.shard_files() if task is None else []
        head = {"conversion": self.conversion, "identity": identity, "dictionaries": encoded, "replaced": self.replaced}
        if task is not None:
            # What `finish` cannot know without the source.
            head["segments"] = [segment.first for segment in plan.segments] + [plan.records]
        return Journal.create(self.files, self.target.path, head, task), []

    def _same_as_other_tasks(self, identity: dict[str, Any]) -> None:
        """A task that begins belongs to what the others have begun, or all its work would be for nothing."""
        for task, path in task_journals(self.target.path) if self.options.task is not None else ():
            (head, *_), _ = read_journal(path)
            if head["conversion"] != self.conversion:
                now = msgspec.json.decode(msgspec.json.encode(identity))
                raise TargetExistsError(
                    f"{self.target.path}: task {task.number}/{task.count} belongs to another conversion ({told(head['identity'], now)}). "
                    "Run all tasks alike, or choose a new target"
                )

    def _same(self, head: dict[str, Any], identity: dict[str, Any]) -> None:
        if head.get("conversion") == self.conversion:
            return
        before, now = head.get("identity", {}), msgspec.json.decode(msgspec.json.encode(identity))
        raise TargetExistsError(
            f"{self.target.path}: the unfinished conversion was another one ({told(before, now)}). "
            "Repeat it exactly to resume, or start again with --overwrite"
        )

    def _train(self, plan: Plan) -> dict[str, bytes]:
        if not needs_training(self.source, plan):
            return {}
        self.pool.set_up(self._setup({}))
        return train_dictionaries(self.source, plan, self.target.work, self.pool)

    def _setup(self, dictionaries: dict[str, bytes]) -> dict[str, Any]:
        """What a worker is told before its first record. What a scan finds out may change it."""
        return {
            "source": self.source.config(),
            "stage": str(self.target.work),
            "fields": [msgspec.structs.asdict(spec) for spec in self.source.fields],
            "dictionaries": dictionaries,
            "keep_bad": self.options.on_error == "quarantine",
        }

    # -- encoding -----------------------------------------------------------------------------------------------------

    def _encode(self, plan: Plan, journal: Journal, done: list[dict[str, Any]]) -> None:
        segments = self._restore(plan, done)
        task = self.options.task
        mine = [(n, s) for n, s in enumerate(plan.segments) if task is None or task.makes(n)]
        todo = [(n, s, segments.get(n) or Done(s.first)) for n, s in mine]
        todo = [(n, s, at) for n, s, at in todo if at.closing is None]
        self.progress(plan.records - sum(segment.stop - at.record for _, segment, at in todo), plan.records)
        if not todo:
            return
        self.pool.set_up(self._setup(self.dictionaries))
        for number, segment, at in todo:
            self.source.stage(segment.unit, self.target.work)
            SegmentWriter(self, plan, journal, number, len(at.shards)).run(self.pool, segment, at.record)
            self.source.unstage(segment.unit, self.target.work)

    def _restore(self, plan: Plan, lines: list[dict[str, Any]]) -> dict[int, Done]:
        if lines:
            # A shard renamed by the killed run may have a name that is not durable yet.
            self.files.sync_directory(self.target.path)
        segments = done_segments(self.target, lines, plan.segments, self.replaced)
        for done in segments.values():
            for shard, line in done.shards:
                self.made.add(shard, line["statistics"], line["errors"])
                self.report.restore(line["errors"])
                self.resumed += 1
            if done.closing is not None:
                self.made.entries += done.closing["errors"]
                self.report.restore(done.closing["errors"])
        return segments

    # -- end ----------------------------------------------------------------------------------------------------------

    def _remarks(self) -> list[str]:
        count = sum(entry["action"] == "stored" for entry in self.made.entries)
        return [f"{count} values were stored with a remark: see {self.target.path / ERRORS}"] if count else []

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
            "shards": len(self.made.shards),
            "records": plan.records,
        }
        path = self.target.path / RUN_LOG
        before = path.read_bytes() if path.exists() else b""
        self.files.write_file(path, before + msgspec.json.encode(entry, enc_hook=str) + b"\n")

    def _summary(self, plan: Plan) -> Summary:
        if not self.made.shards and (self.target.path / MANIFEST).exists():
            self.made.shards = list(_manifest_shards(self.target.path))
            self.resumed = len(self.made.shards)
        return Summary(
            samples=sum(shard.rows for shard in self.made.shards),
            shards=len(self.made.shards),
            resumed_shards=self.resumed,
            bytes=sum(shard.bytes for shard in self.made.shards),
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
