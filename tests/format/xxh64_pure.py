"""XXH64 in plain Python, as written out in docs/format.md section 2.4."""

from __future__ import annotations

import struct

M = (1 << 64) - 1
P1, P2, P3 = 11400714785074694791, 14029467366897019727, 1609587929392839161
P4, P5 = 9650029242287828579, 2870177450012600261


def _rotl(x: int, r: int) -> int:
    return ((x << r) | (x >> (64 - r))) & M


def _round(a: int, x: int) -> int:
    return _rotl((a + x * P2) & M, 31) * P1 & M


def _stripes(data: memoryview, seed: int) -> int:
    """The four accumulators over all whole 32-byte stripes, merged."""
    a, b, c, d = (seed + P1 + P2) & M, (seed + P2) & M, seed, (seed - P1) & M
    for w, x, y, z in struct.iter_unpack("<4Q", data):
        a, b, c, d = _round(a, w), _round(b, x), _round(c, y), _round(d, z)
    h = (_rotl(a, 1) + _rotl(b, 7) + _rotl(c, 12) + _rotl(d, 18)) & M
    for acc in (a, b, c, d):
        h = ((h ^ _round(0, acc)) * P1 + P4) & M
    return h


def xxh64(data: bytes | memoryview, seed: int = 0) -> int:
    """XXH64 of ``data`` as an unsigned integer."""
    view = memoryview(data).cast("B")
    whole = len(view) // 32 * 32
    h = _stripes(view[:whole], seed) if whole else (seed + P5) & M
    h = (h + len(view)) & M
    at = whole
    while at + 8 <= len(view):
        h = (_rotl(h ^ _round(0, int.from_bytes(view[at : at + 8], "little")), 27) * P1 + P4) & M
        at += 8
    if at + 4 <= len(view):
        h = (_rotl(h ^ (int.from_bytes(view[at : at + 4], "little") * P1 & M), 23) * P2 + P3) & M
        at += 4
    for byte in view[at:]:
        h = _rotl(h ^ (byte * P5 & M), 11) * P1 & M
    h = (h ^ (h >> 33)) * P2 & M
    h = (h ^ (h >> 29)) * P3 & M
    return h ^ (h >> 32)
