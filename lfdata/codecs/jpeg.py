"""JPEG structure (ITU-T T.81): header, completeness, restart markers, one span of rows as a small JPEG, lossless transcoding.

Nothing here decodes pixels. Every walk is bounded by the length of the data.
"""

from __future__ import annotations

import itertools
import re
import shutil
import struct
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lfdata.errors import OptionError, SampleError

_MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")
_RESTART = re.compile(rb"\xff[\xd0-\xd7]")
_SOF = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_STANDALONE = frozenset({0x01, *range(0xD0, 0xD8)})
_GUARD = b"\xff\x00" * 16
MAX_SCANS = 100
# Of a row, with restart markers within rows.
GROUPS = 8
"""Scans a JPEG may have: encoders write about 10; a hostile file of thousands would take minutes to decode."""

TRANSCODE_TIMEOUT = 120.0
"""Seconds after which ``jpegtran`` is given up on: a picture takes milliseconds, a hang must not stop a conversion."""


@dataclass(frozen=True, slots=True)
class Component:
    """One colour component: its identifier and its sampling factors."""

    ident: int
    horizontal: int
    vertical: int


@dataclass(frozen=True, slots=True)
class JpegInfo:
    """The header of a JPEG.

    Attributes:
        width, height: pixels. sof: code of the frame marker (0xC0 baseline, 0xC2 progressive, ...). bits: bits a sample.
        sof_offset: byte offset of the frame marker. scan_offset: byte offset of the first scan's entropy-coded data.
        scan: identifiers of the components in the first scan. restart_interval: MCUs between restart markers, 0 for none.
        adobe: whether an Adobe APP14 segment is there (CMYK is then stored inverted).
    """

    width: int
    height: int
    sof: int
    bits: int
    components: tuple[Component, ...]
    sof_offset: int
    scan_offset: int
    scan: tuple[int, ...]
    restart_interval: int
    adobe: bool

    @property
    def progressive(self) -> bool:
        return self.sof in (0xC2, 0xC6, 0xCA, 0xCE)

    @property
    def mcu(self) -> tuple[int, int]:
        """(width, height) in pixels of one MCU of an interleaved scan; 8x8 when there is one component."""
        if len(self.components) == 1:
            return 8, 8
        return 8 * max(c.horizontal for c in self.components), 8 * max(c.vertical for c in self.components)

    @property
    def mcu_columns(self) -> int:
        return -(-self.width // self.mcu[0])

    @property
    def mcu_rows(self) -> int:
        return -(-self.height // self.mcu[1])


def parse(data: bytes) -> JpegInfo:
    """Read the header up to the first scan. Raises :class:`SampleError` ``truncated`` or ``corrupt``."""
    if data[:2] != b"\xff\xd8":
        raise SampleError("corrupt", "JPEG does not begin with SOI")
    pos, frame, interval, adobe = 2, None, 0, False
    while True:
        pos, code, body = _segment(data, pos)
        if code in _SOF:
            if frame is not None:
                raise SampleError("corrupt", f"JPEG has a second frame header before byte {pos}")
            frame = (code, pos - len(body) - 4, *_parse_frame(body))
        elif code == 0xDD and len(body) >= 2:
            interval = int.from_bytes(body[:2], "big")
        elif code == 0xEE and body[:5] == b"Adobe":
            adobe = True
        elif code == 0xD9:
            raise SampleError("corrupt", "JPEG ends before any picture data")
        elif code == 0xDA:
            if frame is None:
                raise SampleError("corrupt", "JPEG has a scan before its frame header")
            sof, offset, bits, width, height, components = frame
            scan, _, _, _ = _parse_scan(body)
            return JpegInfo(width, height, sof, bits, components, offset, pos, scan, interval, adobe)


def segments(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Marker code and body of each segment before the first scan. Raises as :func:`parse`."""
    pos, code = 2, 0
    while code not in (0xDA, 0xD9):
        pos, code, body = _segment(data, pos)
        yield code, body


def _segment(data: bytes, pos: int) -> tuple[int, int, bytes]:
    """The marker segment at or after ``pos``: (offset after it, marker code, body). Stray bytes before it are skipped."""
    match = _MARKER.search(data, pos)
    while match and data[match.start() + 1] in _STANDALONE:
        match = _MARKER.search(data, match.end())
    if match is None:
        raise SampleError("truncated", f"truncated: JPEG ends at byte {len(data)} without its EOI marker")
    pos, code = match.end(), data[match.start() + 1]
    if code in (0xD8, 0xD9):
        return pos, code, b""
    length = int.from_bytes(data[pos : pos + 2], "big")
    if pos + max(length, 2) > len(data):
        raise SampleError("truncated", f"truncated: JPEG ends inside segment 0x{code:02x} at byte {pos}")
    if length < 2:
        raise SampleError("corrupt", f"JPEG segment 0x{code:02x} at byte {pos} has length {length}")
    return pos + length, code, data[pos + 2 : pos + length]


def _parse_frame(body: bytes) -> tuple[int, int, int, tuple[Component, ...]]:
    if len(body) < 6 or len(body) < 6 + 3 * body[5]:
        raise SampleError("corrupt", "JPEG frame header is too short")
    bits, height, width, count = struct.unpack_from(">BHHB", body)
    components = tuple(Component(body[i], body[i + 1] >> 4, body[i + 1] & 15) for i in range(6, 6 + 3 * count, 3))
    if not width or not height or not 1 <= count <= 4:
        raise SampleError("corrupt", f"JPEG claims {width}x{height} pixels and {count} components")
    if any(not 1 <= f <= 4 for c in components for f in (c.horizontal, c.vertical)):
        raise SampleError("corrupt", "JPEG has a sampling factor out of range")
    return bits, width, height, components


def _parse_scan(body: bytes) -> tuple[tuple[int, ...], int, int, int]:
    """(component identifiers, first coefficient, last coefficient, point transform)."""
    if not body or len(body) < 4 + 2 * body[0]:
        raise SampleError("corrupt", "JPEG scan header is too short")
    count = body[0]
    return tuple(body[1 : 1 + 2 * count : 2]), body[1 + 2 * count], body[2 + 2 * count], body[3 + 2 * count] & 15


def check_complete(data: bytes, info: JpegInfo) -> int:
    """Follow the scans to the EOI marker and return its byte offset.

    Raises :class:`SampleError` ``truncated`` when EOI is missing, a progressive picture lacks scans, or there are fewer bytes
    than that many blocks take at one bit a Huffman code. Bytes after EOI (a second MPO picture) are allowed.
    """
    missing = {c.ident: bytearray(b"\xff" * 64) for c in info.components}
    scan, first, last, low = _parse_scan(data[info.scan_offset - 4 - 2 * len(info.scan) : info.scan_offset])
    pos, entropy = info.scan_offset, 0
    for _ in range(MAX_SCANS):
        for ident in scan:
            if ident in missing and first <= last < 64:
                missing[ident][first : last + 1] = bytes([low]) * (last + 1 - first)
        match = _MARKER.search(data, pos)
        end = match.start() if match else len(data)
        entropy += end - pos
        pos, code, body = _segment(data, end)
        while code not in (0xDA, 0xD9):
            pos, code, body = _segment(data, pos)
        if code == 0xD9:
            _check_amount(info, missing, entropy)
            return pos - 2
        scan, first, last, low = _parse_scan(body)
    raise SampleError("corrupt", f"JPEG has more than {MAX_SCANS} scans: each costs a pass over the picture")


def _check_amount(info: JpegInfo, missing: dict[int, bytearray], entropy: int) -> None:
    if info.progressive and any(any(levels) for levels in missing.values()):
        raise SampleError("truncated", "truncated: progressive JPEG lacks some of its scans")
    if not info.progressive and any(levels[0] == 0xFF for levels in missing.values()):
        raise SampleError("truncated", "truncated: JPEG lacks the scan of a component")
    wide, high = info.mcu
    per_mcu = sum(c.horizontal * c.vertical for c in info.components) if len(info.components) > 1 else 1
    bits = info.width * info.height * per_mcu // (wide * high) * (1 if info.progressive else 2)
    if info.sof in (0xC0, 0xC1, 0xC2) and entropy * 8 < bits:
        raise SampleError("truncated", f"truncated: {entropy} bytes cannot hold {info.width}x{info.height} JPEG pixels")


def guard(data: bytes, info: JpegInfo) -> bytes:
    """Check ``data`` (:func:`check_complete`) and return a copy that makes a decoder fail where it would fill in grey.

    libjpeg answers an EOI marker that comes too early with a warning (which PIL drops) and grey blocks. Without the marker, but
    with a few bytes of padding for its look-ahead, it runs out of data and reports that. Only for pictures of one sequential
    Huffman scan; any other is returned as it is. Up to 3 blocks at the very end can still be missing unseen.
    """
    end = check_complete(data, info)
    if info.sof not in (0xC0, 0xC1) or set(info.scan) != {c.ident for c in info.components}:
        return data
    return data[:end] + _GUARD


def row_offsets(data: bytes) -> NDArray[np.uint64]:
    """Byte offset of the entropy-coded data of every MCU row of a baseline JPEG with a restart marker after each row.

    Shape (MCU rows,), uint64, from the start of ``data``. Raises :class:`SampleError` ``corrupt`` for any other JPEG.
    """
    info = parse(data)
    end = check_complete(data, info)
    starts = [info.scan_offset, *(m.end() for m in _RESTART.finditer(data, info.scan_offset, end))]
    codes = [data[s - 1] & 7 for s in starts[1:]]
    single_row = info.mcu_rows == 1
    if info.sof not in (0xC0, 0xC1) or (not single_row and info.restart_interval != info.mcu_columns):
        raise SampleError("corrupt", "JPEG does not restart after every MCU row")
    if len(starts) != info.mcu_rows or codes != [i % 8 for i in range(len(codes))]:
        raise SampleError("corrupt", f"JPEG has {len(starts)} restart intervals for {info.mcu_rows} MCU rows")
    return np.array(starts, dtype=np.uint64)


def rows_jpeg(data: bytes, offsets: Sequence[int], first: int, last: int) -> bytes:
    """A small JPEG of MCU rows [``first``, ``last``) of ``data``, whose row offsets are ``offsets``; pixels are not touched.

    Only the header and the bytes of those rows are read. Raises :class:`SampleError` ``corrupt`` when the offsets do not fit.
    """
    info = parse(data)
    rows = info.mcu_rows
    if len(offsets) != rows or not 0 <= first < last <= rows or int(offsets[0]) != info.scan_offset:
        raise SampleError("corrupt", f"row offsets do not fit a JPEG of {rows} MCU rows")
    if int(offsets[last - 1]) > len(data) or int(offsets[min(last, rows - 1)]) > len(data):
        raise SampleError("corrupt", f"row offsets lie outside a JPEG of {len(data)} bytes")
    stop = int(offsets[last]) - 2 if last < rows else _last_row_end(data, int(offsets[-1]))
    bounds = [*(int(o) for o in offsets[first:last]), stop + 2]
    if any(b < a + 2 for a, b in itertools.pairwise(bounds)) or stop > len(data):
        raise SampleError("corrupt", "row offsets are not in order")
    head = bytearray(data[: info.scan_offset])
    height = min(info.height, last * info.mcu[1]) - first * info.mcu[1]
    struct.pack_into(">H", head, info.sof_offset + 5, height)
    parts: list[bytes] = [bytes(head)]
    for i, (start, end) in enumerate(itertools.pairwise(bounds)):
        marker = data[end - 2 : end]
        if i + 1 < len(bounds) - 1:
            if marker != bytes((0xFF, 0xD0 + (first + i) % 8)):
                raise SampleError("corrupt", f"no restart marker before byte {end}")
            marker = bytes((0xFF, 0xD0 + i % 8))
        else:
            marker = b"\xff\xd9"
        parts += (data[start : end - 2], marker)
    return b"".join(parts)


def _last_row_end(data: bytes, start: int) -> int:
    match = _MARKER.search(data, start)
    if match is None:
        raise SampleError("truncated", "truncated: JPEG ends without its EOI marker")
    return match.start()


_NO_JPEGTRAN = "transcode=yes, and restart= with codec=keep, need the program jpegtran: apt install libjpeg-turbo-progs"


def jpegtran_version() -> str:
    """Version text of the ``jpegtran`` on the path. Raises :class:`OptionError` naming the package that has it."""
    tool = shutil.which("jpegtran")
    if tool is None:
        raise OptionError(_NO_JPEGTRAN)
    done = subprocess.run(
        [tool, "-version"], capture_output=True, timeout=TRANSCODE_TIMEOUT, check=False, stdin=subprocess.DEVNULL
    )
    return (done.stdout + done.stderr).decode("utf-8", "replace").strip().splitlines()[0]


def restart_group(columns: int) -> int:
    """MCUs between restart markers where rows of so many are cut into groups: a divisor, about an eighth; all if none is near."""
    wanted = columns / GROUPS
    found = [n for n in range(2, columns + 1) if columns % n == 0]
    best = min(found, key=lambda n: max(n / wanted, wanted / n), default=1)
    return best if wanted / 2 <= best <= 2 * wanted or best == 2 else columns


def to_baseline(data: bytes, restart: str = "") -> bytes:
    """Losslessly rewrite a JPEG as a sequential one: same coefficients, all metadata kept, a restart marker after every MCU row
    (``restart``: ``"rows"``) or after every group of MCUs (``"blocks"``: :func:`restart_group`).

    Raises :class:`SampleError` ``transcode`` when jpegtran fails or warns, :class:`OptionError` when it is not installed.
    """
    tool = shutil.which("jpegtran")
    if tool is None:
        raise OptionError(_NO_JPEGTRAN)
    every = f"{restart_group(parse(data).mcu_columns)}B" if restart == "blocks" else "1" if restart else ""
    try:
        done = subprocess.run(
            [tool, "-copy", "all", "-optimize", *(("-restart", every) if every else ())],
            input=data,
            capture_output=True,
            timeout=TRANSCODE_TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SampleError("transcode", f"jpegtran took more than {TRANSCODE_TIMEOUT:.0f} s") from None
    if done.returncode or done.stderr:
        raise SampleError("transcode", f"jpegtran: {done.stderr.decode('utf-8', 'replace').strip() or done.returncode}")
    return done.stdout
