"""``lfbench windows``: temporal windows out of shards against LeRobot's own class on the same frames."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np

import lfdata
from benchmarks.harness.environments import environment, interpreter
from benchmarks.record import REPEATS, interleave, ratio, save, summary, writable
from shard_builder.convert import convert
from shard_builder.options import ConvertOptions
from shard_builder.sources import open_source

CHILD = Path(__file__).resolve().parents[1] / "windows_child.py"
CHECKED_ROWS = 32
# Mean absolute difference of 8-bit samples between pictures that were stored again as JPEG and the video's own.
TOLERANCE = 4.0
SECONDS = 1800
Task = dict[str, Any]


@click.command("windows")
@click.argument("source", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--lerobot",
    "peer",
    help="Command of the Python that has lerobot (default: the one that `lfbench environment lerobot` made).",
)
@click.option(
    "--make", "size", metavar="EPISODESxFRAMES", help="First make SOURCE, if it is not there, with LeRobot: such as 20x300."
)
@click.option("--side", default=96, show_default=True, help="Pixels a side of pictures that --make makes.")
@click.option(
    "--window", "given", multiple=True, metavar="FEATURE=FIRST:STOP", help="Deltas of a feature (repeatable): action=0:16."
)
@click.option("--batch", default=64, show_default=True, help="Windows of a batch.")
@click.option("--batches", default=50, show_default=True, help="Batches a repeat times.")
@click.option("--warm", default=4, show_default=True, help="Batches before the clock starts.")
@click.option(
    "--workers", "counts", multiple=True, type=int, help="Worker counts of LeRobot's DataLoader (default: 0 and the cores)."
)
@click.option("--quality", default=95, show_default=True, help="JPEG quality of pictures in shards.")
@click.option("--repeats", default=REPEATS, show_default=True)
@click.option("--output", type=click.Path(path_type=Path))
def command(
    source: Path, peer: str | None, size: str | None, side: int, given: tuple[str, ...], output: Path | None, **options: Any
) -> None:
    """Windows/s in shuffled batches from SOURCE, a LeRobot data set, each repeat in a fresh process. The values are compared first."""
    if output is not None and (why := writable(output)):
        raise click.ClickException(why)
    if peer is None:
        if not environment("lerobot_").is_dir():
            raise click.ClickException(
                "LeRobot is not installed: `lfbench environment lerobot` does (9 GB), or name a Python with --lerobot"
            )
        peer = shlex.quote(interpreter("lerobot_"))
    if not source.exists():
        made_here(source, peer, size, side)
    cores = len(os.sched_getaffinity(0))
    counts = sorted(set(options.pop("counts") or (0, cores)))
    with tempfile.TemporaryDirectory() as scratch:
        shards = Path(scratch, "shards")
        made = convert(open_source(str(source), images=f"codec=jpeg,quality={options['quality']}"), shards, ConvertOptions())
        deltas = parse(given)
        about = lfdata.open(shards).manifest.provenance["notes"]["lerobot"]
        task = base_task(shards, about, deltas, options)
        if made.samples < options["batch"]:
            raise click.ClickException(f"{source} has {made.samples} frames; --batch is {options['batch']}")
        pictures = check(task, source, peer, made.samples, Path(scratch))
        subjects: dict[str, Callable[[], float]] = {}
        first: dict[str, list[float]] = {}

        def subject(name: str, one: Task, interpreter: str) -> None:
            first[name] = []

            def once() -> float:
                answer = run(one, interpreter)
                first[name].append(answer["first_batch_s"])
                return float(answer["windows_s"])

            subjects[name] = once

        subject("lfdata", task | {"subject": "lfdata", "mode": "time", "workers": cores}, sys.executable)
        for count in counts:
            one = task | {"subject": "lerobot", "mode": "time", "workers": count, "path": str(source.resolve())}
            subject(f"lerobot, {count} workers", one, peer)
        rates = interleave(subjects, options["repeats"])
    results: dict[str, Any] = {"pictures": pictures}
    for name, found in rates.items():
        results[name] = {"windows_s": summary(found) | {"repeats": found}, "first_batch_s": summary(first[name])}
        against = ratio(rates["lfdata"], found)
        results[name]["lfdata_over_this"] = against
        click.echo(f"{name:22} {results[name]['windows_s']['median']:10,.0f} windows/s   lfdata x {against['median']:.2f}")
    kept = options | {"deltas": {name: list(one) for name, one in deltas.items()}, "lerobot_workers": counts, "cores": cores}
    click.echo(f"record: {save('windows', kept | {'source': source.name, 'frames': made.samples}, results, output)}")


def made_here(source: Path, peer: str, size: str | None, side: int) -> None:
    """Have LeRobot make a data set."""
    if size is None:
        raise click.ClickException(
            f"{source}: no such directory; --make 20x300 makes a data set there, of 20 episodes of 300 frames"
        )
    episodes, _, frames = size.partition("x")
    if not (episodes.isdecimal() and frames.isdecimal() and int(episodes) and int(frames)):
        raise click.BadParameter(f"{size!r}: write EPISODESxFRAMES, such as 20x300", param_hint="--make")
    one = {"mode": "make", "subject": "lerobot", "path": str(source.resolve()), "side": side}
    run(one | {"episodes": int(episodes), "frames": int(frames)}, peer)


def parse(given: tuple[str, ...]) -> dict[str, range]:
    """Deltas by feature; a state and sixteen actions by default."""
    found = {}
    for text in given or ("observation.state=-1:1", "action=0:16"):
        name, _, span = text.rpartition("=")
        try:
            first, stop = (int(part) for part in span.split(":"))
            found[name] = range(first, stop)
        except ValueError:
            found[name] = range(0)
        if not name or not found[name]:
            raise click.BadParameter(f"{text!r}: write FEATURE=FIRST:STOP, such as action=0:16", param_hint="--window")
    return found


def base_task(shards: Path, about: Any, deltas: dict[str, range], options: dict[str, Any]) -> Task:
    """What both subjects are told."""
    features = about["features"]
    if unknown := [name for name in deltas if name not in features]:
        raise click.ClickException(f"no feature {unknown[0]!r}; there are {', '.join(features)}")
    sizes = {name: features[name]["shape"][:2] for name in deltas if features[name]["dtype"] in ("image", "video")}
    plain = {name: list(one) for name, one in deltas.items()}
    timing = {name: options[name] for name in ("batch", "batches", "warm")}
    return {"path": str(shards), "fps": about["fps"], "deltas": plain, "sizes": sizes, **timing}


def run(task: Task, interpreter: str) -> dict[str, Any]:
    """A fresh process's answer."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    if task["subject"] == "lfdata":
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    line = [*shlex.split(interpreter), str(CHILD), json.dumps(task)]
    try:
        done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise click.ClickException(f"{task['subject']}: {error}") from error
    if done.returncode:
        raise click.ClickException(f"{task['subject']} failed (exit status {done.returncode}): {done.stderr.strip()[-2000:]}")
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def check(task: Task, source: Path, peer: str, frames: int, scratch: Path) -> dict[str, float]:
    """Both must give the same windows; for pictures, the mean absolute difference by feature."""
    rows = np.unique(np.linspace(0, frames - 1, CHECKED_ROWS).astype(int)).tolist()
    places = {"lfdata": str(scratch / "ours.npz"), "lerobot": str(scratch / "theirs.npz")}
    ask = task | {"mode": "values", "rows": rows, "workers": 0}
    run(ask | {"subject": "lfdata", "output": places["lfdata"]}, sys.executable)
    run(ask | {"subject": "lerobot", "output": places["lerobot"], "path": str(source.resolve())}, peer)
    apart = {}
    with np.load(places["lfdata"], allow_pickle=False) as ours, np.load(places["lerobot"], allow_pickle=False) as theirs:
        for name in theirs.files:
            mine, other = ours[name], theirs[name]
            if name in task["sizes"]:
                apart[name] = float(np.abs(mine.astype(np.int16) - other.astype(np.int16)).mean())
                if apart[name] > TOLERANCE:
                    raise click.ClickException(f"{name}: pictures differ by {apart[name]:.1f} in the mean")
            elif not np.array_equal(mine.astype(other.dtype).reshape(other.shape), other):
                raise click.ClickException(f"{name}: both subjects must give the same windows")
    return apart
