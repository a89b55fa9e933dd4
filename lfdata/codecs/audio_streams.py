"""What libsndfile passes over in silence in Ogg and MP3 streams: damaged pages, later streams, changing formats."""

from __future__ import annotations

import io
import itertools
import zlib
from dataclasses import dataclass
from typing import Any

from lfdata.errors import SampleError

_OGG_HEADER = 27
_BEGINS, _ENDS = 2, 4
_REVERSED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))


@dataclass(frozen=True, slots=True)
class OggFacts:
    """``links``: the chained streams, each a file of its own; ``warnings``: texts for the report."""

    links: tuple[bytes, ...]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Mp3Facts:
    """What walking the frames of an MP3 file found.

    Attributes:
        data: the file without a leading frame that claims a wrong count.
        warnings: texts for the report.
        least: frames of audio that decoding must give.
        length: bytes that ``data`` must pretend to have, for libsndfile not to stop early; 0 when the real length will do.
    """

    data: bytes
    warnings: tuple[str, ...]
    least: int
    length: int = 0


class LengthenedBytes(io.BytesIO):
    """Bytes whose end, for those who seek to it, is at ``length``; reading on still stops where the data stops.

    The last 128 bytes before ``length`` read as zeros, since an MP3 decoder looks there for a tag; ``length`` must exceed the
    data by more than that.
    """

    def __init__(self, data: bytes, length: int) -> None:
        super().__init__(data)
        self._length = length

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """As :meth:`io.BytesIO.seek`, with the end at ``length``."""
        if whence == io.SEEK_END:
            return super().seek(max(0, self._length + offset))
        return super().seek(offset, whence)

    def readinto(self, buffer: Any, /) -> int:
        """As :meth:`io.BytesIO.readinto`, with zeros before ``length``."""
        left = self._length - self.tell()
        if not 0 < left <= _MP3_TAG:
            return super().readinto(buffer)
        count = min(left, len(buffer))
        buffer[:count] = bytes(count)
        self.seek(count, io.SEEK_CUR)
        return count


def inspect_ogg(raw: bytes) -> OggFacts:
    """Check every page of an Ogg file and find its links (streams chained one after the other).

    libsndfile leaves damaged pages out, which shortens the recording, and stops after the first link.

    Raises:
        SampleError: ``corrupt``: a page's checksum or number is wrong, or something else stands between pages.
    """
    position, began = 0, True
    links: list[int] = []
    numbers: dict[bytes, int] = {}
    ended: set[bytes] = set()
    warnings: tuple[str, ...] = ()
    while position < len(raw):
        head = raw[position : position + _OGG_HEADER]
        if not b"OggS".startswith(head[:4]):
            if ended != set(numbers) or not numbers:
                raise SampleError("corrupt", f"Ogg page expected at byte {position}")
            warnings = (f"{len(raw) - position} bytes after the end of the Ogg stream are ignored",)
            break
        table = raw[position + _OGG_HEADER : position + _OGG_HEADER + (head[26] if len(head) == _OGG_HEADER else 0)]
        end = position + _OGG_HEADER + len(table) + sum(table)
        if len(head) < _OGG_HEADER or len(table) < head[26] or end > len(raw):
            warnings = ("the Ogg stream is cut short; what is there is decoded",)
            break
        if _ogg_crc(raw[position:end]) != int.from_bytes(head[22:26], "little"):
            raise SampleError("corrupt", f"Ogg page at byte {position}: checksum mismatch")
        serial, number = head[14:18], int.from_bytes(head[18:22], "little")
        if head[5] & _BEGINS:
            if began:  # the first page behind a link's pages starts the next one
                links.append(position)
                numbers, ended, began = {}, set(), False
        else:
            began = True
            if number != (numbers.get(serial, -1) + 1) % 2**32:
                raise SampleError("corrupt", f"Ogg page at byte {position} is number {number}, after {numbers.get(serial)}")
        numbers[serial] = number
        if head[5] & _ENDS:
            ended.add(serial)
        position = end
    if not warnings and ended != set(numbers):
        warnings = ("the last Ogg page is not marked as the last; the stream may be cut short",)
    return OggFacts(tuple(raw[a:b] for a, b in itertools.pairwise([*links, position])) or (raw,), warnings)


