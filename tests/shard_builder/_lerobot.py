"""The LeRobot data sets of ``fixtures``, and ways to read and spoil them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shard_builder.sources import open_source
from shard_builder.sources.base import BadRecord, RawSample, Record, Source

pytest.importorskip("av", exc_type=ImportError)
pa: Any = pytest.importorskip("pyarrow", exc_type=ImportError)
pq: Any = pytest.importorskip("pyarrow.parquet", exc_type=ImportError)

FIXTURES = Path(__file__).resolve().parent / "fixtures" / "lerobot"
VERSIONS = ("v2.1", "v3.0")
LENGTHS = (7, 12, 5)
# Of pictures the library's values are kept at every fourth pixel.
STEP = 4


def expected(version: str) -> dict[str, Any]:
    """What the real library returned, frame by frame."""
    with np.load(FIXTURES / f"{version}.npz", allow_pickle=False) as stored:
        return dict(stored)


def copy(version: str, to: Path) -> Path:
    """A data set to spoil."""
    return Path(shutil.copytree(FIXTURES / version, to))


def edit_json(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a JSON file in place."""
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def edit_parquet(path: Path, change: Callable[[Any], Any]) -> None:
    """Change a Parquet file in place."""
    pq.write_table(change(pq.read_table(path)), path)


def with_column(table: Any, name: str, values: Any) -> Any:
    """The table with one column replaced."""
    return table.set_column(table.schema.get_field_index(name), name, values)


def scanned(source: Source) -> tuple[list[Record], list[BadRecord]]:
    """Good and bad samples of a scan."""
    found = list(source.scan())
    return [one for one in found if isinstance(one, Record)], [one for one in found if isinstance(one, BadRecord)]


def loaded(source: Source) -> list[RawSample]:
    """Every good sample."""
    return [source.load(record.locator) for record in scanned(source)[0]]


def opened(root: Path, **options: str) -> Source:
    """The source."""
    return open_source(str(root), **options)
