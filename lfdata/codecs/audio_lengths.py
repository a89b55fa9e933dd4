"""Lengths that AIFF, AU, W64 and CAF headers declare: libsndfile silently believes the file's end instead."""

from __future__ import annotations

_W64 = bytes.fromhex("726966662e91cf11a5d628db04c10000")  # GUID of the outermost chunk
_UNKNOWN_32 = 0xFFFFFFFF


def shorter_than_declared(data: bytes) -> tuple[str, ...]:
    """A warning when ``data`` ends before its header says it does; nothing for other formats or undeclared lengths."""
    declared: int | None = None
    if data[:4] == b"FORM" and data[8:12] in (b"AIFF", b"AIFC", b"8SVX", b"16SV"):
        declared = 8 + int.from_bytes(data[4:8], "big")
    elif data[:4] == b".snd":
        size = int.from_bytes(data[8:12], "big")
        declared = None if size == _UNKNOWN_32 else int.from_bytes(data[4:8], "big") + size
    elif data[:16] == _W64:
        declared = int.from_bytes(data[16:24], "little")
    elif data[:4] == b"caff":
        declared = _caf_length(data)
    if declared is not None and declared > len(data):
        return (f"data shorter than its header says: {len(data)} of {declared} bytes",)
    return ()


def _caf_length(data: bytes) -> int | None:
    position = 8
    while position + 12 <= len(data):
        size = int.from_bytes(data[position + 4 : position + 12], "big", signed=True)
        if size < 0:  # -1: the data chunk runs to the end of the file
            return None
        position += 12 + size
    return position
