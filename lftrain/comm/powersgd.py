"""PowerSGD between ranks, and what it keeps from step to step: for checkpoints as tensors and plain values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from lftrain.comm.group import Group
from lftrain.options import DdpOptions

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

Tensors = dict[str, torch.Tensor]
ANEW = "PowerSGD's error feedback starts at zero"


class PowerSgd:
    """torch's PowerSGD. Of each bucket it keeps what this rank's gradients lost by compression (the error), and factors that all ranks share.

    Buckets must lie the same way in all steps of all lives of a run: see :class:`lftrain.comm.ddp.FixedBuckets`.

    Args:
        tell: called with what people should know, the same on all ranks.
    """

    def __init__(self, options: DdpOptions, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._state = powerSGD_hook.PowerSGDState(
            dist.group.WORLD, matrix_approximation_rank=options.powersgd_rank, start_powerSGD_iter=options.powersgd_start
        )
        self._buckets: dict[int, list[str]] = {}
        self._loaded: dict[int, tuple[list[str], list[torch.Tensor]]] = {}

    def reduce(self, bucket: GradBucket, names: Sequence[str]) -> torch.futures.Future[torch.Tensor]:
        """The hook. ``names``: of the bucket's parameters."""
        self._buckets[bucket.index()] = list(names)
        if self._loaded:
            self._take(bucket)
        found = powerSGD_hook.powerSGD_hook(self._state, bucket)
        if bucket.buffer().device.type == "cpu":
            # Its second and third collective are begun by gloo's threads, as they come: those of two buckets would mix, by rank.
            found.wait()
        return found

    def forget(self) -> None:
        """After gradients that are not finite: what is kept of them is not either, and would spoil every later step."""
        for kept in (self._state.error_dict, self._state.p_memory_dict, self._state.q_memory_dict):
            kept.clear()

    def state(self, group: Group) -> tuple[dict[str, Any], Tensors]:
        """All ranks together: a JSON-able part, the same on each, and tensors on the host, copies: the errors of all ranks, the factors."""
        tensors: Tensors = {}
        for index, error in sorted(self._state.error_dict.items()):
            for rank, one in enumerate(group.gather(error.cpu())):
                tensors[f"error.{index}.{rank}"] = one
            # Copies: they are written to a file while the next steps write to the factors, in place.
            tensors[f"p.{index}"] = self._state.p_memory_dict[index].to("cpu", copy=True)
            tensors[f"q.{index}"] = self._state.q_memory_dict[index].to("cpu", copy=True)
        name, keys, position, has_gauss, cached = self._state.rng.get_state(legacy=True)
        random = [str(name), np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)]
        plain = {
            "steps": self._state.iter,
            "random": random,
            "rank": self._state.matrix_approximation_rank,
            "world": group.world,
        }
        plain["buckets"] = {str(index): self._buckets[index] for index in self._state.error_dict}
        return plain, tensors

    def load(self, plain: dict[str, Any] | None, read: Callable[[str], torch.Tensor], group: Group) -> None:
        """From :meth:`state`; ``read`` gives a tensor by its name. Tells what does not fit. Raises KeyError, TypeError, ValueError."""
        self.forget()
        self._loaded = {}
        if plain is None:
            self._tell(f"the checkpoint has no state of PowerSGD: {ANEW}, after ddp.powersgd_start steps")
            return
        name, keys, position, has_gauss, cached = plain["random"]
        self._state.rng.set_state((name, np.asarray(keys, np.uint32), position, has_gauss, cached))
        self._state.iter = int(plain["steps"])
        for what, then, now in (
            ("ranks", plain["world"], group.world),
            ("ddp.powersgd_rank", plain["rank"], self._state.matrix_approximation_rank),
        ):
            if then != now:
                self._tell(f"the checkpoint is of {what} {then}, and here are {now}: {ANEW}")
                return
        for index, names in plain["buckets"].items():
            values = [read(name).to(group.device) for name in (f"error.{index}.{group.rank}", f"p.{index}", f"q.{index}")]
            self._loaded[int(index)] = (list(names), values)

    def _take(self, bucket: GradBucket) -> None:
        """What was loaded for a bucket, if it is of the same gradients."""
        index, gradients = bucket.index(), bucket.buffer()
        if index not in self._loaded:
            return
        names, (error, p, q) = self._loaded.pop(index)
        if names != self._buckets[index] or error.shape != gradients.shape or error.dtype != gradients.dtype:
            self._loaded = {}
            self.forget()
            self._tell(f"gradients travel in other buckets than in the checkpoint (ddp.bucket_mb): {ANEW}")
            return
        state = self._state
        state.error_dict[index], state.p_memory_dict[index], state.q_memory_dict[index] = error, p, q
