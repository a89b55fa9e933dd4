"""Byte layout of shard files (docs/format.md, section 2): constants, and packing and parsing of the fixed structures.

Parsing functions take bytes that were already read, check every rule that concerns them and raise typed errors naming the file and
the offset. They allocate nothing that a damaged header could size.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import xxhash

from lfdata.errors import CorruptError, LimitError, VersionError

MAJOR, MINOR = 1, 0
MAGIC = b"\x89LFD\r\n\x1a\n"
TRAILER_MAGIC = b"LFDTRAIL"
KIND_BASE, KIND_SIDECAR, KIND_INDEX = 0, 1, 2

HEADER_BYTES = 4096
TRAILER_BYTES = 128
ENTRY_BYTES = 64
REGION_ALIGN = 4096
COLUMN_ALIGN = 64
BLOCK_BYTES = 65536
NO_FIELD = 0xFFFFFFFF

FLAG_REQUIRED, FLAG_BLOCKED = 1, 2

MAX_ROWS = 1 << 40
MAX_ENTRIES = 262_144
MAX_META_BYTES = 16 << 20
MAX_MANIFEST_BYTES = 512 << 20  # a manifest, and META of an index, which lists the shards: a million of them fit
MAX_DICT_BYTES = 16 << 20
MAX_DICTS_BYTES = 256 << 20
# A tail longer than this is not read in one piece, whatever the manifest says: the parts of it that matter are, each by its own limit.
MAX_TAIL_BYTES = 256 << 20
MAX_KEY_BYTES = 65_535
MAX_FIELDS = 4096

# Element types by their code in the directory.
LOCATOR = np.dtype([("offset", "<u8"), ("check", "<u8")])
ELEMENTS: dict[int, np.dtype[np.generic]] = {
    1: np.dtype("u1"),
    2: np.dtype("<u2"),
    3: np.dtype("<u4"),
    4: np.dtype("<u8"),
    5: np.dtype("i1"),
    6: np.dtype("<i2"),
    7: np.dtype("<i4"),
    8: np.dtype("<i8"),
    9: np.dtype("<f2"),
    10: np.dtype("<f4"),
    11: np.dtype("<f8"),
    12: np.dtype("?"),
    13: LOCATOR,
}
ELEMENT_CODES = {dtype: code for code, dtype in ELEMENTS.items()}

# Roles of index columns, and the element type each must have (0: by the field's dtype).
ROLES = (
    "value",
    "present",
    "bytes",
    "width",
    "height",
    "channels",
    "codec",
    "bits",
    "frames",
    "rate",
    "tokens",
    "raw_bytes",
    "dims",
    "aux_first",
    "aux_count",
    "aux",
)
ROLE_CODES = {name: code for code, name in enumerate(ROLES)}
ROLE_ELEMENTS = (0, 1, 4, 3, 3, 2, 1, 1, 4, 3, 4, 4, 4, 4, 4, 4)

# Size columns of each kind, in the order they are written.
SIZE_ROLES: dict[str, tuple[str, ...]] = {
    "image": ("bytes", "width", "height", "channels", "codec", "bits"),
    "audio": ("bytes", "frames", "channels", "rate"),
    "json": ("bytes", "raw_bytes"),
    "array": ("bytes", "dims"),
    "text": ("bytes",),
    "bytes": ("bytes",),
    "tokens": ("tokens",),
    "scalar": ("value",),
}
ALIGNED_KINDS = ("audio", "array")
GROUP_KINDS = ("image", "audio", "json", "array", "text", "bytes")

# Section types a version 1.0 reader knows, with whether each is blocked.
SECTIONS = {
    b"GRUP": False,
    b"TOKN": True,
    b"LOCR": True,
    b"COLM": True,
    b"KEYS": True,
    b"KOFF": True,
    b"KHSH": True,
    b"KROW": True,
    b"DICT": False,
    b"META": False,
    b"BSUM": False,
}
FIELD_SECTIONS = (b"TOKN", b"LOCR", b"COLM", b"DICT")  # these belong to a field
PLAIN_SECTIONS = (b"GRUP", b"DICT", b"META")  # these have no elements

_IDENTITY = struct.Struct("<HHIQQ16s16s")  # bytes 8 to 63 of the header, repeated in the trailer
_TRAILER_TAIL = struct.Struct("<QQQQQQQ")  # bytes 64 to 119 of the trailer
_ENTRY = struct.Struct("<4sIIHHQQQQQQ")


def xxh3(data: object, seed: int = 0) -> int:
    """XXH3 of a bytes-like object."""
    return xxhash.xxh3_64_intdigest(data, seed)  # type: ignore[arg-type]


def new_xxh3(seed: int) -> xxhash.xxh3_64:
    """A streaming XXH3."""
    return xxhash.xxh3_64(seed=seed)


def align(offset: int, step: int) -> int:
    """The smallest multiple of ``step`` that is not below ``offset``."""
    return -(-offset // step) * step


def is_zero(data: bytes | memoryview) -> bool:
    """Whether every byte is zero."""
    return not np.frombuffer(data, np.uint8).any()


@dataclass(frozen=True, slots=True)
class Identity:
    """What header and trailer both say: version, kind, features, shard id and part id."""

    major: int
    minor: int
    kind: int
    required: int
    optional: int
    shard_id: bytes
    part_id: bytes

    @property
    def seed(self) -> int:
        """Seed of every check in the file."""
        return xxh3(self.shard_id + self.part_id)

    def pack(self) -> bytes:
        """The 56 bytes as stored."""
        return _IDENTITY.pack(self.major, self.minor, self.kind, self.required, self.optional, self.shard_id, self.part_id)


@dataclass(frozen=True, slots=True)
class Trailer:
    """The parsed trailer."""

    identity: Identity
    rows: int
    directory_offset: int
    entries: int
    directory_check: int
    file_size: int
    header_check: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One section of the directory."""

    type: bytes
    flags: int
    field: int
    role: int
    element: int
    offset: int
    length: int
    count: int
    check: int
    first: int

    @property
    def blocked(self) -> bool:
        """Whether the section has a check every ``BLOCK_BYTES``."""
        return bool(self.flags & FLAG_BLOCKED)

    @property
    def blocks(self) -> int:
        """Number of blocks of a blocked section."""
        return -(-self.length // BLOCK_BYTES)

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """Numpy dtype of the elements (``uint8`` for plain bytes)."""
        return ELEMENTS.get(self.element, ELEMENTS[1])

    @property
    def end(self) -> int:
        """Offset of the first byte after the section."""
        return self.offset + self.length


def pack_header(identity: Identity) -> bytes:
    """The 4,096 bytes of the header."""
    body = (MAGIC + identity.pack()).ljust(HEADER_BYTES - 8, b"\0")
    return body + struct.pack("<Q", xxh3(body))


def parse_identity(file: object, data: bytes | memoryview, offset: int) -> Identity:
    """Parse bytes 8 to 63 of a header or trailer and refuse versions and features this reader lacks."""
    identity = Identity(*_IDENTITY.unpack(data))
    if identity.major != MAJOR:
        raise VersionError(
            file,
            offset,
            f"format version {identity.major}.{identity.minor}; this reader knows {MAJOR}.x. Update lfdata to read it",
        )
    if identity.kind not in (KIND_BASE, KIND_SIDECAR, KIND_INDEX):
        raise CorruptError(file, offset + 4, f"unknown file kind {identity.kind}")
    if (identity.kind == KIND_SIDECAR) != (identity.part_id != bytes(16)):
        raise CorruptError(file, offset + 40, "the part id must be zero except in a sidecar")
    return identity


def parse_header(file: object, data: bytes) -> tuple[Identity, int]:
    """Parse the header; returns the identity and the header's check."""
    if data[:8] != MAGIC:
        raise CorruptError(file, 0, f"not an lfdata shard: it begins with {bytes(data[:8])!r}")
    (check,) = struct.unpack_from("<Q", data, HEADER_BYTES - 8)
    # The version comes first: a newer major may have moved or changed the check itself.
    identity = parse_identity(file, data[8:64], 8)
    if xxh3(data[: HEADER_BYTES - 8]) != check:
        raise CorruptError(file, 0, "the header does not match its check")
    if not is_zero(data[64 : HEADER_BYTES - 8]):
        raise CorruptError(file, 64, "reserved bytes of the header are not zero")
    return identity, check


def pack_trailer(trailer: Trailer) -> bytes:
    """The 128 bytes of the trailer."""
    body = TRAILER_MAGIC + trailer.identity.pack()
    body += _TRAILER_TAIL.pack(
        trailer.rows,
        trailer.directory_offset,
        trailer.entries,
        trailer.directory_check,
        trailer.file_size,
        trailer.header_check,
        0,
    )
    return body + struct.pack("<Q", xxh3(body))


def parse_trailer(file: object, data: bytes, file_size: int) -> Trailer:
    """Parse the trailer of a file of ``file_size`` bytes and check its geometry."""
    at = file_size - TRAILER_BYTES
    if data[:8] != TRAILER_MAGIC:
        raise CorruptError(file, at, "no trailer at the end: the file is truncated, still being written, or has bytes appended")
    identity = parse_identity(file, data[8:64], at + 8)
    (check,) = struct.unpack_from("<Q", data, TRAILER_BYTES - 8)
    if xxh3(data[: TRAILER_BYTES - 8]) != check:
        raise CorruptError(file, at, "the trailer does not match its check")
    rows, directory, entries, directory_check, size, header_check, reserved = _TRAILER_TAIL.unpack_from(data, 64)
    if reserved:
        raise CorruptError(file, at + 112, "reserved bytes of the trailer are not zero")
    if size != file_size:
        raise CorruptError(file, at + 96, f"the trailer says {size} bytes, the file has {file_size}")
    if rows > MAX_ROWS:
        raise LimitError(file, at + 64, f"{rows} rows; the limit is {MAX_ROWS}")
    if entries > MAX_ENTRIES:
        raise LimitError(file, at + 80, f"{entries} directory entries; the limit is {MAX_ENTRIES}")
    if directory % COLUMN_ALIGN or directory < HEADER_BYTES or directory + entries * ENTRY_BYTES != at:
        raise CorruptError(file, at + 72, f"directory at {directory} with {entries} entries does not end at the trailer")
    return Trailer(identity, rows, directory, entries, directory_check, size, header_check)


def pack_entry(entry: Entry) -> bytes:
    """The 64 bytes of a directory entry."""
    return _ENTRY.pack(
        entry.type,
        entry.flags,
        entry.field,
        entry.role,
        entry.element,
        entry.offset,
        entry.length,
        entry.count,
        entry.check,
        entry.first,
        0,
    )


def parse_directory(file: object, data: bytes, trailer: Trailer) -> list[Entry]:
    """Parse and check the whole directory: order, bounds, alignment, element counts, flags. Returns entries in file order."""
    base = trailer.directory_offset
    if xxh3(data, trailer.identity.seed) != trailer.directory_check:
        raise CorruptError(file, base, "the directory does not match its check")
    entries = []
    end = HEADER_BYTES
    for number in range(trailer.entries):
        at = base + number * ENTRY_BYTES
        *values, reserved = _ENTRY.unpack_from(data, number * ENTRY_BYTES)
        entry = Entry(*values)
        if reserved or entry.flags & ~3:
            raise CorruptError(file, at, f"reserved bits of directory entry {number} are not zero")
        _check_known(file, at, entry)
        if entry.offset > base or entry.length > base - entry.offset:
            raise CorruptError(file, at + 16, f"section {_name(entry)} ends outside the file")
        if entry.offset < end:
            raise CorruptError(file, at + 16, f"section {_name(entry)} overlaps what comes before it")
        if entry.offset - end >= REGION_ALIGN:
            raise CorruptError(file, at + 16, f"a gap of {entry.offset - end} bytes before section {_name(entry)}")
        if entry.offset % (REGION_ALIGN if entry.type in (b"GRUP", b"TOKN") else COLUMN_ALIGN):
            raise CorruptError(file, at + 16, f"section {_name(entry)} at {entry.offset} is not aligned")
        end = entry.end
        entries.append(entry)
    if base - end >= REGION_ALIGN:
        raise CorruptError(file, end, f"a gap of {base - end} bytes before the directory")
    return entries


def _name(entry: Entry) -> str:
    return entry.type.decode("ascii", "backslashreplace")


def _check_known(file: object, at: int, entry: Entry) -> None:
    blocked = SECTIONS.get(entry.type)
    if blocked is None:
        if entry.flags & FLAG_REQUIRED:
            raise VersionError(
                file,
                at,
                f"section type {_name(entry)!r} is required to read this file and this reader does not know it. Update lfdata",
            )
        return
    if entry.flags != FLAG_REQUIRED | (FLAG_BLOCKED if blocked else 0):
        raise CorruptError(file, at + 4, f"section {_name(entry)} has the wrong flags")
    if (entry.field != NO_FIELD) != (entry.type in FIELD_SECTIONS):
        raise CorruptError(file, at + 8, f"section {_name(entry)} has the field ordinal {entry.field}")
    if entry.role >= (len(ROLES) if entry.type == b"COLM" else 1):
        raise CorruptError(file, at + 12, f"section {_name(entry)} has the role {entry.role}")
    if entry.element not in ({0} if entry.type in PLAIN_SECTIONS else {0, *ELEMENTS}):
        raise CorruptError(file, at + 14, f"section {_name(entry)} has the element type {entry.element}")
    if entry.first and not blocked and entry.type != b"GRUP":
        raise CorruptError(file, at + 48, f"section {_name(entry)}: reserved bytes are not zero")
    if entry.type != b"GRUP" and entry.count * entry.dtype.itemsize != entry.length:
        raise CorruptError(file, at + 32, f"section {_name(entry)}: {entry.count} elements do not make {entry.length} bytes")
