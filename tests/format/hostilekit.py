"""Takes shards apart and puts them together again with every check recomputed: files that are hostile, not merely damaged."""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from lfdata.codecs.registry import make_decoder
from lfdata.dataset.shard import Shard
from lfdata.errors import LfdataError, SampleError, TruncatedError
from lfdata.format.cache import IndexCache
from lfdata.format.meta import ShardEntry
from lfdata.format.reader import ShardFile
from lfdata.format.verify import Damage, verify_bytes

ENTRY = struct.Struct("<4sIIHHQQQQQQ")
ENTRY_FIELDS = ("type", "flags", "field", "role", "element", "offset", "length", "count", "check", "first", "zero")
BLOCK = 65536
ALIGN = {"GRUP": 4096, "TOKN": 4096}


def xxh3(data: bytes, seed: int = 0) -> int:
    """The format's hash, from the library (tests of the library's own use compare with the pure one)."""
    return xxhash.xxh3_64_intdigest(data, seed)


class MemoryFile:
    """A :class:`lfdata.format.files.RangeFile` over bytes; it logs what is read."""

    def __init__(self, data: bytes, name: str = "memory") -> None:
        self.data, self.name, self.size = data, name, len(data)
        self.reads: list[tuple[int, int]] = []

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Copy from the bytes, or raise as a local file would."""
        self.reads.append((offset, len(buffer)))
        part = self.data[offset : offset + len(buffer)]
        if len(part) < len(buffer):
            raise TruncatedError(self.name, offset + len(part), "the file ends here")
        buffer[:] = part


@dataclass
class Section:
    """A section on its way from one file into another."""

    type: str
    flags: int
    field: int
    role: int
    element: int
    count: int
    first: int
    data: bytes
    check: int = 0


def entries_of(raw: bytes) -> list[dict[str, Any]]:
    """The directory as it stands, unchecked."""
    offset, count = struct.unpack_from("<QQ", raw, len(raw) - 128 + 72)
    return [dict(zip(ENTRY_FIELDS, ENTRY.unpack_from(raw, offset + 64 * n), strict=True)) for n in range(count)]


def sections_of(raw: bytes) -> list[Section]:
    """All sections with their bytes."""
    return [
        Section(
            e["type"].decode(),
            e["flags"],
            e["field"],
            e["role"],
            e["element"],
            e["count"],
            e["first"],
            raw[e["offset"] : e["offset"] + e["length"]],
        )
        for e in entries_of(raw)
    ]


def seed_of(raw: bytes) -> int:
    """Seed of the file's checks."""
    return xxh3(raw[32:64])


def reseal(raw: bytes | bytearray) -> bytes:
    """Recompute header, directory and trailer checks of a file whose sections may lie anywhere."""
    out = bytearray(raw)
    out[4088:4096] = struct.pack("<Q", xxh3(bytes(out[:4088])))
    at = len(out) - 128
    out[at + 104 : at + 112] = out[4088:4096]
    offset, count = struct.unpack_from("<QQ", out, at + 72)
    table = bytes(out[offset : offset + 64 * count]) if offset < 1 << 40 and count < 1 << 20 else b""
    out[at + 88 : at + 96] = struct.pack("<Q", xxh3(table, seed_of(out)))
    out[at + 120 :] = struct.pack("<Q", xxh3(bytes(out[at : at + 120])))
    return bytes(out)


