"""Who owns the memory, and whether anybody's part keeps growing."""

from __future__ import annotations

import os
from collections import deque
from typing import Any

import torch
from torch import nn

MB = 1e6
LOOKS = 8
_PAGE = os.sysconf("SC_PAGESIZE")


class Ledger:
    """Bytes by owner.

    ``parameters`` are with their masters (precision.weights). On a GPU ``other`` is what torch has allocated there beyond parameters,
    gradients and optimiser; ``activations`` the peak beyond those since the last look; ``cached`` what torch holds and does not use. ``host``
    is this process's resident memory without the loader's slots, which are ``loader``.

    Args:
        growth: MB by which an owner must grow over :data:`LOOKS` looks that never fell, to be reported.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any, device: torch.device, growth: float
    ) -> None:
        self._model, self._optimizer, self._loader, self._device = model, optimizer, loader, device
        self._growth = growth
        self._seen: dict[str, deque[float]] = {}

    def look(self) -> dict[str, float]:
        """MB by owner, now."""
        parameters = list(self._model.parameters())
        masters = [one for one in (getattr(one, "master", None) for one in parameters) if one is not None]
        states = [value for state in self._optimizer.state.values() for value in state.values()]
        owners = {
            "parameters": _bytes([*parameters, *masters]),
            "gradients": _bytes([one.grad for one in parameters if one.grad is not None]),
            "optimizer": _bytes([value for value in states if isinstance(value, torch.Tensor)]),
        }
        slots = float(self._loader.stats().get("slot_bytes", 0)) if hasattr(self._loader, "stats") else 0.0
        known = sum(owners.values())
        if self._device.type == "cuda":
            allocated, peak = torch.cuda.memory_allocated(self._device), torch.cuda.max_memory_allocated(self._device)
            owners |= {"other": allocated - known, "activations": peak - known}
            owners["cached"] = torch.cuda.memory_reserved(self._device) - allocated
            torch.cuda.reset_peak_memory_stats(self._device)
            known = 0.0
        resident, shared = _resident()
        owners |= {"loader": slots, "host": max(0.0, resident - min(slots, shared) - known)}
        return {owner: round(value / MB, 3) for owner, value in owners.items()}

    def grown(self, looked: dict[str, float]) -> list[tuple[str, float]]:
        """Owners that have grown since the first of the last looks without ever falling, with MB. Each is told once, then watched anew."""
        found = []
        for owner, value in looked.items():
            seen = self._seen.setdefault(owner, deque(maxlen=LOOKS))
            if seen and value < seen[-1]:
                seen.clear()
            seen.append(value)
            if len(seen) == LOOKS and seen[-1] - seen[0] >= self._growth and seen[-1] > seen[LOOKS // 2] > seen[0]:
                found.append((owner, seen[-1] - seen[0]))
                seen.clear()
        return found


def _bytes(tensors: list[Any]) -> float:
    """Of all storages, each once."""
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    return float(sum(storages.values()))


def _resident() -> tuple[float, float]:
    """Bytes of this process in memory, and those of them that are shared."""
    with open("/proc/self/statm", encoding="ascii") as file:
        _, resident, shared, *_ = file.read().split()
    return float(resident) * _PAGE, float(shared) * _PAGE
