"""``lfbench forecast``: the bytes that a loader foretells, beside those that come, over whole epochs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from benchmarks.record import RecordError, save
from lfdata import Loader


def compared(loader: Any, epochs: int) -> dict[str, Any]:
    """Of every tensor: bytes of its largest batch and of all, and the largest error of a batch. ``loader``: a Loader or a DeviceLoader."""
    if not len(loader):
        raise RecordError("the data set has no whole batch: take a smaller --batch")
    told = loader.forecast(epochs * len(loader))
    expected = told.device or told.bytes
    found: dict[str, dict[str, int]] = {name: {"bytes": 0, "largest": 0, "error": 0} for name in expected}
    number = 0
    for _ in range(epochs):
        for batch in loader:
            if set(batch) != set(expected):
                raise click.ClickException(f"foretold were {sorted(expected)}, and {sorted(batch)} came")
            for name, value in batch.items():
                one, size = found[name], int(value.nbytes)
                one["bytes"] += size
                one["largest"] = max(one["largest"], size)
                one["error"] = max(one["error"], abs(size - int(expected[name][number])))
            del batch
            number += 1
    return {"batches": number, "foretold": len(told), "fields": found, "error": max(one["error"] for one in found.values())}


@click.command("forecast")
@click.argument("data", type=click.Path(exists=True, path_type=Path))
@click.option("--field", "fields", multiple=True, help="May be repeated; all by default, as they are stored.")
@click.option("--batch", default=4, show_default=True)
@click.option("--epochs", type=click.IntRange(1), default=3, show_default=True)
@click.option("--device", help="cuda: also the bytes on the device, of a DeviceLoader.")
@click.option("--output", type=click.Path(path_type=Path))
def command(data: Path, fields: tuple[str, ...], batch: int, epochs: int, device: str | None, output: Path | None) -> None:
    """Pictures of their own size, recordings and tokens of DATA in shuffled epochs."""
    results: dict[str, Any] = {}
    loader = Loader(data, batch, list(fields) or None, shuffle="full")
    results["host"] = compared(loader, epochs)
    loader.close()
    if device is not None:
        from lfdata import DeviceLoader

        on_device = DeviceLoader(Loader(data, batch, list(fields) or None, shuffle="full"), device)
        results["device"] = compared(on_device, epochs)
        on_device.close()
    for where, one in results.items():
        ragged = sum(found["largest"] * one["batches"] > found["bytes"] for found in one["fields"].values())
        click.echo(
            f"{where}: {one['batches']} batches, {len(one['fields'])} tensors, {ragged} of them of changing size: error {one['error']} bytes"
        )
    options = {"data": data.name, "fields": list(fields), "batch": batch, "epochs": epochs, "device": device}
    click.echo(f"wrote {save('forecast', options, results, output)}")