def rebuild(raw: bytes, change: Callable[[list[Section]], None], rows: int | None = None) -> bytes:
    """The file with its sections changed, laid out anew where they must move, every check recomputed.

    Row groups keep their offsets as long as nothing before them grows. Block checks, BSUM and counts of plain bytes are recomputed.
    """
    sections = sections_of(raw)
    change(sections)
    seed, sums, out = seed_of(raw), [], bytearray(raw[:4096])
    for section in sections:
        if section.flags & 2:
            section.first = len(sums)
            mine = [xxh3(section.data[at : at + BLOCK], seed) for at in range(0, len(section.data), BLOCK)]
            sums += mine
            section.check = xxh3(struct.pack(f"<{len(mine)}Q", *mine), seed)
    entries = []
    for section in sections:
        if section.type == "BSUM":
            section.data, section.count = struct.pack(f"<{len(sums)}Q", *sums), len(sums)
        if not section.flags & 2:
            section.check = xxh3(section.data, seed)
        step = ALIGN.get(section.type, 64)
        region_before = not entries or entries[-1][0] in (b"GRUP", b"TOKN", b"KROW")
        if section.type in ("LOCR", "COLM", "DICT", "META") and region_before:
            step = 4096
        out += bytes(-len(out) % step)
        entries.append(
            (section.type.encode(), section.flags, section.field, section.role, section.element, len(out), len(section.data), section.count,
             section.check, section.first, 0)
        )  # fmt: skip
        out += section.data
    out += bytes(-len(out) % 64)
    start = len(out)
    out += b"".join(ENTRY.pack(*entry) for entry in entries)
    trailer = bytearray(raw[-128:])
    if rows is not None:
        struct.pack_into("<Q", trailer, 64, rows)
    struct.pack_into("<QQ", trailer, 72, start, len(entries))
    struct.pack_into("<Q", trailer, 96, len(out) + 128)
    return reseal(out + trailer)


def change_meta(raw: bytes, change: Callable[[dict[str, Any]], Any] | bytes) -> bytes:
    """The file with another META: changed as an object, or replaced by bytes."""

    def swap(sections: list[Section]) -> None:
        (meta,) = (s for s in sections if s.type == "META")
        if isinstance(change, bytes):
            meta.data = change
        else:
            value = json.loads(meta.data)
            change(value)
            meta.data = json.dumps(value).encode()
        meta.count = len(meta.data)

    return rebuild(raw, swap)


def change_column(raw: bytes, type_: str, field: int, role: int, change: Callable[[np.ndarray], np.ndarray | None]) -> bytes:
    """The file with another index section: ``change`` gets a copy of its elements and alters or replaces it."""
    dtypes = {1: "u1", 2: "<u2", 3: "<u4", 4: "<u8", 8: "<i8", 10: "<f4", 12: "?", 13: "<u8", 0: "u1"}

    def swap(sections: list[Section]) -> None:
        (section,) = (s for s in sections if (s.type, s.field, s.role) == (type_, field, role))
        values = np.frombuffer(section.data, dtypes[section.element]).copy()
        result = change(values)
        section.data = (values if result is None else result).tobytes()

    return rebuild(raw, swap)


def trailer_rows(raw: bytes) -> int:
    """Rows as the trailer says."""
    return int(struct.unpack_from("<Q", raw, len(raw) - 64)[0])


def entry_for(raw: bytes, name: str = "memory") -> ShardEntry:
    """A manifest entry that believes the file."""
    return ShardEntry(name, raw[-128 + 32 : -128 + 48].hex(), trailer_rows(raw), len(raw), 0, "0" * 64)


def read_everything(raw: bytes, *, verify: bool = False) -> dict[str, Any]:
    """Open a file from memory and read every value the way a data set does.

    Returns:
        Keys, sizes, stored bytes and decoded values by field; a value that cannot be decoded is its error's code.

    Raises:
        LfdataError: whatever the reader finds. Anything else is a defect.
    """
    file = MemoryFile(raw)
    opened = ShardFile(file)
    fields = {field.name: field for field in opened.fields}
    entry = ShardEntry("memory", opened.identity.shard_id.hex(), opened.rows, len(raw), 0, "0" * 64)
    if opened.identity.kind != 0:
        return {"sections": [opened.read_span(e, 0, e.blocks).tobytes() for e in opened.entries if e.blocked]}
    shard = Shard(entry, lambda _name, _size: file, fields, IndexCache())
    rows = np.arange(opened.rows)
    result: dict[str, Any] = {"keys": opened.keys(rows), "find": [opened.find(key) for key in opened.keys(rows)]}
    for name in fields:
        result[name] = read_field(shard, name, rows)
    if verify:
        result["damage"] = [str(d) for d in verify_bytes(file, decoders=make_decoder)]
    return result


