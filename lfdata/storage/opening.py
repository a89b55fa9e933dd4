"""Where a data set lies: in place, or behind a cache."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from lfdata.errors import StorageError
from lfdata.storage import urls
from lfdata.storage.options import Cache, as_cache

if TYPE_CHECKING:
    from lfdata.storage.remote import RemoteStore


def open_store(location: str | os.PathLike[str], cache: Cache | str | os.PathLike[str] | None) -> RemoteStore | None:
    """The store of a data set by URL, or by path with a cache; ``None`` for one that is read in place."""
    local: str | os.PathLike[str] | None = location
    url = ""
    if urls.is_url(location):
        local = urls.local_path(urls.checked(str(location)))
        url = str(location) if local is None else ""
    if not url:
        if cache is None or local is None:
            return None
        path = os.path.abspath(os.fspath(local))
        if not os.path.isdir(path):
            raise StorageError(path, "open", None, "no such directory")
        url = f"file://{path}"
    # Most data sets are local, and a decoder process that starts is waited for.
    from lfdata.storage.remote import RemoteStore

    return RemoteStore(url, as_cache(cache))
