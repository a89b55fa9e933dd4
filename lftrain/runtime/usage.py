"""Memory that a micro-batch takes, measured: forward and backward of a part of a real batch."""

from __future__ import annotations

import math

import torch
from torch import nn

from lftrain.errors import ConfigError
from lftrain.memory.measure import kept, same_random, undisturbed
from lftrain.options import PrecisionOptions
from lftrain.runtime.feed import Batch
from lftrain.runtime.precision import Precision
from lftrain.runtime.step import Loss

# What AdamW keeps for a trained parameter beside it: its gradient and two averages, fp32.
BESIDE = 12
GPU_SHARE = 0.9


class MicroBatches:
    """Micro-batches of different sizes, cut from one batch.

    Args:
        batch: on the host; every tensor of it has a row for each sample.
    """

    def __init__(self, model: nn.Module, loss: Loss, batch: Batch, precision: PrecisionOptions, device: torch.device) -> None:
        self._model, self._loss, self._device = model, loss, device
        self._precision = Precision(precision, device)
        self._precision.prepare(model)
        self._warm = False
        self.rows = len(batch["__mask__"]) if "__mask__" in batch else len(next(iter(batch.values())))
        if odd := next((name for name, value in batch.items() if not value.dim() or len(value) != self.rows), None):
            raise ConfigError(
                f'data.accumulate = "auto" needs fields of one length a row, and {odd!r} is not: bring it to one, or set a number'
            )
        self._batch = {name: value.clone() for name, value in batch.items()}

    def bytes(self, rows: int) -> float:
        """On a GPU the peak of memory beyond what was there, infinite for too much; on CPU what is kept for the backward pass."""
        part = {name: value[:rows].to(self._device) for name, value in self._batch.items()}
        cuda = self._device.type == "cuda"
        with same_random(self._device), undisturbed(self._model):
            if cuda and not self._warm:
                # What libraries keep for ever after their first use (workspaces) is no micro-batch's.
                self._warm = math.isfinite(self._peak(part))
            return self._peak(part) if cuda else self._kept(part)

    def limit(self, asked: float | None) -> float:
        """Bytes that a micro-batch may take. Raises :class:`ConfigError` on CPU if nothing is asked for."""
        if asked is not None:
            return asked * 1e6
        if self._device.type != "cuda":
            raise ConfigError('data.accumulate = "auto" on a CPU needs activations.limit_mb')
        held = torch.cuda.memory_allocated(self._device)
        states = sum(BESIDE * one.numel() for one in self._model.parameters() if one.requires_grad)
        return GPU_SHARE * torch.cuda.get_device_properties(self._device).total_memory - held - states

    def _kept(self, part: Batch) -> float:
        with kept(self._model.parameters()) as taken, self._precision.autocast():
            self._loss(self._model, part)
        return taken.bytes

    def _peak(self, part: Batch) -> float:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        try:
            with self._precision.autocast():
                mean, _ = self._loss(self._model, part)
            mean.backward()
            torch.cuda.synchronize(self._device)
            gradients = sum(one.grad.nbytes for one in self._model.parameters() if one.grad is not None)
            return float(torch.cuda.max_memory_allocated(self._device) - before - gradients)
        except torch.cuda.OutOfMemoryError:
            return float("inf")
        finally:
            self._model.zero_grad(set_to_none=True)
