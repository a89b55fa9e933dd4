"""How remote files are read and kept."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from lfdata.errors import OptionError

PAGE = 1 << 16
FEWEST_BLOCKS = 16
DEFAULT_BYTES = 64 << 30


class Cache(msgspec.Struct, frozen=True):
    """A cache on the local disk for data sets by URL (docs/remote.md). Processes that share a directory give the same sizes.

    Attributes:
        directory: where; ``""``: ``$LFDATA_CACHE``, else ``lfdata`` below ``$XDG_CACHE_HOME`` or ``~/.cache``.
        max_bytes: the most it may hold. 64 GiB: a part of what a node has, more than a window of block shuffle.
        block_bytes: unit of fetching and keeping; a multiple of 64 KiB. 1 MiB: a few samples, see docs/remote.md.
        request_bytes: the most one request asks for. 8 MiB: a row group, and a second of a slow connection.
        threads: requests under way at a time, and as many again for what is fetched ahead.
        ahead_bytes: how much is fetched before it is needed; 0 for nothing.
        deadline: seconds for one request with all its repetitions; then :class:`lfdata.errors.RemoteError`.
        timeout: seconds without a byte after which a connection is given up and tried again.
    """

    directory: str = ""
    max_bytes: int = DEFAULT_BYTES
    block_bytes: int = 1 << 20
    request_bytes: int = 8 << 20
    threads: int = 16
    ahead_bytes: int = 256 << 20
    deadline: float = 120.0
    timeout: float = 20.0

    def __post_init__(self) -> None:
        for name in ("max_bytes", "block_bytes", "request_bytes", "threads", "ahead_bytes"):
            if not isinstance(value := getattr(self, name), int):
                raise OptionError(f"{name} is {value!r}; it is an integer")
        if self.block_bytes < PAGE or self.block_bytes % PAGE or self.block_bytes > 1 << 30:
            raise OptionError(f"block_bytes is {self.block_bytes}; it is a multiple of {PAGE}, at most a GiB")
        if self.max_bytes < FEWEST_BLOCKS * self.block_bytes:
            raise OptionError(
                f"max_bytes is {self.max_bytes}; a cache holds at least {FEWEST_BLOCKS} blocks of {self.block_bytes} bytes"
            )
        if not 1 <= self.threads <= 256 or self.request_bytes < 1 or self.ahead_bytes < 0:
            raise OptionError("threads is 1 to 256, request_bytes at least 1, ahead_bytes at least 0")
        if not 0 < self.timeout <= self.deadline < float("inf"):
            raise OptionError(
                f"timeout is {self.timeout} and deadline {self.deadline}; they are seconds, the timeout at most the deadline"
            )

    @property
    def path(self) -> Path:
        """The directory, absolute."""
        if self.directory:
            return Path(os.path.abspath(os.path.expanduser(self.directory)))
        if named := os.environ.get("LFDATA_CACHE"):
            return Path(os.path.abspath(named))
        return Path(os.path.abspath(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"), "lfdata")


def as_cache(given: Cache | str | os.PathLike[str] | None) -> Cache:
    """Options as given: whole, or the directory alone."""
    if isinstance(given, Cache):
        return given
    if given is not None and not isinstance(given, str | os.PathLike):
        raise OptionError(f"cache is {given!r}; it is a Cache or a directory")
    return Cache() if given is None else Cache(directory=os.fspath(given))
