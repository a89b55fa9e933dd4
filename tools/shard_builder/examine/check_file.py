"""One file: that it is the one the manifest means, every structure and check in it, and its digest."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import msgspec

from lfdata.errors import LfdataError, StorageError
from lfdata.format import layout
from lfdata.format.files import LocalFile
from lfdata.format.reader import ShardFile
from shard_builder.examine.damage import Damage, DamageList, code_of, of_error, reason_of
from shard_builder.examine.opened import DataSet, Member
from shard_builder.examine.worker import Progress

READ_BYTES = 4 << 20


def file(data: DataSet | None, task: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Operation ``file``: ``member`` (ordinal), or ``path`` for a file outside the manifest; ``quick``: no payload bytes."""
    found = DamageList()
    if "path" in task:
        _contents(Path(task["path"]), None, task["quick"], found)
        return {"damage": msgspec.to_builtins(found.listed), "unlisted": found.unlisted}
    assert data is not None
    member = data.members[task["member"]]
    path = data.path / member.file
    try:
        size = os.stat(path).st_size
    except OSError as error:
        text = "the file is missing" if isinstance(error, FileNotFoundError) else error.strerror or str(error)
        found.add(Damage(member.file, "missing" if isinstance(error, FileNotFoundError) else "storage", text, shard=member.number))
        return {"damage": msgspec.to_builtins(found.listed)}
    if size != member.bytes:
        code = "truncated" if size < member.bytes else "corrupt"
        reason = f"{size} bytes; the manifest says {member.bytes}"
        found.add(Damage(member.file, code, reason, offset=min(size, member.bytes), shard=member.number))
    try:
        _against_manifest(data, member, data.file(member), found)
    except LfdataError as error:
        found.add(of_error(member, error))
    progress.beat()
    _contents(path, member, task["quick"], found)
    return {"damage": msgspec.to_builtins(found.listed), "unlisted": found.unlisted}


def _against_manifest(data: DataSet, member: Member, opened: ShardFile, found: DamageList) -> None:
    """Place, last shard of a segment, and schema."""
    if data.single:
        return
    position, base = opened.meta.position, member.base
    if member.sidecar is None and (position.segment, position.ordinal) != (base.segment, base.ordinal):
        reason = f"it says segment {position.segment}, shard {position.ordinal}; the manifest says {base.segment}, {base.ordinal}"
        found.add(Damage(member.file, "order", reason, section="META", shard=member.number))
    following = data.manifest.shards[member.number + 1 :][:1]
    if member.sidecar is None and not position.last and (not following or following[0].segment != base.segment):
        reason = f"it says that a shard follows in segment {base.segment}; the manifest names none"
        found.add(Damage(member.file, "order", reason, level="warning", section="META", shard=member.number))
    held = {field.name: field for field in opened.fields}
    wanted = member.sidecar.fields if member.sidecar else [name for name in data.schema if name not in _replaced(base)]
    for name in wanted:
        field, stored = data.schema.get(name), held.get(name)
        if stored is None:
            found.add(Damage(member.file, "schema", "the file lacks this field", section="META", shard=member.number, field=name))
        elif field is not None and (stored.kind, stored.params.get("dtype")) != (field.kind, field.params.get("dtype")):
            reason = f"kind {stored.kind} {stored.params.get('dtype', '')}; the manifest says {field.kind} {field.params.get('dtype', '')}"
            found.add(Damage(member.file, "schema", reason, section="META", shard=member.number, field=name))


def _replaced(base: Any) -> set[str]:
    return {name for sidecar in base.sidecars for name in sidecar.fields}


def _contents(path: Path, member: Member | None, quick: bool, found: DamageList) -> None:
    """Every section check of a file by itself."""
    name, number = (path.name, None) if member is None else (member.file, member.number)
    try:
        opened = ShardFile(LocalFile(path))
    except LfdataError as error:
        offset = getattr(error, "offset", None)
        found.add(Damage(name, code_of(error), reason_of(error), offset=offset, shard=number))
        return
    for entry in opened.entries:
        if not entry.blocked or entry.type not in layout.SECTIONS or (quick and entry.type == b"TOKN"):
            continue
        try:
            opened.view(entry)
        except LfdataError as error:
            field = opened.fields[entry.field].name if entry.field < len(opened.fields) else None
            offset = getattr(error, "offset", None)
            found.add(Damage(name, code_of(error), reason_of(error), offset=offset, section=entry.type.decode(), shard=number, field=field))


def digest(data: DataSet, task: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Operation ``digest``: ``member``: SHA-256 of the whole file against the manifest."""
    member = data.members[task["member"]]
    found = DamageList()
    hasher = hashlib.sha256()
    size = 0
    buffer = bytearray(READ_BYTES)
    try:
        with open(data.path / member.file, "rb", buffering=0) as stream:
            while count := stream.readinto(buffer):
                hasher.update(memoryview(buffer)[:count])
                size += count
                progress.beat()
    except FileNotFoundError:
        return {"damage": [], "bytes": 0}  # reported by the operation "file"
    except OSError as error:
        failure = StorageError(data.path / member.file, f"read at byte {size}", error.errno, error.strerror or str(error))
        found.add(of_error(member, failure))
        return {"damage": msgspec.to_builtins(found.listed), "bytes": size}
    if hasher.hexdigest() != member.sha256:
        reason = f"the SHA-256 of the file is {hasher.hexdigest()}; the manifest says {member.sha256}"
        found.add(Damage(member.file, "digest", reason, shard=member.number))
    return {"damage": msgspec.to_builtins(found.listed), "bytes": size}
