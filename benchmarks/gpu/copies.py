"""Rates of copies from the host, and what memory costs when it is asked for anew."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import record
from benchmarks.gpu.consumers import Clock, allocated
from lfdata.device.backend import backend_of
from lfdata.device.register import Registered
from lfdata.device.ring import Ring
from lfdata.loader.slots import Slots

# Copies of one timing.
COPIES = 20
MIB = 1 << 20


def copy_rates(device: torch.device, size: int, repeats: int, say: Callable[[str], None]) -> dict[str, Any]:
    """MiB/s of the same bytes from registered slots, from torch's pinned memory, and from slots that are not registered; interleaved."""
    slots, bare, backend = Slots(3, size), Slots(3, size), backend_of(device)
    for one in (slots, bare):
        one.memory()[:] = 7
    began = time.perf_counter()
    registered = None if backend is None else Registered(backend, slots)
    registering = time.perf_counter() - began
    pinned = [torch.full((size,), 7, dtype=torch.uint8) for _ in range(3)]
    if backend is not None:
        pinned = [one.pin_memory() for one in pinned]
    target, clock = torch.empty(size, dtype=torch.uint8, device=device), Clock(device)
    sources = {
        "registered": [torch.frombuffer(slots.slot(number), dtype=torch.uint8)[:size] for number in range(3)],
        "pinned": pinned,
        "pageable": [torch.frombuffer(bare.slot(number), dtype=torch.uint8)[:size] for number in range(3)],
    }

    def rate(name: str) -> float:
        marks = [clock.mark()]
        for number in range(COPIES):
            target.copy_(sources[name][number % 3], non_blocking=True)
        marks.append(clock.mark())
        clock.reach(marks[1])
        return COPIES * size / MIB / (clock.ms(*marks) / 1e3)

    for name in sources:
        rate(name)
    subjects: dict[str, Callable[[], float]] = {name: (lambda name=name: rate(name)) for name in sources}  # type: ignore[misc]
    found = record.interleave(subjects, max(5, repeats))
    against = record.ratio(found["registered"], found["pinned"])
    say(
        f"copies of {size:,} bytes, MiB/s: "
        + ", ".join(f"{name} {record.summary(all_of)['median']:,.0f}" for name, all_of in found.items())
    )
    result = {
        "bytes": size,
        "refused": "" if registered is None else registered.refused,
        "registering_ms": 1e3 * registering,
        "registered_bytes": len(slots.memory()),
        "repeats": found,
        "summary": {name: record.summary(all_of) for name, all_of in found.items()},
        "registered_against_pinned": against,
    }
    sources.clear()
    if registered is not None:
        registered.release()
    slots.close()
    bare.close()
    return result


def allocation(device: torch.device, size: int, steps: int, say: Callable[[str], None]) -> dict[str, Any]:
    """ms a step that a host spends to get memory for a batch, of sizes that vary by a fifth: pinned and on the device, from torch;
    on the device alone; and from the ring."""
    backend, chance = backend_of(device), random.Random(1)
    sizes = [int(size * chance.uniform(0.8, 1.2)) for _ in range(steps)]
    if device.type == "cuda":
        torch.cuda.empty_cache()
    ring = None if backend is None else Ring(backend, 4)
    if ring is not None:
        ring.reserve(max(sizes))

    def pinned(wanted: int) -> None:
        torch.empty(wanted, dtype=torch.uint8, pin_memory=device.type == "cuda")
        torch.empty(wanted, dtype=torch.uint8, device=device)

    def on_device(wanted: int) -> None:
        torch.empty(wanted, dtype=torch.uint8, device=device)

    def from_ring(wanted: int) -> None:
        if ring is not None and backend is not None:
            place = ring.take(wanted)
            assert place is not None
            if place.released is not None:
                backend.wait(place.released)
            ring.lend(place, wanted, backend.consumer())

    found: dict[str, Any] = {}
    for name, get in (("ring", from_ring), ("device", on_device), ("pinned and device", pinned)):
        before, times = allocated(device), []
        for wanted in sizes:
            began = time.perf_counter()
            get(wanted)
            times.append(1e3 * (time.perf_counter() - began))
        after = allocated(device)
        found[name] = {"ms": times, "mean_ms": sum(times) / steps} | {key: after[key] - before[key] for key in after}
    if ring is not None:
        ring.close()
    say("allocation, ms a step: " + ", ".join(f"{name} {one['mean_ms']:.3f}" for name, one in found.items()))
    return found
