"""The buffer for stored bytes that is used again."""

from __future__ import annotations

import threading

import numpy as np

from lfdata.dataset.rows import Memory


def test_a_buffer_is_used_again_by_its_thread_alone() -> None:
    memory = Memory()
    first = memory(3 << 20)
    assert len(first) == 3 << 20
    assert np.shares_memory(memory(2 << 20), first)
    found: list[np.ndarray] = []
    other = threading.Thread(target=lambda: found.append(memory(2 << 20)))
    other.start()
    other.join()
    assert not np.shares_memory(found[0], first)


def test_a_buffer_grows_and_one_that_is_far_too_large_is_given_up() -> None:
    memory = Memory()
    small = memory(1000)
    large = memory(32 << 20)
    assert len(large) == 32 << 20 and not np.shares_memory(small, large)
    assert not np.shares_memory(memory(1000), large)
    assert len(memory(0)) == 0
