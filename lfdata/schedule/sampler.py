"""Reads a sensor all the time, in a thread of its own, and publishes what it says in shared memory."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from numbers import Real

import numpy as np
from numpy.typing import NDArray

from lfdata.schedule.sensors import Reading, Sensor, SensorError

# Seconds between readings, and how old one may be.
EVERY, STALE = 0.1, 1.0
# How long an answer may take before the sensor is lost, and before its thread is left to itself at the end.
PATIENCE, CLOSE_SECONDS = 10.0, 0.5
# Two clocks are behind a share, so it may be a little more than all. And what a time may be ahead, for rounding: seconds.
SLACK, AHEAD = 0.1, 0.1
# Words of the board: thousandths of busy time, and when (nanoseconds of the monotonic clock; 0: never).
BUSY_WORD, AT_WORD, WORDS = 0, 1, 2
log = logging.getLogger("lfdata")


class Sampler:
    """Publishes readings on a board: int64 (2,), of shared memory.

    The sensor is made in the thread, by ``find``, which gives ``None`` as long as there is nothing to look at yet, and closed there. A sensor
    that fails is given up, and said to be: the consumer's waits remain. So is one that does not answer for ``patience`` seconds, by who asks.
    """

    def __init__(
        self,
        find: Callable[[], Sensor | None],
        board: NDArray[np.int64],
        every: float = EVERY,
        patience: float = PATIENCE,
    ) -> None:
        self._find, self._every, self._patience = find, every, patience
        self._board: NDArray[np.int64] | None = board
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
        board = self._board
        if board is None or self.state.startswith("lost"):
            return None
        share, at = int(board[BUSY_WORD]), int(board[AT_WORD])
        return share / 1000 if at and time.monotonic_ns() - at < STALE * 1e9 else None

    def _run(self) -> None:
        sensor: Sensor | None = None
        try:
            # At once: one that is known is closed, however soon the end comes.
            while True:
                self._asked = time.monotonic()
                if sensor is None:
                    sensor = self._find()
                    if sensor is not None:
                        self._state = sensor.name
                elif self._board is not None:
                    self._publish(_sound(sensor.read()))
                self._asked = 0.0
                if self._end.wait(self._every):
                    break
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

    def move(self, board: NDArray[np.int64] | None) -> None:
        """Publish there from now on; ``None``: the sensor is left alone until there is a board again."""
        self._board = board

    def _publish(self, reading: Reading) -> None:
        board = self._board
        if board is None or self._end.is_set():
            return
        self.last = reading
        # First old, then new: whoever reads in between finds nothing rather than what does not go together.
        board[AT_WORD] = 0
        board[BUSY_WORD] = round(1000 * reading.busy)
        board[AT_WORD] = round(1e9 * reading.at)

    def _lost(self, why: str) -> None:
        if self._end.is_set():
            log.debug("the GPU sensor, which is not used any more: %s", why)
            return
        self._end.set()
        if (board := self._board) is not None:
            board[AT_WORD] = 0
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
        self._board = None


def _sound(found: object) -> Reading:
    """What a sensor says, if it can be so. Raises :class:`SensorError`: one that says something else knows nothing of the GPU."""
    if not isinstance(found, Reading):
        raise SensorError(f"read() gave {type(found).__name__}; it must give a lfdata.schedule.sensors.Reading")
    for name, value in (("busy", found.busy), ("at", found.at)):
        if not isinstance(value, Real):
            raise SensorError(f"read() says {name}={value!r}, of type {type(value).__name__}; {name} is a number")
    busy, at, now = float(found.busy), float(found.at), time.monotonic()
    if not -SLACK <= busy <= 1 + SLACK:
        raise SensorError(f"read() says that the GPU was busy for {found.busy!r} of the time; that is a share from 0 to 1")
    if not (0 <= at < math.inf and isinstance(found.more, dict)):
        raise SensorError(f"read() says at={found.at!r}, more={found.more!r}; at is time.monotonic(), more a dict")
    if at > now + AHEAD:
        # It would be new for ever.
        raise SensorError(
            f"read() says at={found.at!r}, and time.monotonic() is {now:.3f}: at is of that clock, and not in the future"
        )
    return replace(found, busy=min(1.0, max(0.0, busy)), at=at)
