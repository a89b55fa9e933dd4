"""What the loader's fault tests share: a small data set, functions that misbehave in the decoder, and a census of what a process has.

The decoder imports this module for its functions: nothing heavy at the top.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

WIDTH = 30_000
GATE = "LOADERKIT_GATE"
BATCH = 10
STEPS = 10
ENGINES = ("process", "thread", "inline")


def shared_files() -> set[str]:
    """Files in /dev/shm that could be of a loader: of its names, or of tempfile's where there is no memfd. Other things there are others'."""
    names = ("lfdata-slots", "lfdata-hello", *(() if hasattr(os, "memfd_create") else (tempfile.gettempprefix(),)))
    return {one.name for one in os.scandir("/dev/shm") if one.name.startswith(names) and one.is_file(follow_symlinks=False)}


# -- functions of the decoder ---------------------------------------------------------------------------------------------


def wide(about: Any) -> Any:
    """The sample's number, so often that a batch of ten fills a slot."""
    return np.full(WIDTH, about["number"], np.float32)


def _from(about: Any, what: str) -> bool:
    """The gate file holds a word and a number: what happens to samples from that number on."""
    try:
        word, number = Path(os.environ[GATE]).read_text().split()
    except (KeyError, OSError, ValueError):
        return False
    return word == what and about["number"] >= int(number)


def gated(about: Any) -> Any:
    """Waits, leaves, calls sys.exit, raises, or talks, as the gate file says."""
    while _from(about, "wait"):
        time.sleep(0.005)
    if _from(about, "leave"):
        os._exit(7)
    if _from(about, "exit"):
        sys.exit(3)
    if _from(about, "raise"):
        raise ZeroDivisionError(f"sample {about['number']} is not liked")
    if _from(about, "talk"):
        os.write(2, b"a word of the decoder\n")
    return wide(about)


def slow(about: Any) -> Any:
    """A hundredth of a second for each sample."""
    time.sleep(0.01)
    return wide(about)


# -- data and loaders -----------------------------------------------------------------------------------------------------


def dataset(place: Path, records: int = BATCH * STEPS, name: str = "target") -> Path:
    """Shards of synthetic samples: a copy of those made first."""
    made = _made.get(records)
    if made is None:
        from faultkit import run, synthetic

        made = _made[records] = tempfile.TemporaryDirectory(prefix="loaderkit-")
        run(Path(made.name, "target"), synthetic(records))
    shutil.copytree(Path(made.name, "target"), place / name)
    return place / name


_made: dict[int, tempfile.TemporaryDirectory[str]] = {}


def gate(place: Path, monkeypatch: Any = None) -> Path:
    """Where the gate file of :func:`gated` will be; not there yet."""
    path = place / "gate"
    if monkeypatch is None:
        os.environ[GATE] = str(path)
    else:
        monkeypatch.setenv(GATE, str(path))
    return path


def loader(path: Path, function: str = "gated", **options: Any) -> Any:
    """One step a slot, in the data set's order, through a function of this module."""
    import lfdata.transforms as T
    from lfdata import Loader

    fields = {"about": [T.Map(f"loaderkit:{function}", shape=(WIDTH,), dtype="float32")], "label": None}
    return Loader(path, BATCH, fields, **{"shuffle": "sequential", "engine": "process", "stall_seconds": 20.0} | options)


def engine_of(one: Any) -> Any:
    """The engine that is running."""
    return one._pipelines[0]._engine


def decoders(one: Any) -> list[int]:
    """Process ids of a loader's decoders."""
    return list(engine_of(one).processes)


def busy(one: Any) -> bool:
    """Whether some lane has work."""
    from lfdata.loader.slots import PHASE

    return bool(engine_of(one).slots.lanes[:, PHASE].any())


def numbers(batch: Any) -> list[int]:
    """The samples of a batch, by what the function made of them."""
    return [int(value) for value in batch["about"][:, 0]]


def whole(batches: Any) -> list[list[int]]:
    """All of an epoch."""
    return [numbers(batch) for batch in batches]


