"""The process group, and small things all ranks must know of each other. Nothing is pickled: numbers and JSON only."""

from __future__ import annotations

import glob
import os
import sys
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from lftrain.errors import ConfigError, RanksError
from lftrain.options import RunOptions

# Its name since torch 2.13, and before.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
# How long gloo's threads may take at the end, and how long others that Python did not start may keep the interpreter; looks in turn that
# must find none.
_SETTLE_SECONDS, _FOREIGN_SECONDS, _QUIET = 5.0, 0.5, 3


@dataclass(frozen=True)
class Group:
    """This process among the ranks.

    Attributes:
        rank, world: of all. local_rank: among those of this machine.
        device: what this rank computes on.
        joined: whether the process group was made here and is to be left here.
    """

    rank: int
    world: int
    local_rank: int
    device: torch.device
    joined: bool = False
    _lent: list[weakref.ref[torch.Tensor]] = field(default_factory=list, init=False, repr=False, compare=False)

    def gather(self, facts: torch.Tensor) -> torch.Tensor:
        """The facts (k,) of all ranks: (world, k), of the same dtype, on the same device."""
        if self.world == 1:
            return facts[None]
        found, own = facts.new_empty(self.world * facts.numel()), facts.contiguous()
        _all_gather(found, own)
        self._lent[:] = weakref.ref(found), weakref.ref(own)
        return found.view(self.world, -1).clone()

    def gather_json(self, value: Any) -> list[Any]:
        """A JSON-able value of each rank, in order of ranks."""
        if self.world == 1:
            return [value]
        text = msgspec.json.encode(value)
        sizes = self.gather(torch.tensor([len(text)])).flatten().tolist()
        padded = torch.zeros(max(*sizes, 1), dtype=torch.uint8)
        padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        rows = self.gather(padded)
        return [msgspec.json.decode(rows[rank, :size].numpy().tobytes()) for rank, size in enumerate(sizes)]

    def same(self, what: str, value: Any) -> None:
        """Raise :class:`RanksError` unless all ranks have an equal (JSON-able) value."""
        found = self.gather_json(value)
        if odd := next((rank for rank, one in enumerate(found) if one != found[0]), None):
            raise RanksError(f"{what} differs between ranks: {found[0]!r} on rank 0, {found[odd]!r} on rank {odd}")

    def leave(self) -> None:
        """Leave the process group, if it was joined here, and let its threads finish.

        gloo's threads free the tensors of a collective after whoever waited for it goes on, and take the interpreter's lock for it. A thread
        that asks for the lock while the interpreter ends takes the process down (SIGABRT).
        """
        if self.world > 1:
            began, quiet = time.monotonic(), 0
            while quiet < _QUIET and (waited := time.monotonic() - began) < _SETTLE_SECONDS:
                # In this order: a thread that does not run is either idle or waits for the interpreter, and is then in it.
                busy = any(lent() is not None for lent in self._lent) or _running_threads()
                quiet = 0 if busy or (waited < _FOREIGN_SECONDS and _foreign_threads()) else quiet + 1
                time.sleep(0.001)
        if self.joined and dist.is_initialized():
            dist.destroy_process_group()


def join(options: RunOptions) -> Group:
    """This process's place: of torch.distributed if it is initialised, else of the environment that torchrun sets, else alone.

    Raises:
        ConfigError: a GPU is asked for and there is none, or fewer than ranks on this machine.
    """
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    local = int(os.environ.get("LOCAL_RANK", 0))
    device = _device(options.device, local)
    joined = False
    if dist.is_available() and dist.is_initialized():
        world, rank = dist.get_world_size(), dist.get_rank()
        if world > 1 and "gloo" not in str(dist.get_backend_config()):
            raise RanksError('the process group has no backend for the host: init_process_group("cpu:gloo,cuda:nccl")')
    elif world > 1:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        # gloo carries what lives on the host (checkpoints, JSON), whatever the gradients take.
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        timeout = timedelta(seconds=options.collective_seconds)
        dist.init_process_group(backend, timeout=timeout, rank=rank, world_size=world)
        joined = True
    return Group(rank, world, local, device, joined)


def _device(asked: str, local: int) -> torch.device:
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if asked == "cpu" or (asked == "auto" and not there):
        return torch.device("cpu")
    if not there:
        raise ConfigError(
            'run.device is "cuda" and torch sees no GPU: set run.device = "cpu" or "auto", or see what "lftrain doctor" says of the driver'
        )
    if local >= there:
        raise ConfigError(
            f'rank {local} of this machine has no GPU: there are {there}. Start fewer ranks, or set run.device = "cpu"'
        )
    return torch.device("cuda", local)


def _foreign_threads() -> bool:
    """Whether a thread that Python did not start is in the interpreter, or waits for it."""
    return not {one.ident for one in threading.enumerate()}.issuperset(sys._current_exceptions())


def _running_threads() -> bool:
    """Whether a thread of gloo's runs, or would if it had a processor. Known on Linux only."""
    for place in glob.iglob("/proc/self/task/*/stat"):
        with suppress(OSError), open(place, "rb") as file:
            _, _, rest = file.read().partition(b"(")
            name, _, state = rest.rpartition(b") ")
            if name.startswith(b"pt_gloo") and state[:1] != b"S":
                return True
    return False
