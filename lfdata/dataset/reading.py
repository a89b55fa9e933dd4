"""Samples that are being read while their reader does something else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Readings:
    """Samples that are being read. ``parts``: the native reads, one a shard."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self._parts = parts

    def finish(self) -> bool:
        """Wait; whether every sample was read and matches its check."""
        return max([part.finish() for part in self._parts], default=-1) < 0
