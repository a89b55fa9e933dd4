"""Locks that survive ``fork``: a lock that another thread held at the fork would stay locked in the child for ever."""

from __future__ import annotations

import atexit  # noqa: F401
import os
import threading
import weakref
from typing import Protocol

# Imported here because np.unique (numpy.ma) and weakref.finalize (atexit) import them at their first call: in a thread, at a fork,
# that would leave a module lock held in the child for ever.
import numpy.ma  # noqa: F401


class Forked(Protocol):
    """Something that has to be put right in a forked child."""

    def after_fork(self) -> None:
        """Called in the child, in its only thread, before ``fork`` returns: replace the locks, drop what other threads were doing."""
        ...


# Held while a thread imports; a fork waits for it. Python does not put the locks of half-imported modules right in the child.
importing = threading.RLock()

_watched: weakref.WeakSet[Forked] = weakref.WeakSet()


def watch(thing: Forked) -> None:
    """Have ``thing.after_fork()`` called in forked children for as long as it lives."""
    _watched.add(thing)


def _in_child() -> None:
    importing.release()
    for thing in list(_watched):
        thing.after_fork()


os.register_at_fork(before=importing.acquire, after_in_parent=importing.release, after_in_child=_in_child)
