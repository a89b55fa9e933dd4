"""The loader alone at each world size: a consumer that takes all it gets on the device; memory of the whole node; one cache for all ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import data
from benchmarks.gpu.arms import endless
from benchmarks.gpu.consumers import measure
from benchmarks.gpu.log import summary
from benchmarks.gpu.many import node, rates, sets
from benchmarks.gpu.many.rank import meet
from benchmarks.gpu.many.rates import divided, told_by
from benchmarks.gpu.subjects import free
from lfdata import Cache, DeviceLoader, Loader
from lfdata.loader.taker import Taker
from lftrain.comm.group import Group

# Steps before the first round: what was made ahead is used up.
WARM = 8
# Blocks of the cache are this large, so that ranks that share pictures' neighbours show it.
BLOCK = 1 << 20


# -- on a rank --------------------------------------------------------------------------------------------------------


def on_rank(group: Group, told: dict[str, Any]) -> dict[str, Any]:
    """Rounds of some seconds; then an epoch by way of a cache that is empty."""
    launcher, first, batch = os.getppid(), group.rank == 0, told["batch"] * group.world
    folder, empty = Path(told["data"]), Path("")
    loader = DeviceLoader(sets.loader("multimodal", folder, empty, batch, told["side"]), group.device)
    rounds: list[dict[str, Any]] = []
    try:
        batches = endless(loader)
        for number in range(told["rounds"]):
            meet(group)
            one = measure(_count, batches, group.device, told["seconds"], WARM if number == 0 else 2)
            rounds.append({name: one[name] for name in ("steps", "rows", "ms", "waited", "cpu_own", "cpu_others")})
        meet(group)
        memory = node.memory(launcher) if first else {}
        found: dict[str, Any] = {
            "rounds": rounds,
            "memory": memory,
            "loader": told_by(loader.loader),
            "threads": node.threads(os.getpid()),
        }
        meet(group)
        del batches
    finally:
        loader.close()
    free(group.device)
    twice = Loader(folder / data.SHARDS, batch, ["image"], processes=2)
    found |= {"two": Taker(twice).threads, "cores": len(os.sched_getaffinity(0))}
    twice.close()
    return {**found, "cache": through_cache(group, told, batch)}


def _count(batch: Mapping[str, Any]) -> int:
    return len(batch["__index__"])


def through_cache(group: Group, told: dict[str, Any], batch: int) -> dict[str, Any]:
    """An epoch with a cache that all ranks share: what this rank fetched, and what lies on the disk in the end."""
    folder = Path(told["scratch"]) / f"cache-{group.world}"
    cache = Cache(str(folder), block_bytes=BLOCK)
    loader = Loader(Path(told["data"]) / data.SHARDS, batch, ["image"], seed=sets.SEED, cache=cache)
    try:
        rows = sum(len(one["__index__"]) for one in loader)
        counts = loader.stats()["storage"]
    finally:
        loader.close()
    meet(group)
    return {"rows": rows, "counts": counts, "disk_bytes": size(folder) if group.rank == 0 else 0}


def size(folder: Path) -> int:
    """Bytes on the disk below a folder; holes take none."""
    return sum(512 * path.stat().st_blocks for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


# -- what is concluded ------------------------------------------------------------------------------------------------


def concluded(ranks: Sequence[Mapping[str, Any]], shards: Path) -> dict[str, Any]:
    """Of one world size. ``samples_per_s``: the ranks' own rates together."""
    rounds = [list(one) for one in zip(*(rank["rounds"] for rank in ranks), strict=True)]
    found = [sum(1e3 * one["rows"] / one["steps"] / one["ms"] for one in each) for each in rounds]
    spent = [
        1e3 * sum(one["cpu_own"] + one["cpu_others"] for one in each) / sum(one["rows"] for one in each) for each in rounds
    ]
    memory, slots = ranks[0]["memory"], rates.slot_mib([rank["loader"] for rank in ranks])
    return {
        "batch_of_a_rank": ranks[0]["rounds"][0]["rows"] // ranks[0]["rounds"][0]["steps"],
        "samples_per_s": summary(found),
        "of_each_rank": {
            str(rank): summary([1e3 * one["rows"] / one["steps"] / one["ms"] for one in mine["rounds"]])
            for rank, mine in enumerate(ranks)
        },
        "cpu_s_per_1000": summary(spent),
        "data_wait_ms": {str(rank): summary([one["waited"] for one in found["rounds"]]) for rank, found in enumerate(ranks)},
        "memory_mib": memory,
        "slot_mib": slots,
        # Slots are mapped by trainer and decoder; proportionally they count once. Those that were never filled take nothing.
        "shared_over_slots": round(memory["shared"] / slots, 3) if memory.get("shared") and slots else None,
        **divided(ranks, [rank["loader"]["threads"] for rank in ranks]),
        "decoding_cores_used": summary([_decoding(each) for each in rounds]),
        "with_two_processes": divided(ranks, [rank["two"] for rank in ranks], 2),
        "threads_of_processes": [rank["threads"] for rank in ranks],
        "cache": cached(ranks, shards),
    }


def _decoding(each: Sequence[Mapping[str, Any]]) -> float:
    """How many cores the decoder processes of all ranks kept busy in a round."""
    return float(sum(1e3 * one["cpu_others"] / (one["steps"] * one["ms"]) for one in each))


def cached(ranks: Sequence[Mapping[str, Any]], shards: Path) -> dict[str, Any]:
    """Whether the cache holds the data once, however many ranks read through it."""
    disk, there = ranks[0]["cache"]["disk_bytes"], size(shards)
    # What is left of last blocks, and the cache's own lists.
    most = 1.1 * there + 4 * BLOCK
    counts = [rank["cache"]["counts"] for rank in ranks]
    return {"data_bytes": there, "disk_bytes": disk, "counts": counts, "multiplied": disk > most}
