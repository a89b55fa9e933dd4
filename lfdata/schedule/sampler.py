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
# How long an answer may take before the sensor is lost, and before its thread is left to itself at the end.
PATIENCE, CLOSE_SECONDS = 10.0, 0.5
# Two clocks are behind a share, so it may be a little more than all.
SLACK = 0.1
# Words of the board: thousandths of busy time, and when (nanoseconds of the monotonic clock; 0: never).
BUSY_WORD, AT_WORD, WORDS = 0, 1, 2
log = logging.getLogger("lfdata")


class Sampler:
    """Publishes readings on a board: int64 (2,), of shared memory.

    The sensor is made in the thread, by ``find``, which gives ``None`` as long as there is nothing to look at yet. A sensor that fails is
    given up, and said to be: the consumer's waits remain. So is one that does not answer for ``patience`` seconds, by who asks.
    """

    def __init__(
        self,
        find: Callable[[], Sensor | None],
        board: NDArray[np.int64],
        every: float = EVERY,
        patience: float = PATIENCE,
    ) -> None:
        self._find, self._board, self._every, self._patience = find, board, every, patience
        self._end = threading.Event()
        self._state = "looking for a sensor"
        # When it was asked what it has not answered yet (0: nothing).
        self._asked = 0.0
        self.last: Reading | None = None
        self._thread = threading.Thread(target=self._run, name="lfdata-sensor", daemon=True)
        self._thread.start()

    @property
    def state(self) -> str:
        """Name of the sensor, or why there is none."""
        if (asked := self._asked) and not self._end.is_set() and time.monotonic() - asked > self._patience:
            self._lost(f"no answer for {self._patience:g} seconds ({self._state})")
        return self._state

    def busy(self) -> float | None:
        """Share of the time in which the GPU did anything, lately; ``None``: not known."""
        if self.state.startswith("lost"):
            return None
        share, at = int(self._board[BUSY_WORD]), int(self._board[AT_WORD])
        return share / 1000 if at and time.monotonic_ns() - at < STALE * 1e9 else None

    def _run(self) -> None:
        sensor: Sensor | None = None
        try:
            while not self._end.wait(self._every):
                self._asked = time.monotonic()
                if sensor is None:
                    sensor = self._find()
                    if sensor is not None:
                        self._state = sensor.name
                else:
                    self._publish(_sound(sensor.read()))
                self._asked = 0.0
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

    def _publish(self, reading: Reading) -> None:
        if self._end.is_set():
            return
        self.last = reading
        # First old, then new: whoever reads in between finds nothing rather than what does not go together.
        self._board[AT_WORD] = 0
        self._board[BUSY_WORD] = round(1000 * reading.busy)
        self._board[AT_WORD] = round(1e9 * reading.at)

    def _lost(self, why: str) -> None:
        if self._end.is_set():
            log.debug("the GPU sensor, which is not used any more: %s", why)
            return
        self._end.set()
        self._board[AT_WORD] = 0
        log.warning("the GPU sensor is lost, feedback goes by the consumer's waits alone: %s", why)
        self._state = f"lost: {why}"

    def close(self) -> None:
        """End the thread. One that hangs is left behind: it has nothing to bring to an end, and keeps nothing."""
        over = self._end.is_set()
        self._end.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_SECONDS)
            if self._thread.is_alive() and not over:
                log.warning("the GPU sensor hangs (%s): its thread is left behind", self._state)
        self._board = np.zeros_like(self._board)


def _sound(found: object) -> Reading:
    """What a sensor says, if it can be so. Raises :class:`SensorError`: one that says something else knows nothing of the GPU."""
    if not isinstance(found, Reading):
        raise SensorError(f"read() gave {type(found).__name__}; it must give a lfdata.schedule.sensors.Reading")
    if not (isinstance(found.busy, int | float) and -SLACK <= found.busy <= 1 + SLACK):
        raise SensorError(f"read() says that the GPU was busy for {found.busy!r} of the time; that is a share from 0 to 1")
    if not (isinstance(found.at, int | float) and 0 <= found.at < math.inf and isinstance(found.more, dict)):
        raise SensorError(f"read() says at={found.at!r}, more={found.more!r}; at is time.monotonic(), more a dict")
    return replace(found, busy=min(1.0, max(0.0, found.busy)))
