"""Members of tar files as a stream: plain or gzip, bounded memory, and nothing ever extracted.

Headers are parsed by the standard library's ``tarfile``, which believes what they say; :class:`_Guard` stands between it and
the bytes and bounds every read. Whatever stops the stream early is a :class:`TarFault` with code and offset.
"""

from __future__ import annotations

import gzip
import os
import re
import tarfile
import zlib
from collections.abc import Iterator
from typing import Protocol

import msgspec

from lfdata.errors import SampleError
from shard_builder.sources.files import LFS_HEAD

BLOCK = 512
GZIP_MAGIC = b"\x1f\x8b"

_PACKED = {"xz": b"\xfd7zXZ\0", "bzip2": b"BZh", "zstd": b"\x28\xb5\x2f\xfd", "zip": b"PK\x03\x04", "7-zip": b"7z\xbc\xaf"}
_CHUNK = 1 << 16
_MAX_HEADER = 1 << 16  # one extended header: names and attributes, never data
_MAX_HEADERS = 1 << 20  # all headers of one member together
_MAX_GLOBALS = 1000
_LONG_NUMBER = re.compile(rb"[0-9]{256}")  # tarfile's own patterns take quadratic time over runs of digits


class Member(msgspec.Struct, frozen=True):
    """One member: its name, byte for byte, and where its header (``start``) and its data lie in the uncompressed tar.

    ``skip`` is empty for a regular file that can be read; otherwise it says why not (``link``, ``directory``, ``sparse``, ...).
    """

    name: bytes
    start: int
    offset: int
    size: int
    skip: str


class TarFault(Exception):
    """Why a tar ends early. ``member`` is the member that is cut, where its header could be read."""

    def __init__(self, code: str, reason: str, offset: int, member: Member | None = None) -> None:
        super().__init__(code, reason)
        self.code, self.reason, self.offset, self.member = code, reason, offset, member


class NoEnd(TarFault):
    """The tar stops after a whole member, without the two zero blocks that end it."""


class ByteStream(Protocol):
    """Uncompressed bytes, read forwards."""

    def read(self, size: int) -> bytes:
        """The next bytes: fewer than ``size`` only at the end."""
        ...

    def tell(self) -> int:
        """Position of the next byte."""
        ...

    def seek(self, position: int) -> None:
        """Go forwards, or back by at most a block."""
        ...

    def reach(self, position: int) -> bool:
        """Whether the stream has at least ``position`` bytes."""
        ...


