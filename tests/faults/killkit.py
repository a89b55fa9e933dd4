"""Converters that are killed: in a forked child at a chosen operation, or from outside as a real process."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from lfdata.format.durable import Files

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]


class KillingFiles(Files):
    """Kills its own process at operation ``at``: before it, after it, or in the middle of a write."""

    def __init__(self, at: int, rng: random.Random) -> None:
        self.left = at
        self.how = rng.choice(("before", "after", "inside", "inside"))
        self.share = rng.random()

    def call(self, operation: str, path: Path, function: Callable[[], T], **detail: object) -> T:
        del path, detail
        self.left -= 1
        if self.left >= 0:
            return function()
        if self.how == "inside" and operation == "write" and isinstance(function, partial):
            descriptor, data = function.args
            os.write(descriptor, data[: int(len(data) * self.share)])
        elif self.how == "after":
            function()
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("survived SIGKILL")


class CountingFiles(Files):
    """Counts operations."""

    count = 0

    def call(self, operation: str, path: Path, function: Callable[[], T], **detail: object) -> T:
        del operation, path, detail
        self.count += 1
        return function()


def in_child(function: Callable[[], Any]) -> int:
    """Run in a forked child; its exit status as ``os.waitstatus_to_exitcode`` gives it: 0, 1 for an exception, -9 for SIGKILL."""
    child = os.fork()
    if not child:
        status = 1
        try:
            function()
            status = 0
        except BaseException as error:
            os.write(2, f"in the child: {error!r}\n".encode())
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def command(*arguments: str | Path) -> list[str]:
    """Command line of ``shard-builder``."""
    return [sys.executable, "-m", "shard_builder.cli", *(str(argument) for argument in arguments)]


def environment(**more: str) -> dict[str, str]:
    """Environment in which the command line finds this checkout."""
    return os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tools'}"} | more


@contextmanager
def started(*arguments: str | Path, **more: Any) -> Iterator[subprocess.Popen[bytes]]:
    """``shard-builder`` as a real process, killed at the end if it still runs."""
    process = subprocess.Popen(command(*arguments), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def children(pid: int) -> list[int]:
    """Processes started by ``pid``."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                fields = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == pid and fields[0] != "Z":
                found.append(int(name))
    return found


def wait_until(condition: Callable[[], Any], seconds: float = 30.0) -> Any:
    """Poll until ``condition`` gives something true, and return it. Fails after ``seconds``."""
    end = time.monotonic() + seconds
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


def gone(pids: list[int]) -> bool:
    """Whether none of these processes runs any more."""
    for pid in pids:
        try:
            if Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                return False
        except OSError:
            continue
    return True
