"""A process of :class:`shard_builder.examine.pool.Pool`: opens the data set and answers tasks.

Started as ``python -m shard_builder.examine.worker CONNECTION PAGE`` (two inherited descriptors); speaks
:mod:`shard_builder.wire`.
"""

from __future__ import annotations

import ctypes
import importlib
import mmap
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from lfdata.errors import LfdataError
from shard_builder import wire
from shard_builder.examine.opened import DataSet
from shard_builder.examine.pool import NOTE
from shard_builder.examine.text import visible

_PR_SET_PDEATHSIG = 1

# Where each operation lives; they import this module, so it imports them late.
OPERATIONS = {
    "file": "shard_builder.examine.check_file",
    "groups": "shard_builder.examine.check_file",
    "digest": "shard_builder.examine.check_file",
    "rows": "shard_builder.examine.check_rows",
    "keys": "shard_builder.examine.check_keys",
    "index": "shard_builder.examine.check_index",
    "columns": "shard_builder.examine.columns",
    "content": "shard_builder.examine.content",
    "subset": "shard_builder.examine.content",
}
CODECS = ("array", "image", "pcm", "raw", "scalar", "structured", "text", "tokens")


class Progress:
    """The page the parent looks at when a worker dies or stands still."""

    def __init__(self, page: mmap.mmap | None = None) -> None:
        self._page = page
        self._counter = 0

    def at(self, row: int, field: int) -> None:
        """About to decode this value."""
        self._counter += 1
        if self._page is not None:
            NOTE.pack_into(self._page, 0, self._counter, row + 1, field)

    def beat(self) -> None:
        """Still moving, between values."""
        self._counter += 1
        if self._page is not None:
            NOTE.pack_into(self._page, 0, self._counter, 0, 0)


def open_setup(setup: dict[str, Any]) -> DataSet | None:
    """The data set a worker works on; ``None`` for a file so damaged that only its structure can be checked."""
    return DataSet.open(Path(os.fsdecode(setup["path"]))) if setup["readable"] else None


def serve(connection: socket.socket, page: mmap.mmap | None) -> None:
    """Answer tasks until the connection ends."""
    setup, _ = wire.receive(connection)
    # Imported now: a task's time limit is for its values, not for loading libraries.
    operations = {name: getattr(importlib.import_module(module), name) for name, module in OPERATIONS.items()}
    for module in CODECS:
        importlib.import_module(f"lfdata.codecs.{module}")
    try:
        data = open_setup(setup)
    except LfdataError as error:
        wire.send(connection, {"fatal": visible(str(error))})
        return
    wire.send(connection, {"ready": True})
    progress = Progress(page)
    while True:
        task, _ = wire.receive(connection)
        answer = operations[task["op"]](data, task, progress)
        progress.beat()
        wire.send(connection, answer)


def main(connection: int, page: int) -> None:
    """Entry point."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _die_with_parent()
    try:
        serve(socket.socket(fileno=connection), mmap.mmap(page, mmap.PAGESIZE))
    except (wire.ClosedError, BrokenPipeError, ConnectionResetError):
        return


def _die_with_parent() -> None:
    """A hung worker must not outlive its parent, where the kernel can see to it."""
    try:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    except (OSError, AttributeError):
        return


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
