"""Batches of a loader, taken by one thread at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

from lfdata.errors import LfdataError

# How long closing waits for a thread that is at work on a batch itself, and such a thread for closing.
CLOSE_SECONDS = 5.0
_ENDED = (
    "this {0} was closed, or another iteration of it begun, by another thread (or a handler of signals) during this one: "
    "one thread uses a {0}"
)
ENDED = _ENDED.format("Loader")
BUSY = "another thread is taking a batch of this {0}: one thread uses a {0} (make one for each)"


class Turn:
    """Whose turn it is. The thread that has it may come again. ``what``: of which class, for messages."""

    def __init__(self, what: str = "Loader") -> None:
        self._what, self._why = what, ""
        self._lock = threading.RLock()
        # How often whose turn it is has come again, and what is to be done before it ends.
        self._depth, self._later = 0, list[Callable[[], None]]()
        # Threads that are closing whatever it is: who comes meanwhile learns of it once they are done.
        self._closing = 0
        # Who ended the iterations under way last.
        self._mover = threading.get_ident()

    def take(self, seconds: float = 0.0) -> bool:
        """Whether it became this thread's turn within some seconds; :meth:`over` ends it."""
        if not self._lock.acquire(timeout=seconds):
            return False
        self._depth += 1
        return True

    def over(self) -> None:
        """Somebody else's turn, unless it had come again."""
        try:
            while self._depth == 1 and self._later:
                self._later.pop()()
        finally:
            self._depth -= 1
            self._lock.release()

    def at_the_end(self, what: Callable[[], None]) -> bool:
        """Have something done when this thread's turn ends, if it had come again: a handler of signals has interrupted it, say."""
        if self._depth > 1:
            self._later[:] = [what]
        return self._depth > 1

    def begin(self) -> None:
        """It becomes this thread's turn. Raises :class:`LfdataError`: it is another's, who does not close."""
        if not self.take() and not (self._closing and self.take(CLOSE_SECONDS)):
            raise LfdataError(BUSY.format(self._what))

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Around all of closing, from another thread perhaps."""
        self._closing += 1
        try:
            yield
        finally:
            self._closing -= 1

    @contextmanager
    def held(self) -> Iterator[None]:
        """This thread's turn for a while. Raises as :meth:`begin`."""
        self.begin()
        try:
            yield
        finally:
            self.over()

    def move(self, why: str = "") -> None:
        """This thread ends the iterations that are under way. ``why``: they are told, also if they are its own."""
        self._mover, self._why = threading.get_ident(), why

    def ended(self) -> None:
        """An iteration in this thread was ended. Raises :class:`LfdataError`: by another, or for a reason that is to be told."""
        if self._why:
            raise LfdataError(self._why)
        if self._mover != threading.get_ident():
            raise LfdataError(_ENDED.format(self._what))


class Batches(Iterator[dict[str, Any]]):
    """An iteration."""

    def __init__(self, batches: Generator[dict[str, Any]], turn: Turn) -> None:
        self._batches, self._turn = batches, turn

    def __next__(self) -> dict[str, Any]:
        self._turn.begin()
        try:
            return next(self._batches)
        finally:
            self._turn.over()

    def close(self) -> None:
        """Leave it."""
        with self._turn.held():
            self._batches.close()
