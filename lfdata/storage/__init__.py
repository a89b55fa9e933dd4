"""Data sets by URL: objects read range by range through a bounded cache on the local disk (docs/remote.md).

May import ``lfdata.format`` and ``lfdata.errors``; knows nothing of samples, orders or loaders. fsspec is imported when a URL is first opened.
"""

from lfdata.storage.options import Cache
from lfdata.storage.remote import RemoteFile, RemoteStore, open_store
from lfdata.storage.urls import is_url

__all__ = ["Cache", "RemoteFile", "RemoteStore", "is_url", "open_store"]