def _ogg_crc(page: bytes) -> int:
    """Ogg's CRC-32 (polynomial 0x04C11DB7, most significant bit first) through zlib's, which is the same with bits reversed."""
    blank = page[:22] + b"\0\0\0\0" + page[26:]
    reflected = ~zlib.crc32(blank.translate(_REVERSED), 0xFFFFFFFF) & 0xFFFFFFFF
    return int(f"{reflected:032b}"[::-1], 2)


_MP3_BITRATES = {  # kbit/s by (MPEG 1, layer)
    (True, 1): (0, 32, 64, 96, 128, 160, 192, 224, 256, 288, 320, 352, 384, 416, 448),
    (True, 2): (0, 32, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384),
    (True, 3): (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    (False, 1): (0, 32, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256),
    (False, 2): (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
    (False, 3): (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
_MP3_RATES = {3: (44100, 48000, 32000), 2: (22050, 24000, 16000), 0: (11025, 12000, 8000)}
_MP3_TAG = 128  # bytes of an ID3v1 tag at the end
_MP3_LARGEST = 2881  # bytes of the longest frame
_MP3_MAX_SKIPS = 100_000  # bounds the search for frames in what is mostly something else
_MP3_TRIM = 4  # frames that encoder delay and padding may take off
_MP3_TAGS = (b"ID3", b"TAG", b"APETAGEX", b"LYRICS")


@dataclass(frozen=True, slots=True)
class _Mp3Frame:
    length: int
    rate: int
    channels: int
    samples: int


def inspect_mp3(raw: bytes) -> Mp3Facts:
    """Walk the frames of an MPEG audio file.

    libsndfile plays a stream whose rate or channels change as if they did not. It stops at the length that a Xing or VBRI
    header claims or, without one, at a guess from the file's length and the first frame's bit rate.

    Raises:
        SampleError: ``unknown-format`` (no two frames follow each other: this is not MPEG audio), ``rate-change``.
    """
    walk = _Mp3Walk(raw)
    walk.run()
    found = walk.found
    if not found:
        raise SampleError("unknown-format", "no MPEG audio frames follow each other")
    least = max(0, len(found) - _MP3_TRIM) * found[0].samples
    warnings: list[str] = []
    if walk.skipped:
        warnings.append(f"damaged MP3: {walk.skipped} places without a frame were passed over")
    if walk.cut:
        warnings.append("the last MP3 frame is cut short")
    if walk.claimed >= len(found):
        return Mp3Facts(raw, tuple(warnings), least)
    if walk.claimed:
        warnings.append(f"the header says {walk.claimed} MP3 frames, {len(found)} are there and are decoded")
    return Mp3Facts(raw[walk.start : walk.end], tuple(warnings), least, len(raw) + len(found) * _MP3_LARGEST)


class _Mp3Walk:
    """Steps from frame to frame.

    ``found``: whole frames of audio; ``start``, ``end``: where the first begins and the last ends; ``claimed``: frames that a
    leading header frame claims, 0 without one; ``skipped``: places where no frame was; ``cut``: the last frame is incomplete.
    """

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self.found: list[_Mp3Frame] = []
        self.start = self.end = self.claimed = self.skipped = 0
        self.cut = False
        self._header_seen = False

    def run(self) -> None:
        position = skip_id3(self.raw)
        while position + 4 <= len(self.raw) and not self.cut:
            frame = _mp3_frame(self.raw, position)
            # the very first frame must be followed by another: four bytes alone prove nothing
            if frame is None or not (self.found or self._followed(frame, position)):
                if self.found and self.raw.startswith(_MP3_TAGS, position):
                    if not self.raw.startswith(b"ID3", position):
                        return
                    position = max(skip_id3(self.raw, position), position + 1)
                else:
                    position = self._resync(position)
            elif self.found and not _same(frame, self.found[0]):
                self._check_change(frame, position)
                position += 1
            else:
                self._take(frame, position)
                position += frame.length

    def _take(self, frame: _Mp3Frame, position: int) -> None:
        claimed = None
        if not self.found and not self._header_seen:
            claimed = _claimed_frames(self.raw[position : position + min(frame.length, 200)])
        if claimed is not None:
            self._header_seen, self.claimed = True, claimed
        elif position + frame.length > len(self.raw):
            self.cut = True
        else:
            if not self.found:
                self.start = position
            self.found.append(frame)
            self.end = position + frame.length

    def _followed(self, frame: _Mp3Frame, position: int) -> bool:
        after = position + frame.length
        return after + 4 > len(self.raw) or _mp3_frame(self.raw, after) is not None

    def _check_change(self, frame: _Mp3Frame, position: int) -> None:
        if _same(frame, _mp3_frame(self.raw, position + frame.length)):
            before = self.found[0]
            raise SampleError(
                "rate-change",
                f"MP3 changes from {before.rate} Hz and {before.channels} channels to {frame.rate} Hz and {frame.channels} "
                f"channels at byte {position}: split the file",
            )

    def _resync(self, position: int) -> int:
        self.skipped += 1
        if self.skipped > _MP3_MAX_SKIPS:
            raise SampleError("corrupt", f"MP3 damaged in more than {_MP3_MAX_SKIPS} places")
        found = self.raw.find(b"\xff", position + 1)
        return found if found >= 0 else len(self.raw)


def skip_id3(raw: bytes, position: int = 0) -> int:
    """Offset behind the ID3v2 tags at ``position``."""
    while raw.startswith(b"ID3", position) and len(raw) >= position + 10:
        a, b, c, d = raw[position + 6 : position + 10]
        position += 10 + ((a & 127) << 21 | (b & 127) << 14 | (c & 127) << 7 | d & 127)
    return position


def _same(frame: _Mp3Frame, other: _Mp3Frame | None) -> bool:
    return other is not None and (frame.rate, frame.channels) == (other.rate, other.channels)


def _mp3_frame(raw: bytes, at: int) -> _Mp3Frame | None:
    head = raw[at : at + 4]
    if len(head) < 4 or head[0] != 0xFF or head[1] & 0xE0 != 0xE0:
        return None
    version, layer = head[1] >> 3 & 3, 4 - (head[1] >> 1 & 3)
    bitrate_code, rate_code, padding = head[2] >> 4, head[2] >> 2 & 3, head[2] >> 1 & 1
    if version == 1 or layer == 4 or bitrate_code in (0, 15) or rate_code == 3:
        return None
    one = version == 3
    bitrate = _MP3_BITRATES[one, layer][bitrate_code] * 1000
    rate = _MP3_RATES[version][rate_code]
    samples = 384 if layer == 1 else 1152 if one or layer == 2 else 576
    length = (12 * bitrate // rate + padding) * 4 if layer == 1 else samples // 8 * bitrate // rate + padding
    return _Mp3Frame(length, rate, 1 if head[3] >> 6 == 3 else 2, samples)


def _claimed_frames(frame: bytes) -> int | None:
    """Frames that a Xing, Info or VBRI header frame claims; 0 when it claims none; ``None`` for an ordinary frame."""
    for tag in (b"Xing", b"Info"):
        at = frame.find(tag)
        if at >= 0:
            return int.from_bytes(frame[at + 8 : at + 12], "big") if frame[at + 7 : at + 8][-1:] and frame[at + 7] & 1 else 0
    at = frame.find(b"VBRI")
    return int.from_bytes(frame[at + 14 : at + 18], "big") if at >= 0 else None
