"""``lfbench read``: random ``read_many`` of stored bytes against numpy.memmap fancy indexing of the same bytes."""

from __future__ import annotations

import ctypes
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.record import REPEATS, interleave, ratio, save, summary
from benchmarks.synthetic import write_bytes_dataset
from lfdata import ShardDataset
from lfdata.format import gather

# Bytes a row, rows, rows a call.
CASES = (
    (1_024, 100_000, 1024),
    (4_096, 60_000, 512),
    (16_384, 20_000, 256),
    (32_768, 10_000, 128),
    (65_536, 6_000, 64),
    (110_000, 4_000, 64),
)
# Bytes a repeat reads: some tenths of a second.
REPEAT_BYTES = 512 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


@click.command("read")
@click.option("--repeats", default=2 * REPEATS + 1, show_default=True)
@click.option("--threads", type=int, help="Threads a call may use (default: the package's own choice).")
@click.option("--output", type=click.Path(path_type=Path))
def command(repeats: int, threads: int | None, output: Path | None) -> None:
    """Rows/s, warm page cache, every payload verified against its check on our side."""
    _keep_memory()
    results: dict[str, Any] = {}
    for size, rows, batch in CASES:
        with tempfile.TemporaryDirectory() as scratch:
            results[str(size)] = found = _case(Path(scratch), size, rows, batch, repeats, threads)
        click.echo(
            f"{size:7} bytes a row: ratio {found['ratio']['median']:.2f} [{found['ratio']['min']:.2f}, {found['ratio']['max']:.2f}]"
            f"  ours {found['ours_rows_s']['median']:,.0f}/s  memmap {found['memmap_rows_s']['median']:,.0f}/s"
        )
    options = {"repeats": repeats, "bytes": REPEAT_BYTES, "threads": threads, "native": gather.native is not None}
    click.echo(f"record: {save('read', options, results, output)}")


def _keep_memory() -> None:
    """Keep what is freed: results of some MiB otherwise go back to the kernel after some calls and not after others, whoever made them."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_TRIM_THRESHOLD, 1 << 30)
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30)


def _case(scratch: Path, size: int, rows: int, batch: int, repeats: int, threads: int | None) -> dict[str, Any]:
    data = np.random.default_rng(0).integers(0, 256, (rows, size), dtype=np.uint8)
    write_bytes_dataset(scratch / "shards", data)
    data.tofile(scratch / "raw.bin")
    del data
    dataset = ShardDataset(scratch / "shards", read_threads=threads)
    mapped = np.memmap(scratch / "raw.bin", np.uint8, "r", shape=(rows, size))
    rng = np.random.default_rng(1)
    check = rng.integers(0, rows, batch)
    stored = dataset.read_many(check, decode=False)["value"]
    if not np.array_equal(stored.values.reshape(batch, size), mapped[check]):
        raise click.ClickException("both subjects must give the same bytes")

    count = max(40, REPEAT_BYTES // (size * batch))

    def timed(read: Callable[[Any], Any]) -> Callable[[], float]:
        def once() -> float:
            calls = [rng.integers(0, rows, batch) for _ in range(count)]
            start = time.perf_counter()
            for indices in calls:
                read(indices)
            return count * batch / (time.perf_counter() - start)

        return once

    subjects = {"ours": timed(lambda i: dataset.read_many(i, ["value"], decode=False)), "memmap": timed(lambda i: mapped[i])}
    interleave(subjects, 1)
    rates = interleave(subjects, repeats)
    return {
        "ours_rows_s": summary(rates["ours"]) | {"repeats": rates["ours"]},
        "memmap_rows_s": summary(rates["memmap"]) | {"repeats": rates["memmap"]},
        "ratio": ratio(rates["ours"], rates["memmap"]),
    }
