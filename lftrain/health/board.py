"""TensorBoard's event file (extra ``tensorboard``)."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable
from pathlib import Path

from lfdata.errors import MissingExtraError, StorageError

log = logging.getLogger("lftrain")
FLUSH_SECONDS = 30.0


class Board:
    """Scalars of one life of a run. They are written by who adds them: tensorboardX's own writer has a thread for it, and when a full disk ends
    that, the next values wait for it for ever.

    Raises:
        MissingExtraError, StorageError: when it is made.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboardX import summary
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto.event_pb2 import Event
        except ImportError as error:
            raise MissingExtraError("metrics.tensorboard needs the extra: pip install 'lfdata[tensorboard]'") from error
        self._scalar, self._event = summary.scalar, Event
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._writer = EventsWriter(str(folder / "events"))
        except OSError as error:
            raise StorageError(folder, "open", error.errno, error.strerror or str(error)) from error
        self._open, self._flushed = True, time.monotonic()

    def add(self, values: Iterable[tuple[str, float]], step: int) -> None:
        """Values by name. After one that the disk did not take, which is said, nothing more is written."""
        if not self._open:
            return
        try:
            for name, value in values:
                self._writer.write_event(self._event(wall_time=time.time(), step=step, summary=self._scalar(name, value)))
            if time.monotonic() - self._flushed > FLUSH_SECONDS:
                self._writer.flush()
                self._flushed = time.monotonic()
        except OSError as error:
            log.error("TensorBoard's file cannot be written, it ends here: %s", error)
            self.close()

    def close(self) -> None:
        """No more values."""
        if self._open:
            self._open = False
            with contextlib.suppress(OSError):
                self._writer.close()
