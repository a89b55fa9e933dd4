"""Many shards as one data set: samples, columns, keys.

May import ``lfdata.format`` and ``lfdata.codecs``; never the loader, torch or anything above.
"""

from lfdata.dataset.dataset import ShardDataset
from lfdata.dataset.ragged import Ragged

__all__ = ["Ragged", "ShardDataset"]