class PlainStream:
    """A regular file, read with ``pread``."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._at = descriptor, 0
        self._size = os.fstat(descriptor).st_size

    def read(self, size: int) -> bytes:
        """See :class:`ByteStream`."""
        data = os.pread(self._descriptor, size, self._at)
        while data and len(data) < size and (more := os.pread(self._descriptor, size - len(data), self._at + len(data))):
            data += more
        self._at += len(data)
        return data

    def tell(self) -> int:
        """See :class:`ByteStream`."""
        return self._at

    def seek(self, position: int) -> None:
        """See :class:`ByteStream`."""
        self._at = position

    def reach(self, position: int) -> bool:
        """See :class:`ByteStream`."""
        return position <= self._size


class GzipStream:
    """A gzip file, decompressed in fixed steps, so that whoever reads it again gets exactly as far.

    Raises:
        SampleError: from any method: ``truncated``, ``gzip`` (not gzip, or broken), ``gzip-crc``, ``trailing-data``,
            ``too-large``.
    """

    def __init__(self, descriptor: int, limit: int) -> None:
        self._raw = os.fdopen(os.dup(descriptor), "rb", buffering=_CHUNK)
        self._raw.seek(0)
        self._file = gzip.GzipFile(fileobj=self._raw, mode="rb")
        self._limit = limit
        self._start = 0  # position of the first byte of the buffer
        self._buffer = b""
        self._at = 0

    def close(self) -> None:
        """Close the descriptor."""
        self._raw.close()

    def step(self) -> bytes:
        """The next piece of the stream, empty at its end."""
        try:
            data = self._file.read1(_CHUNK)
        except EOFError:
            raise SampleError("truncated", "the gzip stream ends too early") from None
        except zlib.error as error:
            raise SampleError("gzip", f"the gzip stream is broken: {error}") from None
        except gzip.BadGzipFile as error:
            if str(error).startswith("Not a gzipped"):
                if self._start or self._buffer:
                    raise SampleError("trailing-data", "bytes that are not gzip follow the gzip stream") from None
                raise SampleError("gzip", "not gzip") from None
            code = "gzip-crc" if "CRC" in str(error) or "length" in str(error) else "gzip"
            raise SampleError(code, f"the gzip stream is broken: {error}") from None
        if self._start + len(self._buffer) + len(data) > self._limit:
            raise SampleError("too-large", f"more than {self._limit} bytes when decompressed (option max_unpacked_bytes)")
        return data

    def _more(self) -> bool:
        data = self.step()
        keep = self._buffer[-BLOCK:]
        self._start += len(self._buffer) - len(keep)
        self._buffer = keep + data
        return bool(data)

    def read(self, size: int) -> bytes:
        """See :class:`ByteStream`."""
        parts = []
        while size:
            first = self._at - self._start
            part = self._buffer[first : first + size]
            if not part:
                if not self._more():
                    break
                continue
            parts.append(part)
            self._at += len(part)
            size -= len(part)
        return b"".join(parts)

    def tell(self) -> int:
        """See :class:`ByteStream`."""
        return self._at

    def seek(self, position: int) -> None:
        """See :class:`ByteStream`."""
        if position < self._start:
            raise SampleError("tar-header", "a header points backwards")
        self.reach(position)
        self._at = min(position, self._start + len(self._buffer))

    def reach(self, position: int) -> bool:
        """See :class:`ByteStream`."""
        while self._start + len(self._buffer) < position:
            if not self._more():
                return False
        return True


class _Guard:
    """The file that ``tarfile`` sees: bounds reads and refuses extended headers it would choke on."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._left = _MAX_HEADERS
        self._state = "header"
        self.short = False

    def begin(self) -> None:
        """The next member's headers come."""
        self._left, self._state, self.short = _MAX_HEADERS, "header", False

    def tell(self) -> int:
        return self._stream.tell()

    def seek(self, position: int) -> None:
        if position < 0:
            raise SampleError("tar-header", "a header points before the start of the tar")
        self._stream.seek(position)

    def read(self, size: int) -> bytes:
        self._left -= size
        if not 0 <= size <= _MAX_HEADER or self._left < 0:
            raise SampleError("tar-header", f"a member's headers claim more than {_MAX_HEADER} bytes")
        data = self._stream.read(size)
        self.short |= len(data) < size
        if self._state in ("pax", "name"):
            if self._state == "pax" and not self.short:
                _check_pax(data)
            self._state = "header"
        elif self._state == "header" and size == BLOCK:
            kind = data[156:157]
            self._state = {b"x": "pax", b"g": "pax", b"X": "pax", b"L": "name", b"K": "name", b"S": "map"}.get(kind, "header")
        return data


def _check_pax(data: bytes) -> None:
    """Refuse extended headers that are not records ``LENGTH KEYWORD=VALUE\\n``, in one linear pass."""
    at = 0
    if _LONG_NUMBER.search(data):
        raise SampleError("tar-header", "an absurd number in an extended header")
    while at < len(data) and data[at]:
        space = data.find(b" ", at, at + 10)
        digits = data[at : max(space, at)]
        end = at + int(digits) if digits.isdigit() else 0
        if not space < end <= len(data) or data[end - 1] != 0x0A or data.find(b"=", space, end) < 0:
            raise SampleError("tar-header", "a malformed extended header")
        at = end


