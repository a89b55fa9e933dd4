"""Data sets that the tests of this folder share, and devices that are late."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import batchkit
import pytest
from latedevice import LateBackend


@pytest.fixture(scope="session")
def sets() -> Iterator[Path]:
    """A folder where fsync costs nothing, if there is such a place."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def complete(sets: Path) -> Path:
    """40 rows with a field of every kind."""
    return batchkit.write_all_kinds(sets / "complete", complete=True)


@pytest.fixture(scope="session")
def numbers(sets: Path) -> Path:
    """103 small rows."""
    return batchkit.write_numbers(sets / "numbers", 103)


@pytest.fixture(scope="session")
def pictures(sets: Path) -> Path:
    """48 pictures with labels."""
    return batchkit.write_pictures(sets / "pictures", 48)


@pytest.fixture
def late() -> Iterator[Callable[..., LateBackend]]:
    """Makes devices, and looks at the end whether all went well on them."""
    made: list[LateBackend] = []

    def make(copies: float = 0.0, consumer: float = 0.0, refuse: str = "") -> LateBackend:
        made.append(LateBackend(copies, consumer, refuse))
        return made[-1]

    yield make
    for one in made:
        one.end()
