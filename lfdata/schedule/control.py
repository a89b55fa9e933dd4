"""How many threads decode, how far ahead, and whose fault idleness is (docs/scheduler.md)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

WINDOW = 8
# A wait that is a missed deadline: this share of the period, and at least so many seconds.
LATE_SHARE, LATE_SECONDS = 0.02, 0.001
MARGIN = 1.5
FLOOR_TICKS = 256
# A GPU that did something for this share of the time has work queued: a host that waits then is early, not late.
BUSY = 0.97
# Idle for less than this share, a GPU counts as busy.
IDLE = 0.05

FED, CONSUMER, COPY, UNKNOWN = "fed", "consumer", "copy", "unknown"


@dataclass(frozen=True, slots=True)
class Tick:
    """A slot was handed out.

    Attributes:
        period: seconds since the one before.
        waited: those of them that the consumer waited for the slot.
        work: thread-seconds of decoding in it.
        ready: slots that were filled when it was asked for.
        copying: seconds of the period that the device waited for copies from the host.
        busy: share of the last time in which the GPU did anything; ``None``: nobody knows.
        stages: seconds of its stages by name.
    """

    period: float
    waited: float
    work: float
    ready: int = 0
    copying: float = 0.0
    busy: float | None = None
    stages: Mapping[str, float] = field(default_factory=dict)

    @property
    def late(self) -> bool:
        """A deadline was missed."""
        return self.waited > max(LATE_SECONDS, LATE_SHARE * self.period) and not (self.busy is not None and self.busy >= BUSY)


class Level:
    """A number that goes up to its most at once, and down by one at a time. One that was too small is not tried again soon."""

    def __init__(self, most: int) -> None:
        self.most = self.value = most
        self._fewer, self._floor, self._floor_left, self._load = 0, 1, 0, 0.0

    def up(self, load: float = 0.0) -> None:
        """A deadline was missed, with so much to do: in threads that are at work all the time, if that is what the number is of."""
        if self.value < self.most:
            self._floor, self._floor_left, self._load = self.value + 1, FLOOR_TICKS, load
        self.value, self._fewer = self.most, 0

    def towards(self, needed: int, load: float = 0.0) -> None:
        """None was missed; so many would do."""
        self._floor_left -= 1
        if self._floor_left <= 0:
            self._floor = 1
        floor = self._floor
        if 0 < load < self._load:
            # With less to do, less of it: what was too small then is not so now.
            floor = math.ceil(floor * load / self._load)
        needed = min(self.most, max(floor, needed, 1))
        if needed >= self.value:
            self.value, self._fewer = needed, 0
            return
        self._fewer += 1
        if self._fewer >= WINDOW:
            self.value, self._fewer = self.value - 1, 0


class Controller:
    """Sets the width of decoding and the look-ahead from ticks.

    Args:
        threads: that may decode at a time in each process, at most.
        ahead: slots that may be under way at a time, at most.
        processes: decoder processes.
    """

    def __init__(self, threads: int, ahead: int, processes: int = 1) -> None:
        self._width, self._ahead = Level(threads), Level(ahead)
        self._processes = processes
        self._seen: deque[Tick] = deque(maxlen=WINDOW)

    @property
    def width(self) -> int:
        """Threads that may decode at a time in each process."""
        return self._width.value

    @property
    def ahead(self) -> int:
        """Slots that may be under way at a time."""
        return self._ahead.value

    def tick(self, tick: Tick) -> None:
        """Look at one more slot."""
        self._seen.append(tick)
        seconds = sum(one.period for one in self._seen)
        load = sum(one.work for one in self._seen) / self._processes / max(1e-9, seconds)
        if tick.late:
            self._width.up(load)
            self._ahead.up()
            return
        self._width.towards(math.ceil(MARGIN * load), load)
        # With all that had had time filled each time, one less would have been enough. Of the most there may be, one waits for the slot that
        # the consumer gives back as it asks, and has had none.
        had_time = min(self.ahead, self._ahead.most - 1)
        self._ahead.towards(self.ahead - 1 if tick.ready >= had_time else self.ahead)

    def verdict(self) -> str:
        """Whose fault it is that the GPU idles, over the last slots.

        ``read``, ``decode``, ``augment``, ``mix`` or ``plan``: the consumer waits for data, and most of their making is that; ``copy``: the
        device waits for copies from the host; ``consumer``: batches are ready, and the GPU idles all the same; ``fed``: it does not;
        ``unknown``: batches are ready, and no sensor says what the GPU does.
        """
        seen = self._seen
        seconds = sum(one.period for one in seen)
        if not seen or seconds <= 0:
            return UNKNOWN
        if sum(one.waited for one in seen if one.late) > LATE_SHARE * seconds:
            stages: dict[str, float] = {}
            for one in seen:
                for name, spent in one.stages.items():
                    stages[name] = stages.get(name, 0.0) + spent
            return max(stages, key=lambda name: stages[name]) if stages else "decode"
        if sum(one.copying for one in seen) > LATE_SHARE * seconds:
            return COPY
        known = [one.busy for one in seen if one.busy is not None]
        if not known:
            return UNKNOWN
        return FED if sum(known) / len(known) >= 1 - IDLE else CONSUMER
