"""The group of ranks, as far as one process shows it."""

from __future__ import annotations

import _thread
import time
import weakref

import torch

from lftrain.comm.group import Group


def test_leaving_waits_for_threads_that_still_want_the_interpreter() -> None:
    """gloo frees a collective's tensors in threads of its own; when the interpreter ends under one, the process aborts."""
    group = Group(0, 2, 0, torch.device("cpu"))
    done: list[str] = []
    lent = [torch.zeros(1)]
    group._lent.append(weakref.ref(lent[0]))

    def hold() -> None:
        time.sleep(0.1)
        lent.clear()
        time.sleep(0.05)
        done.append("thread")

    # A thread that Python's threading does not know, as gloo's are.
    _thread.start_new_thread(hold, ())
    group.leave()
    assert done == ["thread"]
