"""What eats batches: a transformer that fills the GPU, and a model that mostly launches. And how long their steps take."""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

CLASSES = 1000
# Steps that the host may be ahead of the device, as a loop that reads its loss a little later is.
LAG = 2
Batch = dict[str, torch.Tensor]
# Children whose time is not counted.
BYSTANDERS: set[int] = set()


class _Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, width = x.shape
        q, k, v = self.qkv(self.before(x)).view(rows, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(rows, tokens, width)
        x = x + self.out(found)
        return x + self.down(F.gelu(self.up(self.after(x))))  # type: ignore[no-any-return]


class Vit(nn.Module):
    """A vision transformer with patches of 16 pixels; as large as ViT-L by default."""

    def __init__(self, side: int, width: int = 1024, depth: int = 24, heads: int = 16) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.place = nn.Parameter(torch.zeros(1, (side // 16) ** 2, width))
        self.layers = nn.Sequential(*(_Layer(width, heads) for _ in range(depth)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, CLASSES))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """(rows, CLASSES)."""
        x = self.patches(images).flatten(2).transpose(1, 2) + self.place
        return self.head(self.layers(x).mean(1))  # type: ignore[no-any-return]


class Launches(nn.Module):
    """Many small layers: the GPU waits for the host's launches."""

    def __init__(self, depth: int = 64, width: int = 64) -> None:
        super().__init__()
        self.first = nn.Linear(3 * 16, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(depth)
        )
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """(rows, CLASSES)."""
        x = self.first(F.adaptive_avg_pool2d(images, 4).flatten(1))
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)  # type: ignore[no-any-return]


def stepper(model: nn.Module, device: torch.device) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Forward, backward and update of one batch in bf16."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, fused=device.type == "cuda")

    def step(images: torch.Tensor, target: torch.Tensor) -> None:
        loss = F.cross_entropy(model(images).float(), target)
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()

    return step


class Clock:
    """Marks on the device, or of the host where there is no GPU."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def reach(self, mark: Any) -> None:
        """Wait until the device is there."""
        if self._cuda:
            mark.synchronize()

    def ms(self, before: Any, after: Any) -> float:
        return float(before.elapsed_time(after)) if self._cuda else 1e3 * (after - before)


def measure(
    step: Callable[[Any], int], batches: Iterator[Any], device: torch.device, seconds: float, warm: int = 3
) -> dict[str, Any]:
    """Steps for some seconds. Of each the time from its end back to the end of the one before, on the device's clock.

    Returns:
        ``ms`` a step (mean), ``p50``, ``p99`` and ``most`` of them, ``waited``: ms a step the host spent in asking for batches; ``cpu_own`` and
        ``cpu_others``: CPU seconds of this process and of its children; allocations of torch's a step, and segments in all.
    """
    clock, waited, rows = Clock(device), 0.0, 0
    for _ in range(warm):
        step(next(batches))
    if device.type == "cuda":
        torch.cuda.synchronize()
    cpu, memory, began = cpu_seconds(), allocated(device), time.perf_counter()
    marks = [clock.mark()]
    while time.perf_counter() - began < seconds or len(marks) < 4:
        asked = time.perf_counter()
        batch = next(batches)
        waited += time.perf_counter() - asked
        rows += step(batch)
        del batch
        marks.append(clock.mark())
        if len(marks) > LAG:
            clock.reach(marks[-1 - LAG])
    clock.reach(marks[-1])
    now, then = cpu_seconds(), allocated(device)
    times = [clock.ms(one, other) for one, other in itertools.pairwise(marks)]
    steps = len(times)
    ordered = sorted(times)
    return {
        "steps": steps,
        "rows": rows,
        "ms": statistics.fmean(times),
        "p50": statistics.median(times),
        "p99": ordered[min(steps - 1, int(0.99 * steps))],
        "most": ordered[-1],
        "waited": 1e3 * waited / steps,
        "cpu_own": now[0] - cpu[0],
        "cpu_others": now[1] - cpu[1],
        "allocations": (then["allocations"] - memory["allocations"]) / steps,
        "segments": then["segments"] - memory["segments"],
        "device_allocations": then["device_allocations"] - memory["device_allocations"],
    }


def allocated(device: torch.device) -> dict[str, int]:
    """What torch has allocated on the device so far: blocks, segments, calls of cudaMalloc."""
    found: dict[str, int] = torch.cuda.memory_stats(device) if device.type == "cuda" else {}
    return {
        "allocations": found.get("allocation.all.allocated", 0),
        "segments": found.get("segment.all.allocated", 0),
        "device_allocations": found.get("num_device_alloc", 0),
    }


def cpu_seconds() -> tuple[float, float]:
    """CPU time so far, of this process and of all its descendants that live, but for bystanders."""
    tick = os.sysconf("SC_CLK_TCK")
    parents, spent = {}, {}
    for place in Path("/proc").iterdir():
        if place.name.isdigit() and int(place.name) not in BYSTANDERS:
            try:
                fields = (place / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(place.name)] = int(fields[1])
            spent[int(place.name)] = (int(fields[11]) + int(fields[12])) / tick
    ours, others = os.getpid(), 0.0
    for process in spent:
        above = parents.get(process, 0)
        while above not in (0, ours):
            above = parents.get(above, 0)
        others += spent[process] if above == ours and process != ours else 0.0
    return spent.get(ours, 0.0), others
