"""The queue of work in a decoder process: classes and deadlines (docs/scheduler.md)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Generic, TypeVar

T = TypeVar("T")
# Work of the last class is passed over so often at most.
PATIENCE = 16


class Class(IntEnum):
    """Classes of work, the most urgent first."""

    DECODE = 0
    """Reading and decoding: nothing else of a step can begin without it."""
    AUGMENT = 1
    """Random augmentation of each sample."""
    MIX = 2
    """What is done to whole batches: MixUp, CutMix, Mosaic, with their partners of other ranks."""


@dataclass(slots=True)
class _Entry(Generic[T]):
    item: T
    kind: Class
    deadline: int
    order: int
    passed: int = 0


class WorkQueue(Generic[T]):
    """Hands out work: what is due first, whatever its class; then by class; within a class by deadline.

    Due is what belongs to the smallest deadline that :meth:`open` was told and :meth:`done` was not. Work of the last class that was passed
    over :data:`PATIENCE` times comes before all that is not due. Safe for several threads; nobody holds it while work is done.

    Args:
        depths: is told the numbers of waiting entries, by class, whenever they change.
    """

    def __init__(self, depths: Callable[[int, int], None] | None = None) -> None:
        self._waiting: list[_Entry[T]] = []
        self._open: set[int] = set()
        self._counts = [0] * len(Class)
        self._told, self._number, self._closed = depths, 0, False
        self._changed = threading.Condition()

    def open(self, deadline: int) -> None:
        """There is a step with this deadline (steps are numbered in the order in which they are needed)."""
        with self._changed:
            self._open.add(deadline)

    def done(self, deadline: int) -> None:
        """The step is finished."""
        with self._changed:
            self._open.discard(deadline)

    def put(self, item: T, kind: Class, deadline: int) -> None:
        """Work for a step."""
        with self._changed:
            self._number += 1
            self._waiting.append(_Entry(item, kind, deadline, self._number))
            self._count(kind, 1)
            self._changed.notify()

    def take(self) -> T | None:
        """The next piece of work, awaited; ``None`` once the queue is closed."""
        with self._changed:
            while not self._waiting and not self._closed:
                self._changed.wait()
            if self._closed:
                return None
            due = min(self._open, default=0)
            chosen = min(self._waiting, key=lambda entry: self._urgency(entry, due))
            for entry in self._waiting:
                entry.passed += entry is not chosen
            self._waiting.remove(chosen)
            self._count(chosen.kind, -1)
            return chosen.item

    @staticmethod
    def _urgency(entry: _Entry[T], due: int) -> tuple[bool, bool, int, int, int]:
        overdue = entry.kind == Class.MIX and entry.passed >= PATIENCE
        return entry.deadline != due, not overdue, 0 if overdue else int(entry.kind), entry.deadline, entry.order

    def _count(self, kind: Class, change: int) -> None:
        self._counts[kind] += change
        if self._told is not None:
            self._told(kind, self._counts[kind])

    def close(self) -> None:
        """Drop what waits; takers get ``None``."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            # Whoever is told has the queue: neither must keep the other, and its memory, until the garbage collector comes.
            self._told = None
            self._changed.notify_all()
