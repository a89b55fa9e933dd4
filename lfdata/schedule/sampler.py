"""Reads a sensor all the time, in a thread of its own, and publishes what it says in shared memory."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from lfdata.schedule.sensors import Reading, Sensor, SensorError

# Seconds between readings, and how old one may be.
EVERY, STALE = 0.1, 1.0
# Two clocks are behind a share, so it may be a little more than all.
SLACK = 0.1
# Words of the board: thousandths of busy time, and when (nanoseconds of the monotonic clock; 0: never).
BUSY_WORD, AT_WORD, WORDS = 0, 1, 2
log = logging.getLogger("lfdata")


class Sampler:
    """Publishes readings on a board: int64 (2,), of shared memory.

    The sensor is made in the thread, by ``find``, which gives ``None`` as long as there is nothing to look at yet. A sensor that fails is
    given up, and said to be: the consumer's waits remain.
    """

    def __init__(self, find: Callable[[], Sensor | None], board: NDArray[np.int64], every: float = EVERY) -> None:
        self._find, self._board, self._every = find, board, every
        self._end = threading.Event()
        self.state = "looking for a sensor"
        self.last: Reading | None = None
        self._thread = threading.Thread(target=self._run, name="lfdata-sensor", daemon=True)
        self._thread.start()

    def busy(self) -> float | None:
        """Share of the time in which the GPU did anything, lately; ``None``: not known."""
        share, at = int(self._board[BUSY_WORD]), int(self._board[AT_WORD])
        return share / 1000 if at and time.monotonic_ns() - at < STALE * 1e9 else None

    def _run(self) -> None:
        sensor: Sensor | None = None
        try:
            while not self._end.wait(self._every):
                if sensor is None:
                    sensor = self._find()
                    if sensor is not None:
                        self.state = sensor.name
                    continue
                reading = _sound(sensor.read())
                self.last = reading
                # First old, then new: whoever reads in between finds nothing rather than what does not go together.
                self._board[AT_WORD] = 0
                self._board[BUSY_WORD] = round(1000 * reading.busy)
                self._board[AT_WORD] = round(1e9 * reading.at)
        except SensorError as error:
            self._lost(str(error))
        except BaseException as error:
            # Of somebody's own sensor, whatever it raises. Training goes on without it.
            self._lost(repr(error))
        finally:
            if sensor is not None:
                try:
                    sensor.close()
                except BaseException as error:
                    log.debug("closing the sensor: %r", error)

    def _lost(self, why: str) -> None:
        self._board[AT_WORD] = 0
        self.state = f"lost: {why}"
        log.warning("the GPU sensor is lost, feedback goes by the consumer's waits alone: %s", why)

    def close(self) -> None:
        """End the thread."""
        self._end.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)


def _sound(found: object) -> Reading:
    """What a sensor says, if it can be so. Raises :class:`SensorError`: one that says something else knows nothing of the GPU."""
    if not isinstance(found, Reading):
        raise SensorError(f"read() gave {type(found).__name__}; it must give a lfdata.schedule.sensors.Reading")
    if not (isinstance(found.busy, int | float) and -SLACK <= found.busy <= 1 + SLACK):
        raise SensorError(f"read() says that the GPU was busy for {found.busy!r} of the time; that is a share from 0 to 1")
    if not (isinstance(found.at, int | float) and 0 <= found.at < math.inf and isinstance(found.more, dict)):
        raise SensorError(f"read() says at={found.at!r}, more={found.more!r}; at is time.monotonic(), more a dict")
    return replace(found, busy=min(1.0, max(0.0, found.busy)))
