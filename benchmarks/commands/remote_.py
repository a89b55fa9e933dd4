"""``lfbench remote``: epochs over a data set behind a slow server, and what a cache of half the data fetches."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np
import xxhash

from benchmarks.harness.cache_rules import least_recently_used, offline_optimum
from benchmarks.harness.environments import interpreter
from benchmarks.harness.remote_child import KEY_BYTES, Job
from benchmarks.harness.slow_server import SlowServer
from benchmarks.record import REPEATS, interleave, save, summary
from benchmarks.synthetic import write_bytes_shards
from lfdata import Cache, Loader
from lfdata.loader.ahead import blocks_by_step
from lfdata.storage.options import FEWEST_BLOCKS

PEERS = ("webdataset", "streaming")
TAR_BYTES, BLOCK_BYTES = 16 << 20, 1 << 18
ORDERS: dict[str, dict[str, Any]] = {"full": {"shuffle": "full"}, "block": {"shuffle": "block", "block": 80, "window": 8}}
# Unsigned requests to a server that looks at no signature.
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "none", "AWS_SECRET_ACCESS_KEY": "none", "AWS_DEFAULT_REGION": "us-east-1"}


@click.command("remote")
@click.option("--samples", default=2000, show_default=True)
@click.option("--size", default=100_000, show_default=True, help="Bytes a sample.")
@click.option("--batch", default=64, show_default=True)
@click.option("--latency", default=0.03, show_default=True, help="Seconds before every answer of the server.")
@click.option("--rate", default=100.0, show_default=True, help="MB a second, of all connections together.")
@click.option("--workers", default=2, show_default=True, help="Worker processes of the peers.")
@click.option("--epochs", default=4, show_default=True, help="Epochs over a cache of half the data.")
@click.option("--repeats", default=REPEATS, show_default=True)
@click.option(
    "--peer", "peers", multiple=True, type=click.Choice(PEERS), help="Peers measured (default: those that are installed)."
)
@click.option("--scratch", type=click.Path(path_type=Path), help="Where data and caches lie (about six times the data).")
@click.option("--output", type=click.Path(path_type=Path))
def command(
    samples: int,
    size: int,
    batch: int,
    latency: float,
    rate: float,
    workers: int,
    epochs: int,
    repeats: int,
    peers: tuple[str, ...],
    scratch: Path | None,
    output: Path | None,
) -> None:
    """Every subject in a fresh process over the same server: a cold epoch (from the imports on), then a warm one. Every sample is checked."""
    if samples < batch or size <= KEY_BYTES or samples * size < 2 * FEWEST_BLOCKS * BLOCK_BYTES:
        least = 2 * FEWEST_BLOCKS * BLOCK_BYTES
        raise click.UsageError(f"at least {batch} samples of more than {KEY_BYTES} bytes, and {least} bytes of data")
    options = {
        "samples": samples,
        "size": size,
        "batch": batch,
        "latency": latency,
        "rate": rate,
        "workers": workers,
        "epochs": epochs,
        "repeats": repeats,
    }
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        place = Path(folder)
        bench = _Bench(place, samples, size, batch, workers)
        wanted = [peer for peer in peers or PEERS if bench.prepare(peer, required=bool(peers))]
        with SlowServer(place / "served", latency, rate * 1e6) as server:
            results: dict[str, Any] = {"epoch": _epochs(bench, server, wanted, repeats), "half": _half(bench, server, epochs)}
    click.echo(f"record: {save('remote', options, results, output)}")


class _Bench:
    """The data, and what runs over them."""

    def __init__(self, place: Path, samples: int, size: int, batch: int, workers: int) -> None:
        self.place, self.samples, self.batch, self.workers = place, samples, batch, workers
        self.bytes = samples * size
        rows = np.random.default_rng(0).integers(0, 256, (samples, size), dtype=np.uint8)
        rows[:, :KEY_BYTES] = np.arange(samples, dtype="<u8").view(np.uint8).reshape(samples, 8)
        self.source = place / "rows.npy"
        np.save(self.source, rows)
        np.save(place / "expected.npy", np.array([xxhash.xxh3_64_intdigest(row.tobytes()) for row in rows], np.uint64))
        write_bytes_shards(place / "served" / "lfdata", rows, 8)
        self.names: tuple[str, ...] = ()

    def prepare(self, peer: str, *, required: bool) -> bool:
        """Write the data in a peer's format; false where it is not installed."""
        target = self.place / "served" / peer
        try:
            if peer == "webdataset":
                self.names = self._tars(target)
            else:
                line = [
                    interpreter("streaming_"),
                    "-m",
                    "benchmarks.harness.remote_child",
                    "write-mds",
                    str(self.source),
                    str(target),
                ]
                subprocess.run(line, check=True, capture_output=True)
        except (ImportError, subprocess.CalledProcessError) as error:
            if required:
                raise click.ClickException(f"{peer} cannot be prepared: {error}") from error
            click.echo(f"{peer}: not installed, left out (lfbench environment {peer})")
            return False
        return True

    def _tars(self, target: Path) -> tuple[str, ...]:
        import webdataset

        if shutil.which("curl") is None:
            raise ImportError("webdataset reads through curl, which is not there")
        target.mkdir(parents=True)
        with webdataset.ShardWriter(f"{target}/%04d.tar", maxsize=TAR_BYTES, verbose=0) as writer:
            for key, row in enumerate(np.load(self.source, mmap_mode="r", allow_pickle=False)):
                writer.write({"__key__": f"{key:08d}", "bin": row.tobytes()})
        return tuple(sorted(path.name for path in target.glob("*.tar")))

    def run(self, subject: str, server: SlowServer, epochs: int, most: int, options: dict[str, Any]) -> dict[str, Any]:
        """A fresh process with an empty cache; also what it asked of the server."""
        requests, count = server.requests, server.bytes
        with tempfile.TemporaryDirectory(dir=self.place) as local:
            job = Job(
                subject,
                server.url,
                local,
                most,
                self.samples,
                self.batch,
                self.workers,
                epochs,
                str(self.place / "expected.npy"),
                self.names,
                options,
            )
            own = {"streaming": "streaming_", "webdataset": "webdataset_"}.get(subject)
            line = [
                interpreter(own) if own else sys.executable,
                "-m",
                "benchmarks.harness.remote_child",
                msgspec.json.encode(job).decode(),
            ]
            done = subprocess.run(line, capture_output=True, env=os.environ | CREDENTIALS)
        if done.returncode:
            raise click.ClickException(f"{subject} failed: {done.stderr.decode(errors='replace')[-800:]}")
        found: dict[str, Any] = msgspec.json.decode(done.stdout.splitlines()[-1])
        return found | {"requests": server.requests - requests, "bytes": server.bytes - count}


