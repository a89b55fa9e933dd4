"""Everything that a decoder must know to produce batches, as one structure that travels to another process as MessagePack."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

# Steps of small samples that share a slot make about this many bytes.
SLOT_BYTES = 1 << 20
MOST_STEPS_A_SLOT = 64


class SourceSpec(msgspec.Struct, frozen=True):
    """One data set.

    Attributes:
        path: its directory, absolute.
        fingerprint: digest of its manifest and selection.
        selection: bitmap of the rows that take part, little-endian bits (``numpy.packbits``); ``None`` for all.
        name: how events and statistics call it.
    """

    path: str
    fingerprint: str
    selection: bytes | None = None
    name: str = ""


class FieldSpec(msgspec.Struct, frozen=True):
    """One field and its declared transforms (:func:`lfdata.transforms.to_spec`)."""

    name: str
    transforms: tuple[dict[str, Any], ...] = ()


class OrderSpec(msgspec.Struct, frozen=True):
    """The order of an epoch (docs/order.md).

    Attributes:
        mode, block, window: of each source's :class:`lfdata.order.order.Order`.
        mixture: options of :class:`lfdata.order.mixture.Mixture`, or ``None`` for one source.
        buckets: options of :class:`lfdata.order.packing.Buckets` and the field whose lengths count.
        packing: options of :class:`lfdata.order.packing.Packing` and the field whose lengths count.
    """

    mode: str = "full"
    block: int = 1024
    window: int = 16
    mixture: dict[str, Any] | None = None
    buckets: dict[str, Any] | None = None
    packing: dict[str, Any] | None = None


class BadSpec(msgspec.Struct, frozen=True):
    """What becomes of bad samples: ``stop``, ``replace`` or ``mask``; with the latter two, how many there may be."""

    policy: str = "stop"
    most: int = 1000
    rate: float = 0.01


class Spec(msgspec.Struct, frozen=True):
    """What comes out (see :attr:`identity`), for which rank, and how. Of an epoch's steps only ``first``, ``first + every``, ..., which are
    counted 0, 1, ... then, are made here; all, but in a worker of torch's DataLoader."""

    sources: tuple[SourceSpec, ...]
    fields: tuple[FieldSpec, ...]
    order: OrderSpec
    batch_ops: tuple[dict[str, Any], ...]
    seed: int
    batch: int
    tail: str
    static: bool
    bad: BadSpec
    rank: int
    world: int
    threads: int
    native: bool | None = None
    poison: bool = False
    first: int = 0
    every: int = 1

    @property
    def identity(self) -> dict[str, str]:
        """Digests and values that decide what comes out, by name: equal identities give equal bytes."""

        def digest(value: Any) -> str:
            return hashlib.sha256(msgspec.json.encode(value, order="sorted")).hexdigest()[:16]

        return {
            "data": digest([source.fingerprint for source in self.sources]),
            "fields": digest(self.fields),
            "order": digest(self._order()),
            "batch_ops": digest(self.batch_ops),
            "seed": str(self.seed),
            "tail": self.tail,
            "bad": self.bad.policy,
        }

    def _order(self) -> OrderSpec:
        """Without where packing keeps its counts, which decides nothing."""
        if self.order.packing is None:
            return self.order
        packing = {name: value for name, value in self.order.packing.items() if name != "cache"}
        return msgspec.structs.replace(self.order, packing=packing)


def encode(spec: Spec) -> bytes:
    """For the decoder process."""
    return msgspec.msgpack.encode(spec)


def decode(data: bytes) -> Spec:
    """What :func:`encode` made."""
    return msgspec.msgpack.decode(data, type=Spec)
