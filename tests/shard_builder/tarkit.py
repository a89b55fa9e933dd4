"""Tars for tests, made by the standard library, and what a source says about them."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from shard_builder.sources import open_source, source_from_config
from shard_builder.sources.base import BadRecord, FieldSpec, Record, Source

BYTES = [FieldSpec("a", "bytes", "a"), FieldSpec("b", "bytes", "b")]
Members = Iterable[tuple[str, bytes] | tarfile.TarInfo]


def tar_bytes(members: Members, *, form: int = tarfile.PAX_FORMAT, end: bool = True) -> bytes:
    """A tar of regular files given as (name, data), and of ready headers without data; padded to 512 bytes only."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form, encoding="utf-8", errors="surrogateescape") as tar:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                tar.addfile(member)
            else:
                info = tarfile.TarInfo(member[0])
                info.size = len(member[1])
                tar.addfile(info, io.BytesIO(member[1]))
        size = tar.offset
    return out.getvalue()[: size + (1024 if end else 0)]


def header(name: str, kind: bytes, link: str = "") -> tarfile.TarInfo:
    """A member without data: a link, a device, a directory."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


def pairs(count: int, size: int = 10) -> list[tuple[str, bytes]]:
    """Members of ``count`` samples with the extensions a and b; the data says whose it is."""
    return [(f"{n:04d}.{ext}", f"{n}{ext}".encode().ljust(size, b".")) for n in range(count) for ext in "ab"]


def source(location: object, fields: Sequence[FieldSpec] | None = None, **options: str) -> Source:
    """A WebDataset source."""
    return open_source(str(location), kind="webdataset", fields=fields, **options)


def write(path: Path, members: Members, **options: Any) -> Path:
    """Write :func:`tar_bytes`."""
    path.write_bytes(tar_bytes(members, **options))
    return path


def everything(opened: Source, stage: Path) -> tuple[dict[bytes, dict[str, Any]], list[BadRecord]]:
    """All good samples, loaded as a worker would, by key in order, and the bad ones."""
    records = list(opened.scan())
    worker = source_from_config(opened.config(), stage)
    samples: dict[bytes, dict[str, Any]] = {}
    staged = -1
    for record in records:
        if isinstance(record, Record):
            if record.unit != staged:
                opened.stage(record.unit, stage)
                staged = record.unit
            assert record.key not in samples
            samples[record.key] = worker.load(record.locator).values
    return samples, [record for record in records if isinstance(record, BadRecord)]
