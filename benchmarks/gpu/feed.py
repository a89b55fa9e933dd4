"""How a GPU is fed: rates of copies, time in allocation, idleness for data, and what each rung of the device path does.

    python -m benchmarks.gpu.feed --data SHARDS --output FILE.json

``SHARDS`` is a data set with a field of pictures. The record is written after every round; when ``--budget`` seconds are over, no more rounds
are begun. ``--device cpu --tiny`` goes through everything in a minute, without meaning.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import shlex
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import record
from benchmarks.gpu import arms as ways
from benchmarks.gpu.consumers import BYSTANDERS, CLASSES, Clock, Launches, Vit, cpu_seconds, measure, stepper
from benchmarks.gpu.copies import allocation, copy_rates
from benchmarks.gpu.log import Log, no_gpu
from lfdata.device.images import _kernels
from lftrain.runtime.environment import version

PARTS = ("copies", "vit", "small", "starved")
COMPARED = ("resident", "resident uint8", ways.BESIDE)
# Steps before each timing of what takes little time.
SMALL_WARM, STARVED_WARM = 40, 8
# Seconds that are waited for other ways' processes to have nothing left to do.
SETTLE = 2.0


class Run(Log):
    """One run of the script: its record, and the time it has."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.device = options, torch.device(options.device)
        super().__init__(options.output, "gpu-feed", "benchmarks.gpu.feed", self.device, anew=True)
        told = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
        told["data"] = Path(options.data).name
        del told["output"]
        self.made |= {"options": told, "gpu": gpu(self.device)}
        self.say(f"{self.made['gpu'] or 'no GPU'}, torch {torch.__version__}")

    def save(self) -> None:
        """Write what there is."""
        self.made["seconds"] = self.seconds
        record.write(self.made, self.path)

    def over(self, needed: float) -> bool:
        """Whether something that takes so long does not fit any more."""
        return bool(self.seconds + needed > self.options.budget)


def gpu(device: torch.device) -> dict[str, Any]:
    """What it is."""
    if device.type != "cuda":
        return {}
    found = torch.cuda.get_device_properties(device)
    return {
        "name": found.name,
        "memory_mib": found.total_memory >> 20,
        "count": torch.cuda.device_count(),
        "cuda": torch.version.cuda,
        "triton": version("triton"),
        "kernel": _kernels() is not None,
        "libraries": ways.libraries(),
    }


def rounds(
    run: Run, name: str, made: dict[str, ways.Arm], step: Callable[[Any], int], seconds: float, warm: int
) -> dict[str, Any]:
    """Every arm once a round, for some seconds after some steps; the order turns round every other time."""
    found: dict[str, Any] = {"repeats": {arm: [] for arm in made}, "errors": {}}
    run.results[name] = found
    longest, warm = 0.0, run.options.warm if run.options.tiny else warm
    for number in range(run.options.repeats):
        if run.over(longest):
            found["stopped"] = f"after {number} of {run.options.repeats} rounds: the time is over"
            break
        began = time.monotonic()
        for arm in list(made)[:: 1 if number % 2 == 0 else -1]:
            if arm in found["errors"]:
                continue
            try:
                settle()
                once = measure(step, made[arm].batches, run.device, seconds, warm)
            except Exception as error:
                # One way that fails must not cost the others' figures.
                found["errors"][arm] = repr(error)
                run.say(f"{name}: {arm} failed: {error!r}")
                continue
            found["repeats"][arm].append(once)
            run.say(
                f"{name} {number + 1}: {arm}: {once['ms']:.2f} ms a step, {once['rows'] / once['steps'] / once['ms'] * 1e3:,.0f} rows/s"
            )
        longest = time.monotonic() - began
        found["summary"] = summarised(found["repeats"])
        run.save()
    found["stats"] = {arm: picked(way.stats()) for arm, way in made.items()}
    run.save()
    return found


def settle() -> None:
    """Wait until no process of ours works ahead any more."""
    began, before = time.monotonic(), cpu_seconds()[1]
    while time.monotonic() - began < SETTLE:
        time.sleep(0.1)
        now = cpu_seconds()[1]
        if now - before < 0.02:
            return
        before = now


