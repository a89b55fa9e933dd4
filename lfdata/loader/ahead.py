"""Fetches what the next steps need before they are made, and tells the cache which blocks are needed when (docs/remote.md)."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future as Fetched
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfdata.dataset import ShardDataset
from lfdata.loader.plan import Plan
from lfdata.loader.spec import Spec
from lfdata.storage.blockfile import Block
from lfdata.storage.future import STRETCH_BITS, Future
from lfdata.storage.remote import RemoteFile, report

# Accesses that are known ahead, for the choice of what to give up: some 32 MiB.
HORIZON = 1 << 20
# Rows that are looked up at a time: few at the beginning, since the first fetch waits for them.
_FIRST_ROWS, _MOST_ROWS = 256, 1 << 14
# Fetches begun at a time, as a multiple of the threads that do them.
_QUEUED = 2
_LOOK_SECONDS = 0.02
# It ends after what it is doing, unless that waits for a server.
END_SECONDS = 2.0


@dataclass(slots=True)
class _Needs:
    """What this rank reads in some steps, in their order: number of the file, block, step (int64, one each). ``at``: how many are fetched."""

    times: NDArray[np.int64]
    files: NDArray[np.int64]
    blocks: NDArray[np.int64]
    at: int = 0


class Ahead:
    """Follows the steps that are made. The first one starts it; it ends with the last reference to it."""

    def __init__(self, plan: Plan, sources: Sequence[ShardDataset], spec: Spec) -> None:
        self._work = _Work(plan, sources, spec)
        # At the end of the program too: a thread that the interpreter ends inside numpy takes the process with it.
        weakref.finalize(self, self._work.stop)

    def report(self) -> dict[str, int]:
        """What was asked of servers and of the caches by now."""
        return report(self._work.stores)

    @contextmanager
    def making(self, epoch: int, step: int) -> Iterator[None]:
        """Steps from this one on are being made within."""
        self._work.begin(epoch, step)
        try:
            yield
        finally:
            self._work.end(epoch, step)


class _Work:
    """What the thread has; it keeps no reference to who started it."""

    def __init__(self, plan: Plan, sources: Sequence[ShardDataset], spec: Spec) -> None:
        self._plan, self._sources, self._spec = plan, sources, spec
        stores = {source.store: None for source in sources if source.store is not None}
        self.stores = list(stores)
        self._options = self.stores[0].options
        self._future = Future()
        for store in stores:
            store.rank_by(self._future)
        self._fields = [
            field.name
            for field in spec.fields
            if (kind := sources[0].schema[field.name].kind) != "scalar" and not (kind == "audio" and field.transforms)
        ]
        self._files: list[RemoteFile] = []
        self._places: dict[bytes, int] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._making: list[tuple[int, int]] = []
        self._present: tuple[int, int] | None = None
        # Other ranks of the node may be a step behind.
        self._behind = 1 if spec.node[1] > 1 else 0
        self._stopped = False
        self._fetching: list[Fetched[Any]] = []
        self._begin(0, 0)

    def _begin(self, epoch: int, step: int) -> None:
        """Know nothing, from a step on."""
        self._future.clear()
        self._epochs = [(epoch, step, 0)]
        self._cursor, self._time = (epoch, step), 0
        self._rows = _FIRST_ROWS
        self._needs: deque[_Needs] = deque()
        self._taken: deque[tuple[int, int]] = deque()
        self._group = self._options.request_bytes // 8

    def begin(self, epoch: int, step: int) -> None:
        with self._changed:
            self._making.append((epoch, step))
            # The first of those under way: what it reads is not over.
            self._present = min(self._making)
            if self._thread is None and not self._stopped:
                self._thread = threading.Thread(target=self._run, name="lfdata-ahead", daemon=True)
                self._thread.start()
            self._changed.notify()

    def end(self, epoch: int, step: int) -> None:
        with self._changed:
            self._making.remove((epoch, step))
            if self._making:
                self._present = min(self._making)
                self._changed.notify()

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify()
            thread = self._thread
        # The garbage collector may call this in the thread itself.
        if thread is not None and thread is not threading.current_thread():
            thread.join(END_SECONDS)

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._stopped:
                    return
                present = self._present
            assert present is not None
            try:
                busy = self._go(*present)
            except Exception:
                # Whoever reads the same tells it, in its turn; a fetch ahead is no reason to fail.
                self._wait_for_another(present)
                continue
            if not busy:
                with self._changed:
                    if not self._stopped and self._present == present:
                        self._changed.wait(_LOOK_SECONDS if self._fetching else None)

    def _wait_for_another(self, present: tuple[int, int]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._present != present)

    # -- time ---------------------------------------------------------------------------------------------------------

    def _time_of(self, epoch: int, step: int) -> int:
        """Steps from where knowledge began; -1 for what lies before it, or beyond what is known."""
        for known, first, time in reversed(self._epochs):
            if known == epoch and step >= first:
                found = time + step - first
                return found if found <= self._time else -1
        return -1

    def _go(self, epoch: int, step: int) -> bool:
        """A little work: fetch, or look further ahead. False when there is none."""
        now = self._time_of(epoch, step)
        if now < 0:
            self._begin(epoch, step)
            now = 0
        self._future.go(max(0, now - self._behind))
        while self._taken and self._taken[0][0] < now:
            self._taken.popleft()
        self._skip(now)
        self._fetching = [one for one in self._fetching if not one.done()]
        room = min(self._options.ahead_bytes, self._options.max_bytes // 4) - sum(size for _, size in self._taken)
        if room > 0 and self._needs and len(self._fetching) < _QUEUED * self._options.threads:
            self._fetch(room)
            return True
        # Every block comes in what is left of this epoch and in the next one, if it comes at all.
        if self._cursor[0] < epoch + 2 and self._future.accesses < HORIZON:
            return self._look()
        return False

    # -- looking ahead ------------------------------------------------------------------------------------------------

    def _look(self) -> bool:
        """The next stretch of steps. False where there is none."""
        epoch, step = self._cursor
        steps = len(self._plan.batches(epoch))
        if not steps:
            return False
        if step >= steps and self._plan.packing is not None:
            # How many rows the next epoch has takes a pass over all lengths.
            return False
        if step >= steps:
            epoch, step = epoch + 1, 0
            self._epochs.append((epoch, 0, self._time))
            # Times of epochs that are over are asked for no more.
            del self._epochs[:-4]
            steps = len(self._plan.batches(epoch))
        share = max(1, self._plan.batches(epoch).share(self._spec.rank, self._spec.world))
        count = min(steps - step, max(1, self._rows // share), 1 << STRETCH_BITS)
        first, empty = self._time, np.empty(0, np.int64)
        ids, times, own, files, numbers = [empty], [empty], [empty], [empty], [empty]
        for file, blocks, when, mine in self._accesses(epoch, step, count):
            ids.append(self._future.object(file.identity, file.payload_blocks) | blocks)
            times.append(first + when)
            own.append(first + when[mine])
            files.append(np.full(len(own[-1]), self._number(file)))
            numbers.append(blocks[mine])
        self._future.add(first, first + count, np.concatenate(ids), np.concatenate(times))
        when_own = np.concatenate(own)
        order = np.argsort(when_own, kind="stable")
        self._needs.append(_Needs(when_own[order], np.concatenate(files)[order], np.concatenate(numbers)[order]))
        self._cursor, self._time = (epoch, step + count), first + count
        self._rows = min(_MOST_ROWS, 2 * self._rows)
        return True

    def _accesses(
        self, epoch: int, step: int, count: int
    ) -> Iterator[tuple[RemoteFile, NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]]:
        """File by file: blocks that are read, in which of the steps, and whether by this rank."""
        samples, when, mine = self._plan.of_node(epoch, step, count, self._spec.node)
        size = self._options.block_bytes
        for number, source in enumerate(self._sources):
            here = np.flatnonzero(samples.source == number)
            if source.store is None or not len(here):
                continue
            for field in self._fields:
                for file, where, offsets, lengths in source.locate(field, samples.index[here]):
                    where, offsets, lengths = where[lengths > 0], offsets[lengths > 0], lengths[lengths > 0]
                    if not len(where) or not isinstance(file, RemoteFile):
                        continue
                    first = offsets // size
                    counts = (offsets + lengths - 1) // size - first + 1
                    row = np.repeat(here[where], counts)
                    nth = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
                    yield file, np.repeat(first, counts) + nth, when[row], mine[row]

    # -- fetching -----------------------------------------------------------------------------------------------------

    def _number(self, file: RemoteFile) -> int:
        """A file's place among those that were met."""
        found = self._places.get(file.identity)
        if found is None:
            found = self._places[file.identity] = len(self._files)
            self._files.append(file)
        return found

    def _skip(self, now: int) -> None:
        """Forget what steps that are over needed."""
        while self._needs:
            needs = self._needs[0]
            needs.at = max(needs.at, int(np.searchsorted(needs.times, now)))
            if needs.at < len(needs.times):
                return
            self._needs.popleft()

    def _fetch(self, room: int) -> None:
        """A group of the next needs, file by file, so that neighbours become one request."""
        size, limit = self._options.block_bytes, min(room, self._group)
        needs = self._needs[0]
        first = last = int(needs.times[needs.at])
        wanted: dict[int, dict[int, int]] = {}
        taken = 0
        while taken < limit and needs.at < len(needs.times):
            blocks = wanted.setdefault(int(needs.files[needs.at]), {})
            block, last = int(needs.blocks[needs.at]), int(needs.times[needs.at])
            if block not in blocks:
                blocks[block] = last
                taken += size
            needs.at += 1
        self._skip(first)
        self._taken.append((last, taken))
        self._group = min(2 * self._group, 4 * self._options.request_bytes)
        for number, blocks in wanted.items():
            self._fetching += self._files[number].fetch_ahead(blocks)


def blocks_by_step(sources: Sequence[ShardDataset], plan: Plan, spec: Spec, epochs: int) -> Iterator[list[Block]]:
    """The blocks that each step of some epochs reads, for simulations of caches."""
    work = _Work(plan, sources, spec)
    for epoch in range(epochs):
        for step in range(len(plan.batches(epoch))):
            yield [
                file.block(number)
                for file, blocks, _, _ in work._accesses(epoch, step, 1)
                for number in np.unique(blocks).tolist()
            ]
