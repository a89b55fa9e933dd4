"""One batch from a slot to the device: copies, operations, and who waits for whom."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from lfdata.device.backend import Backend, Event
from lfdata.device.dali import Refused
from lfdata.device.decoding import Decoding, Piece
from lfdata.device.forecast import OFFSETS, Sizes, aligned
from lfdata.device.images import Op
from lfdata.device.register import Registered
from lfdata.device.ring import Place, Ring
from lfdata.loader.taker import Spot, Taker

# What a batch says of its rows stays on the host too, and where rows begin.
_ABOUT_ROWS = ("__index__", "__source__", "__mask__", "__part__")
Batch = dict[str, torch.Tensor]
# Kinds of batches that are remembered. Bytes of the largest element of a tensor.
PLANS, LARGEST = 8, 16


def about_rows(batch: Batch) -> Batch:
    """What a batch says of its rows."""
    return {name: value for name, value in batch.items() if name in _ABOUT_ROWS or name.endswith(OFFSETS)}


class Part(NamedTuple):
    """A tensor of a batch: where its bytes lie in the batch's place, and what is in them. Of one that something is made of: where the result's
    bytes lie, and in the staging area its own."""

    name: str
    at: int
    size: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    op: Op | None
    staged: int


class Plan(NamedTuple):
    """Of batches whose tensors are alike: their tensors, bytes in a place, and in the staging area."""

    parts: tuple[Part, ...]
    size: int
    room: int


NOTHING = Plan((), 0, 0)


@dataclass(slots=True)
class Copied:
    """A batch that is copied, or being copied, and not handed out.

    Attributes:
        spot: where the loader is after it. error: instead of a batch.
        inputs: its tensors on the device, before operations; pieces: those of its pictures that are still decoded.
    """

    spot: Spot
    place: Place | None = None
    plan: Plan = NOTHING
    done: Event | None = None
    rows: Batch | None = None
    error: Exception | None = None
    inputs: Batch = field(default_factory=dict)
    pieces: dict[str, Piece] = field(default_factory=dict)


class Transfer:
    """Copies the batches of one loader.

    Args:
        ops: what is done to fields, by name.
        decoding: who decodes pictures, if the loader does not.
    """

    def __init__(
        self, backend: Backend, taker: Taker, ring: Ring, ops: Mapping[str, Op], decoding: Decoding | None = None
    ) -> None:
        self._backend, self._taker, self.ring, self._ops = backend, taker, ring, dict(ops)
        self._decoding = decoding
        self.sizes = Sizes.of(taker, self._ops, () if decoding is None else decoding.beside)
        self._staging: torch.Tensor | None = None
        # By names, dtypes and shapes of a batch: most are like the one before. And the views of the staging area for one.
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self._staged: tuple[Plan, Batch] | None = None
        self.registered: Registered | None = None
        # Host batches whose copies are not known to be done, with their slots: they must not be filled anew.
        self._held: deque[tuple[Event, Any, int | None]] = deque()
        self._waits: deque[tuple[Event, Event]] = deque()
        self.batches = self.bytes = self.pageable = 0
        self.waited = 0.0

    # -- the host's side ----------------------------------------------------------------------------------------------

    def reap(self) -> None:
        """Give slots back whose copies are done; tell the feedback how long the device waited."""
        while self._held and self._held[0][0].query():
            self._held.popleft()
        while self._waits and self._waits[0][1].query():
            seconds = self._backend.seconds(*self._waits.popleft())
            self.waited += seconds
            self._taker.copied(seconds)

    def has_room(self) -> bool:
        """Whether the loader can hand out another slot and keep one for its decoder."""
        slots = self._taker.slots
        held = {slot for _, _, slot in self._held if slot is not None}
        return slots is None or self._taker.left > 0 or len(held) <= slots.count - 2

    def make_room(self) -> None:
        """Wait for that."""
        while self._held and not self.has_room():
            self._held[0][0].synchronize()
            self.reap()

    def reserve(self) -> None:
        """The ring's places, for the largest batch to come."""
        spot = self._taker.spot
        self.ring.reserve(self.sizes.largest(self._taker, spot.epoch, spot.done))

    @property
    def staging(self) -> int:
        """Bytes of what operations work from."""
        return 0 if self._staging is None else self._staging.numel()

    # -- copies -------------------------------------------------------------------------------------------------------

    def begin(self, batch: Batch) -> Copied:
        """Have a batch copied, which the loader has just given."""
        self._know(batch)
        pieces: dict[str, Piece] = {}
        whole = batch
        if self._decoding is not None:
            batch, pieces = self._decoding.begin(batch)
        return self._begin(batch, pieces, self._slot_of(whole))

    def _begin(self, batch: Batch, pieces: dict[str, Piece], slot: int | None) -> Copied:
        plan, backend = self._planned(batch), self._backend
        place = self.ring.take(plan.size) or self.ring.more(plan.size)
        if place.released is not None:
            backend.wait(place.released)
            place.released = None
        inputs = self._views(plan, place)
        # What is still decoded comes later, with what is made of it.
        sources = {name: value for name, value in batch.items() if name not in pieces} if pieces else batch
        found = Copied(self._taker.spot, place, plan, inputs=inputs, pieces=pieces)
        parts = [part for part in plan.parts if part.op is not None and part.name not in pieces]
        pairs = [(inputs[name], value) for name, value in sources.items() if value.numel()]
        backend.copy(pairs, self._operation(found, parts) if parts else None)
        found.done = backend.record()
        self._held.append((found.done, sources, slot))
        self.batches += 1
        self.bytes += sum(value.nbytes for value in sources.values())
        found.rows = {name: value.clone() for name, value in about_rows(batch).items()}
        return found

    def _operation(self, copied: Copied, parts: Sequence[Part]) -> Callable[[], None]:
        """Operations, to be done after the copies."""
        place, inputs = copied.place, copied.inputs
        assert place is not None
        memory = place.memory

        def operate() -> None:
            for part in parts:
                assert part.op is not None
                out = part.op.out(memory[part.at : part.at + part.size], part.shape)
                part.op.run(part.name, inputs[part.name], out, inputs)

        return operate

    def completed(self, copied: Copied) -> Copied:
        """The batch, whose pictures are waited for if others than the loader decode them. Raises what making it raises."""
        pieces, decoding = copied.pieces, self._decoding
        if not pieces or decoding is None:
            return copied
        try:
            pairs = [pair for name, piece in pieces.items() for pair in decoding.collect(name, piece, copied.inputs[name])]
        except Refused as why:
            self.drop(copied)
            made: Copied = decoding.again(copied.spot, why, lambda batch: self._begin(batch, {}, None))
            made.spot = copied.spot
            return made
        parts = [part for part in copied.plan.parts if part.op is not None and part.name in pieces]
        self._backend.copy(pairs, self._operation(copied, parts) if parts else None)
        copied.done = self._backend.record()
        # Its memory is the decoder's, who uses it again once it is let go of.
        self._held.append((copied.done, pairs, None))
        copied.pieces = {}
        return copied

    def _planned(self, batch: Batch) -> Plan:
        """Where everything of a batch lies."""
        key = tuple((name, value.dtype, value.shape) for name, value in batch.items())
        found = self._plans.get(key)
        if found is not None:
            return found
        parts, at, room = [], 0, 0
        for name, value in batch.items():
            op = self._ops.get(name)
            size = value.nbytes if op is None else op.bytes(value.nbytes, value.shape[1:])
            stride = torch.empty(value.shape, device="meta").stride()
            parts.append(Part(name, at, size, value.dtype, value.shape, stride, op, room))
            at += aligned(size)
            room += 0 if op is None else aligned(value.nbytes)
        if len(self._plans) >= PLANS:
            self._plans.clear()
        return self._plans.setdefault(key, Plan(tuple(parts), at, room))

    def _views(self, plan: Plan, place: Place) -> Batch:
        """A batch's tensors on the device, before operations: in its place, or in the staging area."""
        if place.views is None or place.views[0] is not plan:
            place.views = plan, _views(place.memory, [(part, part.at) for part in plan.parts if part.op is None])
        if not plan.room:
            return place.views[1]
        if self._staging is None or self._staging.numel() < plan.room:
            # One batch's at a time, as the stream of copies goes.
            self._staging, self._staged = self._backend.memory(plan.room), None
        if self._staged is None or self._staged[0] is not plan:
            self._staged = plan, _views(self._staging, [(part, part.staged) for part in plan.parts if part.op is not None])
        return {**place.views[1], **self._staged[1]}

    def hand_out(self, copied: Copied) -> Batch:
        """A batch's tensors, for work on the current stream."""
        backend, place = self._backend, copied.place
        assert place is not None and copied.done is not None
        consumer = backend.consumer()
        timed = self._taker.watched
        before = backend.note(consumer, timed=True) if timed else None
        backend.hold(consumer, copied.done)
        if before is not None:
            self._waits.append((before, backend.note(consumer, timed=True)))
        plan, flat = copied.plan, self.ring.lend(place, copied.plan.size, consumer)
        copied.place, copied.inputs = None, {}
        found, typed = {}, dict[torch.dtype, torch.Tensor]()
        for part in plan.parts:
            if part.op is None:
                found[part.name] = _view(flat, part, part.at, typed)
            else:
                found[part.name] = part.op.out(flat[part.at : part.at + part.size], part.shape)
        return found

    def drop(self, copied: Copied) -> None:
        """A batch that nobody will get. What is copied into its place next comes after it on the same stream."""
        if self._decoding is not None:
            self._decoding.drop(copied.pieces)
        if copied.place is not None:
            self.ring.give(copied.place)
            copied.place = None

    # -- slots --------------------------------------------------------------------------------------------------------

    def _know(self, batch: Batch) -> None:
        """The slots are registered, once; other slots, of a loader that began anew, in their place."""
        slots = self._taker.slots
        if slots is not None and (self.registered is None or self.registered.slots is not slots):
            self.forget()
            self.registered = Registered(self._backend, slots)
        if self.registered is None or self.registered.refused or self._slot_of(batch) is None:
            self.pageable += 1

    def _slot_of(self, batch: Batch) -> int | None:
        """The slot in which a batch lies; ``None``: it was copied out of it."""
        if self.registered is None:
            return None
        for value in batch.values():
            if value.numel():
                found = self.registered.slot_of(value.data_ptr())
                if found is not None:
                    return found
        return None

    def forget(self) -> None:
        """Wait for all copies, give slots back, undo the registration."""
        self._backend.finish()
        self._held.clear()
        if self.registered is not None:
            self.registered.release()
            self.registered = None

    def close(self) -> None:
        """Free everything."""
        try:
            self.forget()
        finally:
            self._waits.clear()
            if self._decoding is not None:
                self._decoding.close()
            self._staging = self._staged = None
            self.ring.close()

    def report(self) -> dict[str, Any]:
        """For :meth:`DeviceLoader.stats`."""
        known = self.registered
        return {
            "registered": known.size if known is not None and not known.refused else 0,
            "refused": known.refused if known is not None else "",
            "places": len(self.ring.places),
            "place_bytes": self.ring.size,
            "bytes": self.ring.bytes,
            "staging": self.staging,
            "reservations": self.ring.reservations,
            "grown": self.ring.grown,
            "extra": self.ring.extra,
            "batches": self.batches,
            "copied_bytes": self.bytes,
            "pageable": self.pageable,
            "waited": self.waited,
        }


def _view(flat: torch.Tensor, part: Part, at: int, typed: dict[torch.dtype, torch.Tensor]) -> torch.Tensor:
    """A tensor over bytes of ``flat``, which is the beginning of a storage. ``typed``: all of it by dtype, filled here."""
    values = typed.get(part.dtype)
    if values is None:
        values = typed[part.dtype] = flat[: flat.numel() // LARGEST * LARGEST].view(part.dtype)
    return values.as_strided(part.shape, part.stride, at // part.dtype.itemsize)


def _views(flat: torch.Tensor, parts: Sequence[tuple[Part, int]]) -> Batch:
    """Tensors over memory that is used again and again, whatever mode the consumer is in now."""
    typed: dict[torch.dtype, torch.Tensor] = {}
    with torch.inference_mode(False):
        return {part.name: _view(flat, part, at, typed) for part, at in parts}