def summarised(repeats: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Of each arm, round by round: idle is the part of a step that it takes longer than on a resident batch."""
    found: dict[str, Any] = {}
    for arm, all_of in repeats.items():
        if not all_of:
            continue
        found[arm] = {
            "ms": record.summary([one["ms"] for one in all_of]),
            "p99_over_p50": record.summary([one["p99"] / one["p50"] for one in all_of]),
            "waited_ms": record.summary([one["waited"] for one in all_of]),
            "rows_per_s": record.summary([1e3 * one["rows"] / one["steps"] / one["ms"] for one in all_of]),
            "cpu_s_per_1000": record.summary([1e3 * (one["cpu_own"] + one["cpu_others"]) / one["rows"] for one in all_of]),
            "cpu_others_s_per_1000": record.summary([1e3 * one["cpu_others"] / one["rows"] for one in all_of]),
            "allocations_a_step": record.summary([one["allocations"] for one in all_of]),
            "segments": sum(one["segments"] for one in all_of),
            "device_allocations": sum(one["device_allocations"] for one in all_of),
        }
        for base in COMPARED:
            if len(repeats.get(base, ())) >= len(all_of):
                pairs = zip(all_of, repeats[base], strict=False)
                found[arm][f"idle_against_{base.replace(' ', '_')}"] = record.summary([1 - b["ms"] / a["ms"] for a, b in pairs])
    ladder = [arm for arm in ways.LADDER if arm in found]
    for before, arm in itertools.pairwise(ladder):
        pairs = zip(repeats[arm], repeats[before], strict=False)
        found[arm]["ms_against_rung_before"] = record.summary([a["ms"] / b["ms"] for a, b in pairs])
    return found


def picked(stats: dict[str, Any]) -> dict[str, Any]:
    """What of a loader's statistics says how it did."""
    return {
        name: stats[name]
        for name in ("copied", "width", "waiting", "feedback", "device", "decoding", "slots", "slot_bytes")
        if name in stats
    }


@contextlib.contextmanager
def burning(count: int) -> Iterator[None]:
    """So many processes that do nothing but take a core."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    BYSTANDERS.update(one.pid for one in busy)
    try:
        yield
    finally:
        for one in busy:
            one.kill()
            one.wait()


def fed(run: Run, name: str, model: torch.nn.Module, batch: int, seconds: float, chosen: list[str], warm: int) -> None:
    """All ways to feed one model."""
    options = run.options
    run.say(f"{name}: batch {batch}, {sum(one.numel() for one in model.parameters()):,} parameters")
    device = run.device
    train = stepper(model.to(device=device, dtype=torch.bfloat16), device)
    setting = ways.Setting(options.data, options.field, device, options.side, options.threads)

    def step(found: Any) -> int:
        images, numbers = found
        train(images, numbers % CLASSES)
        return len(images)

    makers = ways.arms(setting, batch, options.workers)
    made: dict[str, ways.Arm] = {}
    try:
        # Its workers are forked before the threads and processes of the others begin.
        for arm in sorted(chosen, key=lambda one: one not in ways.FORKED):
            made[arm] = makers[arm]()
        made = {arm: made[arm] for arm in chosen}
        with burning(options.burn):
            rounds(run, name, made, step, seconds, warm)
    finally:
        for one in made.values():
            one.close()


def starved(run: Run, batch: int, seconds: float, chosen: list[str]) -> None:
    """A consumer that takes all it gets: the decoder's rate with nothing behind it, and with a device behind it."""
    options = run.options
    setting = ways.Setting(options.data, options.field, run.device, options.side, options.threads)
    # Those of others are starved, too, if they were asked for; workers are forked first.
    makers = ways.arms(setting, batch, options.workers)
    others = [name for name in chosen if name in ways.NEEDS or name in ways.FORKED]
    made = {name: makers[name]() for name in sorted(others, key=lambda one: one not in ways.FORKED)}
    alone = setting.loader(batch)
    made |= {
        "loader alone": ways.Arm(ways.endless(alone), alone.close, alone.stats),
        "kernel": ways.on_device(setting, batch, kernel=True),
    }

    def step(found: Any) -> int:
        return len(found["__index__"]) if isinstance(found, dict) else len(found[0])

    try:
        # So many that what was made while others were measured is used up.
        found = rounds(run, "starved", made, step, seconds, STARVED_WARM)
    finally:
        for one in made.values():
            one.close()
    # Without a step of the device's the time is the host's.
    repeats = found["repeats"]
    if all(repeats.values()):
        pairs = zip(repeats["kernel"], repeats["loader alone"], strict=False)
        found["rate_against_loader_alone"] = record.summary([b["ms"] / a["ms"] for a, b in pairs])
    run.save()


def main(arguments: list[str] | None = None) -> int:
    """Measure; 0 if all that was asked for was measured."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.feed", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="data set with pictures")
    parser.add_argument("--output", type=Path, required=True, help="the record, JSON")
    parser.add_argument("--field", default="image")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--batch", type=int, default=256, help="of the transformer, and of the starved consumer")
    parser.add_argument("--small-batch", type=int, default=32, help="of the launch-bound model")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.5, help="an arm and repeat")
    parser.add_argument("--warm", type=int, default=2, help="steps before each")
    parser.add_argument("--threads", type=int, default=None, help="that decode; none: the cores")
    parser.add_argument("--workers", type=int, default=None, help="of torch's DataLoader; none: the cores")
    parser.add_argument("--budget", type=float, default=285.0, help="seconds in all")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, by comma")
    parser.add_argument("--arms", default="", help="ways to feed, by comma; none: all")
    parser.add_argument("--burn", type=int, default=0, help="processes that take a core each, beside all that is measured")
    parser.add_argument("--tiny", action="store_true", help="small models and batches, to see whether it runs")
    options = parser.parse_args(arguments)
    if why := record.writable(options.output):
        parser.error(why)
    no_gpu(torch.device(options.device), "--device cpu --tiny")
    parts, wanted = options.only.split(","), options.arms.split(",") if options.arms else []
    if unknown := [one for one in parts if one not in PARTS]:
        parser.error(f"--only: there is no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    if unknown := [one for one in wanted if one not in ways.NAMES]:
        parser.error(f"--arms: there is no way {unknown[0]!r}; there are {', '.join(ways.NAMES)}")
    if missing := [one for one in wanted if one in ways.NEEDS and not ways.there(ways.NEEDS[one])]:
        parser.error(f"--arms: {missing[0]!r} needs {ways.NEEDS[missing[0]]}, which is not installed")
    if options.workers is None:
        options.workers = record.machine()["cores"]
    if options.tiny:
        options.side, options.batch, options.small_batch, options.seconds = 64, 8, 8, 0.3
        options.repeats, options.warm, options.workers = min(2, options.repeats), 1, min(2, options.workers)
    torch.manual_seed(0)
    random.seed(0)
    if options.device == "cpu":
        warnings.simplefilter("ignore")
    run = Run(options)
    setting = ways.Setting(options.data, options.field, run.device, options.side, options.threads)
    chosen = [name for name in ways.arms(setting, 1, 0) if not wanted or name in wanted]
    vit = {"width": 64, "depth": 2, "heads": 2} if options.tiny else {}
    if "copies" in parts:
        size = options.batch * options.side * options.side * 3
        run.results["copies"] = copy_rates(run.device, size, options.repeats, run.say)
        run.results["allocation"] = allocation(run.device, size, 5 if options.tiny else 30, run.say)
        run.save()
    if "vit" in parts:
        fed(run, "vit", Vit(options.side, **vit), options.batch, options.seconds, chosen, options.warm)
    if "small" in parts:
        fed(run, "small", Launches(4 if options.tiny else 64), options.small_batch, options.seconds / 2, chosen, SMALL_WARM)
    if "starved" in parts:
        starved(run, options.batch, options.seconds / 2, chosen)
    run.save()
    run.say(f"written: {options.output.name}")
    return 1 if any("stopped" in one or one.get("errors") for one in run.results.values()) else 0


__all__ = ["Clock", "main"]

if __name__ == "__main__":
    print("command:", shlex.join(sys.argv), file=sys.stderr)
    sys.exit(main())
