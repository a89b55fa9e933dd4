"""Memory on the device, reserved once, in places for a batch each."""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from lfdata.device.backend import Backend, Event
from lfdata.errors import LimitError

# Of a batch that needs more room than was reserved: so much is added to it, so that the next larger one does not come at once.
GROWTH = 1.125
FEWEST_PLACES = 2
# Sizes of places are numbers of so many bits, and zeros: up to a sixteenth more than is needed.
ROOM_BITS = 5


@dataclass(eq=False, slots=True)
class Place:
    """Memory for a batch.

    Attributes:
        memory: uint8 (n,).
        released: from when on it may be overwritten; ``None``: the stream of copies alone has used it.
        extra: it is none of the ring's.
        views: tensors over it, and for what kind of batches.
    """

    memory: torch.Tensor
    released: Event | None = None
    extra: bool = False
    views: tuple[Any, dict[str, torch.Tensor]] | None = None


class Ring:
    """Up to ``places`` places. One that was lent is free again when nothing sees its memory any more.

    Args:
        most: bytes of all places together, at most.
    """

    def __init__(self, backend: Backend, places: int, most: int | None = None) -> None:
        self._backend, self._most, self._wanted = backend, most, places
        self.size = self.grown = self.extra = self.reservations = 0
        self.places: list[Place] = []
        self._free: deque[Place] = deque()

    @property
    def free(self) -> int:
        """Places that can be taken, in the end."""
        return len(self._free)

    @property
    def bytes(self) -> int:
        """Of all places."""
        return sum(place.memory.numel() for place in self.places)

    def reserve(self, size: int) -> None:
        """Have room for batches of ``size`` bytes. Places that are lent are replaced later."""
        if size <= self.size and self.places:
            return
        self.reservations += 1
        self.size = max(self.size, self.roomy(size))
        count = self.count(self.size)
        while self._free:
            self.places.remove(self._free.popleft())
        while len(self.places) < count:
            place = Place(self._backend.memory(self.size))
            self.places.append(place)
            self._free.append(place)

    def roomy(self, size: int) -> int:
        """A little more, so that another epoch's largest batch, which is seldom much larger, needs no other places; not at the cost of one."""
        step = 1 << max(0, size.bit_length() - ROOM_BITS)
        more = -(-size // step) * step
        return more if self._most is None or self._most // more >= min(self._wanted, self._most // max(1, size)) else size

    def count(self, size: int) -> int:
        """How many places of a size there may be. Raises :class:`LimitError`."""
        if self._most is None:
            return self._wanted
        fits = self._most // max(1, size)
        if fits < FEWEST_PLACES:
            raise LimitError(
                "max_bytes",
                None,
                f"{self._most:,} bytes on the device do not hold {FEWEST_PLACES} batches of {size:,}. Raise max_bytes, or lower "
                "batch_size",
            )
        return min(self._wanted, fits)

    def take(self, size: int) -> Place | None:
        """A place of at least ``size`` bytes, if one is free."""
        if size > self.size:
            self.grown += 1
            self.reserve(int(size * GROWTH))
        while self._free:
            place = self._free.popleft()
            if place.memory.numel() >= self.size:
                return place
            # From before the ring grew.
            self.places.remove(place)
            if len(self.places) < self.count(self.size):
                place = Place(self._backend.memory(self.size))
                self.places.append(place)
                return place
        return None

    def more(self, size: int) -> Place:
        """Memory beside the ring, for a consumer that keeps what it gets."""
        self.extra += 1
        return Place(self._backend.memory(size), extra=True)

    def give(self, place: Place) -> None:
        """Make a place free that was never lent."""
        if not place.extra:
            self._free.append(place)

    def lend(self, place: Place, size: int, consumer: Any) -> torch.Tensor:
        """The first bytes of a place, for work on a consumer's stream; when all tensors over them are gone, the place is free."""
        flat, owner = self._backend.lend(place.memory, size)
        self._backend.used(place.memory, consumer)
        if not place.extra:
            weakref.finalize(owner, _returned, self._backend, self._free, place, consumer).atexit = False
        return flat

    def close(self) -> None:
        """Give all memory back; what is lent goes when it is returned."""
        self.places.clear()
        self._free.clear()
        # Those that come back later find nobody who takes them.
        self._free = deque()
        self.size = 0


def _returned(backend: Backend, free: deque[Place], place: Place, consumer: Any) -> None:
    """May be called by any thread: autograd's have tensors too."""
    place.released = backend.note(consumer)
    free.append(place)
