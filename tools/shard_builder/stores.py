"""Whole operations of an object store: tried again after what may pass, within a deadline."""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable
from typing import Any, TypeVar

from lfdata.errors import DiskFullError, RemoteError, StorageError
from lfdata.storage import Cache
from lfdata.storage import urls as locations
from lfdata.storage.client import filesystem_of, store_options

T = TypeVar("T")

# One request of a copy; the parts that large objects are uploaded in.
RANGE_BYTES, PART_BYTES = 8 << 20, 64 << 20
_NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError")


def system_of(url: str) -> Any:
    """fsspec's file system of a store. Raises as :func:`lfdata.storage.client.filesystem_of`."""
    return filesystem_of(url, **store_options(url, Cache(), 3))


def bucket_of(url: str) -> str:
    """What of a URL the store must have before anything can lie there."""
    scheme, _, rest = locations.shown(url).partition("://")
    return f"{scheme}://{rest.partition('/')[0]}"


def tried(call: Callable[[], T], url: str) -> T:
    """A whole operation, again after errors that may pass, within the deadline of requests."""
    end, wait = time.monotonic() + Cache().deadline, 0.2
    while True:
        try:
            return call()
        except (FileNotFoundError, PermissionError) as error:
            number, reason = errno.ENOENT, "no such object"
            if isinstance(error, PermissionError):
                number, reason = errno.EACCES, "permission denied; credentials are taken from the environment"
            raise StorageError(locations.shown(url), "transfer", number, reason) from None
        except Exception as error:
            if type(error).__name__ in _NO_CREDENTIALS:
                raise StorageError(
                    locations.shown(url), "transfer", errno.EACCES, "no credentials in the environment"
                ) from None
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise DiskFullError(locations.shown(url), "transfer", error.errno, "no space left") from None
            told = f"{type(error).__name__}: {locations.scrubbed(str(error))}"
        if time.monotonic() + wait > end:
            raise RemoteError(locations.shown(url), "transfer", None, told)
        time.sleep(wait * random.uniform(0.5, 1.0))
        wait = min(5.0, 2 * wait)
