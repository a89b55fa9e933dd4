"""META of a shard and ``manifest.json`` (docs/format.md, sections 6 and 8) as typed structures, and their JSON."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from lfdata.errors import CorruptError, FormatError, LimitError, VersionError
from lfdata.format.files import read_small
from lfdata.format.layout import MAJOR, MAX_FIELDS, MAX_MANIFEST_BYTES, MAX_ROWS, MINOR, SIZE_ROLES

MANIFEST = "manifest.json"
INDEX = "index.lfi"
_BLANK = "0" * 64
_HEX_ID = re.compile("[0-9a-f]{32}")
_HEX_DIGEST = re.compile("[0-9a-f]{64}")


class FieldMeta(msgspec.Struct, frozen=True):
    """One field of the schema: ``kind`` is one of the format's kinds, ``params`` what a decoder needs."""

    name: str
    kind: str
    params: dict[str, Any] = {}


class Position(msgspec.Struct, frozen=True):
    """Where a shard belongs in its data set."""

    segment: int = 0
    segments: int = 1
    ordinal: int = 0
    last: bool = True


class SourceRange(msgspec.Struct, frozen=True):
    """Records of the source that a shard covers: first included, stop excluded."""

    first: int = 0
    stop: int = 0


class ShardMeta(msgspec.Struct, omit_defaults=True):
    """META of one shard file."""

    fields: tuple[FieldMeta, ...]
    position: Position = Position()
    source: SourceRange = SourceRange()
    statistics: dict[str, Any] = {}
    provenance: dict[str, Any] = {}
    features: dict[str, str] = {}
    shards: list[Any] = []


class SidecarEntry(msgspec.Struct, frozen=True):
    """A sidecar in the manifest."""

    file: str
    part: str
    bytes: int
    tail: int
    sha256: str
    fields: tuple[str, ...]


class ShardEntry(msgspec.Struct, frozen=True):
    """A base shard in the manifest. ``tail`` is the offset from which one read opens the shard."""

    file: str
    id: str
    rows: int
    bytes: int
    tail: int
    sha256: str
    segment: int = 0
    ordinal: int = 0
    sidecars: tuple[SidecarEntry, ...] = ()

    @property
    def files(self) -> tuple[ShardEntry | SidecarEntry, ...]:
        """The shard and its sidecars."""
        return (self, *self.sidecars)


class Manifest(msgspec.Struct):
    """``manifest.json``."""

    rows: int
    fields: tuple[FieldMeta, ...]
    shards: tuple[ShardEntry, ...]
    statistics: dict[str, Any] = {}
    provenance: dict[str, Any] = {}
    format: str = "lfdata"
    version: tuple[int, int] = (MAJOR, MINOR)
    checksum: str = _BLANK


def check_fields(file: object, fields: Sequence[FieldMeta]) -> None:
    """Refuse a schema that breaks the format's rules."""
    if len(fields) > MAX_FIELDS:
        raise LimitError(file, None, f"{len(fields)} fields; the limit is {MAX_FIELDS}")
    seen: set[str] = set()
    for field in fields:
        size = len(field.name.encode("utf-8", "surrogatepass"))
        if not 1 <= size <= 255 or field.name.startswith("__"):
            raise CorruptError(
                file, None, f"field name {field.name[:80]!r}: 1 to 255 bytes, not beginning with two underscores"
            )
        if field.name in seen:
            raise CorruptError(file, None, f"field {field.name!r} appears twice in the schema")
        if field.kind not in SIZE_ROLES:
            raise VersionError(
                file, None, f"field {field.name!r} has the unknown kind {field.kind!r}. Update lfdata to read it"
            )
        seen.add(field.name)


def decode_json(file: object, data: bytes | memoryview, type_: type[Any], what: str) -> Any:
    """Decode bounded JSON into a typed structure; every failure is a :class:`CorruptError`."""
    if len(data) > MAX_MANIFEST_BYTES:
        raise LimitError(file, None, f"{what} of {len(data)} bytes; the limit is {MAX_MANIFEST_BYTES}")
    try:
        return msgspec.json.decode(data, type=type_)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, OverflowError, ValueError) as error:
        raise CorruptError(file, None, f"{what} is not valid: {error}") from error


def encode_meta(meta: ShardMeta) -> bytes:
    """META as stored: compact JSON."""
    return msgspec.json.encode(meta)


