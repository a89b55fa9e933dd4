"""Keyed permutations of 0 to n - 1, evaluated at any positions alone (docs/order.md)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfdata.errors import OptionError
from lfdata.format.gather import native

Indices = NDArray[np.int64]

MAX_SAMPLES = 1 << 48
ROUNDS = 10
_MASK = (1 << 64) - 1
_G = 0x9E3779B97F4A7C15
_M1, _M2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix(x: int) -> int:
    """The 64-bit mixer."""
    x ^= x >> 30
    x = x * _M1 & _MASK
    x ^= x >> 27
    x = x * _M2 & _MASK
    return x ^ x >> 31


def make_key(*parts: int) -> int:
    """A key of some unsigned 64-bit numbers, in order."""
    key = 0
    for part in parts:
        if not 0 <= part <= _MASK:
            raise OptionError(f"{part}: seeds and epochs are integers from 0 to 2^64 - 1")
        key = mix(((key + _G) & _MASK) ^ mix((part + _G) & _MASK))
    return key


def _mix_all(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = x ^ (x >> np.uint64(30))
    x *= np.uint64(_M1)
    x ^= x >> np.uint64(27)
    x *= np.uint64(_M2)
    return x ^ (x >> np.uint64(31))


class Permutation:
    """A permutation of 0 to ``n`` - 1 that belongs to ``key``. No memory beyond its round keys; n is at most 2^48."""

    def __init__(self, n: int, key: int) -> None:
        if not 0 <= n <= MAX_SAMPLES:
            raise OptionError(f"{n} samples: there may be 0 to 2^48")
        self.n = n
        side = math.isqrt(max(0, n - 1)) + 1 if n else 1
        self._a, self._b = np.uint64(side), np.uint64(max(1, -(-n // side)))
        self._keys = np.array([mix((key + (i + 1) * _G) & _MASK) for i in range(ROUNDS)], np.uint64)

    def __call__(self, positions: Any) -> Indices:
        """The elements at some positions: int64, of the shape of ``positions``. Raises ``IndexError`` outside 0 to n - 1."""
        return self._walk(positions, inverse=False)

    def inverse(self, elements: Any) -> Indices:
        """The positions of some elements."""
        return self._walk(elements, inverse=True)

    def _walk(self, values: Any, inverse: bool) -> Indices:
        given: Indices = np.asarray(values, np.int64)
        if native is None:
            return self._walk_plain(given, self._backward if inverse else self._forward)
        result = np.empty(given.shape, np.int64)
        bad = native.permute(np.ascontiguousarray(given), self.n, int(self._a), int(self._b), self._keys, result, inverse)
        if bad >= 0:
            raise IndexError(f"position {int(given.reshape(-1)[bad])} of {self.n}")
        return result

    def _walk_plain(self, given: Indices, rounds: Any) -> Indices:
        if given.size and (given.min() < 0 or given.max() >= self.n):
            raise IndexError(f"position {int(given.min() if given.min() < 0 else given.max())} of {self.n}")
        found = rounds(given.astype(np.uint64).reshape(-1))
        limit = np.uint64(self.n)
        while len(outside := np.flatnonzero(found >= limit)):
            found[outside] = rounds(found[outside])
        result: Indices = found.astype(np.int64).reshape(given.shape)
        return result

    def _forward(self, x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = x // self._b, x % self._b
        for i, key in enumerate(self._keys):
            if i % 2 == 0:
                left = (left + _mix_all(right ^ key) % self._a) % self._a
            else:
                right = (right + _mix_all(left ^ key) % self._b) % self._b
        return left * self._b + right

    def _backward(self, x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = x // self._b, x % self._b
        for i, key in reversed(list(enumerate(self._keys))):
            if i % 2 == 0:
                left = (left + self._a - _mix_all(right ^ key) % self._a) % self._a
            else:
                right = (right + self._b - _mix_all(left ^ key) % self._b) % self._b
        return left * self._b + right
