"""The parts, one after the other: which ranks are started for each, and what of them goes into the record."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import data
from benchmarks.gpu.log import Log
from benchmarks.gpu.many import faults, feeding, order, overlap, rates, sets
from benchmarks.gpu.many.launch import Launched, launch
from benchmarks.gpu.many.rank import PEER_SECONDS

# What a checkpoint is made with, and with what it is gone on.
ORIGIN, ONTO = 2, (4, 1)


@dataclass(frozen=True)
class Plan:
    """How much is done.

    Attributes:
        worlds: numbers of ranks. size: of the model. batch, feed_batch: samples of a rank. order_batch: of all ranks.
        lead: steps before each round. order_steps: the most. side: of pictures. limit: seconds of a group of ranks.
    """

    worlds: list[int]
    size: str
    batch: int
    order_batch: int
    feed_batch: int
    rounds: int
    steps: int
    seconds: float
    lead: int
    order_steps: int
    side: int
    limit: float

    def told(self) -> dict[str, Any]:
        """For the record."""
        return asdict(self)


class Run:
    """One run of the script."""

    def __init__(self, plan: Plan, log: Log, scratch: Path, folder: Path, tokens: Path, device: str, tiny: bool) -> None:
        self.plan, self.log, self.scratch = plan, log, scratch
        self._common = {"scratch": str(scratch), "data": str(folder), "tokens": str(tokens), "device": device, "tiny": tiny}
        self._shards = folder / data.SHARDS
        there = torch.cuda.device_count() if device == "cuda" else None
        self.worlds = [world for world in plan.worlds if there is None or world <= there]
        self.not_run = {str(world): f"there are {there} GPUs" for world in plan.worlds if world not in self.worlds}
        self.wrong: list[str] = []

    def parts(self, names: list[str]) -> list[str]:
        """Do some of :data:`PARTS`. Returns what is not as it must be, or did not run."""
        self.log.fresh("worlds")
        self.log.put("worlds", run=self.worlds, not_run=self.not_run)
        for name in names:
            self.log.say("part", name)
            PARTS[name](self)
        return self.wrong

    def start(self, part: str, world: int, **told: Any) -> Launched:
        """A group of ranks; those that fail are said to."""
        limit = self.plan.limit
        name = "-".join([part, str(world), *(str(told[key]) for key in ("harm",) if key in told)])
        found = launch(self.scratch, name, world, limit, {**self._common, "part": part, "limit": limit, **told})
        gpus = [rank["gpu"] | {"uuid": rank["uuid"]} for rank in found.ranks if "gpu" in rank]
        if len(gpus) > len(self.log.made["machine"].get("gpus", ())):
            self.log.made["machine"]["gpus"] = gpus
        # Of a rank that is killed the others are to fail.
        failed = [f"failed: {found.error}"] if found.error and told.get("harm") != "kill" else []
        self.log.say(part, f"{world} ranks: {found.seconds:.0f} s", *failed)
        return found

    def must(self, holds: bool | None, what: str) -> None:
        """Write down what is not as it must be; ``None``: it was not tried."""
        if holds is False:
            self.wrong.append(what)

    def crowded(self, world: int, one: dict[str, Any]) -> None:
        """Whether more threads decode than there are cores."""
        threads = f"{one['decoding_threads']} threads on {one['cores']} cores"
        self.must(not one["oversubscribed"], f"{world} ranks decode with {threads}")

    def failed(self, part: str, found: Launched) -> bool:
        """Whether a group of ranks came to nothing; the record says why."""
        if found.error:
            errors = self.log.results.get(part, {}).get("errors", {})
            self.log.put(part, errors={**errors, str(found.world): found.error})
            self.wrong.append(f"{part} with {found.world} ranks: {found.error}")
        return bool(found.error)


def ordered(run: Run) -> None:
    """``order`` and ``resume``: whole runs at each world size, and runs that go on from a checkpoint of two ranks."""
    run.log.fresh("order")
    run.log.fresh("resume")
    plan, groups = run.plan, dict[int, list[dict[str, Any]]]()
    origin = ORIGIN if ORIGIN in run.worlds else None
    # The one that writes the checkpoints first.
    for world in sorted(run.worlds, key=lambda one: one != origin):
        todo = order.runs(run.scratch, world, origin if world in (ORIGIN, *ONTO) else None)
        told = {"runs": todo, "batch": plan.order_batch, "side": plan.side, "most": plan.order_steps}
        found = run.start("order", world, **told)
        if run.failed("order", found):
            continue
        groups[world] = found.ranks
        for kind in sets.KINDS:
            run.log.put("order", **{kind: order.compared(kind, groups)})
            if origin in groups:
                run.log.put("resume", **{kind: order.resumed(kind, groups, ORIGIN)})
    for part in ("order", "resume"):
        for kind in sets.KINDS:
            one = run.log.results.get(part, {}).get(kind, {"same": None, "differences": []})
            run.must(one["same"], f"{part} of {kind}: {'; '.join(one['differences'])}")
            run.log.say(
                part, f"{kind}: {'not compared' if one['same'] is None else 'the same' if one['same'] else one['differences']}"
            )
    missing = {str(world): run.not_run.get(str(world), "not asked for") for world in (ORIGIN, *ONTO) if world not in run.worlds}
    run.log.put("resume", not_run=missing)


def trained(run: Run) -> None:
    """``training`` and ``division``: rates and waits by world size, threads and feedback of each rank."""
    run.log.fresh("training")
    run.log.fresh("division")
    plan, alone = run.plan, None
    for world in run.worlds:
        told = {"size": plan.size, "batch": plan.batch, "rounds": plan.rounds, "steps": plan.steps, "lead": plan.lead}
        found = run.start("rates", world, **told)
        if run.failed("training", found):
            continue
        one = rates.concluded(found.ranks)
        if world == 1:
            alone = one[rates.RESIDENT]["samples_per_s"]["median"]
        one["efficiency"] = rates.efficiency(one, alone)
        run.log.put("training", **{str(world): one}, one_gpu_without_loader=alone)
        divided = rates.divided(found.ranks, [rank["subjects"][rates.LOADED]["threads"] for rank in found.ranks])
        divided |= rates.watched(found.ranks)
        run.log.put("division", **{str(world): divided})
        run.crowded(world, divided)
        run.must(divided["one_sensor_a_gpu"], f"{world} ranks: a sensor looks at another GPU than its rank's")
        rate = one[rates.LOADED]["samples_per_s"]["median"]
        run.log.say("training", f"{world}: {rate:.1f} samples/s, efficiency {one['efficiency']}")


def fed(run: Run) -> None:
    """``feeding``: the loader alone."""
    run.log.fresh("feeding")
    plan, alone = run.plan, run.log.results.get("training", {}).get("one_gpu_without_loader")
    first: float | None = None
    for world in run.worlds:
        told = {"batch": plan.feed_batch, "rounds": plan.rounds, "seconds": plan.seconds, "side": plan.side}
        found = run.start("feeding", world, **told)
        if run.failed("feeding", found):
            continue
        one = feeding.concluded(found.ranks, run._shards)
        rate = one["samples_per_s"]["median"]
        first = rate if world == 1 else first
        one["against_one_rank"] = None if first is None else round(rate / (world * first), 4)
        one["times_training_without_loader"] = None if alone is None else round(rate / (world * alone), 4)
        run.log.put("feeding", **{str(world): one})
        run.must(
            not one["oversubscribed"], f"{world} ranks decode with {one['decoding_threads']} threads on {one['cores']} cores"
        )
        run.must(not one["cache"]["multiplied"], f"{world} ranks: the cache takes {one['cache']['disk_bytes']} bytes")
        run.log.say("feeding", f"{world}: {rate:.0f} samples/s, {one['cpu_s_per_1000']['median']:.2f} CPU-s a thousand")


def overlapped(run: Run) -> None:
    """``overlap``: with several ranks."""
    run.log.fresh("overlap")
    plan = run.plan
    for world in [one for one in run.worlds if one > 1]:
        told = {"size": plan.size, "batch": plan.batch, "rounds": plan.rounds, "steps": plan.steps, "lead": plan.lead}
        found = run.start("overlap", world, **told, traced=3)
        if run.failed("overlap", found):
            continue
        one = overlap.concluded(found.ranks)
        run.log.put("overlap", **{str(world): one})
        said = {each["why"] if each["exposed_ms"] is None else f"{name}: {each['exposed_ms']}" for name, each in one.items()}
        run.log.say("overlap", f"{world}: exposed ms a step:", "; ".join(sorted(said)))


def harmed(run: Run) -> None:
    """``faults``: with several ranks."""
    run.log.fresh("faults")
    for world in [one for one in run.worlds if one > 1]:
        found = run.start("faults", world, harm="inf", batch=4)
        kept: dict[str, Any] = {}
        if not run.failed("faults", found):
            kept["not_finite"] = one = faults.not_finite(found.ranks)
            run.must(one["ok"], f"gradients that are not finite, {world} ranks: {one}")
        killed = run.start("faults", world, harm="kill", batch=4)
        ended, at = time.time(), faults.killed_at(run.scratch, world)
        if at.exists():
            seconds, limit = ended - float(at.read_text()), PEER_SECONDS + faults.MARGIN
            kept["killed"] = one = faults.killed(killed.ranks, killed.output, seconds, limit)
            run.must(one["ok"], f"a rank that was killed, {world} ranks: {one}")
        else:
            run.failed("faults", killed)
        run.log.put("faults", **{str(world): kept})
        run.log.say("faults", f"{world}:", {name: one["ok"] for name, one in kept.items()})


PARTS = {"order": ordered, "training": trained, "feeding": fed, "overlap": overlapped, "faults": harmed}
