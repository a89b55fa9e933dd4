"""``shard-builder repair``: rebuild a lost manifest from the shards."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Any

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
from shard_builder.examine.report import progress_bar
from shard_builder.operations.salvage import LOST, salvage
from shard_builder.signals import interruptible
from shard_builder.target import SHARD_SUFFIX, Target

# Names of what operations make: place, number of files, start of the id.
_PLACED = re.compile(r"m([0-9]{6,})of([0-9]{6,})-[0-9a-f]{8}\.lfd\Z")


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
    made = [_PLACED.match(Path(shard.name).name) for shard in bases]
    if all(made):
        return _result(directory, bases, sides)
    conversions = {str(shard.meta.provenance.get("conversion")) for shard in bases}
    if len(conversions) > 1:
        raise FormatError(
            directory,
            None,
            f"shards of {len(conversions)} different conversions lie here; keep one data set's shards and try again",
        )
    bases.sort(key=lambda shard: (shard.meta.position.segment, shard.meta.position.ordinal))
    manifest, warnings = _joined(bases, sides, bases[0].meta.provenance)
    return manifest, warnings + _gaps(bases)


def _result(directory: Path, bases: list[ShardFile], sides: list[ShardFile]) -> tuple[Manifest, list[str]]:
    """The manifest of what merge, split, filter or salvage made: their names say the order, and how many there are."""
    bases.sort(key=lambda shard: shard.name)
    places = [_PLACED.match(Path(shard.name).name) for shard in bases]
    totals = {int(place[2]) for place in places if place}
    if len(totals) > 1:
        raise FormatError(directory, None, "shards of several results lie here; keep one data set's shards and try again")
    manifest, warnings = _joined(bases, sides, {"operation": "repair"})
    missing = sorted(set(range(totals.pop())) - {int(place[1]) for place in places if place})
    if missing:
        warnings.append(f"shards {', '.join(map(str, missing[:20]))} are missing")
    return manifest, warnings


def _joined(bases: list[ShardFile], sides: list[ShardFile], provenance: dict[str, Any]) -> tuple[Manifest, list[str]]:
    fields: dict[str, FieldMeta] = {field.name: field for field in bases[0].fields}
    shards, statistics, warnings = [], [], []
    everywhere = _fields_everywhere(bases, sides)
    for base in bases:
        mine = sorted((s for s in sides if s.identity.shard_id == base.identity.shard_id), key=_order)
        for side in mine:
            missing = sorted({field.name for field in side.fields} - everywhere)
            if missing:
                warnings.append(
                    f"{side.name}: field {missing[0]!r} is not in every shard: its add-field did not finish; left out"
                )
        mine = [side for side in mine if {field.name for field in side.fields} <= everywhere]
        fields |= {field.name: field for side in mine for field in side.fields}
        statistics.append(base.meta.statistics | {name: value for side in mine for name, value in side.meta.statistics.items()})
        shards.append(_entry(base, tuple(_sidecar(side) for side in mine)))
    owned = {base.identity.shard_id for base in bases}
    warnings += [
        f"{side.name}: a sidecar of a shard that is not here; left out" for side in sides if side.identity.shard_id not in owned
    ]
    manifest = Manifest(
        rows=sum(shard.rows for shard in shards),
        fields=tuple(fields.values()),
        shards=tuple(shards),
        statistics=merge_statistics(statistics),
        provenance=provenance,
    )
    return manifest, warnings


def _order(side: ShardFile) -> tuple[int, str]:
    """Sidecars in the order in which they were added: the last that has a field wins."""
    order = side.meta.provenance.get("order")
    return (order if isinstance(order, int) else 0), side.name


def _fields_everywhere(bases: list[ShardFile], sides: list[ShardFile]) -> set[str]:
    """Fields that every shard has, in its base or a sidecar."""
    held = {base.identity.shard_id: {field.name for field in base.fields} for base in bases}
    for side in sides:
        if side.identity.shard_id in held:
            held[side.identity.shard_id] |= {field.name for field in side.fields}
    return set.intersection(*held.values())


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


@click.command("repair", short_help="Rebuild a lost manifest, or save what is whole of damaged shards.")
@click.argument("dataset", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--force", is_flag=True, help="Replace a manifest that is intact, and accept missing shards.")
@click.option(
    "--salvage", "target", type=click.Path(path_type=Path), help="Write the samples that are whole into this directory."
)
def command(dataset: Path, force: bool, target: Path | None) -> None:
    """Rebuild DATASET/manifest.json (and the index) from what the shards say of themselves.

    With --salvage, read DATASET only, and write a new data set of its whole samples, with lost.jsonl that lists the others.
    """
    if target is not None:
        _salvage(dataset, target)
        return
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


def _salvage(dataset: Path, target: Path) -> None:
    interruptible()
    with progress_bar("salvage") as progress:
        made = salvage(dataset, target, progress=progress)
    click.echo(
        f"{target}: {made.rows:,} samples saved, {made.lost:,} lost (see {target / LOST}); "
        f"{made.whole} shards without damage, {made.rewritten} written anew, {made.gone} of which nothing is left"
    )
