"""Who is alive and where: each rank tells the store of the process group once a second, from a thread."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import msgspec
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from lftrain.comm.group import Group
from lftrain.errors import PeerError

# Status of a process that ends because a rank is gone while it cannot be told otherwise.
EXIT_PEER = 75
STORE_SECONDS, LOOK_SECONDS = 30.0, 10.0


class Pulse:
    """Beats for this rank and listens to the others. Alone, it only remembers where this rank is.

    Args:
        group: the ranks.
        seconds: silence after which a rank is taken for dead: ``lost`` is called with the message, from the thread.
    """

    def __init__(self, group: Group, seconds: float, lost: Callable[[str], None] | None = None) -> None:
        self._group, self._seconds = group, seconds
        self._lost = lost or _leave
        self._where: tuple[int, str] = (0, "start")
        self._said: dict[int, list[Any]] = {}
        self._heard = dict.fromkeys(range(group.world), time.monotonic())
        self._interval = min(1.0, seconds / 4)
        self._stop = threading.Event()
        self._count = 0
        self._thread: threading.Thread | None = None
        if group.world > 1:
            self._prefix = f"lftrain/pulse/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
            self._store = _connect(group)
            self._set()
            dist.barrier()
            self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)
            self._thread.start()

    def note(self, step: int, phase: str) -> None:
        """Where this rank is now; costs an assignment."""
        self._where = (step, phase)

    def stop(self, failed: str = "") -> None:
        """The last beat: this rank is done, or has failed with a message that the others can show."""
        if self._thread is None or self._stop.is_set():
            return
        self._stop.set()
        self._thread.join(2 * self._interval)
        self._where = (self._where[0], f"failed: {failed}" if failed else "done")
        try:
            self._set()
        except RuntimeError:
            return  # the store has gone with the launcher; nobody is there to be told

    def explain(self, error: BaseException) -> PeerError:
        """What a failed collective means: waits a few beats and says which ranks are gone, have failed, or are elsewhere."""
        asked = time.monotonic()
        while time.monotonic() - asked < 3.5 * self._interval and not self._failed():
            time.sleep(self._interval / 4)
        # A last beat may have been heard up to one interval after it was sent.
        silent = time.monotonic() - 2.2 * self._interval
        gone = [rank for rank, heard in self._heard.items() if heard < silent and rank != self._group.rank]
        gone = [rank for rank in gone if rank not in self._failed() and not self._is_done(rank)]
        here = f"rank {self._group.rank} in {self._where[1]} of step {self._where[0]}"
        parts = [f"rank {rank} {said}" for rank, said in self._failed().items()]
        parts += [f"rank {rank} is gone (last heard of in {self._place(rank)})" for rank in gone]
        if not parts:
            others = (rank for rank in range(self._group.world) if rank != self._group.rank)
            parts = ["all ranks are alive: " + ", ".join(f"rank {rank} in {self._place(rank)}" for rank in others)]
        return PeerError(
            f"{'; '.join(parts)}. Noticed by {here}: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        )

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            try:
                self._set()
                self._listen()
            except RuntimeError as error:
                # The launcher hosts the store: without it the job has ended.
                self._lost(f"rank {self._group.rank}: the job's store is gone, so its launcher or first rank is: {error}")
                return
            now = time.monotonic()
            for rank, heard in self._heard.items():
                if now - heard > self._seconds and not self._is_done(rank):
                    self._lost(
                        f"rank {rank} is gone: nothing heard of it for {now - heard:.0f} s (last in {self._place(rank)}). Noticed by "
                        f"rank {self._group.rank} in {self._where[1]} of step {self._where[0]}"
                    )
                    return

    def _set(self) -> None:
        self._count += 1
        self._store.set(f"{self._prefix}/{self._group.rank}", msgspec.json.encode([self._count, *self._where]).decode())

    def _listen(self) -> None:
        values = self._store.multi_get([f"{self._prefix}/{rank}" for rank in range(self._group.world)])
        for rank, value in enumerate(values):
            said = msgspec.json.decode(value)
            if said != self._said.get(rank):
                self._said[rank], self._heard[rank] = said, time.monotonic()

    def _failed(self) -> dict[int, str]:
        return {rank: said[2] for rank, said in self._said.items() if str(said[2]).startswith("failed")}

    def _is_done(self, rank: int) -> bool:
        return rank in self._said and self._said[rank][2] == "done"

    def _place(self, rank: int) -> str:
        said = self._said.get(rank)
        return "the start" if said is None else f"{said[2]} of step {said[1]}"


def is_collective_error(error: BaseException) -> bool:
    """Whether an exception comes from an operation among ranks rather than from this rank's own work."""
    text = str(error)
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and ("gloo" in text or "NCCL" in text))


def _connect(group: Group) -> TCPStore:
    """A connection of its own: the group's store is busy while a collective waits on it. A group that was not made from the environment gets a
    store at its first rank."""
    seconds = timedelta(seconds=STORE_SECONDS)
    if "MASTER_PORT" in os.environ:
        host, port = os.environ.get("MASTER_ADDR", "localhost"), int(os.environ["MASTER_PORT"])
        return TCPStore(host, port, group.world, False, seconds, wait_for_workers=False)
    own = TCPStore("localhost", 0, group.world, True, seconds, wait_for_workers=False) if group.rank == 0 else None
    host, port = group.gather_json([socket.gethostname(), own.port] if own is not None else None)[0]
    if own is not None:
        return own
    try:
        return TCPStore(host, port, group.world, False, timedelta(seconds=LOOK_SECONDS), wait_for_workers=False)
    except (RuntimeError, OSError):
        # A name that the machine itself does not know.
        return TCPStore("localhost", port, group.world, False, seconds, wait_for_workers=False)


def _leave(message: str) -> None:
    sys.stderr.write(f"lftrain: {message}\n")
    sys.stderr.flush()
    os._exit(EXIT_PEER)
