"""Training of the vision-language-action model at each world size: with the loader, with feedback, and on one batch that is there."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.log import summary
from benchmarks.gpu.many import node
from benchmarks.gpu.many.rank import meet
from benchmarks.gpu.subjects import Bench, Setting, Subject, free
from lfdata import Loader
from lfdata.loader.taker import Taker
from lftrain.comm.group import Group
from lftrain.runtime.feed import Feed, Step

SUBJECTS = {"resident": Setting(), "loader": Setting(), "feedback": Setting(feedback=True)}
RESIDENT, LOADED = "resident", "loader"


class Resident(Feed):
    """One step that is on the device, again and again."""

    def __init__(self, step: Step) -> None:
        self._step = step

    def next(self) -> Step:
        """It."""
        return self._step

    def peek(self) -> Step:
        """It."""
        return self._step

    def arrive(self, step: Step) -> None:
        """It is there."""

    def look_ahead(self) -> None:
        """Nothing comes."""

    def load_state_dict(self, state: Mapping[str, Any], allow_batch_change: bool = False) -> None:
        """It has no place."""

    def close(self) -> None:
        """Nothing is held."""


def hold(subject: Subject) -> None:
    """Give a subject its first step for ever, and end its loader."""
    runtime = subject.runtime
    assert runtime is not None
    step = runtime.feed.next()
    runtime.feed.arrive(step)
    batches = [{name: value.clone() for name, value in batch.items()} for batch in step.batches]
    host = [{name: value.clone() for name, value in batch.items()} for batch in step.host]
    kept = Step(batches, host, step.state, step.epoch)
    runtime.feed.close()
    subject.loader.close()
    runtime.feed = Resident(kept)


def bench_of(group: Group, told: dict[str, Any]) -> Bench:
    """The model and its data, so many samples a step for each rank."""
    scratch = Path(told["scratch"]) / f"{told['part']}-{group.world}"
    return Bench(Path(told["data"]), scratch, group.device, told["size"], told["batch"] * group.world)


# -- on a rank --------------------------------------------------------------------------------------------------------


def on_rank(group: Group, told: dict[str, Any]) -> dict[str, Any]:
    """Rounds of all subjects, in turns; memory at the end, when only the loader's run is left."""
    bench, launcher, first = bench_of(group, told), os.getppid(), group.rank == 0
    subjects: dict[str, Subject] = {}
    found: dict[str, Any] = {name: {"ms": [], "parts": [], "cpu_s": []} for name in SUBJECTS}
    try:
        for name, setting in SUBJECTS.items():
            subjects[name] = Subject(name, bench, setting)
            if name == RESIDENT:
                hold(subjects[name])
            subjects[name].warm_up(told["lead"] + 1)
        for number in range(told["rounds"]):
            for name in list(SUBJECTS)[:: 1 if number % 2 == 0 else -1]:
                one = found[name]
                subjects[name].timed(told["lead"])
                subjects[name].parts()
                meet(group)
                before = node.cpu_seconds(launcher) if first else 0.0
                meet(group)
                one["ms"].append(subjects[name].timed(told["steps"]))
                meet(group)
                one["cpu_s"].append(node.cpu_seconds(launcher) - before if first else 0.0)
                one["parts"].append(subjects[name].parts())
        for name in ("feedback", LOADED):
            found[name] |= told_by(subjects[name].loader)
        for name in [one for one in subjects if one != LOADED]:
            subjects.pop(name).close()
        free(bench.device)
        subjects[LOADED].timed(told["lead"])
        meet(group)
        found["memory"] = node.memory(launcher) if first else {}
        found["threads"] = node.threads(os.getpid())
        meet(group)
    finally:
        for one in subjects.values():
            one.close()
    return {"subjects": found, "rows": bench.batch, "steps": told["steps"], "cores": len(os.sched_getaffinity(0))}


def told_by(loader: Loader) -> dict[str, Any]:
    """Of a loader: threads that may decode, in all its processes; its waits, memory, and what feedback made of it."""
    stats = loader.stats()
    picked = ("slots", "slot_bytes", "waiting", "copied", "feedback")
    threads = {"threads": Taker(loader).threads, "wait_p99_ms": round(stats["wait"]["p99_ms"], 3)}
    return {name: stats[name] for name in picked} | threads


# -- what is concluded ------------------------------------------------------------------------------------------------


def concluded(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of one world size: rates of all ranks together, by the slowest of each round."""
    rows, steps, world = ranks[0]["rows"], ranks[0]["steps"], len(ranks)
    found: dict[str, Any] = {"batch": rows, "batch_of_a_rank": rows // world, "steps_a_round": steps}
    for name in SUBJECTS:
        mine = [rank["subjects"][name] for rank in ranks]
        ms = [max(one) for one in zip(*(each["ms"] for each in mine), strict=True)]
        samples = rows * steps
        found[name] = {
            "ms": summary(ms),
            "samples_per_s": summary([1e3 * rows / one for one in ms]),
            "cpu_s_per_1000": summary([1e3 * one / samples for one in mine[0]["cpu_s"]]),
            "data_wait_ms": {str(rank): summary([_wait(one) for one in each["parts"]]) for rank, each in enumerate(mine)},
            "parts_ms": {str(rank): each["parts"] for rank, each in enumerate(mine)},
        }
    found["memory_mib"] = ranks[0]["subjects"]["memory"]
    found["slot_mib"] = slot_mib([rank["subjects"][LOADED] for rank in ranks])
    return found


def _wait(parts: Mapping[str, float]) -> float:
    """Of a step, ms for data and for copies."""
    return parts.get("data", 0.0) + parts.get("copy", 0.0)


def slot_mib(loaders: Sequence[Mapping[str, Any]]) -> float:
    """Of all slots of all ranks, from what :func:`told_by` says."""
    count: int = sum(one["slots"] * one["slot_bytes"] for one in loaders)
    return round(count / (1 << 20), 1)


def efficiency(found: Mapping[str, Any], alone: float | None) -> dict[str, Any]:
    """Rates over those of as many single GPUs without a loader."""
    if alone is None:
        return {"why": "one rank was not measured: give --worlds 1,..."}
    world = found["batch"] // found["batch_of_a_rank"]
    return {name: round(found[name]["samples_per_s"]["median"] / (world * alone), 4) for name in SUBJECTS if name in found}


def divided(ranks: Sequence[Mapping[str, Any]], threads: Sequence[int], processes: int = 1) -> dict[str, Any]:
    """Whether the decoding threads of all ranks fit on the cores: of each rank those of all its decoder processes together."""
    cores = ranks[0]["cores"]
    # Each process has a thread at least.
    most = max(cores, len(ranks) * processes)
    return {"cores": cores, "decoding_threads": list(threads), "oversubscribed": sum(threads) > most}


def watched(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What feedback made of it on each rank, and whether each looks at its own GPU."""
    found = [rank["subjects"]["feedback"]["feedback"] for rank in ranks]
    uuids = [rank["uuid"] for rank in ranks]
    own = len(set(uuids)) == len(uuids) and [one["gpu"] for one in found] == uuids
    return {"feedback": found, "uuids": uuids, "one_sensor_a_gpu": None if None in uuids else own}
