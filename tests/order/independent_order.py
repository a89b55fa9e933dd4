"""The order of docs/order.md a second time, in plain Python and one element at a time; nothing of lfdata is imported."""

import math

M = (1 << 64) - 1
G = 0x9E3779B97F4A7C15


def mix(x):
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 & M
    x ^= x >> 27
    x = x * 0x94D049BB133111EB & M
    return x ^ x >> 31


def key(*parts):
    k = 0
    for p in parts:
        k = mix((k + G & M) ^ mix(p + G & M))
    return k


def permuted(n, k, x):
    a = next(c for c in range(math.isqrt(n), n + 2) if c * c >= n)
    b = -(-n // a)
    while True:
        left, right = divmod(x, b)
        for i in range(10):
            k_i = mix(k + (i + 1) * G & M)
            if i % 2 == 0:
                left = (left + mix(right ^ k_i) % a) % a
            else:
                right = (right + mix(left ^ k_i) % b) % b
        x = left * b + right
        if x < n:
            return x


def epoch_of(n, seed, epoch, mode, block=1024, window=16):
    """All samples of an epoch."""
    if mode == "sequential":
        return list(range(n))
    if mode == "full":
        return [permuted(n, key(seed, epoch, 0), p) for p in range(n)]
    blocks = [list(range(start, min(start + block, n))) for start in range(0, n, block)]
    blocks = [blocks[permuted(len(blocks), key(seed, epoch, 1), p)] for p in range(len(blocks))]
    found = []
    for w, start in enumerate(range(0, len(blocks), window)):
        together = [sample for samples in blocks[start : start + window] for sample in samples]
        found += [together[permuted(len(together), key(seed, epoch, 2, w), p)] for p in range(len(together))]
    return found
