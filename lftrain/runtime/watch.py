"""Reads what steps report, a step later on a GPU: records, skipped steps and who caused them, whether to stop."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from lftrain.comm.group import Group
from lftrain.errors import LossError, NonFiniteError
from lftrain.health.live import Live
from lftrain.health.meter import Meter
from lftrain.health.records import Records
from lftrain.options import Options
from lftrain.runtime.feed import Batch, Step
from lftrain.runtime.step import Outcome, StepRunner

MOST_KEYS = 64


@dataclass
class _Pending:
    number: int
    report: torch.Tensor
    ready: torch.cuda.Event | None
    host: list[Batch]
    lr: float
    epoch: int


@dataclass
class _Window:
    """Steps since the last logged line."""

    began: float = field(default_factory=time.perf_counter)
    steps: int = 0
    loss: float = 0.0
    items: float = 0.0
    samples: int = 0
    # Items of the loss, and the norm: of steps that were not skipped.
    counted: float = 0.0
    norm: float | None = None


class Watch:
    """Collects outcomes. What it decides is decided on all ranks at the same step, since all see the same report.

    Attributes:
        stop: whether a rank was asked to stop. skipped: steps of the whole run that changed nothing. loss: of the last step read that
            was not skipped, at first of an earlier life of the run; NaN without any.
    """

    def __init__(
        self, options: Options, runner: StepRunner, group: Group, meter: Meter, records: Records, live: Live, loader: Any
    ) -> None:
        self._options, self._runner, self._group = options, runner, group
        self._meter, self._records, self._live = meter, records, live
        self._sources = getattr(loader, "sources", [])
        self._pending: deque[_Pending] = deque()
        self._lag = 1 if group.device.type == "cuda" else 0
        self._window = _Window()
        self.stop = False
        self.skipped, self.in_a_row = 0, 0
        self.loss = float("nan")
        self.memory: dict[str, float] = {}
        self.extra: dict[str, Callable[[], Mapping[str, float]]] = {}

    def add(self, number: int, step: Step, report: torch.Tensor, lr: float) -> None:
        """A step that was launched: the ``number``-th of the run, from 1. Raises what a step read by now asks for."""
        ready = None
        if report.is_cuda:
            report = torch.empty(report.shape, dtype=report.dtype, pin_memory=True).copy_(report, non_blocking=True)
            ready = torch.cuda.Event()
            ready.record()
        self._pending.append(_Pending(number, report, ready, step.host, lr, step.epoch))
        while len(self._pending) > self._lag:
            self._read(self._pending.popleft())

    def drain(self) -> None:
        """Read everything that is outstanding."""
        while self._pending:
            self._read(self._pending.popleft())

    def state_dict(self) -> dict[str, int | float | None]:
        """Counts of the whole run, and its last loss if that is a number. JSON-able."""
        loss = self.loss if math.isfinite(self.loss) else None
        return {"skipped": self.skipped, "in_a_row": self.in_a_row, "loss": loss}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on counting."""
        self.skipped, self.in_a_row = int(state.get("skipped", 0)), int(state.get("in_a_row", 0))
        loss = state.get("loss")
        self.loss = math.nan if loss is None else float(loss)

    def _read(self, one: _Pending) -> None:
        if one.ready is not None:
            one.ready.synchronize()
        outcome = self._runner.read(one.report)
        self.stop |= outcome.stop
        if outcome.odd:
            self._odd(one, outcome)
        window = self._window
        window.steps += 1
        window.samples += self._group.world * sum(_rows(batch) for batch in one.host)
        window.items += outcome.count
        if outcome.skipped:
            self._skipped(one, outcome)
        else:
            self.in_a_row = 0
            self.loss = outcome.loss
            window.loss += outcome.loss * outcome.count
            window.counted += outcome.count
            window.norm = outcome.norm
        if one.number % self._options.metrics.every == 0:
            self._log(one, outcome)
        self._runner.precision.check(outcome.scale)

    def _log(self, one: _Pending, outcome: Outcome) -> None:
        window, self._window = self._window, _Window()
        seconds = max(time.perf_counter() - window.began, 1e-9)
        times = self._meter.take()
        values: dict[str, Any] = {
            "epoch": one.epoch,
            "loss": window.loss / window.counted if window.counted else None,
            "lr": one.lr,
            "norm": window.norm,
            "skipped": self.skipped,
            "samples_per_s": window.samples / seconds,
            "items_per_s": window.items / seconds,
            "step_ms": 1e3 * seconds / window.steps,
            "ms": _means(times),
        }
        if self._runner.precision.scaled:
            values["scale"] = outcome.scale
        if self.memory:
            values["memory"] = self.memory
        values |= {name: report() for name, report in self.extra.items()}
        self._records.write("step", one.number, **values)
        self._live.show(one.number, values)

    def _odd(self, one: _Pending, outcome: Outcome) -> None:
        """A count that is none: no step can be made of it, on no rank."""
        places = ", ".join(f"{count:g} in micro-batch {micro} of rank {rank}" for rank, micro, count in outcome.odd)
        raise LossError(
            f"step {one.number}: the loss gives a count of {places} (total of the step: {outcome.count:g}); a count is the rows or tokens that "
            "the mean is of: 0 or more, and finite. Nothing was changed by this step"
        )

    def _skipped(self, one: _Pending, outcome: Outcome) -> None:
        """All ranks come here at the same step, so they can tell each other whose samples it were."""
        self.skipped += 1
        self.in_a_row += 1
        told: dict[str, Any] = {"bad": [list(cause) for cause in outcome.bad], "keys": [[] for _ in range(self._group.world)]}
        if outcome.bad:
            message, told["keys"] = self._not_finite(one, outcome)
        else:
            message = f"step {one.number} has nothing that counts (the loss gave a count of 0 everywhere), nothing was changed"
        self._records.event("skipped step", message, step=one.number, shared=True, **told)
        if self.in_a_row < self._options.precision.max_skips:
            return
        row = f"{self.in_a_row} steps in a row were skipped (precision.max_skips). The last: {message}"
        if not outcome.bad:
            raise LossError(f"{row}. Look at what the loss counts, and at the mask of its samples")
        raise NonFiniteError(
            f"{row}. Look at the samples named; lower the learning rate or lengthen the warm-up; clip gradients; with fp16, use bf16 or "
            "a lower precision.scale_init"
        )

    def _not_finite(self, one: _Pending, outcome: Outcome) -> tuple[str, list[list[str]]]:
        """Who spoilt a step, in words, and the keys of the samples by rank."""
        self._runner.parallel.forget()
        mine = [micro for rank, _, micro in outcome.bad if rank == self._group.rank]
        keys = self._group.gather_json(self._keys(one.host, mine[0]) if mine else [])
        causes = []
        for rank, name, micro in outcome.bad:
            where = f" in micro-batch {micro}" if micro >= 0 else ""
            parameter = f", first in the gradient of {name!r}" if name else ""
            causes.append(f"rank {rank}{where}{parameter}; samples {', '.join(keys[rank]) or 'unknown'}")
        overflow = self._runner.precision.scaled and not any(micro >= 0 for _, _, micro in outcome.bad)
        why = f" (scale {outcome.scale:g}: it is halved)" if overflow else ""
        large = "" if any(micro >= 0 for _, _, micro in outcome.bad) else ", or too large for their norm (float32)"
        message = f"step {one.number} has gradients that are not finite{large}{why}, nothing was changed: "
        return message + " | ".join(causes), keys

    def _keys(self, host: list[Batch], micro: int) -> list[str]:
        """Keys of this rank's samples in a step, or in one of its micro-batches; indices where the loader tells no keys."""
        found: list[str] = []
        for batch in host if micro < 0 or micro >= len(host) else [host[micro]]:
            if "__index__" not in batch:
                continue
            indices = batch["__index__"].flatten().tolist()
            sources = batch["__source__"].flatten().tolist() if "__source__" in batch else [0] * len(indices)
            for index, source in zip(indices, sources, strict=True):
                if index < 0:
                    continue  # padding
                if len(found) == MOST_KEYS:
                    return [*found, "..."]
                if source < len(self._sources):
                    found.append(self._sources[source].keys([index])[0].decode("utf-8", "backslashreplace"))
                else:
                    found.append(str(index))
        return found


def _rows(batch: Batch) -> int:
    """Samples of a micro-batch."""
    if "__index__" in batch:
        return batch["__index__"].numel()
    return next((len(value) for value in batch.values() if value.dim()), 0)


def _means(times: list[dict[str, float]]) -> dict[str, float]:
    """Of each part over the steps."""
    parts = sorted({part for each in times for part in each})
    return {part: sum(each.get(part, 0.0) for each in times) / len(times) for part in parts}
