"""The cache directory: blocks of bounded bytes, shared by processes, with no lock that outlives one (docs/remote.md)."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lfdata.errors import StorageError
from lfdata.storage import blockfile
from lfdata.storage.blockfile import Block, Piece
from lfdata.storage.client import Counters

NEVER = 1 << 62
"""A next use beyond everything that is known."""
UNKNOWN = -1
"""The next use of a block that no plan knows."""

Ranking = Callable[[list[Block]], NDArray[np.int64]]
"""Next use of blocks, as steps: :data:`NEVER`, or :data:`UNKNOWN`."""

_USAGE = struct.Struct("<8sQ")
_MAGIC = b"LFUSAGE1"
_PART = ".part"
# Somebody who holds a lock longer than this is stopped, not busy: a few system calls are done under it.
# It is not waited for again and again: until it goes on, blocks are not kept.
_LOCK_SECONDS, _STUCK_SECONDS = 5.0, 60.0
# A block that no plan knows is stale when it was not used for so long; its time of use is noted no more often than that.
_STALE_SECONDS, _TOUCH_SECONDS = 600.0, 60.0
# Blocks to give up are chosen so many at a time, as a part of those there are.
_VICTIMS_SHARE = 64
log = logging.getLogger("lfdata")


class Refusal(Enum):
    """Why a block is not to be fetched into the cache by the asker."""

    THERE = "there"
    BUSY = "busy"
    FULL = "full"


@dataclass(slots=True)
class Claim:
    """The right to write a block: a locked file, and its bytes reserved."""

    block: Block
    descriptor: int


class BlockCache:
    """Blocks below a directory.

    Args:
        directory: made if it is not there.
        max_bytes: the most that all blocks take, those being fetched included.
        ranking: says when blocks are needed next; without it all are unknown, and the one unused longest is given up.

    Raises:
        StorageError: the directory cannot be made or written to.
    """

    def __init__(self, directory: Path, max_bytes: int, counters: Counters, ranking: Ranking | None = None) -> None:
        self.directory, self.max_bytes = directory, max_bytes
        self.ranking = ranking
        self._counters = counters
        self._blocks = directory / "blocks"
        self._mutex = threading.Lock()
        self._victims: deque[tuple[Block, int]] = deque()
        self._warned = False
        self._stuck = 0.0
        self._usage = -1
        try:
            self._open_usage()
        except OSError as error:
            raise StorageError(directory, "open the cache", error.errno, error.strerror or str(error)) from error
        try:
            with self._locked() as got:
                if got:
                    self._scan()
                    # The bound may be smaller than it was.
                    self._make_room(0, UNKNOWN)
        except OSError as error:
            raise StorageError(directory, "open the cache", error.errno, error.strerror or str(error)) from error

    def _open_usage(self) -> None:
        """Directory and file of the count, made where they are not there. Raises ``OSError``."""
        self._blocks.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.directory / "usage", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            # Written in place from now on, which needs no room.
            if os.fstat(descriptor).st_size < _USAGE.size:
                os.pwrite(descriptor, _USAGE.pack(b"", 0), 0)
        except BaseException:
            os.close(descriptor)
            raise
        if self._usage >= 0:
            os.close(self._usage)
        self._usage = descriptor

    def close(self) -> None:
        """Give the descriptor back."""
        with self._mutex:
            if self._usage >= 0:
                os.close(self._usage)
                self._usage = -1

    # -- reading ------------------------------------------------------------------------------------------------------

    def read(self, block: Block, pieces: Sequence[Piece]) -> bool:
        """Fill pieces of a block from the cache; false if it is not there, or damaged (then it is removed)."""
        try:
            descriptor = os.open(self._blocks / block.name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return False
        try:
            good = blockfile.read(descriptor, block, pieces)
            found = os.fstat(descriptor)
            if good and time.time() - found.st_mtime > _TOUCH_SECONDS:
                with contextlib.suppress(OSError):
                    os.utime(descriptor)
        except OSError:
            good = False
        finally:
            os.close(descriptor)
        if not good:
            self._counters.add("damaged")
            self.remove(block)
        return good

    def has(self, block: Block) -> bool:
        """Whether a block is there."""
        return os.path.exists(self._blocks / block.name)

    def remove(self, block: Block) -> None:
        """Remove a block, if it is there."""
        with self._locked() as got:
            if got:
                self._unlink(block)

    # -- writing ------------------------------------------------------------------------------------------------------

    def claim(self, block: Block, before: int) -> Claim | Refusal:
        """The right to fetch a block; it ends with :meth:`commit` or :meth:`abandon`, or with this process.

        Args:
            before: the step that needs it. Blocks that are needed sooner are not given up for it (:data:`UNKNOWN`: any is).
        """
        part = self._blocks / (block.name + _PART)
        with self._locked() as got:
            if not got:
                return Refusal.FULL
            try:
                if self.has(block):
                    return Refusal.THERE
                descriptor, taken_over = self._open_part(part)
                if descriptor < 0:
                    return Refusal.BUSY
                try:
                    if taken_over or self._make_room(block.file_bytes, before, part.name):
                        return Claim(block, descriptor)
                except OSError as error:
                    self._not_kept(error)
                os.unlink(part)
                os.close(descriptor)
                return Refusal.FULL
            except OSError as error:
                self._not_kept(error)
                return Refusal.FULL

    def _open_part(self, part: Path) -> tuple[int, bool]:
        """A locked descriptor (-1: somebody else has the lock), and whether the file was there: its bytes are reserved then."""
        while True:
            try:
                descriptor, there = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), False
            except FileExistsError:
                try:
                    descriptor, there = os.open(part, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW), True
                except FileNotFoundError:
                    continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(descriptor)
                return -1, True
            with contextlib.suppress(FileNotFoundError):
                if os.stat(part).st_ino == os.fstat(descriptor).st_ino:
                    return descriptor, there
            # It became the block's own file between these calls.
            os.close(descriptor)

    def commit(self, claim: Claim, data: memoryview) -> bool:
        """Write a block and make it visible; false if the disk refuses (then nothing stays)."""
        part, got = self._blocks / (claim.block.name + _PART), False
        try:
            blockfile.write(claim.descriptor, claim.block, data)
            # Under the lock: a directory that is being counted might have it under neither name, or both.
            with self._locked() as got:
                if got:
                    os.rename(part, self._blocks / claim.block.name)
        except OSError as error:
            self._not_kept(error)
            got = False
        if not got:
            self.abandon(claim)
            return False
        os.close(claim.descriptor)
        return True

    def abandon(self, claim: Claim) -> None:
        """Give a claim up."""
        try:
            with self._locked() as got, contextlib.suppress(OSError):
                # Without the lock the part stays; it is dead then, and found by the next scan.
                if got:
                    os.unlink(self._blocks / (claim.block.name + _PART))
                    self._add(-claim.block.file_bytes)
        finally:
            os.close(claim.descriptor)

    def _not_kept(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            log.warning("%s: blocks are not kept: %s", self.directory, error.strerror or error)

    # -- bytes --------------------------------------------------------------------------------------------------------

    @property
    def bytes(self) -> int:
        """Bytes of all blocks and reservations."""
        found = os.pread(self._usage, _USAGE.size, 0)
        if len(found) == _USAGE.size and (unpacked := _USAGE.unpack(found))[0] == _MAGIC:
            return int(unpacked[1])
        return -1

    def _add(self, count: int) -> None:
        """Raises ``OSError`` where more cannot be counted; too much that is counted is put right by the next scan."""
        try:
            os.pwrite(self._usage, _USAGE.pack(_MAGIC, max(0, self.bytes + count)), 0)
        except OSError:
            if count > 0:
                raise

    @contextlib.contextmanager
    def _locked(self) -> Iterator[bool]:
        """Alone among threads and processes; false where that could not be had in time."""
        if not self._mutex.acquire(timeout=_LOCK_SECONDS):
            yield False
            return
        try:
            got = self._usage >= 0 and self._lock_usage()
            try:
                yield got
            finally:
                if got:
                    fcntl.flock(self._usage, fcntl.LOCK_UN)
        finally:
            self._mutex.release()

    def _lock_usage(self) -> bool:
        now = time.monotonic()
        end, wait = now + (_LOCK_SECONDS if now > self._stuck else 0.0), 0.0005
        while True:
            try:
                fcntl.flock(self._usage, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(self._usage).st_ino == os.stat(self.directory / "usage").st_ino:
                    self._stuck = 0.0
                    return True
                raise FileNotFoundError
            except FileNotFoundError:
                # Somebody removed the cache under its users.
                try:
                    self._open_usage()
                except OSError as error:
                    self._not_kept(error)
                    return False
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EINTR):
                    with contextlib.suppress(OSError):
                        fcntl.flock(self._usage, fcntl.LOCK_UN)
                    return False
                time.sleep(wait)
                wait = min(0.02, 2 * wait)
            if time.monotonic() > end:
                self._stuck = time.monotonic() + _STUCK_SECONDS
                return False

    def _make_room(self, size: int, before: int, part: str = "") -> bool:
        """Reserve for a part that is there already, giving blocks up. Under the lock."""
        scanned = False
        if self.bytes < 0:
            self._scan(part)
        while self.bytes + size > self.max_bytes:
            if not self._victims:
                if scanned:
                    return False
                self._choose(self._scan(part))
                scanned = True
                continue
            victim, use = self._victims[0]
            if before != UNKNOWN and use != UNKNOWN and use <= before:
                if scanned:
                    return False
                self._victims.clear()
                continue
            self._victims.popleft()
            if self._unlink(victim):
                self._counters.add("evicted")
                scanned = False
        self._add(size)
        return True

    def _unlink(self, block: Block) -> bool:
        try:
            os.unlink(self._blocks / block.name)
        except OSError:
            return False
        self._add(-block.file_bytes)
        return True

    def _scan(self, but: str = "") -> list[tuple[Block, float]]:
        """What is there, with times of use; counted anew, without the parts of dead processes, and without one file. Under the lock."""
        found, total = [], 0
        for entry in os.scandir(self._blocks):
            block = blockfile.parse(entry.name.removesuffix(_PART))
            if block is None or entry.name == but:
                continue
            if entry.name.endswith(_PART):
                if not self._remove_dead(entry.path):
                    total += block.file_bytes
                continue
            try:
                found.append((block, entry.stat(follow_symlinks=False).st_mtime))
            except OSError:
                continue
            total += block.file_bytes
        os.pwrite(self._usage, _USAGE.pack(_MAGIC, total), 0)
        return found

    def _remove_dead(self, path: str) -> bool:
        """Whether a part was nobody's, and is gone."""
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.stat(path).st_ino == os.fstat(descriptor).st_ino:
                os.unlink(path)
            return True
        except OSError:
            return not os.path.exists(path)
        finally:
            os.close(descriptor)

    def _choose(self, found: list[tuple[Block, float]]) -> None:
        """The blocks to be given up next: stale ones, then by next use from the furthest on, then those that no plan knows, oldest first."""
        if not found:
            return
        uses = self.ranking([block for block, _ in found]) if self.ranking is not None else np.full(len(found), UNKNOWN)
        times, now = np.array([when for _, when in found]), time.time()
        unknown = uses == UNKNOWN
        group = np.where(unknown, np.where(now - times > _STALE_SECONDS, 0, 2), 1)
        order = np.lexsort((times, np.where(unknown, 0, -uses), group))
        count = max(1, len(found) // _VICTIMS_SHARE)
        self._victims.extend((found[number][0], int(uses[number])) for number in order[:count].tolist())
