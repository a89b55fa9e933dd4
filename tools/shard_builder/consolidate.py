"""Writes ``index.lfi`` for a data set."""

from __future__ import annotations

from pathlib import Path

from lfdata.dataset.shard import Shard
from lfdata.format.cache import IndexCache
from lfdata.format.durable import Files
from lfdata.format.files import DescriptorPool, LocalFile
from lfdata.format.index import write_index
from lfdata.format.meta import INDEX, Manifest


def write_consolidated(directory: Path, manifest: Manifest, files: Files) -> None:
    """Write the consolidated index that belongs to ``manifest``; shards are opened one at a time."""
    pool = DescriptorPool(8)
    schema = {field.name: field for field in manifest.fields}
    held: dict[int, Shard] = {}

    def shard(number: int) -> Shard:
        if number not in held:
            held.clear()
            held[number] = Shard(
                manifest.shards[number], lambda name, _size: LocalFile(directory / name, pool), schema, IndexCache(0)
            )
        return held[number]

    try:
        write_index(
            directory / INDEX,
            manifest,
            lambda number, field, role: shard(number).file_of(field).column(field, role),
            lambda number: shard(number).base.key_hashes(),
            files,
            lambda number: shard(number).files,
        )
    finally:
        pool.close()