def _epochs(bench: _Bench, server: SlowServer, peers: list[str], repeats: int) -> dict[str, Any]:
    """Cold and warm, with room for all."""
    subjects: dict[str, tuple[str, dict[str, Any]]] = {
        f"lfdata {name}": ("lfdata", {"loader": one}) for name, one in ORDERS.items()
    }
    subjects |= {peer: (peer, {}) for peer in peers}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in subjects}

    def once(name: str) -> Callable[[], float]:
        def run() -> float:
            subject, options = subjects[name]
            found[name].append(bench.run(subject, server, 2, 4 * bench.bytes + (64 << 20), options))
            return float(found[name][-1]["seconds"][0])

        return run

    interleave({name: once(name) for name in subjects}, repeats)
    results: dict[str, Any] = {}
    for name, runs in found.items():
        results[name] = {
            "cold_samples_s": summary([bench.samples / one["seconds"][0] for one in runs]),
            "warm_samples_s": summary([bench.samples / one["seconds"][1] for one in runs]),
            "bytes_of_data": summary([one["bytes"] / bench.bytes for one in runs]),
            "requests": summary([one["requests"] for one in runs]),
            "runs": runs,
        }
        cold, warm = results[name]["cold_samples_s"], results[name]["warm_samples_s"]
        click.echo(
            f"{name:14} cold {cold['median']:8.1f}/s [{cold['min']:.1f}, {cold['max']:.1f}]   warm {warm['median']:9.1f}/s"
            f"   {results[name]['bytes_of_data']['median']:.2f} of the data, {results[name]['requests']['median']:.0f} requests"
        )
    return results


def _half(bench: _Bench, server: SlowServer, epochs: int) -> dict[str, Any]:
    """Bytes fetched by a cache of half the data: ours by the server's count, two rules by simulation of the same accesses."""
    results: dict[str, Any] = {}
    for name, how in ORDERS.items():
        # Fetching ahead takes room too: a small part, as it does of a cache of usual size.
        kept = {
            "block_bytes": BLOCK_BYTES,
            "request_bytes": BLOCK_BYTES,
            "ahead_bytes": max(4 * BLOCK_BYTES, bench.bytes // 64),
        }
        run = bench.run("lfdata", server, epochs, bench.bytes // 2, {"loader": how, "cache": kept})
        cache = kept | {"max_bytes": bench.bytes // 2}
        accesses, sizes = _accesses(bench, server, cache, how, epochs)
        found = {
            "ours": run["bytes"],
            "lru": least_recently_used(accesses, sizes, bench.bytes // 2),
            "optimum": offline_optimum(accesses, sizes, bench.bytes // 2),
        }
        results[name] = {"bytes": found, "epochs": epochs, "seconds": run["seconds"]}
        told = "   ".join(f"{rule} {count / bench.bytes / epochs:.3f}" for rule, count in found.items())
        click.echo(f"half the data, {name:5} fetched of the data an epoch: {told}")
    return results


def _accesses(
    bench: _Bench, server: SlowServer, cache: dict[str, Any], how: dict[str, Any], epochs: int
) -> tuple[list[int], Any]:
    """Blocks in the order of steps, as numbers, and the bytes of each."""
    with tempfile.TemporaryDirectory(dir=bench.place) as local:
        loader = Loader(
            f"{server.url}/lfdata", bench.batch, ["value"], tail="pad", cache=Cache(local, **cache), engine="inline", **how
        )
        found = blocks_by_step(loader.sources, loader._producer.plan, loader._spec, epochs)
        loader.close()
    numbers: dict[Any, int] = {}
    accesses = [numbers.setdefault(block, len(numbers)) for step in found for block in step]
    return accesses, np.array([block.length for block in numbers], np.int64)
