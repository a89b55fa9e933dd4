"""Batches of a loader, taken by one thread at a time."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from typing import Any

from lfdata.errors import LfdataError

ENDED = (
    "this Loader was closed, or another iteration of it begun, by another thread (or a handler of signals) during this one: "
    "one thread uses a Loader"
)
BUSY = "another thread is taking a batch of this Loader: one thread uses a Loader (make one for each)"


class Turn:
    """Whose turn it is. The thread that has it may come again."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        # Who ended the iterations under way last.
        self._mover = threading.get_ident()

    def take(self, seconds: float = 0.0) -> bool:
        """Whether it became this thread's turn within some seconds; :meth:`over` ends it."""
        return self._lock.acquire(timeout=seconds)

    def over(self) -> None:
        """Somebody else's turn."""
        self._lock.release()

    def move(self) -> None:
        """This thread ends the iterations that are under way."""
        self._mover = threading.get_ident()

    def ended(self) -> None:
        """An iteration in this thread was ended. Raises :class:`LfdataError`: by another."""
        if self._mover != threading.get_ident():
            raise LfdataError(ENDED)


class Batches(Iterator[dict[str, Any]]):
    """An iteration."""

    def __init__(self, batches: Generator[dict[str, Any]], turn: Turn) -> None:
        self._batches, self._turn = batches, turn

    def __next__(self) -> dict[str, Any]:
        if not self._turn.take():
            raise LfdataError(BUSY)
        try:
            return next(self._batches)
        finally:
            self._turn.over()

    def close(self) -> None:
        """Leave it."""
        if not self._turn.take():
            raise LfdataError(BUSY)
        try:
            self._batches.close()
        finally:
            self._turn.over()
