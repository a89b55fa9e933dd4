"""Threads and look-ahead: up at once when a deadline was missed, down one at a time, and stable under steps of load."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from lfdata.schedule.control import WINDOW, Controller, Tick


class Simulation:
    """A consumer and a decoder with two slots between them: widths, slot by slot."""

    def __init__(self, most: int, processes: int = 1) -> None:
        self.controller = Controller(most, 2, processes)
        self.now, self.filled, self.handed = 0.0, [0.0, 0.0], 0.0
        self.waits: list[float] = []

    def run(self, slots: int, consumer: float, work: float, noise: float = 0.0, seed: int = 0) -> list[int]:
        """``consumer``: seconds it takes for a slot; ``work``: thread-seconds of decoding one."""
        rng, found = np.random.default_rng(seed), []
        for _ in range(slots):
            taken = self.filled.pop(0)
            waited = max(0.0, taken - self.now)
            self.now += waited
            self.waits.append(waited)
            here = work * (1 + noise * rng.standard_normal())
            self.controller.tick(Tick(self.now - self.handed, waited, here))
            width = self.controller.width
            self.handed = self.now
            # One is in the making, one more may be when a slot is free, which it is now.
            begin = max(self.filled[-1], self.now)
            self.filled.append(begin + here / width)
            self.now += consumer * (1 + noise * rng.standard_normal())
            found.append(width)
        return found


def _changes(widths: list[int]) -> int:
    return sum(one != other for one, other in itertools.pairwise(widths))


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_settles_at_what_is_needed_after_steps_of_load(noise: float) -> None:
    simulation = Simulation(16)
    # Three threads' work in the period of a slot: half more than that is five.
    fed = simulation.run(400, consumer=0.1, work=0.3, noise=noise)
    assert fed[0] == 16 and set(fed[200:]) <= {5, 6}
    assert _changes(fed[200:]) <= 8 and max(simulation.waits[20:]) < 0.001 + 0.002
    # The consumer becomes five times as fast: at once with all threads, then with as many as that takes.
    fast = simulation.run(300, consumer=0.02, work=0.3, noise=noise)
    assert max(fast[:3]) == 16 and set(fast[100:]) == {16}
    # And slow again: down, thread by thread.
    slow = simulation.run(600, consumer=0.3, work=0.3, noise=noise)
    assert set(slow[400:]) <= {2, 3} and all(one - other <= 1 for one, other in itertools.pairwise(slow))
    assert _changes(slow[400:]) <= 8


def _width(controller: Controller, *what: float) -> int:
    controller.tick(Tick(*what))
    return controller.width


def test_a_width_that_missed_a_deadline_is_not_tried_again_soon() -> None:
    controller = Controller(8, 2)
    for _ in range(8 * WINDOW):
        controller.tick(Tick(1.0, 0.0, 0.1))
    assert controller.width == 1
    assert _width(controller, 1.0, 0.5, 0.1) == 8
    seen = [_width(controller, 1.0, 0.0, 0.1) for _ in range(200)]
    assert min(seen) == 2 and seen[-1] == 2
    # Long after it may be tried once more.
    assert min(_width(controller, 1.0, 0.0, 0.1) for _ in range(200)) == 1


def test_what_was_too_small_for_much_work_is_not_too_small_for_little() -> None:
    controller = Controller(8, 2)
    for _ in range(8 * WINDOW):
        controller.tick(Tick(1.0, 0.0, 3.0))
    assert controller.width == 5
    assert _width(controller, 1.0, 0.5, 3.0) == 8
    assert min(_width(controller, 1.0, 0.0, 3.0) for _ in range(100)) == 6
    # A tenth of the work: not six any more, nor two once there is more again.
    assert min(_width(controller, 1.0, 0.0, 0.3) for _ in range(80)) == 1
    assert [_width(controller, 1.0, 0.0, 3.0) for _ in range(WINDOW)][-1] == 6


def test_processes_share_the_work_and_one_thread_stays() -> None:
    assert set(Simulation(8, processes=2).run(300, 0.1, 0.3)[200:]) <= {3, 4}
    assert set(Simulation(1).run(50, 0.0, 0.3)) == {1}
    idle = Controller(4, 2)
    assert [_width(idle, 1.0, 0.0, 0.0) for _ in range(4 * WINDOW)][-1] == 1
    assert _width(idle, 0.0, 0.0, 0.0) >= 1


def test_look_ahead_goes_down_while_all_is_filled_and_up_at_once() -> None:
    controller = Controller(4, 6)
    for _ in range(20 * WINDOW):
        controller.tick(Tick(1.0, 0.0, 0.1, ready=controller.ahead))
    assert controller.ahead == 1
    controller.tick(Tick(1.0, 0.3, 0.1))
    assert controller.ahead == 6
    for _ in range(20 * WINDOW):
        controller.tick(Tick(1.0, 0.0, 0.1, ready=controller.ahead))
    assert controller.ahead == 2, "one slot ahead was too few a short while ago"
    # Slots that are not filled when they are asked for are needed.
    steady = Controller(4, 6)
    for _ in range(20 * WINDOW):
        steady.tick(Tick(1.0, 0.0, 0.1, ready=4))
    assert steady.ahead == 6
    # Of the most there may be one waits for the slot that the consumer has.
    for _ in range(WINDOW):
        steady.tick(Tick(1.0, 0.0, 0.1, ready=5))
    assert steady.ahead == 5
    for _ in range(20 * WINDOW):
        steady.tick(Tick(1.0, 0.0, 0.1, ready=4))
    assert steady.ahead == 5


@pytest.mark.parametrize(
    ("tick", "verdict"),
    [
        (Tick(1.0, 0.4, 0.5, stages={"read": 0.1, "decode": 0.5}), "decode"),
        (Tick(1.0, 0.4, 0.5, stages={"read": 0.7, "decode": 0.5}), "read"),
        (Tick(1.0, 0.4, 0.5, busy=0.5, stages={"augment": 0.7}), "augment"),
        (Tick(1.0, 0.0, 0.5, ready=2, copying=0.2, busy=0.7), "copy"),
        (Tick(1.0, 0.0, 0.5, ready=2, busy=0.4), "consumer"),
        (Tick(1.0, 0.0, 0.5, ready=2, busy=0.99), "fed"),
        # The host waits, but the GPU has work queued: nobody is late.
        (Tick(1.0, 0.4, 0.5, busy=0.99, stages={"decode": 0.5}), "fed"),
        (Tick(1.0, 0.0, 0.5, ready=2), "unknown"),
    ],
)
def test_whose_fault_it_is(tick: Tick, verdict: str) -> None:
    controller = Controller(4, 2)
    assert controller.verdict() == "unknown"
    for _ in range(WINDOW):
        controller.tick(tick)
    assert controller.verdict() == verdict


def test_idleness_of_a_gpu_alone_never_speeds_decoding_up() -> None:
    controller = Controller(8, 4)
    for _ in range(10 * WINDOW):
        controller.tick(Tick(1.0, 0.0, 0.1, ready=controller.ahead, busy=1.0))
    low = controller.width, controller.ahead
    for _ in range(10 * WINDOW):
        controller.tick(Tick(1.0, 0.0, 0.1, ready=controller.ahead, busy=0.01))
    assert (controller.width, controller.ahead) == low == (1, 1)
