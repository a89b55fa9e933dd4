"""XXH3 (64 bit, seeded) in plain Python, as written out in docs/format.md section 2.4."""

from __future__ import annotations

import struct

MASK = (1 << 64) - 1
Q1, Q2, Q3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
P1, P2, P3 = 11400714785074694791, 14029467366897019727, 1609587929392839161
P4, P5 = 9650029242287828579, 2870177450012600261
M1, M2 = 0x165667919E3779F9, 0x9FB21C651E98DF25
SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)


def _u64(data: bytes | memoryview, at: int) -> int:
    return int.from_bytes(data[at : at + 8], "little")


def _u32(data: bytes | memoryview, at: int) -> int:
    return int.from_bytes(data[at : at + 4], "little")


def _rotl(x: int, r: int) -> int:
    return ((x << r) | (x >> (64 - r))) & MASK


def _swap(x: int, size: int) -> int:
    return int.from_bytes(x.to_bytes(size, "little"), "big")


def _fold(a: int, b: int) -> int:
    product = a * b
    return (product & MASK) ^ (product >> 64)


def _finish(h: int) -> int:
    h &= MASK
    h = (h ^ (h >> 37)) * M1 & MASK
    return h ^ (h >> 32)


def _finish64(h: int) -> int:
    h = (h ^ (h >> 33)) * P2 & MASK
    h = (h ^ (h >> 29)) * P3 & MASK
    return h ^ (h >> 32)


def _mix(data: memoryview, at: int, secret: int, seed: int) -> int:
    low = (_u64(SECRET, secret) + seed) & MASK
    high = (_u64(SECRET, secret + 8) - seed) & MASK
    return _fold(_u64(data, at) ^ low, _u64(data, at + 8) ^ high)


def _short(data: memoryview, seed: int) -> int:
    n = len(data)
    if n == 0:
        return _finish64(seed ^ _u64(SECRET, 56) ^ _u64(SECRET, 64))
    if n <= 3:
        word = data[0] << 16 | data[n >> 1] << 24 | data[n - 1] | n << 8
        return _finish64(word ^ (((_u32(SECRET, 0) ^ _u32(SECRET, 4)) + seed) & MASK))
    if n <= 8:
        s = seed ^ (_swap(seed & 0xFFFFFFFF, 4) << 32)
        h = (_u32(data, n - 4) + (_u32(data, 0) << 32)) ^ (((_u64(SECRET, 8) ^ _u64(SECRET, 16)) - s) & MASK)
        h = (h ^ _rotl(h, 49) ^ _rotl(h, 24)) * M2 & MASK
        h = (h ^ ((h >> 35) + n)) * M2 & MASK
        return h ^ (h >> 28)
    x = _u64(data, 0) ^ (((_u64(SECRET, 24) ^ _u64(SECRET, 32)) + seed) & MASK)
    y = _u64(data, n - 8) ^ (((_u64(SECRET, 40) ^ _u64(SECRET, 48)) - seed) & MASK)
    return _finish(n + _swap(x, 8) + y + _fold(x, y))


def _middle(data: memoryview, seed: int) -> int:
    n = len(data)
    if n <= 128:
        pairs = range((n - 1) // 32 + 1)
        return _finish(
            n * P1 + sum(_mix(data, 16 * i, 32 * i, seed) + _mix(data, n - 16 * (i + 1), 32 * i + 16, seed) for i in pairs)
        )
    h = _finish(n * P1 + sum(_mix(data, 16 * i, 16 * i, seed) for i in range(8)))
    h += sum(_mix(data, 16 * i, 16 * (i - 8) + 3, seed) for i in range(8, n // 16))
    return _finish(h + _mix(data, n - 16, 119, seed))


def _long(data: memoryview, seed: int) -> int:
    n = len(data)
    words = struct.unpack("<24Q", SECRET)
    key = struct.pack("<24Q", *((word - seed if i % 2 else word + seed) & MASK for i, word in enumerate(words)))
    keys = [struct.unpack_from("<8Q", key, 8 * m) for m in range(16)]
    scramble = struct.unpack_from("<8Q", key, 128)
    acc = [Q3, P1, P2, P3, P4, Q2, P5, Q1]

    def stripe(block: tuple[int, ...], k: tuple[int, ...]) -> None:
        for j in range(8):
            mixed = block[j] ^ k[j]
            acc[j ^ 1] += block[j]
            acc[j] += (mixed & 0xFFFFFFFF) * (mixed >> 32)

    whole = (n - 1) // 64
    for m, block in enumerate(struct.iter_unpack("<8Q", data[: 64 * whole])):
        stripe(block, keys[m % 16])
        if m % 16 == 15:
            acc[:] = [((a & MASK) ^ ((a & MASK) >> 47) ^ s) * Q1 & MASK for a, s in zip(acc, scramble, strict=True)]
    stripe(struct.unpack("<8Q", data[n - 64 :]), struct.unpack_from("<8Q", key, 121))
    merged = sum(
        _fold(acc[2 * j] & MASK ^ _u64(key, 11 + 16 * j), acc[2 * j + 1] & MASK ^ _u64(key, 19 + 16 * j)) for j in range(4)
    )
    return _finish(n * P1 + merged)


def xxh3(data: bytes | memoryview, seed: int = 0) -> int:
    """XXH3 of ``data`` as an unsigned integer."""
    view = memoryview(data).cast("B")
    if len(view) <= 16:
        return _short(view, seed)
    return _middle(view, seed) if len(view) <= 240 else _long(view, seed)
