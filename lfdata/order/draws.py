"""Random numbers that belong to a sample and to nothing else: counter-based, no generator state (docs/order.md)."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfdata.errors import OptionError
from lfdata.order.permutation import make_key

_G = np.uint64(0x9E3779B97F4A7C15)
_M1, _M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31, _S11 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(11)


@lru_cache(maxsize=1024)
def _start(seed: int, operation: str) -> np.uint64:
    """The key of a seed and an operation, before the sample; plus G, as the next part wants it."""
    number = int.from_bytes(hashlib.sha256(operation.encode()).digest()[:8], "little")
    return np.uint64((make_key(seed, 3, number) + int(_G)) % (1 << 64))


@lru_cache(maxsize=64)
def _steps(count: int) -> NDArray[np.uint64]:
    return np.arange(1, count + 1, dtype=np.uint64) * _G


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mixes in place."""
    x ^= x >> _S30
    x *= _M1
    x ^= x >> _S27
    x *= _M2
    x ^= x >> _S31
    return x


class Draws:
    """Draws of some samples, for any number of operations.

    Args:
        epochs: epoch of its source, of each sample: int64 (n,), or one number for all; so are the next two.
        indices: index in its source.
        occurrences: how often the sample has come before in that epoch of its source.
    """

    def __init__(self, epochs: Any, indices: Any, occurrences: Any) -> None:
        parts = [np.asarray(part, np.int64).reshape(-1) for part in (epochs, indices, occurrences)]
        samples = max(map(len, parts)) if all(map(len, parts)) else 0
        self._mixed = np.empty((3, samples), np.uint64)
        for row, part in zip(self._mixed, parts, strict=True):
            row[:] = part.view(np.uint64)
        self._mixed += _G
        _mix(self._mixed)

    def uniform(self, seed: int, operation: str, count: int) -> NDArray[np.float64]:
        """As :func:`uniform`."""
        if count < 0:
            raise OptionError(f"{count} draws; there are 0 or more")
        key = _mix(self._mixed[0] ^ _start(seed, operation))
        for row in self._mixed[1:]:
            key += _G
            key ^= row
            _mix(key)
        found = _mix(key[:, None] + _steps(count))
        found >>= _S11
        result: NDArray[np.float64] = np.multiply(found, 2.0**-53, dtype=np.float64)
        return result


def uniform(seed: int, epochs: Any, indices: Any, occurrences: Any, operation: str, count: int) -> NDArray[np.float64]:
    """Draws of some samples for one operation: float64 (n, count), from 0 up to 1 without 1.

    Row i depends on the arguments of sample i alone, not on the others nor on their number; draw j does not depend on ``count``.

    Args:
        seed: 0 to 2^64 - 1.
        epochs, indices, occurrences: see :class:`Draws`.
        operation: any name; other names give independent draws.

    Raises:
        OptionError: a seed outside its range, or fewer than 0 draws.
    """
    return Draws(epochs, indices, occurrences).uniform(seed, operation, count)