def members(stream: ByteStream) -> Iterator[Member]:
    """Every member of a tar, in order.

    Raises:
        NoEnd: after the last member, when the end-of-archive blocks are missing.
        TarFault: ``truncated``, ``tar-header``, ``trailing-data``, ``empty-file``, ``lfs-pointer``, and the codes of
            :class:`GzipStream`.
    """
    guard = _Guard(stream)
    _check_head(stream)
    archive: tarfile.TarFile | None = None
    at = 0
    while True:
        guard.begin()
        try:
            if archive is None:
                # The constructor reads the first member; next() then gives it out.
                archive = tarfile.TarFile(fileobj=guard, mode="r", encoding="utf-8", errors="surrogateescape")  # type: ignore[arg-type]
            elif not stream.reach(at):
                raise NoEnd("truncated", "the tar ends without its end-of-archive blocks", at)
            info = archive.next()
        except TarFault:
            raise
        except SampleError as error:
            raise TarFault(error.code, error.reason, at) from None
        except Exception as error:
            # tarfile lets IndexError, OverflowError, RecursionError and more out of bad headers.
            code = "truncated" if guard.short else "tar-header"
            said = (
                f"{type(error).__name__}: {error}"[:120] if isinstance(error, tarfile.TarError) else "its values make no sense"
            )
            raise TarFault(code, f"a header that cannot be read ({said})", at) from None
        if info is None:
            _check_end(stream, at)
            return
        archive.members.clear()  # type: ignore[attr-defined]  # it would keep every header of the tar
        member = _member(info, at)
        if archive.offset <= at or len(archive.pax_headers) > _MAX_GLOBALS:
            raise TarFault("tar-header", "a header that points backwards, or too many global ones", at)
        _check_data(stream, member, archive.offset)
        at = archive.offset
        yield member


def _check_head(stream: ByteStream) -> None:
    try:
        head = stream.read(BLOCK)
        stream.seek(0)
    except SampleError as error:
        raise TarFault(error.code, error.reason, 0) from None
    if not head:
        raise TarFault("empty-file", "a file of 0 bytes is no tar", 0)
    packed = next((name for name, magic in _PACKED.items() if head.startswith(magic)), None)
    if packed:
        raise TarFault("tar-header", f"this is {packed} data, not a tar: decompress it first (gzip alone is read as it is)", 0)
    if head.startswith(LFS_HEAD):
        raise TarFault("lfs-pointer", "this is a Git LFS pointer, not the tar: run git lfs pull", 0)


def _member(info: tarfile.TarInfo, start: int) -> Member:
    name = info.name.encode("utf-8", "surrogateescape")
    if not 0 <= info.size < 1 << 62:
        raise TarFault("tar-header", f"a member of {'negative' if info.size < 0 else 'impossible'} size", start)
    return Member(name, start, info.offset_data, info.size, _why_skipped(info, name))


def _why_skipped(info: tarfile.TarInfo, name: bytes) -> str:
    if info.issparse():
        return "sparse"
    if info.isdir():
        return "directory"
    if info.issym() or info.islnk():
        return "link"
    if not info.isreg():
        return "special" if info.isdev() else "unknown-type"
    if not name or b"\0" in name or name.startswith(b"/") or b".." in name.split(b"/"):
        return "unsafe-name"
    return ""


def _check_data(stream: ByteStream, member: Member, following: int) -> None:
    # A sparse member's logical size says nothing about the bytes that are there.
    end = following if member.skip == "sparse" else min(member.offset + member.size, following)
    try:
        whole = stream.reach(end)
    except SampleError as error:
        raise TarFault(error.code, error.reason, member.start, member) from None
    if not whole:
        raise TarFault("truncated", "the tar ends inside this member", member.start, member)


def _check_end(stream: ByteStream, at: int) -> None:
    """``tarfile`` takes any bad header for the end; see which it is."""
    try:
        stream.seek(at)
        block = stream.read(BLOCK)
        if not block:
            raise NoEnd("truncated", "the tar ends without its end-of-archive blocks", at)
        if any(block):
            code, what = (
                ("truncated", "ends inside a header") if len(block) < BLOCK else ("tar-header", "is damaged: a bad header")
            )
            raise TarFault(code, f"the tar {what}", at)
        while data := stream.read(_CHUNK):
            if data.count(0) != len(data):
                place = stream.tell() - len(data.lstrip(b"\0"))
                raise TarFault(
                    "trailing-data", "data follows the end of the tar (tars joined by cat? list them one by one)", place
                )
    except SampleError as error:
        raise TarFault(error.code, error.reason, at) from None