def read_field(shard: Shard, name: str, rows: np.ndarray) -> list[Any]:
    """Presence, sizes, stored bytes and decoded value of every row."""
    present, kind = shard.present(name, rows).tolist(), shard.field(name).kind
    if kind == "scalar":
        return list(zip(present, [value.tobytes() for value in shard.scalars(name, rows)], strict=True))
    sizes = {role: data.tolist() for role, data in shard.sizes(name, rows).items()}
    located = shard.lengths(name, rows)
    ends = np.concatenate([[0], np.cumsum(located[1])]).astype(np.int64)
    out = np.empty(int(ends[-1]), np.uint8)
    shard.read(name, rows, located, out, ends[:-1])
    values: list[Any] = []
    for row in rows.tolist():
        data = out[ends[row] : ends[row + 1]].tobytes()
        mine = {role: tuple(column[row]) if role == "dims" else column[row] for role, column in sizes.items()}
        values.append((present[row], mine, data, decode(shard, name, data, mine, row) if present[row] else None))
    return values


def decode(shard: Shard, name: str, data: bytes, sizes: dict[str, Any], row: int) -> Any:
    """The decoded value as something that compares; for audio also every chunk read alone."""
    try:
        value = shard.decoder(name).decode(data, sizes)
    except SampleError as error:
        return error.code
    if shard.field(name).kind == "audio":
        frames = shard.read_frames(name, np.array([row]), 1, 70)
        return value.samples.tobytes(), value.rate, frames.tobytes()
    return (value.shape, value.tobytes()) if isinstance(value, np.ndarray) else value


def outcome(raw: bytes, *, verify: bool = False) -> dict[str, Any] | LfdataError:
    """What reading everything gives: values, or the typed error."""
    try:
        return read_everything(raw, verify=verify)
    except LfdataError as error:
        return error


def damage_of(raw: bytes) -> list[Damage]:
    """All findings of full verification."""
    return list(verify_bytes(MemoryFile(raw), decoders=make_decoder))


def is_damaged(raw: bytes) -> bool:
    """Whether full verification finds anything; stops at the first finding."""
    return next(verify_bytes(MemoryFile(raw), decoders=make_decoder), None) is not None


def small_shard(seed: int = 0, rows: int = 5) -> bytes:
    """A base shard of a few KiB with every kind, absent and empty values and a duplicate."""
    from shardkit import AUDIO_PARAMS, array, audio, identity, plain, raw_image, scalar, tokens, write_shard

    from lfdata.codecs.registry import make_encoder
    from lfdata.format.meta import FieldMeta

    note = make_encoder("json", {}, dictionary=b"the quick brown fox" * 8)
    fields = [
        FieldMeta("img", "image", make_encoder("image", {"codec": "raw"}).params),
        FieldMeta("snd", "audio", AUDIO_PARAMS),
        FieldMeta("note", "json", note.params),
        FieldMeta("arr", "array", {"dtype": "int32", "ndim": 2}),
        FieldMeta("txt", "text", make_encoder("text", {}).params),
        FieldMeta("ids", "tokens", {"dtype": "uint16", "vocab": 1000}),
        FieldMeta("num", "scalar", {"dtype": "int64"}),
    ]
    rng = np.random.default_rng(seed)
    data = []
    for n in range(rows):
        values = {
            "img": raw_image(rng.integers(0, 255, (2, 3, 1 + n % 3)).astype(np.uint8)),
            "snd": audio(rng.integers(-99, 99, (n * 50 % 170, 1 + n % 2))),
            "note": note.encode({"n": n, "text": "the quick brown fox"}),
            "arr": array(rng.integers(0, 9, (n % 3, 2)).astype(np.int32)),
            "txt": plain(b"same" if n % 2 else "grün".encode() * (n % 4)),
            "ids": tokens(rng.integers(0, 1000, n * 2).tolist(), "uint16"),
            "num": scalar(n - 2, "int64"),
        }
        if n == 3:
            values = {"txt": values["txt"], "num": values["num"]}
        data.append((f"key-{n}".encode() if n else b"", values))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "s.lfd"
        write_shard(
            path, fields, data, identity("small", seed), group_bytes=512, dictionaries={"note": b"the quick brown fox" * 8}
        )
        return path.read_bytes()
