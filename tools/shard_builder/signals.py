"""Signals of a command."""

from __future__ import annotations

import signal
import types


def interruptible() -> None:
    """From here on SIGTERM ends the command as Ctrl-C does: what is half-written goes."""
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(_number: int, _frame: types.FrameType | None) -> None:
    raise KeyboardInterrupt
