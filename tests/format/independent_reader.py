"""A second reader of the shard format, written from docs/format.md alone: struct, numpy and zstandard, nothing of the package.

It reads whole files into memory and verifies every check before it yields a value; speed is no aim.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

sys.path.insert(0, str(Path(__file__).parent))
from msgpack_pure import unpack
from xxh3_pure import xxh3

MAGIC, TRAILER_MAGIC = b"\x89LFD\r\n\x1a\n", b"LFDTRAIL"
BASE, SIDECAR, INDEX = 0, 1, 2
NO_FIELD = 0xFFFFFFFF
BLOCK = 65536
KNOWN = {"GRUP", "TOKN", "LOCR", "COLM", "KEYS", "KOFF", "KHSH", "KROW", "DICT", "META", "BSUM"}
BLOCKED = {"TOKN", "LOCR", "COLM", "KEYS", "KOFF", "KHSH", "KROW"}
ELEMENTS = [None, "u1", "<u2", "<u4", "<u8", "i1", "<i2", "<i4", "<i8", "<f2", "<f4", "<f8", "?", None]
TYPE_NAMES = [
    "bytes",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "float32",
    "float64",
    "bool",
]
ROLES = ["value", "present", "bytes", "width", "height", "channels", "codec", "bits", "frames", "rate", "tokens", "raw_bytes",
         "dims", "aux_first", "aux_count", "aux"]  # fmt: skip
ROLE_TYPE = {"present": 1, "bytes": 4, "width": 3, "height": 3, "channels": 2, "codec": 1, "bits": 1, "frames": 4, "rate": 3,
             "tokens": 4, "raw_bytes": 4, "dims": 4, "aux_first": 4, "aux_count": 4, "aux": 4}  # fmt: skip
KIND_ROLES = {
    "image": {"bytes", "width", "height", "channels", "codec", "bits", "aux_first", "aux_count", "aux"},
    "audio": {"bytes", "frames", "channels", "rate", "aux_first", "aux_count", "aux"},
    "json": {"bytes", "raw_bytes"}, "array": {"bytes", "dims"}, "text": {"bytes"}, "bytes": {"bytes"}, "tokens": {"tokens"},
    "scalar": {"value"},
}  # fmt: skip


class Damage(Exception):
    """The file breaks a rule of the document."""


def need(condition: bool, what: str) -> None:
    """Raise :class:`Damage` unless ``condition`` holds."""
    if not condition:
        raise Damage(what)


@dataclass
class Section:
    """One directory entry, and its bytes."""

    type: str
    flags: int
    field: int
    role: int
    element: int
    offset: int
    length: int
    count: int
    check: int
    first: int
    data: bytes

    def array(self) -> np.ndarray:
        """The elements of a column."""
        return np.frombuffer(self.data, ELEMENTS[self.element])


@dataclass
class Image:
    """A stored picture: its file (or raw pixels) and what the index says of it."""

    payload: bytes
    sizes: dict[str, int]
    row_offsets: list[int]


class ShardReader:
    """One file of any kind: opened, and everything but the payload checks verified."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.raw = path.read_bytes()
        self._read_header()
        self._read_directory()
        self._verify_sections()
        self._read_meta()
        self._read_columns()

    def _read_header(self) -> None:
        raw = self.raw
        need(len(raw) >= 4096 + 128, "too short")
        header, trailer = raw[:4096], raw[-128:]
        need(header[:8] == MAGIC and trailer[:8] == TRAILER_MAGIC, "magic")
        need(xxh3(header[:4088]) == int.from_bytes(header[4088:], "little"), "header check")
        need(xxh3(trailer[:120]) == int.from_bytes(trailer[120:], "little"), "trailer check")
        major, _minor, self.kind, required, _optional = struct.unpack_from("<HHIQQ", header, 8)
        self.shard_id, self.part_id = header[32:48], header[48:64]
        need(major == 1 and required == 0 and self.kind in (BASE, SIDECAR, INDEX), "version, features or kind")
        need((self.kind == SIDECAR) == (self.part_id != bytes(16)), "part id and kind")
        need(not any(header[64:4088]), "header padding")
        need(trailer[8:64] == header[8:64] and trailer[104:112] == header[4088:], "trailer differs from header")
        self.rows, self.dir_offset, self.dir_count, self.dir_check, size = struct.unpack_from("<5Q", trailer, 64)
        need(size == len(raw) and not any(trailer[112:120]), "file size or trailer padding")
        self.seed = xxh3(self.shard_id + self.part_id)

    def _read_directory(self) -> None:
        end = self.dir_offset + 64 * self.dir_count
        need(self.dir_offset % 64 == 0 and self.dir_offset >= 4096 and end == len(self.raw) - 128, "directory range")
        table = self.raw[self.dir_offset : end]
        need(xxh3(table, self.seed) == self.dir_check, "directory check")
        self.sections: list[Section] = []
        position = 4096
        for at in range(0, len(table), 64):
            kind, flags, field, role, element, *rest = struct.unpack_from("<4sIIHH6Q", table, at)
            offset, length, count, check, first, zero = rest
            need(zero == 0 and flags & ~3 == 0, "reserved bits of an entry")
            need(position <= offset < position + 4096 and offset + length <= self.dir_offset, "section order or range")
            need(not any(self.raw[position:offset]), f"padding before byte {offset}")
            name = kind.decode("ascii")
            need(name in KNOWN or not flags & 1, f"unknown section {name}")
            position = offset + length
            if name in KNOWN:
                need(element < 14 and (name == "COLM" or role == 0), f"{name}: element type or role")
                need((field == NO_FIELD) == (name not in ("TOKN", "LOCR", "COLM", "DICT")), f"{name}: field")
                need(bool(flags & 1) and bool(flags & 2) == (name in BLOCKED), f"{name}: flags")
            self.sections.append(
                Section(name, flags, field, role, element, offset, length, count, check, first, self.raw[offset:position])
            )
        need(
            self.dir_offset - position < 4096 and not any(self.raw[position : self.dir_offset]), "padding before the directory"
        )

    def _one(self, name: str, field: int = NO_FIELD) -> Section | None:
        found = [s for s in self.sections if s.type == name and s.field == field]
        need(len(found) <= 1, f"{name} more than once")
        return found[0] if found else None

    def _verify_sections(self) -> None:
        sums = self._one("BSUM")
        need(sums is not None and sums.element == 4, "no BSUM")
        assert sums is not None
        used = 0
        for s in self.sections:
            if s.type not in KNOWN and not s.flags & 2:
                continue
            need(s.offset % (4096 if s.type in ("GRUP", "TOKN") else 64) == 0, f"{s.type}: alignment")
            if s.type in KNOWN - {"GRUP"}:
                size = 16 if s.element == 13 else np.dtype(ELEMENTS[s.element]).itemsize if s.element else 1
                need(s.count * size == s.length, f"{s.type}: count and length")
            if not s.flags & 2:
                need(s.first == 0 or s.type == "GRUP", f"{s.type}: first")
                need(xxh3(s.data, self.seed) == s.check, f"{s.type}: check")
                continue
            blocks = -(-s.length // BLOCK)
            stored = sums.data[8 * s.first : 8 * (s.first + blocks)]
            need(len(stored) == 8 * blocks and xxh3(stored, self.seed) == s.check, f"{s.type}: check of its blocks")
            for i in range(blocks):
                value = int.from_bytes(stored[8 * i : 8 * i + 8], "little")
                need(xxh3(s.data[i * BLOCK : (i + 1) * BLOCK], self.seed) == value, f"{s.type}: block {i}")
            need(s.first == used, f"{s.type}: block ordinals")
            used += blocks
        need(8 * used == sums.length, "BSUM length")

    def _read_meta(self) -> None:
        meta = self._one("META")
        need(meta is not None, "no META")
        assert meta is not None
        self.meta = json.loads(meta.data.decode("utf-8"))
        self.fields = {f["name"]: (i, f["kind"], f["params"]) for i, f in enumerate(self.meta["fields"])}
        need(len(self.fields) == len(self.meta["fields"]), "duplicate field names")

    def _read_columns(self) -> None:
        self.columns: dict[tuple[int, str], np.ndarray] = {}
        kinds = {i: (kind, params) for i, kind, params in self.fields.values()}
        for s in self.sections:
            if s.type != "COLM":
                continue
            role = ROLES[s.role]
            kind, params = kinds[s.field]
            need(role in KIND_ROLES[kind] | {"present"}, f"{kind} field with role {role}")
            element = TYPE_NAMES.index(params["dtype"]) if role == "value" else ROLE_TYPE[role]
            per_row = params["ndim"] if role == "dims" else 1
            need(s.element == element and (role == "aux" or s.count == self.rows * per_row), f"column {role}")
            need((s.field, role) not in self.columns, f"column {role} twice")
            self.columns[s.field, role] = s.array().reshape(self.rows, per_row) if role == "dims" else s.array()
        self.groups = [s for s in self.sections if s.type == "GRUP"]
        at = 0
        for group in self.groups:
            need(group.first == at and group.count > 0, "rows of groups")
            at += group.count
        need(not self.groups or at == self.rows, "groups cover all rows")
        self.keys = self._read_keys() if self.kind == BASE else []

    def _read_keys(self) -> list[bytes]:
        text, offsets, hashes, order = (self._one(n) for n in ("KEYS", "KOFF", "KHSH", "KROW"))
        assert text and offsets and hashes and order
        ends = offsets.array().tolist()
        need(len(ends) == self.rows + 1 and ends[0] == 0 and ends[-1] == text.length and ends == sorted(ends), "KOFF")
        keys = [text.data[a:b] for a, b in itertools.pairwise(ends)]
        expected = sorted((xxh3(key), row) for row, key in enumerate(keys))
        need(list(zip(hashes.array().tolist(), order.array().tolist(), strict=True)) == expected, "KHSH and KROW")
        return keys

    def _size(self, field: int, role: str, row: int) -> int:
        need((field, role) in self.columns, f"no column {role}")
        return int(self.columns[field, role][row])

    def present(self, field: int, row: int) -> bool:
        """Whether a row has the field."""
        column = self.columns.get((field, "present"))
        return column is None or bool(column[row])

    def payload(self, field: int, kind: str, params: dict[str, Any], row: int) -> bytes:
        """The stored bytes of one present value, its check verified."""
        locators = self._one("LOCR", field)
        need(locators is not None and locators.element == 13, "no locators")
        assert locators is not None
        offset, check = struct.unpack_from("<QQ", locators.data, 16 * row)
        if kind == "tokens":
            width = np.dtype(params["dtype"]).itemsize
            length, region = self._size(field, "tokens", row) * width, self._one("TOKN", field)
            assert region is not None
            need(offset * width + length <= region.length, "token range")
            data = region.data[offset * width : offset * width + length]
        else:
            length = self._size(field, "bytes", row)
            inside = any(g.offset <= offset and offset + length <= g.offset + g.length for g in self.groups)
            need(inside if length else offset == 0, "payload outside a group")
            data = self.raw[offset : offset + length]
        need(xxh3(data, self.seed) == check, f"{self.path.name}: row {row}, field {field}: check of the value")
        return data

    def value(self, name: str, row: int) -> Any:
        """The value of a field in a row; ``None`` where absent."""
        field, kind, params = self.fields[name]
        if not self.present(field, row):
            self._check_absent(field, row)
            return None
        if kind == "scalar":
            return self.columns[field, "value"][row].item()
        data = self.payload(field, kind, params, row)
        if kind == "bytes":
            return data
        if kind == "text":
            return data.decode("utf-8")
        if kind == "tokens":
            return np.frombuffer(data, np.dtype(params["dtype"]).newbyteorder("<"))
        if kind == "array":
            return np.frombuffer(data, np.dtype(params["dtype"]).newbyteorder("<")).reshape(self.columns[field, "dims"][row])
        return {"json": self._json, "audio": self._audio, "image": self._image}[kind](field, params, row, data)

    def _check_absent(self, field: int, row: int) -> None:
        for (owner, role), column in self.columns.items():
            if owner == field and role not in ("present", "aux_first", "aux"):
                need(not np.any(column[row]), f"absent value with {role}")
        locators = self._one("LOCR", field)
        need(locators is None or not any(locators.data[16 * row : 16 * row + 16]), "absent value with a locator")

    def _json(self, field: int, _params: dict[str, Any], row: int, data: bytes) -> Any:
        dictionary = self._one("DICT", field)
        shared = zstandard.ZstdCompressionDict(dictionary.data) if dictionary else None
        size = self._size(field, "raw_bytes", row)
        need(zstandard.frame_content_size(data) == size, "raw_bytes")
        return unpack(zstandard.ZstdDecompressor(dict_data=shared).decompress(data))

    def _aux(self, field: int, row: int) -> list[int]:
        if (field, "aux") not in self.columns:
            return []
        first, count = self._size(field, "aux_first", row), self._size(field, "aux_count", row)
        need(first + count <= len(self.columns[field, "aux"]), "aux range")
        return [int(v) for v in self.columns[field, "aux"][first : first + count]]

    def _audio(self, field: int, params: dict[str, Any], row: int, data: bytes) -> tuple[np.ndarray, int]:
        frames, channels, rate = (self._size(field, role, row) for role in ("frames", "channels", "rate"))
        step = params["chunk_frames"] * channels * 2
        checks = self._aux(field, row)
        need(frames * channels * 2 == len(data) and len(checks) == (-(-len(data) // step) if step else 0), "audio sizes")
        for i, check in enumerate(checks):
            need(xxh3(data[i * step : (i + 1) * step], self.seed) == check, f"audio chunk {i}")
        return np.frombuffer(data, "<i2").reshape(frames, channels), rate

    def _image(self, field: int, _params: dict[str, Any], row: int, data: bytes) -> Image:
        sizes = {role: self._size(field, role, row) for role in ("width", "height", "channels", "codec", "bits")}
        if sizes["codec"] == 4:
            need(sizes["width"] * sizes["height"] * sizes["channels"] * sizes["bits"] // 8 == len(data), "raw pixels")
        return Image(data, sizes, self._aux(field, row))


class DataSetReader:
    """A directory: the manifest, its shards with their sidecars, and the index if there is one."""

    def __init__(self, root: Path) -> None:
        text = (root / "manifest.json").read_bytes()
        self.manifest = json.loads(text)
        stated = self.manifest["checksum"]
        need(text.count(stated.encode()) == 1, "checksum found more than once")
        need(hashlib.sha256(text.replace(stated.encode(), b"0" * 64)).hexdigest() == stated, "manifest checksum")
        need(self.manifest["format"] == "lfdata" and self.manifest["version"][0] == 1, "manifest version")
        self.shards: list[tuple[ShardReader, list[ShardReader]]] = []
        for entry in self.manifest["shards"]:
            base = self._file(root, entry, "id", entry["rows"])
            parts = [self._file(root, side, "part", entry["rows"]) for side in entry["sidecars"]]
            need(all(p.shard_id == base.shard_id and p.kind == SIDECAR for p in parts), "sidecar of another shard")
            self.shards.append((base, parts))
        self.rows = sum(base.rows for base, _ in self.shards)
        need(self.rows == self.manifest["rows"], "rows of the data set")
        self.index = ShardReader(root / "index.lfi") if (root / "index.lfi").exists() else None
        if self.index:
            self._check_index(self.index)

    def _file(self, root: Path, entry: dict[str, Any], name: str, rows: int) -> ShardReader:
        shard = ShardReader(root / entry["file"])
        identity = shard.shard_id if name == "id" else shard.part_id
        need(identity.hex() == entry[name] and shard.rows == rows and len(shard.raw) == entry["bytes"], "identity of a shard")
        need(hashlib.sha256(shard.raw).hexdigest() == entry["sha256"], "digest of a shard")
        tail = min(s.offset for s in shard.sections if s.type in ("DICT", "META", "BSUM"))
        need(tail == entry["tail"], "tail offset")
        return shard

    def _check_index(self, index: ShardReader) -> None:
        listed = [[b.shard_id.hex(), *(p.part_id.hex() for p in parts), b.rows] for b, parts in self.shards]
        need(index.meta["shards"] == listed and index.rows == self.rows and index.kind == INDEX, "stale index")
        text = json.dumps(listed, separators=(",", ":")).encode()
        need(hashlib.sha256(text).digest()[:16] == index.shard_id, "id of the index")

    def home(self, name: str, shard: int) -> ShardReader:
        """The file that holds a field of a shard: the last sidecar that has it, else the base."""
        base, parts = self.shards[shard]
        return next(file for file in [*reversed(parts), base] if name in file.fields)

    def samples(self) -> Iterator[dict[str, Any]]:
        """Every row in order, ``__key__`` and every field; absent fields are ``None``."""
        names = [f["name"] for f in self.manifest["fields"]]
        for number, (base, _) in enumerate(self.shards):
            for row in range(base.rows):
                yield {"__key__": base.keys[row], **{n: self.home(n, number).value(n, row) for n in names}}
