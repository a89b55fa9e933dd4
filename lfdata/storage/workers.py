"""A few daemon threads: at the end of the program nobody waits for a server."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
_Task = tuple["Future[Any]", Callable[[], Any]]


class Workers:
    """At most ``count`` threads, started when they are needed."""

    def __init__(self, count: int, name: str) -> None:
        self._count, self._name = count, name
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._started = self._unfinished = 0
        self._closed = False

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Have a call made; its result, or what it raises."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                _cancel(future)
                return future
            self._unfinished += 1
            if self._unfinished > self._started and self._started < self._count:
                self._started += 1
                threading.Thread(target=self._work, name=f"lfdata-{self._name}-{self._started}", daemon=True).start()
        self._tasks.put((future, call))
        return future

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, call = task
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)
            del task, future, call
            with self._lock:
                self._unfinished -= 1

    def close(self) -> None:
        """End the threads when they are done with what they are doing; what has not begun is cancelled."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            count = self._started
        while True:
            try:
                task = self._tasks.get_nowait()
            except queue.Empty:
                break
            if task is not None:
                _cancel(task[0])
        for _ in range(count):
            self._tasks.put(None)


def _cancel(future: Future[Any]) -> None:
    """So that those who wait for it are told."""
    if future.cancel():
        future.set_running_or_notify_cancel()
