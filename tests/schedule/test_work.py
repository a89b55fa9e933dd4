"""The queue of work: what is due first, by class, nothing starves, nothing waits for ever."""

from __future__ import annotations

import threading

from hypothesis import given, settings
from hypothesis import strategies as st

from lfdata.schedule.work import PATIENCE, Class, WorkQueue

Entry = tuple[Class, int]


def _drained(queue: WorkQueue[Entry], count: int) -> list[Entry]:
    found = [queue.take() for _ in range(count)]
    assert None not in found
    return [entry for entry in found if entry is not None]


@given(st.lists(st.tuples(st.sampled_from(Class), st.integers(0, 9)), min_size=1, max_size=60))
def test_what_is_due_comes_first_whatever_its_class(entries: list[Entry]) -> None:
    queue: WorkQueue[Entry] = WorkQueue()
    for kind, deadline in entries:
        queue.open(deadline)
        queue.put((kind, deadline), kind, deadline)
    left = list(entries)
    for _ in entries:
        taken = queue.take()
        assert taken in left
        due = min(deadline for _, deadline in left)
        assert taken is not None and taken[1] == due
        left.remove(taken)
        if all(deadline != due for _, deadline in left):
            queue.done(due)
    queue.close()
    assert queue.take() is None


def test_classes_order_what_is_not_due() -> None:
    queue: WorkQueue[Entry] = WorkQueue()
    queue.open(0)  # in work somewhere else
    for kind, deadline in [(Class.MIX, 1), (Class.AUGMENT, 2), (Class.DECODE, 3), (Class.DECODE, 2), (Class.AUGMENT, 1)]:
        queue.open(deadline)
        queue.put((kind, deadline), kind, deadline)
    assert _drained(queue, 5) == [
        (Class.DECODE, 2), (Class.DECODE, 3), (Class.AUGMENT, 1), (Class.AUGMENT, 2), (Class.MIX, 1),
    ]  # fmt: skip


@settings(deadline=None)
@given(st.integers(1, 5))
def test_the_last_class_is_passed_over_only_so_often(others: int) -> None:
    queue: WorkQueue[Entry] = WorkQueue()
    queue.open(0)
    queue.put((Class.MIX, 5), Class.MIX, 5)
    for number in range(others):
        queue.put((Class.DECODE, number + 6), Class.DECODE, number + 6)
    for taken in range(PATIENCE):
        assert queue.take() != (Class.MIX, 5)
        queue.put((Class.DECODE, taken + 20), Class.DECODE, taken + 20)
    assert queue.take() == (Class.MIX, 5)


def test_depths_are_told_and_end_at_nothing() -> None:
    told: dict[int, int] = {}
    queue: WorkQueue[Entry] = WorkQueue(lambda kind, count: told.update({kind: count}))
    for number in range(3):
        queue.put((Class.DECODE, number), Class.DECODE, number)
    queue.put((Class.AUGMENT, 0), Class.AUGMENT, 0)
    assert told == {Class.DECODE: 3, Class.AUGMENT: 1}
    _drained(queue, 4)
    assert told == {Class.DECODE: 0, Class.AUGMENT: 0}


def test_one_thread_alone_does_work_that_makes_more_work() -> None:
    queue: WorkQueue[tuple[int, int]] = WorkQueue()
    done: list[int] = []

    def work() -> None:
        while (entry := queue.take()) is not None:
            number, stage = entry
            if stage == len(Class):
                queue.done(number)
                done.append(number)
            else:
                queue.put((number, stage + 1), Class(stage), number)

    for number in range(50):
        queue.open(number)
        queue.put((number, 1), Class.DECODE, number)
    thread = threading.Thread(target=work)
    thread.start()
    while len(done) < 50 and thread.is_alive():
        thread.join(0.01)
    queue.close()
    thread.join(5)
    assert sorted(done) == list(range(50)) and not thread.is_alive()


def test_closing_wakes_everybody_who_waits() -> None:
    queue: WorkQueue[Entry] = WorkQueue()
    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(queue.take())) for _ in range(4)]
    for thread in threads:
        thread.start()
    queue.close()
    for thread in threads:
        thread.join(5)
    assert found == [None] * 4
