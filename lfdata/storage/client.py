"""Ranges of objects by URL: tried again after what may pass, taken up where they stopped, within a deadline."""

from __future__ import annotations

import importlib
import os
import random
import threading
import time
from typing import Any

from lfdata.errors import ChangedError, LimitError, MissingExtraError, OptionError, RemoteError
from lfdata.storage.options import Cache
from lfdata.storage.transports import Again, Progress, Transport, make
from lfdata.storage.urls import protocol, shown

_FIRST_WAIT, _LONGEST_WAIT = 0.1, 5.0
_EXTRAS = {"http": "remote", "https": "remote", "s3": "remote", "s3a": "remote", "gs": "gcs", "gcs": "gcs"}

_GOOGLE = ("gs", "gcs")


class Counters:
    """What was asked of servers, and what the cache did. Added to by several threads."""

    NAMES = ("requests", "retries", "fetched_bytes", "hits", "misses", "damaged", "unkept", "evicted")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(self.NAMES, 0)

    def add(self, name: str, count: int = 1) -> None:
        """Count."""
        with self._lock:
            self._counts[name] += count

    def report(self) -> dict[str, int]:
        """All of them."""
        with self._lock:
            return dict(self._counts)


class Client:
    """Reads objects of one protocol. Thread-safe; not to be used in a forked child."""

    def __init__(self, url: str, options: Cache, counters: Counters) -> None:
        self._options, self._counters = options, counters
        self._given_up = threading.Event()
        # Repetitions are ours.
        filesystem = filesystem_of(url, **store_options(url, options, 1))
        self._transport: Transport = make(filesystem, options.timeout)

    def stat(self, url: str) -> tuple[int, str]:
        """Length and entity tag of an object. Raises as :meth:`fetch`."""
        progress = Progress()
        self._try(url, 0, memoryview(b""), progress)
        if progress.total is None:
            raise RemoteError(shown(url), "read", None, "the server does not say how long the object is")
        return progress.total, progress.tag

    def fetch(self, url: str, start: int, buffer: memoryview, size: int | None, tag: str) -> str:
        """Fill ``buffer`` from byte ``start`` of an object on; gives its entity tag.

        Args:
            size: how long the object must be, if known.
            tag: the entity tag it must have, if known.

        Raises:
            StorageError: there is no such object, or no permission. ChangedError: another object than expected.
            RemoteError: failed until the deadline, or refused.
        """
        progress = Progress(tag=tag)
        if buffer:
            self._try(url, start, buffer, progress)
        if size is not None and progress.total is not None and progress.total != size:
            raise ChangedError(shown(url), None, f"the object has {progress.total} bytes, {size} were expected")
        return progress.tag

    def read_all(self, url: str, limit: int) -> bytes:
        """A whole object. Raises as :meth:`fetch`; LimitError: it is larger than ``limit``."""
        size, tag = self.stat(url)
        if size > limit:
            raise LimitError(shown(url), None, f"an object of {size} bytes; the limit is {limit}")
        data = bytearray(size)
        self.fetch(url, 0, memoryview(data), size, tag)
        return bytes(data)

    def give_up(self) -> None:
        """Let reads of other threads fail after the attempt that they are at."""
        self._given_up.set()

    def _try(self, url: str, start: int, buffer: memoryview, progress: Progress) -> None:
        end, wait = time.monotonic() + self._options.deadline, _FIRST_WAIT
        tries = 0
        while True:
            left, before = end - time.monotonic(), progress.done
            tries += 1
            self._counters.add("requests")
            try:
                self._transport.attempt(url, start, buffer, progress, max(0.05, left))
                return
            except Again as error:
                reason = str(error)
            finally:
                self._counters.add("fetched_bytes", progress.done - before)
            if progress.done > before:
                wait = _FIRST_WAIT
            pause = wait * random.uniform(0.5, 1.0)
            if self._given_up.is_set():
                raise RemoteError(shown(url), f"read at byte {start + progress.done}", None, f"given up; the last: {reason}")
            if time.monotonic() + pause >= end:
                told = f"{tries} attempts in {self._options.deadline:g} s failed; the last: {reason}"
                raise RemoteError(shown(url), f"read at byte {start + progress.done}", None, told)
            self._counters.add("retries")
            self._given_up.wait(pause)
            wait = min(_LONGEST_WAIT, 2 * wait)


def filesystem_of(url: str, **options: Any) -> Any:
    """fsspec's file system for a URL.

    Raises:
        MissingExtraError: fsspec, or what it needs for this protocol, is not installed. OptionError: no such protocol.
    """
    scheme = protocol(url)
    try:
        fsspec = importlib.import_module("fsspec")
        if scheme in _GOOGLE:
            # Its plain file system: the one it registers asks over gRPC what kind a bucket is, and waits where it cannot.
            return importlib.import_module("gcsfs.core").GCSFileSystem(skip_instance_cache=True, **options)
        return fsspec.filesystem(scheme, skip_instance_cache=True, **options)
    except ImportError as error:
        extra = _EXTRAS.get(scheme)
        advice = f"pip install 'lfdata[{extra}]'" if extra else "pip install 'lfdata[remote]', and what fsspec asks for"
        raise MissingExtraError(f"{shown(url)}: {scheme}:// needs an extra: {advice} ({error})") from error
    except ValueError as error:
        raise OptionError(f"{shown(url)}: fsspec knows no protocol {scheme!r}") from error
    except TypeError as error:
        raise OptionError(f"{shown(url)}: {scheme}:// cannot be opened by its URL alone: {error}") from error


def store_options(url: str, options: Cache, attempts: int) -> dict[str, Any]:
    """What the file system of a URL is told: where the store is, how long it may take, how often its library tries by itself."""
    if protocol(url) not in ("s3", "s3a"):
        return {}
    config = {
        "connect_timeout": options.timeout,
        "read_timeout": options.timeout,
        "retries": {"total_max_attempts": attempts},
        # As many as there are threads for what is needed and for what is fetched ahead.
        "max_pool_connections": 2 * options.threads,
    }
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    return {"config_kwargs": config, "client_kwargs": {"endpoint_url": endpoint} if endpoint else {}}
