"""What a loader is given, looked at: ranks, filters, sources."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfdata.dataset import ShardDataset
from lfdata.errors import OptionError, printable
from lfdata.loader import options
from lfdata.loader.plan import fingerprint
from lfdata.loader.spec import SourceSpec

Where = NDArray[np.bool_] | Callable[[ShardDataset], NDArray[np.bool_]]


def this_rank(rank: int | None, world: int | None) -> tuple[int, int]:
    """Rank and world size: as given, else of torch.distributed, else of the environment, else 0 of 1."""
    if (rank is None) != (world is None):
        raise OptionError("rank and world_size go together")
    if rank is not None and world is not None:
        world = options.whole("world_size", world, 1, options.MOST_WORLD)
        return options.whole("rank", rank, 0, world - 1), world
    # Whoever did not import it has no process group.
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    world = options.from_environment("WORLD_SIZE", 1, 1)
    if world > 1 and "RANK" not in os.environ:
        raise OptionError(
            f"the environment variable WORLD_SIZE is {world} and RANK is not set: set both, or give rank and world_size"
        )
    return options.whole("the environment variable RANK", options.from_environment("RANK", 0, 0), 0, world - 1), world


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
