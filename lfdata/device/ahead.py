"""The batches of an epoch, ahead of the consumer."""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager

from lfdata.device.transfer import Copied, Transfer
from lfdata.loader.taker import Taker


class Ahead:
    """One iteration.

    Args:
        ahead: batches that are copied beyond the one that is handed out.
        alone: held by whoever takes and copies batches. The consumer's thread does, in :meth:`next`.
        others: whether another thread does too: what is ahead is enough then.

    Attributes:
        spot: where the consumer is.
        exhausted: whether the loader has given the last batch.
        begun: whether the ring is reserved for these batches.
    """

    def __init__(
        self, taker: Taker, transfer: Transfer, ahead: int, alone: AbstractContextManager[object], others: bool
    ) -> None:
        self._taker, self._transfer, self._ahead = taker, transfer, ahead
        self._alone, self._others = alone, others
        self._batches = taker.begin()
        self.spot = taker.spot
        self._queue: deque[Copied] = deque()
        self._over = self.exhausted = False
        self.begun = False

    @property
    def batches(self) -> int:
        """How many are ahead."""
        return len(self._queue)

    def fill(self, most: int) -> None:
        """Be so many batches ahead, as far as that can be had without waiting for anybody."""
        if not self.begun:
            self.begun = True
            try:
                self._transfer.reserve()
            except Exception as error:
                self._failed(error)
        while not self._over and len(self._queue) < most and self._can_take():
            self._take()

    def go_on(self, most: int) -> None:
        """As :meth:`fill`, for the thread that is not the consumer's: whatever goes wrong is told in its turn."""
        try:
            self._transfer.reap()
            self.fill(most)
        except Exception as error:
            self._failed(error)

    def next(self) -> Copied | None:
        """The next batch; ``None`` at the end. Raises what making it raised, once those before it are handed out."""
        if not (self._others and self._queue):
            with self._alone:
                self._come_by()
        if not self._queue:
            return None
        found = self._queue.popleft()
        if found.error is not None:
            raise found.error
        if found.pieces:
            with self._alone:
                found = self._transfer.completed(found)
        self.spot = found.spot
        return found

    def _come_by(self) -> None:
        """Have a batch, unless this is the end, and those that can be had with it."""
        self._transfer.reap()
        self.fill(self._ahead + 1)
        if not self._queue and not self._over:
            self._transfer.make_room()
            self._take()
            self.fill(self._ahead + 1)

    def _can_take(self) -> bool:
        """Whether another batch can be had and copied without waiting for anybody."""
        try:
            ready = self._taker.ready()
        except Exception as error:
            self._failed(error)
            return False
        return ready and self._transfer.ring.free > 0 and self._transfer.has_room()

    def _take(self) -> None:
        try:
            batch = next(self._batches, None)
        except Exception as error:
            self._failed(error)
            return
        if self._over:
            # Left meanwhile: the collector of this thread may end the consumer's iteration.
            return
        if batch is None:
            self._over = self.exhausted = True
        else:
            self._queue.append(self._transfer.begin(batch))

    def _failed(self, error: Exception) -> None:
        """It is told in its turn."""
        self._over = True
        self._queue.append(Copied(self._taker.spot, error=error))

    def leave(self, end: bool) -> None:
        """Put everything back to where the consumer is; ``end``: and end the loader's decoders."""
        self._over = True
        self._taker.go_back(self.spot, end)
        close = getattr(self._batches, "close", None)
        if close is not None:
            close()
        while self._queue:
            self._transfer.drop(self._queue.popleft())
        self._transfer.forget() if end else self._transfer.reap()
