"""One file: that it is the one the manifest means, every structure and check in it, and its digest."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from pathlib import Path
from typing import Any

import msgspec

from lfdata.errors import LfdataError, StorageError
from lfdata.format import layout
from lfdata.format.files import LocalFile, read_range
from lfdata.format.reader import ShardFile
from lfdata.format.verify import verify_file
from shard_builder.examine.damage import Damage, DamageList, code_of, of_error, place, reason_of
from shard_builder.examine.opened import DataSet, Member
from shard_builder.examine.text import visible
from shard_builder.examine.worker import Progress

READ_BYTES = 4 << 20


def file(data: DataSet | None, task: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Operation ``file``: ``member`` (ordinal), or ``path`` for a file outside the manifest. No payload is read."""
    found = DamageList()
    if "path" in task:
        path = Path(os.fsdecode(task["path"]))
        try:
            ShardFile(LocalFile(path))
        except LfdataError as error:
            found.add(Damage(visible(path.name), code_of(error), reason_of(error), offset=getattr(error, "offset", None)))
        else:
            _contents(path, data, data.members[0] if data and data.single and data.members else None, found)
        return {"damage": msgspec.to_builtins(found.listed), "unlisted": found.unlisted}
    assert data is not None
    member = data.members[task["member"]]
    path = data.path / member.file
    try:
        size = os.stat(path).st_size
    except OSError as error:
        text = "the file is missing" if isinstance(error, FileNotFoundError) else error.strerror or str(error)
        found.add(
            Damage(member.file, "missing" if isinstance(error, FileNotFoundError) else "storage", text, shard=member.number)
        )
        return {"damage": msgspec.to_builtins(found.listed)}
    if size != member.size:
        code = "truncated" if size < member.size else "corrupt"
        reason = f"{size} bytes; the manifest says {member.size}"
        found.add(Damage(member.file, code, reason, offset=min(size, member.size), shard=member.number))
    progress.beat()
    try:
        _against_manifest(data, member, data.file(member), found)
    except LfdataError as error:
        found.add(of_error(member, error))
    else:
        _contents(path, data, member, found)
    return {"damage": msgspec.to_builtins(found.listed), "unlisted": found.unlisted}


def _against_manifest(data: DataSet, member: Member, opened: ShardFile, found: DamageList) -> None:
    """Place, last shard of a segment, and schema."""
    if data.single:
        return
    position, base = opened.meta.position, member.base
    if member.sidecar is None and (position.segment, position.ordinal) != (base.segment, base.ordinal):
        reason = (
            f"it says segment {position.segment}, shard {position.ordinal}; the manifest says {base.segment}, {base.ordinal}"
        )
        found.add(Damage(member.file, "order", reason, section="META", shard=member.number))
    following = data.manifest.shards[member.number + 1 :][:1]
    # A merged or filtered set has shards of several conversions, or only some of one.
    whole = "operation" not in data.manifest.provenance
    if whole and member.sidecar is None and not position.last and (not following or following[0].segment != base.segment):
        reason = f"it says that a shard follows in segment {base.segment}; the manifest names none"
        found.add(Damage(member.file, "order", reason, level="warning", section="META", shard=member.number))
    held = {field.name: field for field in opened.fields}
    if member.sidecar:
        # What a later sidecar has put another in the place of may have been of another kind.
        after = base.sidecars[base.sidecars.index(member.sidecar) + 1 :]
        replaced = {name for sidecar in after for name in sidecar.fields}
        wanted = [name for name in member.sidecar.fields if name not in replaced]
    else:
        wanted = [name for name in data.schema if name not in _replaced(base)]
    for name in wanted:
        field, stored = data.schema.get(name), held.get(name)
        if stored is None:
            found.add(
                Damage(member.file, "schema", "the file lacks this field", section="META", shard=member.number, field=name)
            )
        elif field is not None and (stored.kind, stored.params.get("dtype")) != (field.kind, field.params.get("dtype")):
            ours, theirs = (f"{item.kind} {item.params.get('dtype', '')}".strip() for item in (stored, field))
            reason = f"of kind {ours}; the manifest says {theirs}"
            found.add(Damage(member.file, "schema", reason, section="META", shard=member.number, field=name))


def _replaced(base: Any) -> set[str]:
    return {name for sidecar in base.sidecars for name in sidecar.fields}


def _contents(path: Path, data: DataSet | None, member: Member | None, found: DamageList) -> None:
    """Everything in a file by itself but payloads: those are the operations "groups" and "rows"."""
    name, number = (visible(path.name), None) if member is None else (member.file, member.number)
    for item in verify_file(path, quick=True):
        where = {"row": item.row} if data is None or member is None or item.row is None else place(data, member, item.row)
        section, field = item.section or None, item.field or None
        found.add(
            Damage(
                name, "corrupt", visible(item.reason), offset=item.offset, section=section, shard=number, field=field, **where
            )
        )


def groups(data: DataSet, task: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Operation ``groups``: ``member``, ``part``, ``parts``: checks of every ``parts``-th row group (and unknown section)."""
    member = data.members[task["member"]]
    found = DamageList()
    try:
        opened = data.file(member)
        known = [
            entry
            for entry in opened.entries
            if not entry.blocked and (entry.type == b"GRUP" or entry.type not in layout.SECTIONS)
        ]
        for entry in known[task["part"] :: task["parts"]]:
            hasher = layout.new_xxh3(opened.identity.seed)
            for at in range(entry.offset, entry.end, READ_BYTES):
                progress.beat()
                hasher.update(read_range(opened.file, at, min(READ_BYTES, entry.end - at)))
            if hasher.intdigest() != entry.check:
                rows = f"rows {entry.first} to {entry.first + entry.count - 1}"
                reason = f"the {entry.length} bytes of {rows} do not match their check"
                section = entry.type.decode("ascii", "backslashreplace")
                found.add(Damage(member.file, "corrupt", reason, offset=entry.offset, section=section, shard=member.number))
    except StorageError as error:
        if not isinstance(error.errno, int) or error.errno != errno.ENOENT:
            found.add(of_error(member, error))
    except LfdataError:
        pass  # a file that cannot be opened is reported by the operation "file"
    return {"damage": msgspec.to_builtins(found.listed), "unlisted": found.unlisted}


def digest(data: DataSet, task: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Operation ``digest``: ``member``: SHA-256 of the whole file against the manifest."""
    member = data.members[task["member"]]
    found = DamageList()
    hasher = hashlib.sha256()
    size = 0
    buffer = bytearray(READ_BYTES)
    try:
        descriptor = os.open(data.path / member.file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb", buffering=0) as stream:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return {"damage": [], "bytes": 0}  # reported by the operation "file"
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
