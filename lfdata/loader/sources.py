"""The data sets that a loader is given: each with its filter, as the spec has it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfdata.dataset import ShardDataset
from lfdata.errors import OptionError
from lfdata.loader import options
from lfdata.loader.plan import fingerprint
from lfdata.loader.spec import SourceSpec

Where = NDArray[np.bool_] | Callable[[ShardDataset], NDArray[np.bool_]]


def filters_of(where: Any, count: int) -> list[Where | None]:
    """The filter of each of ``count`` sources."""
    if where is None or isinstance(where, np.ndarray) or callable(where):
        return [where] * count
    found = options.several("where", where, "filters, one a source, or one filter for all")
    if len(found) != count:
        raise OptionError(f"where holds {len(found)} filters for {count} sources; one filter is a bool array or a function")
    return found


def source_spec(dataset: ShardDataset, where: Where | None) -> SourceSpec:
    """A source with its fingerprint and selection."""
    path, bitmap = dataset.path, None
    if where is not None:
        mask = np.asarray(where(dataset) if callable(where) else where)
        if mask.dtype != bool or mask.shape != (len(dataset),):
            raise OptionError(f"{path}: where is bool of shape ({len(dataset)},), not {mask.dtype} of {mask.shape}")
        bitmap = np.packbits(mask, bitorder="little").tobytes()
    name = printable(Path(dataset.path).name)
    return SourceSpec(os.fsencode(dataset.absolute), fingerprint(dataset, bitmap), bitmap, name)


def printable(text: str) -> str:
    """A file name as text, whatever its bytes."""
    return text.encode("utf-8", "backslashreplace").decode()
