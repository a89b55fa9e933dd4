"""lfdata: training data from memory-mapped shards.

``lfdata.open(path)`` gives map-style access, ``lfdata.ShardIterableDataset`` feeds torch's DataLoader. ``lfdata.format`` holds the
bytes on disk, ``lfdata.codecs`` what turns values into bytes and back, ``lfdata.dataset`` many shards as one. Nothing here imports
``lftrain``.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from lfdata import errors
from lfdata.codecs.pcm import Audio

if TYPE_CHECKING:
    from lfdata.dataset import Ragged, ShardDataset
    from lfdata.device import DeviceLoader
    from lfdata.loader.loader import Loader, NumpyLoader
    from lfdata.loader.stateful import LoaderDataset
    from lfdata.storage import Cache
    from lfdata.torch import ShardIterableDataset

    open = ShardDataset

__version__ = "0.1.0"
__all__ = [
    "Audio",
    "Cache",
    "DeviceLoader",
    "Loader",
    "LoaderDataset",
    "NumpyLoader",
    "Ragged",
    "ShardDataset",
    "ShardIterableDataset",
    "errors",
    "open",
]

if sys.byteorder != "little":  # pragma: no cover - shards are little-endian and columns are read in place
    raise ImportError("lfdata reads shards in place and needs a little-endian machine")

# Imported when asked for: torch takes seconds, and a converter's workers need no reader.
_LATE = {
    "Cache": ("lfdata.storage", "Cache"),
    "DeviceLoader": ("lfdata.device", "DeviceLoader"),
    "Loader": ("lfdata.loader.loader", "Loader"),
    "LoaderDataset": ("lfdata.loader.stateful", "LoaderDataset"),
    "NumpyLoader": ("lfdata.loader.loader", "NumpyLoader"),
    "Ragged": ("lfdata.dataset", "Ragged"),
    "ShardDataset": ("lfdata.dataset", "ShardDataset"),
    "open": ("lfdata.dataset", "ShardDataset"),
    "ShardIterableDataset": ("lfdata.torch", "ShardIterableDataset"),
}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module 'lfdata' has no attribute {name!r}")
    if name == "Loader":
        # Now rather than with the first loader, of which people want the first batch.
        importlib.import_module("torch")
    module, attribute = _LATE[name]
    found = globals()[name] = getattr(importlib.import_module(module), attribute)
    return found
