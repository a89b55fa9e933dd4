"""The job ``copy``: a task is one file of the result, taken over or written from stored values."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from lfdata.dataset import ShardDataset
from lfdata.errors import CorruptError, StorageError
from lfdata.format.durable import Files, storage_error, temporary_name
from lfdata.format.files import DescriptorPool, LocalFile
from lfdata.format.meta import Position, ShardEntry, ShardMeta, SidecarEntry, merge_statistics
from lfdata.format.reader import ShardFile
from lfdata.format.writer import ShardWriter
from shard_builder.operations.inputs import open_input, place_of, stored_dictionaries, stored_fields, stored_rows
from shard_builder.operations.processes import Run, Task

_READ_BYTES = 4 << 20
# What a file system says that cannot link, at all or between these places.
_NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS, errno.EACCES)


def open_job(setup: dict[str, Any], files: Files) -> Run:
    """See :data:`shard_builder.operations.processes.JOBS`."""
    inputs = [open_input(path, checksum) for path, checksum in setup["inputs"]]
    target = Path(setup["target"])

    def run(task: Task) -> dict[str, Any]:
        if task["whole"]:
            data = inputs[task["input"]]
            return take_over(place_of(data), data.manifest.shards[task["shard"]], task, target, setup["copy"], files)
        if (target / task["name"]).exists():
            return _found(target / task["name"], bytes.fromhex(task["id"]))
        return _write(inputs, setup, task, target, files)

    return run


# -- whole shards ---------------------------------------------------------------------------------------------------------


def take_over(folder: Path, entry: ShardEntry, task: Task, target: Path, copy: bool, files: Files) -> dict[str, Any]:
    """A shard of ``folder`` with its sidecars, under new names: manifest entry, and statistics of the fields that are wanted.

    Raises:
        FormatError: a file that is not what its entry says.
    """
    stem = task["name"].removesuffix(".lfd")
    statistics: dict[str, Any] = {}
    sidecars = []
    parts: tuple[ShardEntry | SidecarEntry, ...] = (entry, *entry.sidecars)
    for part in parts:
        name = task["name"] if isinstance(part, ShardEntry) else f"{stem}+{part.part[:8]}.lfd"
        path = target / name
        if not path.exists():
            _bring(folder / part.file, path, part, copy, files)
        identity = bytes(16) if isinstance(part, ShardEntry) else bytes.fromhex(part.part)
        opened = ShardFile(LocalFile(path, DescriptorPool(1)), expect=(bytes.fromhex(entry.id), identity, entry.rows))
        if opened.file.size != part.bytes:
            raise CorruptError(
                folder / part.file, None, f"the file has {opened.file.size} bytes; the manifest says {part.bytes}"
            )
        statistics |= {item: opened.meta.statistics[item] for item in opened.meta.statistics if item in task["fields"]}
        if isinstance(part, SidecarEntry):
            sidecars.append(msgspec.structs.replace(part, file=name))
    taken = msgspec.structs.replace(entry, file=task["name"], sidecars=tuple(sidecars))
    return {"shard": msgspec.to_builtins(taken), "statistics": statistics}


def _bring(source: Path, path: Path, part: ShardEntry | SidecarEntry, copy: bool, files: Files) -> None:
    """The file under its new name: as a hard link, or where that cannot be (or is not wanted) as a copy whose digest is compared."""
    if not copy:
        try:
            files.link(source, path)
        except StorageError as error:
            if error.errno not in _NO_LINKS:
                raise
        else:
            return
    digest = hashlib.sha256()
    output = files.create(path.with_name(temporary_name(path.name)))
    try:
        with open(source, "rb") as file:
            while data := file.read(_READ_BYTES):
                digest.update(data)
                output.write(data)
        if digest.hexdigest() != part.sha256:
            raise CorruptError(
                source, None, f"the SHA-256 of the file is {digest.hexdigest()}; the manifest says {part.sha256}"
            )
        files.commit(output, path)
    except OSError as error:
        files.discard(output)
        raise storage_error(source, "read", error) from error
    except BaseException:
        files.discard(output)
        raise


# -- new shards -----------------------------------------------------------------------------------------------------------


def _write(inputs: list[ShardDataset], setup: dict[str, Any], task: Task, target: Path, files: Files) -> dict[str, Any]:
    names = setup["fields"]
    first = inputs[task["pieces"][0][0]].shard(task["pieces"][0][1])
    fields = stored_fields(first, names)
    identity = bytes.fromhex(task["id"])
    writer = ShardWriter(
        target / task["name"],
        fields,
        identity,
        dictionaries=stored_dictionaries(first, names),
        group_bytes=setup["group_bytes"],
        files=files,
    )
    try:
        for number, ordinal, packed in task["pieces"]:
            shard = inputs[number].shard(ordinal)
            for _, key, values in stored_rows(shard, names, np.frombuffer(packed, "<i8")):
                writer.add(key, values)
        position = Position(task["number"], task["total"], 0, True)
        written = writer.finish(ShardMeta(fields, position, provenance=setup["provenance"]))
    except BaseException:
        writer.abort()
        raise
    shard_entry = ShardEntry(
        task["name"], task["id"], written.rows, written.bytes, written.tail, written.sha256, task["number"], 0
    )
    return {"shard": msgspec.to_builtins(shard_entry), "statistics": written.statistics}


def _found(path: Path, identity: bytes) -> dict[str, Any]:
    """A shard that an earlier run of this operation finished."""
    opened = ShardFile(LocalFile(path, DescriptorPool(1)))
    if opened.identity.shard_id != identity:
        raise CorruptError(
            path, None, "the file belongs to another operation. Remove the unfinished result and run the command again"
        )
    entry, statistics = entry_of(opened)
    return {"shard": msgspec.to_builtins(entry), "statistics": statistics}


def entry_of(opened: ShardFile) -> tuple[ShardEntry, dict[str, Any]]:
    """Manifest entry and statistics of a base shard, from the file itself."""
    path = Path(opened.name)
    position = opened.meta.position
    tail = min(entry.offset for entry in opened.entries if entry.type in (b"DICT", b"META", b"BSUM"))
    entry = ShardEntry(
        path.name,
        opened.identity.shard_id.hex(),
        opened.rows,
        opened.file.size,
        tail,
        file_digest(path),
        position.segment,
        position.ordinal,
    )
    return entry, merge_statistics([opened.meta.statistics])


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise StorageError(path, "read", error.errno, error.strerror or os.strerror(errno.EIO)) from error
