"""A device that is late: its two streams are threads that work through queues, over host memory. What is not waited for is seen wrong."""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

SCRUB = 0xA5


class LateEvent:
    """A point in a stream."""

    def __init__(self) -> None:
        self._come = threading.Event()
        self.at = 0.0

    def come(self) -> None:
        self.at = time.perf_counter()
        self._come.set()

    def query(self) -> bool:
        return self._come.is_set()

    def synchronize(self) -> None:
        assert self._come.wait(60), "the stream never comes there"


class LateStream:
    """Does what it is given in turn, each piece after a delay."""

    def __init__(self, delay: float) -> None:
        self.delay, self.errors = delay, list[BaseException]()
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except BaseException as error:
                self.errors.append(error)
            # As long as this thread holds a piece of work, it holds the tensors in it.
            del work

    def late(self, work: Callable[[], None]) -> None:
        delay = self.delay

        def later() -> None:
            time.sleep(delay)
            work()

        self.put(later)

    def record(self) -> LateEvent:
        event = LateEvent()
        self.put(event.come)
        return event

    def wait(self, event: LateEvent) -> None:
        self.put(event.synchronize)

    def finish(self) -> None:
        self.record().synchronize()

    def end(self) -> None:
        self._work.put(None)
        self._thread.join(60)


class _Owner:
    def __init__(self, memory: torch.Tensor, size: int) -> None:
        self._memory = memory
        self.__array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (memory.data_ptr(), False), "version": 3}


def unheld(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Reads a tensor's memory when it is called, without keeping it, as work on a device does."""
    address, size, dtype = tensor.data_ptr(), tensor.nbytes, tensor.dtype
    shape, stride = tensor.shape, tensor.stride()

    def read() -> torch.Tensor:
        if not size:
            return torch.empty(shape, dtype=dtype)
        found = np.ctypeslib.as_array((ctypes.c_ubyte * size).from_address(address)).copy()
        return torch.from_numpy(found).view(dtype).as_strided(shape, stride)

    return read


class LateBackend:
    """Copies are done late on one stream; the consumer works late on another (``consumer_stream``).

    Args:
        copies, consumer: seconds by which each piece of work is late.
        refuse: why host memory cannot be registered.
    """

    def __init__(self, copies: float = 0.0, consumer: float = 0.0, refuse: str = "") -> None:
        self.device = torch.device("cpu")
        self.copies, self.consumer_stream = LateStream(copies), LateStream(consumer)
        self._refuse = refuse
        self.registered: dict[int, int] = {}
        self.registrations = 0
        self._pending: list[None] = []
        # Never freed, so that what reads too late finds something else, not nothing.
        self._made: list[torch.Tensor] = []

    @property
    def allocations(self) -> int:
        return len(self._made)

    def memory(self, size: int) -> torch.Tensor:
        self._made.append(torch.full((size,), SCRUB, dtype=torch.uint8))
        return self._made[-1]

    def lend(self, memory: torch.Tensor, size: int) -> tuple[torch.Tensor, object]:
        owner = _Owner(memory, size)
        return torch.from_numpy(np.asarray(owner)), owner

    def copy(self, pairs: Any, work: Callable[[], None] | None = None) -> None:
        # What is copied when its time comes is what is there then.
        reads = [(target, unheld(source)) for target, source in pairs]
        self._pending.append(None)

        def done() -> None:
            for target, read in reads:
                target.copy_(read())
            self._pending.pop()

        self.copies.late(done)
        if work is not None:
            self.copies.late(work)

    def record(self) -> LateEvent:
        return self.copies.record()

    def wait(self, event: Any) -> None:
        self.copies.wait(event)

    def consumer(self) -> Any:
        return self.consumer_stream

    def note(self, consumer: Any, timed: bool = False) -> LateEvent:
        return consumer.record()  # type: ignore[no-any-return]

    def hold(self, consumer: Any, event: Any) -> None:
        consumer.wait(event)

    def used(self, memory: torch.Tensor, consumer: Any) -> None:
        pass

    def seconds(self, before: Any, after: Any) -> float:
        return float(after.at - before.at)

    def finish(self) -> None:
        self.copies.finish()

    def register(self, address: int, size: int) -> str:
        if self._refuse:
            return self._refuse
        assert address not in self.registered, "registered twice"
        # The memory must be there.
        np.ctypeslib.as_array((ctypes.c_ubyte * size).from_address(address)).sum()
        self.registered[address] = size
        self.registrations += 1
        return ""

    def unregister(self, address: int) -> None:
        assert not self._pending, "copies are under way from memory that is unlocked"
        size = self.registered.pop(address)
        # It must still be mapped when it is given back.
        np.ctypeslib.as_array((ctypes.c_ubyte * size).from_address(address)).sum()

    def end(self) -> None:
        """End the streams; nothing may have gone wrong there."""
        self.copies.finish()
        self.consumer_stream.finish()
        self.copies.end()
        self.consumer_stream.end()
        assert not self.copies.errors + self.consumer_stream.errors, self.copies.errors + self.consumer_stream.errors
