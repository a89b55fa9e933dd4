"""lfdata: training data from memory-mapped shards.

``lfdata.open(path)`` gives map-style access, ``lfdata.ShardIterableDataset`` feeds torch's DataLoader. ``lfdata.format`` holds the
bytes on disk, ``lfdata.codecs`` what turns values into bytes and back, ``lfdata.dataset`` many shards as one. Nothing here imports
``lftrain``.
"""

import sys
from typing import TYPE_CHECKING, Any

from lfdata import errors
from lfdata.codecs.pcm import Audio
from lfdata.dataset import Ragged, ShardDataset

if TYPE_CHECKING:
    from lfdata.torch import ShardIterableDataset

__version__ = "0.1.0"
__all__ = ["Audio", "Ragged", "ShardDataset", "ShardIterableDataset", "errors", "open"]

if sys.byteorder != "little":  # pragma: no cover - shards are little-endian and columns are read in place
    raise ImportError("lfdata reads shards in place and needs a little-endian machine")

open = ShardDataset


def __getattr__(name: str) -> Any:
    # torch takes seconds to import: only those who ask for it wait.
    if name == "ShardIterableDataset":
        from lfdata.torch import ShardIterableDataset

        return ShardIterableDataset
    raise AttributeError(f"module 'lfdata' has no attribute {name!r}")