def encode_manifest(manifest: Manifest) -> bytes:
    """``manifest.json`` as stored: readable, one shard a line, with its checksum."""
    manifest = msgspec.structs.replace(manifest, checksum=_BLANK)
    raw = msgspec.to_builtins(manifest)
    shards = raw.pop("shards")
    checksum = raw.pop("checksum")
    head = msgspec.json.format(msgspec.json.encode(raw), indent=1).decode()
    lines = ",\n  ".join(msgspec.json.encode(shard).decode() for shard in shards)
    text = f'{head[:-2]},\n "shards": [{lines and chr(10) + "  " + lines + chr(10) + " "}],\n "checksum": "{checksum}"\n}}\n'
    digest = hashlib.sha256(text.encode()).hexdigest()
    return text.replace(f'"checksum": "{_BLANK}"', f'"checksum": "{digest}"').encode()


def parse_manifest(file: object, data: bytes) -> Manifest:
    """Parse and check ``manifest.json``. Raises :class:`FormatError`."""
    try:
        probe = decode_json(file, data, _Probe, "the manifest")
    except CorruptError as error:
        raise CorruptError(
            file, None, f"{error.reason}. `shard-builder repair` rebuilds the manifest from the shards"
        ) from error
    if probe.format != "lfdata" or not probe.version:
        raise CorruptError(file, None, 'not an lfdata manifest: "format" is not "lfdata"')
    if probe.version[0] != MAJOR:
        raise VersionError(
            file, None, f"manifest version {probe.version}; this reader knows {MAJOR}.x. Update lfdata to read it"
        )
    manifest: Manifest = decode_json(file, data, Manifest, "the manifest")
    text = data.replace(f'"checksum": "{manifest.checksum}"'.encode(), f'"checksum": "{_BLANK}"'.encode())
    if hashlib.sha256(text).hexdigest() != manifest.checksum:
        raise CorruptError(
            file,
            None,
            "the manifest does not match its checksum: it was damaged or edited. `shard-builder repair` rebuilds it from the shards",
        )
    check_fields(file, manifest.fields)
    _check_shards(file, manifest)
    return manifest


class _Probe(msgspec.Struct):
    format: str = ""
    version: tuple[int, ...] = ()


def _check_shards(file: object, manifest: Manifest) -> None:
    names: set[str] = set()
    rows = 0
    for shard in manifest.shards:
        entries: tuple[ShardEntry | SidecarEntry, ...] = (shard, *shard.sidecars)
        for entry in entries:
            if not entry.file or "/" in entry.file or "\0" in entry.file or entry.file in (".", "..") or entry.file in names:
                raise CorruptError(file, None, f"shard file name {entry.file!r} is not a plain, unique name")
            identity = entry.id if isinstance(entry, ShardEntry) else entry.part
            if not _HEX_ID.fullmatch(identity) or not _HEX_DIGEST.fullmatch(entry.sha256):
                raise CorruptError(
                    file, None, f"shard {entry.file}: its id or digest is not the hexadecimal number it should be"
                )
            if not 0 <= entry.tail <= entry.bytes < 1 << 63:
                raise CorruptError(file, None, f"shard {entry.file}: impossible size or tail offset")
            names.add(entry.file)
        if not 0 <= shard.rows <= MAX_ROWS:
            raise CorruptError(file, None, f"shard {shard.file}: {shard.rows} rows")
        rows += shard.rows
    if rows != manifest.rows or rows > MAX_ROWS:
        raise CorruptError(file, None, f"the manifest says {manifest.rows} rows, its shards hold {rows}")


def read_manifest(directory: Path) -> Manifest:
    """Read ``manifest.json`` of a data set directory."""
    path = directory / MANIFEST
    try:
        data = read_small(path)
    except FileNotFoundError as error:
        raise no_manifest(path) from error
    except OSError as error:
        raise FormatError(path, None, f"cannot read the manifest: {error.strerror}") from error
    return parse_manifest(path, data)


def no_manifest(path: object) -> FormatError:
    """The error for a place that has none."""
    return FormatError(
        path,
        None,
        "no manifest: not an lfdata data set, or its conversion has not finished (`shard-builder convert --resume`); "
        "`shard-builder repair` rebuilds a lost manifest from the shards",
    )


def merge_statistics(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Add up per-shard statistics: ``present``, ``nan``, ``sum`` are added, ``min`` and ``max`` compared."""
    total: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            if isinstance(value, Mapping):
                total[name] = merge_statistics([total.get(name, {}), value])
            elif name not in total:
                total[name] = value
            elif name == "min":
                total[name] = min(total[name], value)
            elif name == "max":
                total[name] = max(total[name], value)
            else:
                total[name] += value
    return total
