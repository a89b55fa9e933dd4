"""Which rows of batches go back to the harness to be compared, and those rows. Standard library and numpy only, as for the process."""

from __future__ import annotations

import hashlib
import zlib
from typing import Any

import numpy as np

from benchmarks.harness.work import Batch, Workload, signatures


def host(array: Any) -> Any:
    """An array where the processor can read it."""
    return np.asarray(array.cpu() if getattr(array, "is_cuda", False) else array)


def chosen(key: int, keys: int, wanted: int, epoch: int = 0) -> bool:
    """Whether a key is among the about ``wanted`` that are compared of an epoch; the same ones for every subject."""
    digest = hashlib.sha256(b"%d" % key + (b" %d" % epoch if epoch else b"")).digest()
    return int.from_bytes(digest[:8], "little") / 2**64 < wanted / max(1, keys)


class Kept:
    """What goes back of the epochs of a check: the arrays of chosen keys, and a signature of every sample where one is asked for."""

    def __init__(self, work: Workload, request: dict[str, Any]) -> None:
        self.work, self.request = work, request
        self.keys: list[int] = []
        self.arrays: dict[str, list[Any]] = {name: [] for name in work.arrays}
        self.signature_keys: list[int] = []
        self.signatures: list[Any] = []

    def add(self, epoch: int, keys: list[int], arrays: dict[str, Any]) -> None:
        """One batch."""
        wanted = self.request["wanted"][min(epoch, len(self.request["wanted"]) - 1)]
        for row, key in enumerate(keys):
            if chosen(key, self.request["samples"], wanted, epoch):
                self.keys.append(key)
                for name in self.arrays:
                    self.arrays[name].append(arrays[name][row].copy())
        # One of another shape is refused for that.
        shaped = all(arrays[name].shape[1:] == shape for name, (shape, _) in self.work.arrays.items() if name in arrays)
        if self.request.get("signatures") and keys and shaped:
            self.signature_keys += keys
            if "tokens" in arrays:
                self.signatures += [zlib.crc32(row.tobytes()) for row in arrays["tokens"]]
            else:
                self.signatures += [*signatures(arrays["image"])]

    def save(self, path: str) -> None:
        """All of it, as a NumPy archive."""
        saved: dict[str, Any] = {name: np.array(rows) for name, rows in self.arrays.items()}
        saved |= {"signature_keys": np.array(self.signature_keys, np.int64), "signatures": np.array(self.signatures)}
        np.savez(path, keys=np.array(self.keys, np.int64), **saved)


class Picked:
    """Rows of measured batches, so many at most, each batch with the same chance: what was delivered while the clock ran is looked at too."""

    def __init__(self, work: Workload, wanted: int) -> None:
        self.names, self.wanted, self.seen = tuple(work.arrays), wanted, 0
        self.rows: list[tuple[int, list[Any]]] = []
        # Not by the request's seed: which rows are looked at is nobody's to know.
        self.rng = np.random.default_rng()

    def offer(self, batch: Batch) -> None:
        """One batch, of which one row may be copied."""
        self.seen += 1
        place = self.seen - 1 if len(self.rows) < self.wanted else int(self.rng.integers(self.seen))
        if place >= self.wanted:
            return
        row = int(self.rng.integers(len(batch.keys)))
        picked = (int(batch.keys[row]), [host(batch.arrays[name][row]).copy() for name in self.names])
        self.rows[place : place + 1] = [picked]

    def save(self, path: str) -> None:
        """All of them, as :meth:`Kept.save` does."""
        arrays: dict[str, Any] = {name: np.array([values[n] for _, values in self.rows]) for n, name in enumerate(self.names)}
        nothing = np.zeros(0, np.int64)
        keys = np.array([key for key, _ in self.rows], np.int64)
        np.savez(path, keys=keys, signature_keys=nothing, signatures=nothing, **arrays)
