"""What one step does on the device: forward, backward, agreement, unscaling with clipping, update. Nothing here waits for the device.

All of it is written in place on tensors that stay, so that a CUDA graph can hold it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lftrain.comm.ddp import Parallel
from lftrain.comm.group import Group
from lftrain.errors import ConfigError, LossError
from lftrain.runtime.buffers import Buffers
from lftrain.runtime.feed import Batch
from lftrain.runtime.precision import Precision

Loss = Callable[[nn.Module, Batch], tuple[torch.Tensor, int | torch.Tensor]]
# What each rank says of a step: items, sum of their losses, first bad parameter before and after reduction, first bad micro-batch, stop, first
# micro-batch with a count that is negative or not finite (-1: none), that count.
COUNT, LOSS, FIRST_OWN, FIRST_REDUCED, FIRST_MICRO, STOP, ODD, ODD_COUNT = range(8)
FACTS = 8
NORM, SCALE, BAD = range(3)
# Of the power of two near a micro-batch's items: it and its inverse are float32.
MOST_EXPONENT = 100
_CONTRACT = (
    "a loss returns (mean, count): a scalar tensor, and how many rows or tokens it is the mean of, a number or a scalar tensor"
)


@dataclass(frozen=True)
class Outcome:
    """A step as the host sees it; the same on every rank.

    Attributes:
        loss: mean over all items of all ranks; NaN without any. count: those items. norm: of all gradients, unscaled, before clipping.
        scale: the gradient scale that was used. skipped: whether nothing was changed. stop: whether any rank was asked to stop.
        bad: for each rank with something not finite: (rank, parameter's name or "", micro-batch or -1).
        odd: for each rank with a count that is negative or not finite: (rank, micro-batch, count).
    """

    loss: float
    count: float
    norm: float
    scale: float
    skipped: bool
    stop: bool
    bad: tuple[tuple[int, str, int], ...] = ()
    odd: tuple[tuple[int, int, float], ...] = ()


class StepRunner:
    """Runs steps.

    Args:
        loss: see docs/runtime.md. parallel, precision, group: what they are. optimizer: over the model's parameters.
        clip: largest norm, or ``None``.
        mark: called with the part of a step that just ended.
    """

    def __init__(
        self,
        loss: Loss,
        parallel: Parallel,
        optimizer: torch.optim.Optimizer,
        precision: Precision,
        group: Group,
        clip: float | None,
        mark: Callable[[str], None],
    ) -> None:
        self.loss, self.parallel, self.optimizer = loss, parallel, optimizer
        self.precision, self.group, self.clip, self.mark = precision, group, clip, mark
        self.watching: Callable[[Batch], AbstractContextManager[None]] = lambda _: nullcontext()
        self.buffers = Buffers(parallel.network)
        self.nominal = 0.0
        self.stop = torch.zeros((), dtype=torch.float64, device=group.device)
        self._places = torch.arange(len(parallel.parameters), device=group.device)
        self._none = len(parallel.parameters)
        # Fused optimisers leave everything as it is where this is 1, without the host knowing. Not SGD: its first step, left out, would leave a
        # momentum that nobody has filled.
        self._on_device = getattr(optimizer, "_step_supports_amp_scaling", False) and all(
            one.get("fused") and not (isinstance(optimizer, torch.optim.SGD) and one["momentum"])
            for one in optimizer.param_groups
        )
        parallel.ready = lambda: mark("backward")

    def __call__(self, batches: Sequence[Batch]) -> torch.Tensor:
        """One step. Returns what :meth:`read` takes: float64 (world * FACTS + 3,) on the device."""
        self.buffers.keep()
        facts = self._gradients(batches)
        everyone = self.group.gather(facts)
        self.mark("sync")
        report = self._update(everyone)
        self.mark("optimizer")
        return report

    def read(self, report: torch.Tensor) -> Outcome:
        """A report on the host as numbers and names."""
        values = report.tolist()
        rows = [values[rank * FACTS : (rank + 1) * FACTS] for rank in range(self.group.world)]
        norm, scale, bad = values[self.group.world * FACTS :]
        count = sum(row[COUNT] for row in rows)
        odd = tuple((rank, int(row[ODD]), row[ODD_COUNT]) for rank, row in enumerate(rows) if row[ODD] >= 0)
        return Outcome(
            loss=sum(row[LOSS] for row in rows) / count if count else math.nan,
            count=count,
            norm=norm,
            scale=scale,
            skipped=bool(bad) or not count,
            stop=any(row[STOP] for row in rows),
            bad=self._culprits(rows) if bad else (),
            odd=odd,
        )

    def _gradients(self, batches: Sequence[Batch]) -> torch.Tensor:
        """Forward and backward of all micro-batches; this rank's facts."""
        parallel, last = self.parallel, len(batches) - 1
        if last and self.precision.masters:
            raise ConfigError(
                f'a step came in {last + 1} micro-batches, whose gradients precision.weights = "compute" would add up in bf16: take '
                'precision.weights = "fp32", or one a step'
            )
        self.optimizer.zero_grad(set_to_none=True)
        parallel.begin()
        counts: list[torch.Tensor] = []
        sums: list[torch.Tensor] = []
        for number, batch in enumerate(batches):
            with parallel.quiet(number == last), self.watching(batch):
                with self.precision.autocast():
                    mean, weight = _checked(self.loss(parallel.network, batch))
                if not self.nominal:
                    self.nominal = self._agree_on_nominal(weight)
                scaled = mean.float() * (weight / self.nominal) * self.precision.scale
                self.mark("forward")
                scaled.backward()
            self.mark("backward" if number < last or self.group.world == 1 else "sync")
            counts.append(weight.double())
            sums.append(mean.detach().double() * weight)
        parallel.check(scaled)
        return self._facts(torch.stack(counts), torch.stack(sums))

    def _agree_on_nominal(self, weight: torch.Tensor) -> float:
        """A power of two near the items of a micro-batch, the same on all ranks. The only time a step waits for the device, in its first."""
        largest = float(self.group.gather(weight.detach()[None]).max())
        if not 0 < largest < math.inf:
            return 1.0
        return 2.0 ** min(max(round(math.log2(largest)), -MOST_EXPONENT), MOST_EXPONENT)

    def _facts(self, counts: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
        gradients = self._present()
        self._norms = _norms(gradients)
        reduced = torch.where(torch.isfinite(self._norms), self._none, self._places).min()
        own = self.parallel.first_bad if self.group.world > 1 else reduced
        places = torch.arange(len(sums), device=sums.device)
        micro = torch.where(torch.isfinite(sums), len(sums), places).min()
        wrong = ~(torch.isfinite(counts) & (counts >= 0))
        odd = torch.where(wrong, places, len(sums)).min()
        which = counts.index_select(0, odd.clamp(max=len(sums) - 1)[None])[0]
        odd = torch.where(odd == len(sums), -1, odd)
        facts = [counts.sum(), sums.sum(), own.double(), reduced.double(), micro.double(), self.stop, odd.double(), which]
        return torch.stack(facts)

    def _present(self) -> list[torch.Tensor]:
        """All gradients, in the order of the parameters; zeros for one that took no part, so that ranks never differ."""
        found = []
        for parameter in self.parallel.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            found.append(parameter.grad)
        return found

    def _update(self, everyone: torch.Tensor) -> torch.Tensor:
        scale = self.precision.scale.clone()
        total = everyone[:, COUNT].sum()
        # A step that counts nothing, or cannot be counted, changes nothing. Told apart on the host.
        usable = (total > 0) & torch.isfinite(total) & (everyone[:, ODD] < 0).all()
        total = torch.where(usable, total, 1.0)
        # DDP took the mean over ranks of gradients of sums / nominal * scale.
        factor = (self.group.world * self.nominal / total).float() / scale
        norm = torch.linalg.vector_norm(self._norms) * factor
        bad = (everyone[:, FIRST_OWN : FIRST_REDUCED + 1] < self._none).any() | ~torch.isfinite(norm)
        if self.clip is not None:
            factor = factor * (self.clip / (norm + 1e-6)).clamp(max=1.0)
        skip = bad | ~usable
        self._apply(factor, skip)
        self.buffers.restore(skip)
        self.precision.update(bad, usable)
        return torch.cat([everyone.flatten(), torch.stack([norm.double(), scale.double(), bad.double()])])

    def _apply(self, factor: torch.Tensor, skip: torch.Tensor) -> None:
        """Update with the gradients times ``factor``, or not at all."""
        optimizer: Any = self.optimizer
        if self._on_device:
            # The optimiser's kernel divides by this: a pass over the gradients less.
            optimizer.grad_scale, optimizer.found_inf = factor.reciprocal(), skip.float()
            try:
                optimizer.step()
            finally:
                del optimizer.grad_scale, optimizer.found_inf
        elif not bool(skip):
            torch._foreach_mul_([one.grad for one in self.parallel.parameters if one.grad is not None], factor)
            optimizer.step()

    def _culprits(self, rows: Sequence[Sequence[float]]) -> tuple[tuple[int, str, int], ...]:
        """Ranks whose own gradients were not finite; all of them if only the reduced ones were not."""
        names = self.parallel.names
        found = []
        for rank, row in enumerate(rows):
            own, lost = int(row[FIRST_OWN]), not math.isfinite(row[LOSS])
            if own < len(names) or lost:
                found.append((rank, names[own] if own < len(names) else "", int(row[FIRST_MICRO]) if lost else -1))
        if not found:
            firsts = [int(row[FIRST_REDUCED]) for row in rows]
            found = [(rank, names[first] if first < len(names) else "", -1) for rank, first in enumerate(firsts)]
        return tuple(found)


def _norms(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Of each gradient, summed up in float32: float32 (gradients,)."""
    kinds = {one.dtype for one in gradients}
    if kinds == {torch.float32}:
        return torch.stack(list(torch._foreach_norm(gradients)))
    found: dict[int, torch.Tensor] = {}
    for kind in kinds:
        places = [place for place, one in enumerate(gradients) if one.dtype is kind]
        norms = torch._foreach_norm([gradients[place] for place in places], 2, torch.promote_types(kind, torch.float32))
        found |= zip(places, norms, strict=True)
    return torch.stack([found[place].float() for place in range(len(gradients))])


def _checked(returned: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What a loss returned, as a scalar and a float32 scalar on the same device, without a copy from the host that would wait.

    Raises:
        LossError: it is something else.
    """
    if not (isinstance(returned, tuple | list) and len(returned) == 2):
        what = f"{len(returned)} values" if isinstance(returned, tuple | list) else type(returned).__name__
        raise LossError(f"the loss returned {what}: {_CONTRACT}")
    mean, count = returned
    if not isinstance(mean, torch.Tensor) or mean.numel() != 1:
        what = f"of shape {tuple(mean.shape)}" if isinstance(mean, torch.Tensor) else f"a {type(mean).__name__}"
        raise LossError(f"the loss's mean is {what}: {_CONTRACT}")
    if mean.is_complex():
        raise LossError(f"the loss's mean is complex ({mean.dtype}), and there is no least of such numbers: {_CONTRACT}")
    if not mean.requires_grad:
        raise LossError(
            f"the loss's mean has no gradient: it must come from the model, also where nothing counts (times 0). {_CONTRACT}"
        )
    return mean.reshape(()), scalar(count, mean.device)


def scalar(count: Any, device: torch.device) -> torch.Tensor:
    """A loss's count as a float32 scalar on the device. Raises :class:`LossError` for what is no number."""
    if isinstance(count, torch.Tensor) and count.numel() == 1 and not count.is_complex():
        return count.detach().to(device, torch.float32).reshape(())
    try:
        return torch.full((), float(count), device=device)
    except (TypeError, ValueError, RuntimeError) as error:
        what = f"of shape {tuple(count.shape)}" if isinstance(count, torch.Tensor) else repr(count)
        raise LossError(f"the loss's count is {what}: {_CONTRACT}") from error


def check_parameters(optimizer: torch.optim.Optimizer, parallel: Parallel) -> None:
    """Raise :class:`ConfigError` unless the optimiser holds exactly the parameters that are trained."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    missing = [name for name, parameter in zip(parallel.names, parallel.parameters, strict=True) if id(parameter) not in held]
    if missing:
        raise ConfigError(
            f"the optimizer does not hold {missing[0]!r} ({len(missing)} of {len(parallel.names)} trained parameters): make it from the "
            "model's parameters, or set requires_grad to False for those that are not trained"
        )
