"""Many shards as one data set: samples, columns, keys.

May import ``lfdata.format`` and ``lfdata.codecs``; never the loader, torch or anything above.
"""

from lfdata.dataset.dataset import ShardDataset
from lfdata.dataset.ragged import Ragged
from lfdata.dataset.reading import Readings
from lfdata.dataset.windows import Windows

__all__ = ["Ragged", "Readings", "ShardDataset", "Windows"]
