"""A selection of samples as a bitmap with rank and select (docs/order.md)."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfdata.errors import OptionError

Indices = NDArray[np.int64]

_BYTES = 64  # bytes of a superblock
_CHUNK = 1 << 14  # ranks looked up at once: their superblocks are copied
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_ONES = _BITS.sum(1, dtype=np.uint8)  # ones of a byte
_BELOW = np.concatenate([np.zeros((256, 1), np.uint8), _BITS.cumsum(1, dtype=np.uint8)], 1)  # ones below a bit of a byte
_PLACE = np.argsort(1 - _BITS, axis=1, kind="stable").astype(np.uint8)  # place of the j-th one of a byte


class Selection:
    """Some of the samples 0 to ``n`` - 1. One bit a sample, and an eighth more for the counts.

    Attributes:
        n: samples there are, selected or not.
        digest: SHA-256 of ``n`` and the bitmap, in hexadecimal.
    """

    def __init__(self, n: int, bitmap: NDArray[np.uint8]) -> None:
        """Takes a bitmap of ceil(n / 8) bytes: sample i is bit i mod 8, from the lowest, of byte i // 8; no bit is set beyond n."""
        if bitmap.dtype != np.uint8 or bitmap.shape != (-(-n // 8),) or (n % 8 and int(bitmap[-1]) >> n % 8):
            raise OptionError(f"a bitmap of {n} samples is uint8 of shape ({-(-n // 8)},) with no bit beyond the last")
        self.n = n
        self.digest = hashlib.sha256(n.to_bytes(8, "little") + bitmap.tobytes()).hexdigest()
        padded = np.zeros(-(-len(bitmap) // _BYTES) * _BYTES, np.uint8)
        padded[: len(bitmap)] = bitmap
        self._blocks = padded.reshape(-1, _BYTES)
        self._before = np.zeros(len(self._blocks) + 1, np.int64)
        np.cumsum(_ONES[padded].reshape(-1, _BYTES).sum(1, dtype=np.int64), out=self._before[1:])

    @classmethod
    def of(cls, mask: Any) -> Selection:
        """The samples at which a mask is true: bool (n,)."""
        given = np.asarray(mask)
        if given.dtype != np.bool_ or given.ndim != 1:
            raise OptionError(f"a mask of {given.dtype} {given.shape}; it must be bool and of one dimension")
        return cls(len(given), np.packbits(given, bitorder="little"))

    def __len__(self) -> int:
        """Samples selected."""
        return int(self._before[-1])

    def select(self, ranks: Any) -> Indices:
        """The selected samples of some ranks, 0 to len - 1: int64, of the shape of ``ranks``. Raises ``IndexError`` outside those."""
        given: Indices = np.asarray(ranks, np.int64)
        if given.size and (given.min() < 0 or given.max() >= len(self)):
            raise IndexError(f"a rank outside the {len(self)} selected samples")
        flat = given.reshape(-1)
        found = np.empty(len(flat), np.int64)
        for start in range(0, len(flat), _CHUNK):
            part = flat[start : start + _CHUNK]
            block = np.searchsorted(self._before, part, side="right") - 1
            rest = part - self._before[block]
            bits = self._blocks[block]
            upto = np.cumsum(_ONES[bits], axis=1, dtype=np.int16)
            byte = (upto <= rest[:, None]).sum(1)
            rows = np.arange(len(part))
            value = bits[rows, byte]
            rest -= upto[rows, byte] - _ONES[value].astype(np.int64)
            found[start : start + _CHUNK] = (block * _BYTES + byte) * 8 + _PLACE[value, rest]
        return found.reshape(given.shape)

    def rank(self, indices: Any) -> Indices:
        """How many samples before each of some, 0 to n, are selected: int64, of their shape. Raises ``IndexError`` outside those."""
        given = self._given(indices, self.n)
        flat = given.reshape(-1)
        found = np.empty(len(flat), np.int64)
        for start in range(0, len(flat), _CHUNK):
            part = flat[start : start + _CHUNK]
            block, inside = np.divmod(part, _BYTES * 8)
            found[start : start + _CHUNK] = self._before[block]
            rows = np.flatnonzero(inside)  # only these have a superblock for certain
            bits, byte, bit = self._blocks[block[rows]], inside[rows] // 8, inside[rows] % 8
            ones = np.where(np.arange(_BYTES) < byte[:, None], _ONES[bits], 0).sum(1, dtype=np.int64)
            found[start + rows] += ones + _BELOW[bits[np.arange(len(rows)), byte], bit]
        return found.reshape(given.shape)

    def contains(self, indices: Any) -> NDArray[np.bool_]:
        """Whether each of some samples is selected: bool, of their shape. Raises ``IndexError`` outside 0 to n - 1."""
        given = self._given(indices, self.n - 1)
        byte = self._blocks.reshape(-1)[given >> 3]
        result: NDArray[np.bool_] = (byte >> (given & 7).astype(np.uint8) & 1).astype(np.bool_)
        return result

    @staticmethod
    def _given(indices: Any, last: int) -> Indices:
        given: Indices = np.asarray(indices, np.int64)
        if given.size and (given.min() < 0 or given.max() > last):
            raise IndexError(f"a sample outside 0 to {last}")
        return given
