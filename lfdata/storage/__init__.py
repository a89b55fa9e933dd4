"""Data sets by URL: objects read range by range through a bounded cache on the local disk (docs/remote.md).

May import ``lfdata.format`` and ``lfdata.errors``; knows nothing of samples, orders or loaders. What reads remote files is imported when
a data set by URL is opened, fsspec too.
"""

from lfdata.storage.opening import open_store
from lfdata.storage.options import Cache
from lfdata.storage.urls import is_url

__all__ = ["Cache", "is_url", "open_store"]
