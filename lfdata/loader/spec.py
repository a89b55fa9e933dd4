"""Everything that a decoder must know to produce batches, as one structure that travels to another process as MessagePack."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from lfdata.storage import Cache

# Steps of small samples that share a slot make about this many bytes; of samples that are only copied more, since nobody waits for that.
SLOT_BYTES, COPIED_SLOT_BYTES = 1 << 20, 4 << 20
MOST_STEPS_A_SLOT = 64


class SourceSpec(msgspec.Struct, frozen=True):
    """One data set.

    Attributes:
        path: its directory, absolute, as the file system has it; or its URL.
        fingerprint: digest of its manifest and selection.
        selection: bitmap of the rows that take part, little-endian bits (``numpy.packbits``); ``None`` for all.
        name: how events and statistics call it.
    """

    path: bytes
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


class DrawSpec(msgspec.Struct, frozen=True):
    """What is drawn for pictures that the device crops, mirrors and mixes (drawn.py).

    Attributes:
        field: of the pictures. rows: of a batch, within which is mixed.
        size: (height, width) of what the device makes of them.
        crop: whether that is a part drawn for each; flip: probability.
        mixup, cutmix: alpha of each. mix_prob: that a row is mixed; switch_prob: that CutMix does it, where there are both.
    """

    field: str
    rows: int
    size: tuple[int, int]
    crop: bool = False
    flip: float | None = None
    mixup: float | None = None
    cutmix: float | None = None
    mix_prob: float = 1.0
    switch_prob: float = 0.5

    @property
    def mixes(self) -> bool:
        """Whether rows are mixed."""
        return self.mixup is not None or self.cutmix is not None


class Spec(msgspec.Struct, frozen=True):
    """What comes out (see :attr:`identity`), for which rank, and how. Of an epoch's steps only ``first``, ``first + every``, ..., which are
    counted 0, 1, ... then, are made here; all, but in a worker of torch's DataLoader. ``cache``: where files that are not local are kept;
    ``node``: first of the ranks that share it, and their number; ``stored``: fields of pictures whose JPEGs the device decodes (stored.py);
    ``drawn``: what else it does to pictures (drawn.py); ``exact``: arrays lie in a slot as its samples need them, one after the other;
    ``parts``: batches say which part of a batch they are."""

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
    cache: Cache | None = None
    node: tuple[int, int] = (0, 1)
    stored: tuple[str, ...] = ()
    drawn: tuple[DrawSpec, ...] = ()
    exact: bool = False
    parts: bool = False

    @property
    def identity(self) -> dict[str, str]:
        """What decides what comes out, by name, as text (JSON but for the plain ones): equal identities give equal bytes."""

        def text(value: Any) -> str:
            return msgspec.json.encode(value, order="sorted").decode()

        return {
            "data": text([source.fingerprint[:16] for source in self.sources]),
            "fields": text(self.fields),
            "order": text(self._order()),
            "batch_transforms": text(self.batch_ops),
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


def differences(theirs: Mapping[str, Any], ours: Mapping[str, str]) -> list[str]:
    """Where two identities differ, option by option, for people."""
    found = [f"{name!r:.100} (in the state, unknown here)" for name in theirs if name not in ours]
    for name, text in ours.items():
        other = theirs.get(name)
        if other == text:
            continue
        try:
            before, now = flat(name, msgspec.json.decode(str(other))), flat(name, msgspec.json.decode(text))
        except msgspec.DecodeError:
            before, now = {name: other}, {name: text}
        found += [
            f"{path} ({before.get(path, 'nothing')!r} in the state, {now.get(path, 'nothing')!r} here)"
            for path in sorted(before | now)
            if before.get(path) != now.get(path)
        ]
    return found


def flat(name: str, value: Any) -> dict[str, Any]:
    """Values of nested JSON by their path."""
    if isinstance(value, dict):
        return {path: found for key, inner in value.items() for path, found in flat(f"{name}.{key}", inner).items()}
    if isinstance(value, list):
        return {path: found for key, inner in enumerate(value) for path, found in flat(f"{name}[{key}]", inner).items()}
    return {name: value}


def encode(spec: Spec) -> bytes:
    """For the decoder process."""
    return msgspec.msgpack.encode(spec)


def decode(data: bytes) -> Spec:
    """What :func:`encode` made."""
    return msgspec.msgpack.decode(data, type=Spec)
