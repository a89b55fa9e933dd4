"""Data that the tests of this folder share; none of them changes it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import trainkit


@pytest.fixture(scope="session")
def points() -> Iterator[Path]:
    """64 points, where fsync costs nothing if there is such a place."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        yield trainkit.write_points(Path(folder) / "points")
