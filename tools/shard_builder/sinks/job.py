"""An export as a whole: rows cut into files by their sizes in the index, files written one by one, and ``export.json`` last."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import lfdata
from lfdata.dataset import ShardDataset
from lfdata.errors import CorruptError, OptionError, SampleError, StorageError
from lfdata.format.durable import Files, OutputFile, temporary_name
from lfdata.format.files import read_small
from lfdata.format.meta import FieldMeta
from shard_builder.operations.inputs import (
    describe_input,
    open_input,
    payload_sizes,
    place_of,
    refuse_overlap,
    stored_dictionaries,
    stored_fields,
    stored_rows,
)
from shard_builder.operations.output import Output, identity_of
from shard_builder.operations.processes import Run, Task, default_workers, run_tasks
from shard_builder.sinks.base import ExportOptions, Sink, chosen
from shard_builder.sinks.parquet import ParquetSink
from shard_builder.sinks.webdataset import WebDatasetSink

EXPORT = "export.json"
FORMATS: dict[str, Callable[..., Any]] = {"webdataset": WebDatasetSink, "parquet": ParquetSink}
_READ_BYTES = 4 << 20

Progress = Callable[[int, int], None]
"""Called with (samples done, samples in all)."""


def make_sink(fields: tuple[FieldMeta, ...], options: ExportOptions) -> Sink:
    """The sink of a format. Raises :class:`OptionError` for an unknown one."""
    made = FORMATS.get(options.format)
    if made is None:
        raise OptionError(f"unknown format {options.format!r}; valid: {', '.join(FORMATS)}")
    sink: Sink = made(fields, options)
    return sink


def export(
    source: str | Path,
    target: str | Path,
    options: ExportOptions,
    *,
    progress: Progress | None = None,
    files: Files | None = None,
) -> dict[str, Any]:
    """Write a data set as files of another format into the directory ``target``.

    Returns:
        What ``export.json`` holds: ``format``, ``rows``, ``fields``, ``files`` (name, rows, bytes, sha256).

    Raises:
        TargetExistsError: the target holds anything but the same export, begun or finished.
        SampleError: a value the format cannot carry: key and field are named. FormatError: a damaged shard.
    """
    files = files or Files()
    data = open_input(source)
    refuse_overlap(target, [place_of(data)])
    fields = chosen(data.manifest.fields, options.fields)
    sink = make_sink(fields, options)
    about = {name: value for name, value in asdict(options).items() if name != "workers"}
    identity = {"operation": "export", "lfdata": lfdata.__version__, "options": about, "source": describe_input(data.manifest)}
    if options.format == "parquet":
        identity["pyarrow"] = ParquetSink(fields, options).arrow.__version__
    setup = {
        "job": "export",
        "source": str(data.path),
        "target": str(target),
        "options": about,
        "checksum": data.manifest.checksum,
    }
    with Output(Path(target), identity_of(identity), EXPORT, _finished, files) as out:
        if out.finished:
            return read_export(Path(target))
        written = []
        done = 0
        tasks = ({**task, "there": out.has(task["name"])} for task in cut(data, sink, fields, options))
        for task, answer in run_tasks(setup, tasks, default_workers(options.workers), files):
            written.append({"name": task["name"], "rows": task["stop"] - task["start"], **answer})
            done = task["stop"]
            if progress is not None:
                progress(done, len(data))
        found = {
            "export": identity_of(identity),
            "format": options.format,
            "rows": len(data),
            "fields": sink.describe(),
            "source": describe_input(data.manifest),
            "options": about,
            "files": written,
        }
        out.finish(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    return found


def read_export(target: Path) -> dict[str, Any]:
    """``export.json`` of a finished export. Raises :class:`CorruptError`, :class:`StorageError`."""
    path = target / EXPORT
    try:
        found: dict[str, Any] = msgspec.json.decode(read_small(path), type=dict[str, Any])
    except OSError as error:
        raise StorageError(path, "read", error.errno, error.strerror or str(error)) from error
    except msgspec.MsgspecError as error:
        raise CorruptError(path, None, f"not what an export writes: {error}") from error
    return found


def _finished(target: Path) -> str | None:
    try:
        found = read_export(target).get("export")
    except CorruptError:
        return None
    return found if isinstance(found, str) else None


def cut(data: ShardDataset, sink: Sink, fields: tuple[FieldMeta, ...], options: ExportOptions) -> Iterator[Task]:
    """Files with their rows: a new one begins before the row that would take it over ``shard_bytes``. At least one file."""
    names = [field.name for field in fields]
    number = start = row = size = 0
    for ordinal in range(len(data.manifest.shards)):
        sizes = payload_sizes(data.shard(ordinal), names, unpacked=True) + sink.row_overhead()
        ends = np.cumsum(sizes)
        first = 0
        while True:
            before = int(ends[first - 1]) if first else 0
            stop = int(np.searchsorted(ends, before + options.shard_bytes - size, side="right"))
            if stop >= len(sizes):
                size += int(ends[-1]) - before if len(sizes) else 0
                break
            stop = max(stop, first + (size == 0))  # a row larger than a file has one of its own
            yield _task(options, sink, number, start, row + stop)
            number, start, size, first = number + 1, row + stop, 0, stop
        row += len(sizes)
    if row > start or not number:
        yield _task(options, sink, number, start, row)


def _task(options: ExportOptions, sink: Sink, number: int, start: int, stop: int) -> Task:
    return {"name": f"{options.prefix}-{number:06d}{sink.suffix}", "start": start, "stop": stop}


class _Hashed:
    """An output file whose digest is computed on the way."""

    def __init__(self, output: OutputFile) -> None:
        self._output = output
        self.digest = hashlib.sha256()

    @property
    def position(self) -> int:
        return self._output.position

    def write(self, data: Any) -> None:
        self._output.write(data)
        self.digest.update(data)


def open_job(setup: dict[str, Any], files: Files) -> Run:
    """The job ``export``: a task is one file."""
    data = open_input(setup["source"], setup["checksum"])
    options = ExportOptions(**{**setup["options"], "fields": tuple(setup["options"]["fields"])})
    fields = chosen(data.manifest.fields, options.fields)
    sink = make_sink(fields, options)

    def run(task: Task) -> dict[str, Any]:
        path = Path(setup["target"]) / task["name"]
        if task["there"]:
            return _digest(path)
        return _write(data, sink, [field.name for field in fields], task, path, files)

    return run


def _write(data: ShardDataset, sink: Sink, names: list[str], task: Task, path: Path, files: Files) -> dict[str, Any]:
    output = files.create(path.with_name(temporary_name(path.name)))
    writer: Any = None
    try:
        hashed = _Hashed(output)
        writer = sink.open(hashed)
        first = 0
        for number, entry in enumerate(data.manifest.shards):
            low, high = max(task["start"] - first, 0), min(task["stop"] - first, entry.rows)
            if low < high:
                shard = data.shard(number)
                stored = {field.name: field for field in stored_fields(shard, names)}
                writer.forms.dictionaries = stored_dictionaries(shard, names)
                for row, key, values in stored_rows(shard, names, np.arange(low, high)):
                    try:
                        writer.add(key, stored, values)
                    except SampleError as error:
                        error.key, error.path = key, f"{shard.name}, row {row}"
                        raise
            first += entry.rows
        writer.finish()
        size = output.position
        files.commit(output, path)
    except BaseException:
        if writer is not None:
            writer.abandon()
        files.discard(output)
        raise
    return {"bytes": size, "sha256": hashed.digest.hexdigest()}


def _digest(path: Path) -> dict[str, Any]:
    """Size and digest of a file that an earlier run finished."""
    digest = hashlib.sha256()
    size = 0
    try:
        with open(path, "rb") as file:
            while data := file.read(_READ_BYTES):
                digest.update(data)
                size += len(data)
    except OSError as error:
        raise StorageError(path, "read", error.errno, error.strerror or str(error)) from error
    return {"bytes": size, "sha256": digest.hexdigest()}
