"""``lfbench open``: opening a data set of many rows: time, memory, and what the first lookups cost."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np

from benchmarks.record import REPEATS, save, summary
from benchmarks.synthetic import write_scalar_shards
from lfdata import ShardDataset
from lfdata.format.durable import Files
from shard_builder.consolidate import write_consolidated


def _rss() -> dict[str, int]:
    """Anonymous and file-backed resident bytes of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon", "RssFile"))}
    return {"anonymous": found["RssAnon"], "file": found["RssFile"]}


def probe(path: str) -> dict[str, Any]:
    """In a fresh process: open, one sample, many, one key, a whole column. Seconds, and bytes beyond the start, after each step."""
    steps: dict[str, Any] = {}
    before = _rss()

    def step(name: str, start: float) -> None:
        seconds = time.perf_counter() - start
        now = _rss()
        steps[name] = {"seconds": seconds} | {kind: now[kind] - before[kind] for kind in now}

    start = time.perf_counter()
    dataset = ShardDataset(path)
    step("open", start)
    rows = len(dataset)
    picks = np.random.default_rng(0).integers(0, rows, 1000)
    start = time.perf_counter()
    dataset.read_many(picks[:1])
    step("first random sample", start)
    start = time.perf_counter()
    values = dataset.read_many(picks)
    step("1,000 random samples", start)
    wanted = int(picks[7])
    start = time.perf_counter()
    found = dataset.index_of(f"{wanted:09d}")
    step("key lookup", start)
    start = time.perf_counter()
    column = dataset.column("label")
    step("whole column, verified", start)
    if found != wanted or column[wanted] != values["label"][7] or len(column) != rows:
        raise click.ClickException("wrong values")
    return steps


@click.command("open")
@click.option("--rows", default=100_000_000, show_default=True)
@click.option("--shards", default=1000, show_default=True)
@click.option("--repeats", default=REPEATS, show_default=True)
@click.option("--scratch", type=click.Path(path_type=Path), help="Where the data set is made (about 60 bytes a row).")
@click.option("--output", type=click.Path(path_type=Path))
def command(rows: int, shards: int, repeats: int, scratch: Path | None, output: Path | None) -> None:
    """Synthetic rows, an int32 label and a key of nine digits each, with the consolidated index. Every repeat in a fresh process."""
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        path = Path(folder) / "set"
        start = time.perf_counter()
        size = write_scalar_shards(path, shards, rows // shards)
        write_consolidated(path, ShardDataset(path).manifest, Files())
        made = time.perf_counter() - start
        line = [sys.executable, "-m", __name__, str(path)]
        runs = [msgspec.json.decode(subprocess.run(line, stdout=subprocess.PIPE, check=True).stdout) for _ in range(repeats)]
    results: dict[str, Any] = {"bytes": size, "seconds_to_make": made, "steps": {}}
    for name in runs[0]:
        found = {key: summary([run[name][key] for run in runs]) for key in ("seconds", "anonymous", "file")}
        results["steps"][name] = found
        memory = (
            f"anonymous {found['anonymous']['median'] / 2**20:8.1f} MiB   mapped {found['file']['median'] / 2**20:8.1f} MiB"
        )
        click.echo(f"{name:26} {found['seconds']['median'] * 1e3:10.2f} ms   {memory}")
    click.echo(f"record: {save('open', {'rows': rows, 'shards': shards, 'repeats': repeats}, results, output)}")


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(probe(sys.argv[1])))
