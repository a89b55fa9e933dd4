"""What forward passes change in a model beside its gradients (statistics of a BatchNorm): as before, after a step that is skipped."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from lftrain.memory.measure import can_be_written

Slot = tuple[int, str]
# Compared and chosen as whole numbers: NaN is equal to itself, and there is a kernel for every type.
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Buffers:
    """The buffers of a model that steps change.

    In its first step all are copied, and those found that it changed; from then on these alone. One that is first written to later is copied
    from the next step on.
    """

    def __init__(self, model: nn.Module) -> None:
        self._owners = [module._buffers for module in model.modules() if module._buffers]
        self._watched: set[Slot] | None = None
        self._versions: dict[Slot, tuple[torch.Tensor, int]] = {}
        self._kept: list[tuple[list[Slot], list[torch.Tensor]]] = []

    def tensors(self) -> list[torch.Tensor]:
        """All that can change."""
        return [value.detach() for value in self._now().values()]

    @torch.no_grad()
    def keep(self) -> None:
        """Before a step."""
        if not self._owners:
            return
        now = self._now()
        self._versions = {slot: (value, value._version) for slot, value in now.items()}
        groups: dict[tuple[torch.device, torch.dtype], list[Slot]] = {}
        for slot, value in now.items():
            if self._watched is None or slot in self._watched:
                groups.setdefault((value.device, value.dtype), []).append(slot)
        self._kept = []
        for slots in groups.values():
            sizes = [now[slot].numel() for slot in slots]
            self._kept.append((slots, list(_flat([now[slot] for slot in slots]).split(sizes))))

    @torch.no_grad()
    def restore(self, skip: torch.Tensor) -> None:
        """After the step: as they were if ``skip``, a bool scalar on the device. Waits for the device in the first step only."""
        if not self._owners:
            return
        now, kept, versions = self._now(), self._kept, self._versions
        self._kept, self._versions = [], {}
        changed = {
            slot
            for slot, value in now.items()
            if slot not in versions or versions[slot][0] is not value or versions[slot][1] != value._version
        }
        if self._watched is None:
            # Blocks that are compiled may write without a new version.
            self._watched = changed | _differing(now, kept)
        for slots, before in kept:
            pairs = [(now[slot], one) for slot, one in zip(slots, before, strict=True) if slot in self._watched and slot in now]
            pairs = [(value, one) for value, one in pairs if _kind(value) == _kind(one) and value.device == skip.device]
            if pairs:
                values = [value for value, _ in pairs]
                chosen = torch.where(skip, _whole(torch.cat([one for _, one in pairs])), _whole(_flat(values)))
                pieces = chosen.view(values[0].dtype).split([value.numel() for value in values])
                torch._foreach_copy_(values, [one.view(value.shape) for value, one in zip(values, pieces, strict=True)])
        self._watched |= changed

    def _now(self) -> dict[Slot, torch.Tensor]:
        return {
            (number, name): value
            for number, owner in enumerate(self._owners)
            for name, value in owner.items()
            if value is not None and can_be_written(value)
        }


def _kind(value: torch.Tensor) -> tuple[int, torch.dtype, torch.device]:
    return value.numel(), value.dtype, value.device


def _flat(values: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([value.reshape(-1) for value in values])


def _whole(value: torch.Tensor) -> torch.Tensor:
    return value.view(_WHOLE.get(value.element_size(), value.dtype))


def _differing(now: dict[Slot, torch.Tensor], kept: list[tuple[list[Slot], list[torch.Tensor]]]) -> set[Slot]:
    found = set()
    for slots, before in kept:
        for slot, one in zip(slots, before, strict=True):
            value = now.get(slot)
            if value is None or _kind(value) != _kind(one) or not torch.equal(_whole(value.reshape(-1)), _whole(one)):
                found.add(slot)
    return found
