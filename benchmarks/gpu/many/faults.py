"""What goes wrong on one rank: gradients that are not finite, and an end in the middle of a step."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.gpu.many.rank import PEER_SECONDS
from benchmarks.gpu.subjects import LR, Bench, Setting
from lftrain import CheckpointOptions, DdpOptions, MetricsOptions, Options, RunOptions, Runtime
from lftrain.comm.group import Group

HARMS = ("inf", "kill")
# Steps before the one that is harmed, and of a run; that of a rank that is killed would go on for long.
BEFORE, STEPS, LONG = 2, 5, 100_000
# What torchrun, the last beats and the end of the processes may take beyond the silence after which a rank is given up.
MARGIN = 20.0


class Harm:
    """A loss with something wrong on one rank in one step.

    Attributes:
        step: the one under way, from 0. seen: keys of the samples of each step.
    """

    def __init__(self, loss: Any, kind: str, mine: bool, when: Path, sources: Any) -> None:
        self._loss, self._kind, self._mine, self._when, self._sources = loss, kind, mine, when, sources
        self.step, self.seen = -1, list[list[str]]()

    def __call__(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> Any:
        """The model's own, until the harm."""
        self.step += 1
        found = self._loss(model, batch)
        self.seen.append([key.decode() for key in self._sources[0].keys(batch["__index__"].tolist())])
        if self._kind == "kill" and self._mine and self.step == BEFORE:
            # Forward is done, the others wait for this rank's gradients.
            self._when.write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    def spoil(self, gradient: torch.Tensor) -> torch.Tensor:
        """A hook of a parameter."""
        harmed = self._kind == "inf" and self._mine and self.step == BEFORE
        return torch.full_like(gradient, float("inf")) if harmed else gradient


def harmed_rank(world: int) -> int:
    """Never the first: that one also writes the records."""
    return world - 1


# -- on a rank --------------------------------------------------------------------------------------------------------


def on_rank(group: Group, told: dict[str, Any]) -> dict[str, Any]:
    """One harm, in a run of the small model by the runtime."""
    kind, scratch = told["harm"], Path(told["scratch"])
    bench = Bench(Path(told["data"]), scratch, group.device, "small", told["batch"] * group.world)
    setting = Setting()
    loader = bench.loader(setting)
    model, loss = bench.model(setting)
    mine = group.rank == harmed_rank(group.world)
    harm = Harm(loss, kind, mine, killed_at(scratch, group.world), loader.sources)
    trained = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    name, parameter = trained[len(trained) // 2]
    parameter.register_hook(harm.spoil)
    folder = scratch / f"{kind}-{group.world}"
    cuda = group.device.type == "cuda"
    options = Options(
        run=RunOptions(
            folder=str(folder),
            steps=LONG if kind == "kill" else STEPS,
            device=told["device"],
            peer_seconds=PEER_SECONDS,
            collective_seconds=60.0 if cuda else 20.0,
        ),
        ddp=DdpOptions(checksum_every=1),
        checkpoint=CheckpointOptions(every=0),
        metrics=MetricsOptions(live="off", memory_every=0),
    )
    optimizer = torch.optim.AdamW([one for _, one in trained], lr=LR, fused=True)
    result = Runtime(model, harm, loader, optimizer, options).run()
    loader.close()
    bits = hashlib.sha256(b"".join(one.detach().cpu().numpy().tobytes() for _, one in trained)).hexdigest()
    found = {"step": result.step, "skipped": result.skipped, "bits": bits, "keys": harm.seen[BEFORE], "parameter": name}
    return {**found, "events": _events(folder) if group.rank == 0 else []}


def killed_at(scratch: Path, world: int) -> Path:
    """Where the rank that ends itself says when."""
    return scratch / f"killed-{world}.txt"


def _events(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "event" and line["name"] == "skipped step"]


# -- what is concluded ------------------------------------------------------------------------------------------------


def not_finite(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Whether all ranks skipped the one step, and the record names rank, parameter and samples."""
    world = len(ranks)
    gone = harmed_rank(world)
    parameter, keys, events = ranks[0]["parameter"], ranks[gone]["keys"], ranks[0]["events"]
    event = events[0] if len(events) == 1 else {}
    checks = {
        "all_skip_one_step": all(rank["skipped"] == 1 for rank in ranks) and event.get("step") == BEFORE + 1,
        "same_parameters_after": len({rank["bits"] for rank in ranks}) == 1,
        "names_rank": [cause[0] for cause in event.get("bad", [])] == [gone],
        "names_parameter": [cause[1] for cause in event.get("bad", [])] == [parameter],
        "names_keys": event.get("keys") == [[] if rank != gone else keys for rank in range(world)],
    }
    found = {"message": event.get("message", ""), "events": len(events)}
    return {"ok": all(checks.values()), "rank": gone, "parameter": parameter, **checks, **found}


def killed(ranks: Sequence[Mapping[str, Any]], output: Sequence[str], seconds: float, limit: float) -> dict[str, Any]:
    """Whether all others stopped in time and said who is gone.

    Args:
        seconds: from the rank's end to that of the last process. limit: how long that may take.
    """
    gone = harmed_rank(len(ranks))
    said: dict[str, str] = {}
    for rank, facts in enumerate(ranks):
        if rank != gone:
            told = [line for line in output[rank].splitlines() if line.startswith("lftrain: ")]
            said[str(rank)] = facts.get("error") or (told[-1] if told else "")
    names = all(f"rank {gone} is gone" in text for text in said.values())
    checks = {"ended_by_itself": not ranks[gone], "names_rank": names, "in_time": 0 <= seconds <= limit}
    # Without torch's own words, which follow.
    short = {rank: text.split(": Got the following")[0][:300] for rank, text in said.items()}
    return {"ok": all(checks.values()), "rank": gone, **checks, "seconds": round(seconds, 1), "limit_s": limit, "said": short}
