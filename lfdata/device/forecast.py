"""Memory of the batches to come on the device: what each takes there, and what is reserved when (docs/scheduler.md, "Forecast")."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lfdata.device.images import Op
from lfdata.device.ring import GROWTH, Ring
from lfdata.loader.forecast import Forecast
from lfdata.loader.taker import Taker

ALIGN = 256
# Rows of an epoch that are looked at for its largest batch.
ROWS_LOOKED_AT = 1 << 20
OFFSETS = ".offsets"
Bytes = NDArray[np.int64]


def aligned(size: int) -> int:
    """Rounded up to where a tensor may begin."""
    return -(-size // ALIGN) * ALIGN


@dataclass(frozen=True, slots=True)
class Sizes:
    """What becomes of a batch's bytes.

    Attributes:
        ops: what is done to fields. rows: shapes of their rows.
        beside: what a batch has of pictures that are still to be decoded, and that is not copied.
    """

    ops: Mapping[str, Op]
    rows: Mapping[str, tuple[int, ...]]
    beside: Collection[str]

    @staticmethod
    def of(taker: Taker, ops: Mapping[str, Op], beside: Collection[str]) -> Sizes:
        """Of a loader's batches."""
        declared = {name: taker.declared(name) for name in ops}
        return Sizes(ops, {name: one[1] for name, one in declared.items() if one is not None}, beside)

    def device(self, found: Forecast) -> dict[str, Bytes]:
        """Of every tensor as it is handed out."""
        return {name: self._made(name, sizes) for name, sizes in found.bytes.items() if name not in self.beside}

    def _made(self, name: str, sizes: Bytes) -> Bytes:
        op, row = self.ops.get(name), self.rows.get(name)
        return sizes if op is None or row is None else op.bytes(sizes, row)

    def place(self, found: Forecast) -> Bytes:
        """Of each batch's place."""
        return self._sum(found, self.device(found).values())

    def staging(self, found: Forecast) -> Bytes:
        """Of what each batch's operations work from."""
        return self._sum(found, [sizes for name, sizes in found.bytes.items() if name in self.ops])

    def _sum(self, found: Forecast, parts: Collection[Bytes]) -> Bytes:
        total = np.zeros(len(found), np.int64)
        for sizes in parts:
            total += -(-sizes // ALIGN) * ALIGN
        return total

    def largest(self, taker: Taker, epoch: int, done: int) -> int:
        """Of the places of an epoch's batches after some: of those that are looked at."""
        found = taker.forecast(1, (epoch, done))
        if any(name.endswith(OFFSETS) for name in found.bytes if name not in self.beside):
            most = ROWS_LOOKED_AT // max(1, taker.rows)
            found = taker.forecast(max(1, min(taker.length(epoch) - done, most)), (epoch, done))
        return int(self.place(found).max(initial=0))


def on_host(found: Forecast, taker: Taker, sizes: Sizes) -> Forecast:
    """A loader's forecast where nothing is copied: what operations make is in memory of its own."""
    nothing = np.zeros(len(found), np.int64)
    reserved = {"slots": _slots(found, taker), "registered": nothing, "ring": nothing, "staging": nothing}
    return dataclasses.replace(found, device=sizes.device(found), place=nothing, reserved=reserved)


def on_device(
    found: Forecast, taker: Taker, sizes: Sizes, ring: Ring, staging: int, begun: int | None, refused: bool
) -> Forecast:
    """A loader's forecast with the device's memory.

    Args:
        staging: bytes that there are now.
        begun: the epoch for which the ring is reserved already.
        refused: whether the slots cannot be registered.

    Raises:
        LimitError: an epoch or a batch is beyond the loader's ``max_bytes``, or the ring's.
    """
    place, size = sizes.place(found), ring.size
    rings = np.zeros(len(found), np.int64)
    for number, (epoch, batch, needed) in enumerate(
        zip(found.epoch.tolist(), found.batch.tolist(), place.tolist(), strict=True)
    ):
        if epoch != begun:
            size, begun = max(size, ring.roomy(sizes.largest(taker, epoch, batch))), epoch
        if needed > size:
            size = ring.roomy(int(needed * GROWTH))
        rings[number] = size * ring.count(size)
    slots = _slots(found, taker)
    staged = np.maximum.accumulate(np.maximum(sizes.staging(found), staging)) if len(found) else rings
    reserved = {"slots": slots, "registered": slots * (not refused), "ring": rings, "staging": staged}
    return dataclasses.replace(found, device=sizes.device(found), place=place, reserved=reserved)


def _slots(found: Forecast, taker: Taker) -> Bytes:
    epochs, which = np.unique(found.epoch, return_inverse=True)
    return np.array(taker.slots_of(epochs.tolist()), np.int64)[which] if len(found) else np.zeros(0, np.int64)
