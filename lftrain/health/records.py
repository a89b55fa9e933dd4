"""What is written down: run.json once, metrics.jsonl line by line, TensorBoard if asked for. Rank 0 writes."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from lfdata.errors import StorageError
from lftrain.health.board import Board

log = logging.getLogger("lftrain")


class Records:
    """Records of a run.

    Lines of ``metrics.jsonl`` have a ``kind``: ``start`` (a process begins or goes on at ``step``: later lines of an earlier life with
    greater steps are void), ``step``, ``held_out``, ``event`` (``name``, ``message``), ``end``. Numbers that are not finite are null.

    Args:
        folder: of the run; ``None`` on ranks that write nothing.
        tensorboard: whether scalars go there too.
        rank: of several; said in the log of events that are one rank's own.
    """

    def __init__(self, folder: Path | None, tensorboard: bool = False, rank: int | None = None) -> None:
        self._folder, self._rank = folder, rank
        self._file: int | None = None
        # A checkpoint's thread writes, too.
        self._writing, self._losing = threading.Lock(), False
        self._board: Board | None = None
        self.events = 0
        if folder is None:
            return
        path = folder / "metrics.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise StorageError(path, "open", error.errno, error.strerror or str(error)) from error
        if tensorboard:
            self._board = Board(folder / "tensorboard")

    def run(self, values: dict[str, Any]) -> None:
        """Write ``run.json``: configuration and environment of the latest life of the run."""
        if self._folder is not None:
            path = self._folder / "run.json"
            temporary = path.with_name(".tmp-run.json")
            try:
                temporary.write_bytes(msgspec.json.format(msgspec.json.encode(values), indent=2) + b"\n")
                os.replace(temporary, path)
            except OSError as error:
                with contextlib.suppress(OSError):
                    temporary.unlink()
                raise StorageError(path, "write", error.errno, error.strerror or str(error)) from error

    def write(self, kind: str, step: int, **values: Any) -> None:
        """One line. A disk that takes none is no reason to end a run: lines are lost, which is said once each time that it happens."""
        if self._file is None:
            return
        line = msgspec.json.encode({"kind": kind, "step": step, "time": round(time.time(), 3), **values}) + b"\n"
        with self._writing:
            try:
                _append(self._file, line)
                self._losing = False
            except OSError as error:
                if not self._losing:
                    log.error("metrics.jsonl cannot be written, lines are lost: %s", error)
                self._losing = True
        if self._board is not None:
            self._board.add(((f"{kind}/{name}", value) for name, value in _scalars(values)), step)

    def event(self, name: str, message: str, *, shared: bool = False, **values: Any) -> None:
        """Something people should know: a line, and the log. ``shared``: all ranks tell the same, so the first does it for all."""
        self.events += 1
        step = int(values.pop("step", -1))
        if shared and self._rank:
            return
        quiet = name in ("checkpoint", "resume", "plan", "fp8")
        who = "" if shared or self._rank is None else f"rank {self._rank}: "
        log.log(logging.INFO if quiet else logging.WARNING, "%s%s: %s", who, name, message)
        self.write("event", step, name=name, message=message, **values)

    def close(self) -> None:
        """No more lines."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.close(self._file)
            self._file = None
        if self._board is not None:
            self._board.close()
            self._board = None


def _append(file: int, line: bytes) -> None:
    """All of a line or nothing of it, after what a kill may have left of another. Raises OSError."""
    end = os.fstat(file).st_size
    if end and os.pread(file, 1, end - 1) != b"\n":
        line = b"\n" + line
    if (written := os.write(file, line)) < len(line):
        os.ftruncate(file, end)
        raise OSError(errno.ENOSPC, f"{written} of {len(line)} bytes were taken")


def _scalars(values: dict[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    """Finite numbers, also those of nested tables."""
    found: list[tuple[str, float]] = []
    for name, value in values.items():
        if isinstance(value, dict):
            found += _scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            found.append((prefix + name, float(value)))
    return found