def expected(first: int = 0) -> list[list[int]]:
    """What :func:`whole` gives in the data set's order, from a batch on."""
    return [list(range(step * BATCH, (step + 1) * BATCH)) for step in range(first, STEPS)]


# -- what a process has ---------------------------------------------------------------------------------------------------


def descriptors() -> list[str]:
    """What the open descriptors are, without those that come and go with the process itself."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
    return sorted(one for one in found if not one.startswith("/proc/"))


def slots_mapped() -> int:
    """Mappings of slots."""
    return Path("/proc/self/maps").read_text().count("lfdata-slots")


def census() -> dict[str, Any]:
    """Descriptors by kind, threads, children (zombies too) and slots of this process."""
    from killkit import children

    gc.collect()
    if not gc.get_freeze_count():
        # What is there at the first census, torch above all, need not be looked at again and again.
        gc.freeze()
    # Pipes and sockets have numbers of their own: compare how many.
    kinds = sorted(one.partition(":[")[0] for one in descriptors())
    task = f"/proc/self/task/{os.getpid()}/children"
    zombies = Path(task).read_text().split() if os.path.exists(task) else children(os.getpid())
    return {"descriptors": kinds, "threads": len(os.listdir("/proc/self/task")), "children": zombies, "slots": slots_mapped()}


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """What is there afterwards was there before. A thread of an earlier test may end meanwhile."""
    before = census()
    yield
    after = census()
    assert after["threads"] <= before["threads"], (before, after)
    assert after | {"threads": 0} == before | {"threads": 0}, (before, after)


def resident(pid: int | str = "self") -> int:
    """Resident bytes of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


# -- trainers -------------------------------------------------------------------------------------------------------------


class Trainer:
    """A forked child that runs a function, in a process group of its own as a shell would start it, its stderr in a file.

    The function gets another to tell the parent something, a line at a time. Its end: 0, 1 after an exception (which is printed), 42
    after a KeyboardInterrupt.
    """

    def __init__(self, place: Path, function: Callable[[Callable[[str], None]], None]) -> None:
        self.status = 0
        self.stderr = place / f"stderr-{time.monotonic_ns()}"
        reader, writer = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            status = 1
            try:
                os.setpgid(0, 0)
                os.close(reader)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                file = os.open(self.stderr, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(file, 2)
                os.close(file)
                # Pytest's own would keep to itself what a finalizer could not raise.
                sys.unraisablehook = sys.__unraisablehook__
                sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115 - pytest's own would hide it
                function(lambda line: os.write(writer, f"{line}\n".encode()) and None)
                status = 0
            except KeyboardInterrupt:
                status = 42
            except BaseException as error:
                os.write(2, f"in the trainer: {error!r}\n".encode())
            finally:
                os._exit(status)
        os.close(writer)
        self.told = os.fdopen(reader)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.told.close()
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)

    def line(self) -> str:
        """The next thing it told."""
        return self.told.readline().strip()

    def signal(self, number: int, group: bool = False) -> None:
        """Send a signal to it, or to its group."""
        (os.killpg if group else os.kill)(self.pid, number)

    def ended(self, seconds: float) -> bool:
        """Whether it ends in time; see :attr:`status`."""
        end = time.monotonic() + seconds
        while self.pid:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.pid, self.status = 0, os.waitstatus_to_exitcode(status)
            elif time.monotonic() > end:
                return False
            else:
                time.sleep(0.005)
        return True

    def end(self, seconds: float = 10.0) -> int:
        """Its exit status, which must come in time."""
        assert self.ended(seconds), f"the trainer did not end; it said: {self.noise()}"
        return self.status

    def noise(self) -> str:
        """What it and its decoders wrote to stderr."""
        return self.stderr.read_text() if self.stderr.exists() else ""


def script(code: str, *arguments: str | Path, **more: Any) -> subprocess.CompletedProcess[str]:
    """A program of its own, with this module importable."""
    from killkit import environment

    here = str(Path(__file__).resolve().parent)
    env = environment()
    env["PYTHONPATH"] += os.pathsep + here
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **more,
    )
