"""Data sets that the tests of this folder share; none of them is changed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import batchkit
import pytest

from lfdata.loader.engine import ProcessEngine


@pytest.fixture(scope="session")
def sets() -> Iterator[Path]:
    """A folder where fsync costs nothing, if there is such a place."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def kinds(sets: Path) -> Path:
    """40 rows with a field of every kind, most of which some rows lack."""
    return batchkit.write_all_kinds(sets / "kinds")


@pytest.fixture(scope="session")
def complete(sets: Path) -> Path:
    """The same, nothing absent."""
    return batchkit.write_all_kinds(sets / "complete", complete=True)


@pytest.fixture(scope="session")
def other(sets: Path) -> Path:
    """More rows of the same fields, for mixtures."""
    return batchkit.write_all_kinds(sets / "other", 25, seed=1, shards=2)


@pytest.fixture(scope="session")
def numbers(sets: Path) -> Path:
    """103 small rows."""
    return batchkit.write_numbers(sets / "numbers", 103)


@pytest.fixture(scope="session")
def more_numbers(sets: Path) -> Path:
    """37 other small rows."""
    return batchkit.write_numbers(sets / "more", 37, seed=1)


@pytest.fixture(scope="session")
def pictures(sets: Path) -> Path:
    """48 pictures with labels."""
    return batchkit.write_pictures(sets / "pictures", 48)


@pytest.fixture
def decoders_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer does not make the first batches while the decoder processes start: every batch is theirs."""
    begin = ProcessEngine.__init__

    def begun(self: ProcessEngine, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        self._helps = False

    monkeypatch.setattr(ProcessEngine, "__init__", begun)


BAD = tuple(range(3, 48, 7))


@pytest.fixture(scope="session")
def damaged(sets: Path) -> Path:
    """48 pictures, one in seven of which no decoder takes: 3, 10, 17, ..."""
    return batchkit.write_pictures(sets / "damaged", 48, bad=BAD, seed=1)
