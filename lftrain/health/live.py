"""One line in the terminal that says where a run is, overwritten in place."""

from __future__ import annotations

import shutil
import sys
from typing import Any, TextIO

from lftrain.health.meter import PARTS


class Live:
    """Shows the last logged step.

    Args:
        mode: ``on``, ``off``, or ``auto``: only where ``stream`` is a terminal. On a stream that is none, each state is a line of its own.
    """

    def __init__(self, mode: str, steps: int, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        terminal = self._stream.isatty()
        self._shown = mode == "on" or (mode == "auto" and terminal)
        self._end = "" if terminal else "\n"
        self._start = "\r\x1b[K" if terminal else ""
        self._steps = steps

    def show(self, step: int, values: dict[str, Any]) -> None:
        """``values``: those of a logged step."""
        if not self._shown:
            return
        text = state_line(step, self._steps, values)
        width = shutil.get_terminal_size().columns - 1
        self._write(f"{self._start}{text[:width] if self._start else text}{self._end}")

    def close(self) -> None:
        """Leave the line standing."""
        if self._shown and self._start:
            self._write("\n")
        self._shown = False

    def _write(self, text: str) -> None:
        """A terminal that is gone, or a full disk behind it, is no reason to end a run."""
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            self._shown = False


def state_line(step: int, steps: int, values: dict[str, Any]) -> str:
    """A logged step in one line: progress, loss, speed, where the time goes, time left."""
    milliseconds = values.get("ms", {})
    total = sum(milliseconds.get(part, 0.0) for part in PARTS)
    shares = [
        f"{part} {100 * milliseconds[part] / total:.0f}%" for part in PARTS if total and milliseconds.get(part, 0) > total / 100
    ]
    parts = [
        f"step {step}/{steps}",
        f"loss {_number(values.get('loss'))}",
        f"lr {_number(values.get('lr'))}",
        f"{values.get('samples_per_s') or 0:,.0f} samples/s",
        f"{total:,.1f} ms ({', '.join(shares)})" if shares else "",
        f"skipped {values['skipped']}" if values.get("skipped") else "",
        f"left {_duration((steps - step) * values['step_ms'] / 1e3)}" if values.get("step_ms") else "",
    ]
    return "  ".join(part for part in parts if part)


def _number(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}"


def _duration(seconds: float) -> str:
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}"
