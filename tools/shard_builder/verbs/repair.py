"""``shard-builder repair``: rebuild a lost manifest from the shards."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import click

from lfdata.errors import FormatError, LfdataError, TargetExistsError
from lfdata.format.durable import Files, is_temporary
from lfdata.format.files import DescriptorPool, LocalFile
from lfdata.format.layout import KIND_BASE, KIND_SIDECAR
from lfdata.format.meta import (
    MANIFEST,
    FieldMeta,
    Manifest,
    ShardEntry,
    SidecarEntry,
    encode_manifest,
    merge_statistics,
    read_manifest,
)
from lfdata.format.reader import ShardFile
from shard_builder.consolidate import write_consolidated
from shard_builder.target import SHARD_SUFFIX, Target


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _tail(shard: ShardFile) -> int:
    return min(entry.offset for entry in shard.entries if entry.type in (b"DICT", b"META", b"BSUM"))


def rebuild_manifest(directory: Path) -> tuple[Manifest, list[str]]:
    """The manifest that the shards of ``directory`` imply, and warnings about what may be missing.

    Raises:
        FormatError: a damaged shard, no shards, or shards of different data sets.
    """
    names = sorted(n for n in os.listdir(directory) if n.endswith(SHARD_SUFFIX) and not is_temporary(n))
    pool = DescriptorPool()
    opened = [ShardFile(LocalFile(directory / name, pool)) for name in names]
    bases = [shard for shard in opened if shard.identity.kind == KIND_BASE]
    sides = [shard for shard in opened if shard.identity.kind == KIND_SIDECAR]
    if not bases:
        raise FormatError(directory, None, "no base shards here: nothing to rebuild a manifest from")
    conversions = {str(shard.meta.provenance.get("conversion")) for shard in bases}
    if len(conversions) > 1:
        raise FormatError(
            directory,
            None,
            f"shards of {len(conversions)} different conversions lie here; keep one data set's shards and try again",
        )
    bases.sort(key=lambda shard: (shard.meta.position.segment, shard.meta.position.ordinal))
    fields: dict[str, FieldMeta] = {field.name: field for field in bases[0].fields}
    shards = []
    statistics = []
    for base in bases:
        mine = sorted((s for s in sides if s.identity.shard_id == base.identity.shard_id), key=lambda s: s.name)
        fields |= {field.name: field for side in mine for field in side.fields}
        statistics.append(base.meta.statistics | {name: value for side in mine for name, value in side.meta.statistics.items()})
        shards.append(_entry(base, tuple(_sidecar(side) for side in mine)))
    owned = {base.identity.shard_id for base in bases}
    warnings = [
        f"{side.name}: a sidecar of a shard that is not here; left out" for side in sides if side.identity.shard_id not in owned
    ]
    manifest = Manifest(
        rows=sum(shard.rows for shard in shards),
        fields=tuple(fields.values()),
        shards=tuple(shards),
        statistics=merge_statistics(statistics),
        provenance=bases[0].meta.provenance,
    )
    return manifest, warnings + _gaps(bases)


def _entry(base: ShardFile, sidecars: tuple[SidecarEntry, ...]) -> ShardEntry:
    path = Path(base.name)
    position = base.meta.position
    identity = base.identity.shard_id.hex()
    return ShardEntry(
        path.name, identity, base.rows, base.file.size, _tail(base), _digest(path), position.segment, position.ordinal, sidecars
    )


def _sidecar(side: ShardFile) -> SidecarEntry:
    path = Path(side.name)
    names = tuple(field.name for field in side.fields)
    return SidecarEntry(path.name, side.identity.part_id.hex(), side.file.size, _tail(side), _digest(path), names)


def _gaps(bases: list[ShardFile]) -> list[str]:
    """Shards that the positions say should be there."""
    warnings = []
    by_segment: dict[int, list[ShardFile]] = {}
    for base in bases:
        by_segment.setdefault(base.meta.position.segment, []).append(base)
    for segment, mine in by_segment.items():
        found = [shard.meta.position.ordinal for shard in mine]
        missing = sorted(set(range(max(found) + 1)) - set(found))
        if missing:
            warnings.append(f"segment {segment}: shards {missing} are missing")
        if not mine[-1].meta.position.last:
            warnings.append(f"segment {segment}: the shards after {max(found)} are missing")
    wanted = max(base.meta.position.segments for base in bases)
    absent = sorted(set(range(wanted)) - by_segment.keys())
    if absent:
        warnings.append(f"segments {absent[:20]} have no shards: they are missing, or all their samples were bad")
    return warnings


@click.command("repair", short_help="Rebuild a lost manifest from the shards.")
@click.argument("dataset", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--force", is_flag=True, help="Replace a manifest that is intact, and accept missing shards.")
def command(dataset: Path, force: bool) -> None:
    """Rebuild DATASET/manifest.json (and the index) from what the shards say of themselves."""
    files = Files()
    with Target(dataset, files):
        try:
            read_manifest(dataset)
        except LfdataError:
            pass
        else:
            if not force:
                raise TargetExistsError(f"{dataset / MANIFEST}: the manifest is intact; --force rebuilds it all the same")
        manifest, warnings = rebuild_manifest(dataset)
        for warning in warnings:
            click.echo(f"warning: {warning}", err=True)
        if warnings and not force:
            raise FormatError(dataset, None, "shards seem to be missing; --force writes a manifest of those that are here")
        write_consolidated(dataset, manifest, files)
        files.write_file(dataset / MANIFEST, encode_manifest(manifest))
    click.echo(f"{dataset / MANIFEST}: {manifest.rows:,} samples in {len(manifest.shards)} shards")
