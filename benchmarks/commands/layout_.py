"""``lfbench layout``: requests and read amplification of payload layouts, computed from a real data set's sizes.

No timing: counts are exact. Layouts: row groups contiguous by field (the format's), rows interleaved, one region a field. Readers: one
random sample with all fields; whole row groups (block-shuffled); one field alone, scanned. A gap is how far apart two ranges may lie
and still be fetched by one request.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from benchmarks.record import save
from lfdata import ShardDataset

Placed = dict[str, NDArray[np.int64]]
GROUPS = (1 << 20, 4 << 20, 8 << 20, 32 << 20)
GAPS = (0, 64 << 10, 1 << 20)


def interleaved(lengths: Placed) -> Placed:
    """Offsets if all values of a row lie together, row after row."""
    table = np.stack(list(lengths.values()), 1)
    starts = np.concatenate([[0], np.cumsum(table)[:-1]]).reshape(table.shape)
    return {name: starts[:, number] for number, name in enumerate(lengths)}


def regions(lengths: Placed) -> Placed:
    """Offsets if each field is one region."""
    placed, base = {}, 0
    for name, sizes in lengths.items():
        placed[name] = base + np.concatenate([[0], np.cumsum(sizes)[:-1]])
        base += int(sizes.sum())
    return placed


def group_of(lengths: Placed, group_bytes: int) -> NDArray[np.int64]:
    """Row group of each row."""
    group, number, filled = [], 0, 0
    for size in np.sum(list(lengths.values()), 0).tolist():
        if filled and filled + size > group_bytes:
            number, filled = number + 1, 0
        group.append(number)
        filled += size
    return np.array(group, np.int64)


def grouped(lengths: Placed, group: NDArray[np.int64]) -> Placed:
    """Offsets in row groups contiguous by field."""
    placed = {name: np.zeros(len(group), np.int64) for name in lengths}
    base = 0
    for index in range(int(group.max()) + 1):
        rows = np.flatnonzero(group == index)
        for name, sizes in lengths.items():
            placed[name][rows] = base + np.concatenate([[0], np.cumsum(sizes[rows])[:-1]])
            base += int(sizes[rows].sum())
    return placed


def requests(starts: NDArray[np.int64], sizes: NDArray[np.int64], gap: int) -> tuple[int, int]:
    """Requests and bytes to read some ranges when those no more than ``gap`` apart are joined."""
    keep = sizes > 0
    order = np.argsort(starts[keep], kind="stable")
    begin, end = starts[keep][order], (starts[keep] + sizes[keep])[order]
    if not len(begin):
        return 0, 0
    reach = np.maximum.accumulate(end)
    cut = begin[1:] - reach[:-1] > gap
    first, last = np.concatenate([[True], cut]), np.concatenate([cut, [True]])
    return int(first.sum()), int((reach[last] - begin[first]).sum())


def _read(lengths: Placed, placed: Placed, rows: NDArray[np.int64], gap: int) -> tuple[int, int, int]:
    starts = np.concatenate([placed[name][rows] for name in lengths])
    sizes = np.concatenate([lengths[name][rows] for name in lengths])
    return (*requests(starts, sizes, gap), int(sizes.sum()))


def _ratio(reads: list[tuple[int, int, int]], samples: int) -> dict[str, float]:
    asked = sum(size for _, _, size in reads)
    return {
        "requests_a_sample": sum(r for r, _, _ in reads) / samples,
        "amplification": sum(b for _, b, _ in reads) / max(1, asked),
    }


def measure(lengths: Placed, placed: Placed, blocks: NDArray[np.int64]) -> dict[str, Any]:
    """All readers at all gaps; ``blocks`` are what a block-shuffled reader fetches at a time."""
    rows = np.random.default_rng(0).integers(0, len(blocks), 2000)
    edges = np.concatenate([[0], np.flatnonzero(np.diff(blocks)) + 1, [len(blocks)]])
    found: dict[str, Any] = {}
    for gap in GAPS:
        single = [_read(lengths, placed, np.array([row]), gap) for row in rows]
        block = [_read(lengths, placed, np.arange(a, b), gap) for a, b in itertools.pairwise(edges)]
        alone = {name: requests(placed[name], lengths[name], gap) for name in lengths}
        found[f"gap {gap >> 10} KiB"] = {
            "single": _ratio(single, len(single)),
            "block": _ratio(block, len(blocks)),
            "one field": {
                n: {"requests": r, "amplification": b / max(1, int(lengths[n].sum()))} for n, (r, b) in alone.items()
            },
        }
    return found


@click.command("layout")
@click.argument("dataset", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--name", required=True, help="Name of the record.")
@click.option("--output", type=click.Path(path_type=Path))
def command(dataset: Path, name: str, output: Path | None) -> None:
    """Requests a sample and read amplification of DATASET's payloads under each layout (sharing of equal payloads left aside)."""
    opened = ShardDataset(dataset)
    fields = [field.name for field in opened.manifest.fields if f"{field.name}.bytes" in opened.columns]
    lengths = {field: opened.column(f"{field}.bytes").astype(np.int64) for field in fields}
    blocks = group_of(lengths, 8 << 20)
    plain: dict[str, Callable[[Placed], Placed]] = {"interleaved rows": interleaved, "one region a field": regions}
    results = {what: measure(lengths, place(lengths), blocks) for what, place in plain.items()}
    for size in GROUPS:
        own = group_of(lengths, size)
        results[f"row groups {size >> 20} MiB"] = measure(lengths, grouped(lengths, own), own)
    click.echo(f"{'':22} {'':>9}   one random sample        block-shuffled           the worst field alone")
    click.echo(f"{'layout':22} {'gap':>9}   requests  amplification  requests  amplification  requests  amplification")
    for what, gaps in results.items():
        for gap, found in gaps.items():
            one, block = found["single"], found["block"]
            worst = max(found["one field"].values(), key=lambda item: float(item["requests"]))
            click.echo(
                f"{what:22} {gap[4:]:>9}   {one['requests_a_sample']:8.2f} {one['amplification']:14.2f}"
                f"  {block['requests_a_sample']:8.4f} {block['amplification']:14.2f}"
                f"  {worst['requests']:8} {worst['amplification']:14.2f}"
            )
    click.echo(f"record: {save(f'layout-{name}', {'data': name, 'samples': len(opened), 'fields': fields}, results, output)}")
