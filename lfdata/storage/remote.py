"""Files of a data set by URL, block by block out of the cache or from the server."""

from __future__ import annotations

import hashlib
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, as_completed
from typing import Any

from lfdata.errors import ChangedError, TruncatedError
from lfdata.format.forking import watch
from lfdata.storage import urls
from lfdata.storage.blockfile import Block, Piece
from lfdata.storage.blocks import UNKNOWN, BlockCache, Claim, Ranking, Refusal
from lfdata.storage.client import Client, Counters
from lfdata.storage.options import Cache
from lfdata.storage.workers import Workers

Got = dict[int, memoryview]
"""Blocks by number."""

# How long a block that another process fetches is waited for, before it is fetched here too.
_PATIENCE = 30.0


class RemoteStore:
    """A directory by URL, read through a cache. Thread-safe, and may be used after ``fork``.

    Args:
        url: of the directory. A path or ``file://`` URL is read like any other.
        options: of the cache.

    Raises:
        OptionError: the URL holds credentials, or has an unknown protocol. MissingExtraError. StorageError: the cache cannot be made.
    """

    def __init__(self, url: str, options: Cache) -> None:
        self.url, self.options = urls.checked(url), options
        self.name = urls.shown(self.url)
        self.counters = Counters()
        self.lock = threading.Lock()
        self.running: dict[Block, Future[Got]] = {}
        self._tags: dict[str, str] = {}
        self._ranking: Ranking | None = None
        self._forked = False
        self._begin()
        watch(self)

    def _begin(self) -> None:
        """What does not survive a fork: connections, threads, locked files."""
        self.client = Client(self.url, self.options, self.counters)
        self.needed = Workers(self.options.threads, "fetch")
        self.ahead = Workers(self.options.threads, "ahead")
        self.cache = BlockCache(self.options.path, self.options.max_bytes, self.counters, self._ranking)
        for thing in (self.needed, self.ahead, self.cache):
            weakref.finalize(self, thing.close).atexit = False

    def after_fork(self) -> None:
        """See :class:`lfdata.format.forking.Forked`. The rest waits until it is needed."""
        self.lock = threading.Lock()
        self.running = {}
        self.counters = Counters()
        self._forked = True

    def live(self) -> None:
        """Make sure that connections and threads are this process's."""
        if self._forked:
            with self.lock:
                if self._forked:
                    self._begin()
                    self._forked = False

    def __repr__(self) -> str:
        return f"RemoteStore({self.name!r})"

    def rank_by(self, ranking: Ranking | None) -> None:
        """Have blocks given up by their next use."""
        self._ranking = self.cache.ranking = ranking

    def address(self, name: str) -> str:
        """The URL of a file."""
        return urls.below(self.url, name)

    def read_all(self, name: str, limit: int) -> bytes:
        """A whole small file, from the server. Raises as :meth:`Client.read_all`."""
        self.live()
        return self.client.read_all(self.address(name), limit)

    def stat(self, name: str) -> tuple[int, str]:
        """Length and entity tag of a file."""
        self.live()
        return self.client.stat(self.address(name))

    def open(self, name: str, size: int, identity: str) -> RemoteFile:
        """A file of ``size`` bytes. ``identity``: what its content is known by, wherever it lies."""
        return RemoteFile(self, name, size, hashlib.sha256(identity.encode()).digest()[:16])

    def fetch(self, name: str, start: int, buffer: memoryview, size: int) -> None:
        """Bytes of a file from the server, which must be the same object all along."""
        with self.lock:
            before = self._tags.get(name, "")
        tag = self.client.fetch(self.address(name), start, buffer, size, before)
        with self.lock:
            if self._tags.setdefault(name, tag) != tag:
                raise ChangedError(urls.shown(self.address(name)), None, "the object was replaced while it was in use")


