"""A worker whose text decoder dies on ``CRASH`` and never ends on ``HANG``: what a broken codec does."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from typing import Any

from lfdata.codecs.base import Buffer
from lfdata.codecs.text import TextDecoder
from shard_builder.examine import worker

_decode = TextDecoder.decode


def _hostile(self: TextDecoder, payload: Buffer, sizes: Mapping[str, Any]) -> str:
    if bytes(payload) == b"CRASH":
        os.kill(os.getpid(), signal.SIGSEGV)
    while bytes(payload) == b"HANG":
        pass
    return _decode(self, payload, sizes)


if __name__ == "__main__":
    TextDecoder.decode = _hostile  # type: ignore[method-assign]
    worker.main(int(sys.argv[1]), int(sys.argv[2]))
