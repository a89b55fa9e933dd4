"""The batches of an epoch, ahead of the consumer."""

from __future__ import annotations

from collections import deque

from lfdata.device.transfer import Copied, Transfer
from lfdata.loader.taker import Taker


class Ahead:
    """One iteration. ``ahead``: batches that are copied beyond the one that is handed out.

    Attributes:
        spot: where the consumer is.
        exhausted: whether the loader has given the last batch.
        begun: whether the ring is reserved for these batches.
    """

    def __init__(self, taker: Taker, transfer: Transfer, ahead: int) -> None:
        self._taker, self._transfer, self._ahead = taker, transfer, ahead
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

    def next(self) -> Copied | None:
        """The next batch; ``None`` at the end. Raises what making it raised, once those before it are handed out."""
        self._transfer.reap()
        self.fill(self._ahead + 1)
        if not self._queue and not self._over:
            self._transfer.make_room()
            self._take()
            self.fill(self._ahead + 1)
        if not self._queue:
            return None
        found = self._queue.popleft()
        if found.error is not None:
            raise found.error
        found = self._transfer.completed(found)
        self.spot = found.spot
        return found

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
            # Left meanwhile: a handler of signals, or the collector, has ended this iteration.
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