class RemoteFile:
    """A file of a :class:`RemoteStore`: a :class:`lfdata.format.files.ScatterFile`."""

    def __init__(self, store: RemoteStore, name: str, size: int, identity: bytes) -> None:
        self.store, self.file, self.size, self.identity = store, name, size, identity
        self.name = urls.shown(store.address(name))
        self._block_bytes = store.options.block_bytes
        # Blocks, from the first on, that hold nothing but payloads; see :class:`lfdata.storage.future.Future`.
        self.payload_blocks = -(-size // self._block_bytes)

    def block(self, number: int) -> Block:
        """One block."""
        start = number * self._block_bytes
        return Block(self.identity, self._block_bytes, number, min(self._block_bytes, self.size - start))

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """See :class:`lfdata.format.files.RangeFile`."""
        self.read_many([(buffer, offset)])

    def read_many(self, parts: Iterable[Piece]) -> None:
        """Fill buffers, each from an offset on. Blocks that are not in the cache are fetched at the same time.

        Raises:
            TruncatedError: beyond the end. StorageError, ChangedError: see docs/remote.md.
        """
        self.store.live()
        store, missing = self.store, self._missing(parts)
        if not missing:
            return
        waited: dict[Future[Got], None] = {}
        with store.lock:
            alone = [number for number in sorted(missing) if self.block(number) not in store.running]
            for number in missing:
                if (found := store.running.get(self.block(number))) is not None:
                    waited[found] = None
            for first, count in self._runs(alone):
                waited[self._start(first, count, None)] = None
        for future in as_completed(waited):
            # What was copied need not be held until the last one comes.
            del waited[future]
            got = future.result() if not future.cancelled() else {}
            for number in [number for number in missing if number in got]:
                for into, offset in missing.pop(number):
                    into[:] = got[number][offset : offset + len(into)]
        for number, pieces in missing.items():
            # What was being fetched ahead and had no room after all.
            data = self._fetch(number, 1, None)[number]
            for into, offset in pieces:
                into[:] = data[offset : offset + len(into)]

    def _missing(self, parts: Iterable[Piece]) -> dict[int, list[Piece]]:
        """The parts cut at blocks; what the cache has is filled in, the rest is given."""
        wanted: dict[int, list[Piece]] = {}
        for buffer, offset in parts:
            if offset < 0 or offset + len(buffer) > self.size:
                raise TruncatedError(
                    self.name, self.size, f"bytes {offset} to {offset + len(buffer)} wanted, it has {self.size}"
                )
            at = 0
            while at < len(buffer):
                number, begin = divmod(offset + at, self._block_bytes)
                count = min(self._block_bytes - begin, len(buffer) - at)
                wanted.setdefault(number, []).append((buffer[at : at + count], begin))
                at += count
        cache = self.store.cache
        missing = {number: pieces for number, pieces in wanted.items() if not cache.read(self.block(number), pieces)}
        self.store.counters.add("hits", len(wanted) - len(missing))
        self.store.counters.add("misses", len(missing))
        return missing

    def _runs(self, numbers: Sequence[int]) -> list[tuple[int, int]]:
        """Neighbouring blocks as (first, count), as many as one request may ask for."""
        most = max(1, self.store.options.request_bytes // self._block_bytes)
        runs: list[tuple[int, int]] = []
        for number in numbers:
            if runs and sum(runs[-1]) == number and runs[-1][1] < most:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((number, 1))
        return runs

    def blocks_of(self, offset: int, length: int) -> range:
        """Numbers of the blocks that a range lies in."""
        return range(offset // self._block_bytes, -(-(offset + length) // self._block_bytes)) if length else range(0)

    def fetch_ahead(self, needed: Mapping[int, int]) -> list[Future[Got]]:
        """Begin to fetch blocks, each with the step that needs it: those that are not there, nor under way, as far as there is room."""
        store = self.store
        store.live()
        numbers = [number for number in sorted(needed) if not store.cache.has(self.block(number))]
        with store.lock:
            rest = [number for number in numbers if self.block(number) not in store.running]
            return [self._start(first, count, needed) for first, count in self._runs(rest)]

    def _start(self, first: int, count: int, ahead: Mapping[int, int] | None) -> Future[Got]:
        """Under the store's lock."""
        store = self.store
        blocks = [self.block(number) for number in range(first, first + count)]

        def work() -> Got:
            try:
                return self._fetch(first, count, ahead)
            finally:
                with store.lock:
                    for block in blocks:
                        store.running.pop(block, None)

        future = (store.needed if ahead is None else store.ahead).submit(work)
        if not future.cancelled():
            store.running.update(dict.fromkeys(blocks, future))
        return future

    def _fetch(self, first: int, count: int, ahead: Mapping[int, int] | None) -> Got:
        """Blocks from the server, kept if that can be; those that another process has or fetches, from the cache.

        ``ahead``: the steps that need them; ``None``: they are needed now.
        """
        got: Got = {}
        claims: dict[int, Claim] = {}
        busy, ours = [], []
        try:
            for number in range(first, first + count):
                answer = self.store.cache.claim(self.block(number), UNKNOWN if ahead is None else ahead[number])
                if isinstance(answer, Claim):
                    claims[number] = answer
                    ours.append(number)
                elif answer is Refusal.FULL:
                    if ahead is not None:
                        break
                    ours.append(number)
                    self.store.counters.add("unkept")
                else:
                    busy.append(number)
            for start, length in self._runs(ours):
                self._get(start, length, got, claims)
        finally:
            for claim in claims.values():
                self.store.cache.abandon(claim)
        for number in busy:
            if (data := self._from_another(number, ahead is None)) is not None:
                got[number] = data
        return got

    def _get(self, first: int, count: int, got: Got, claims: dict[int, Claim]) -> None:
        """One request, cut into blocks; those that are claimed are kept."""
        start = first * self._block_bytes
        data = memoryview(bytearray(min(count * self._block_bytes, self.size - start)))
        self.store.fetch(self.file, start, data, self.size)
        for number in range(first, first + count):
            at = (number - first) * self._block_bytes
            got[number] = data[at : at + self._block_bytes]
            if (claim := claims.pop(number, None)) is not None and not self.store.cache.commit(claim, got[number]):
                self.store.counters.add("unkept")

    def _from_another(self, number: int, needed: bool) -> memoryview | None:
        """A block that another process was fetching. If that one dies or takes too long, it is fetched here."""
        block, cache = self.block(number), self.store.cache
        data = memoryview(bytearray(block.length))
        end, wait = time.monotonic() + _PATIENCE, 0.002
        while time.monotonic() < end:
            if cache.has(block) and cache.read(block, [(data, 0)]):
                return data
            answer = cache.claim(block, UNKNOWN)
            if isinstance(answer, Claim):
                got: Got = {}
                claims = {number: answer}
                try:
                    self._get(number, 1, got, claims)
                finally:
                    for claim in claims.values():
                        cache.abandon(claim)
                return got[number]
            if answer is Refusal.FULL or not needed:
                break
            time.sleep(wait)
            wait = min(0.05, 2 * wait)
        if not needed:
            return None
        self.store.counters.add("unkept")
        self.store.fetch(self.file, number * self._block_bytes, data, self.size)
        return data

    def distrust(self, offset: int, length: int) -> None:
        """Have the blocks of a range fetched anew: the format says that their bytes are wrong."""
        for number in self.blocks_of(offset, length):
            self.store.counters.add("damaged")
            self.store.cache.remove(self.block(number))


def report(stores: Iterable[Any]) -> dict[str, int]:
    """Counters of several stores together; of no store, nothing."""
    total: dict[str, int] = {}
    for store in stores:
        for name, count in store.counters.report().items():
            total[name] = total.get(name, 0) + count
    return total
