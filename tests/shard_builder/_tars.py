"""Tars for tests, good and bad, written header by header where the standard library would not write them."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shard_builder.sources import open_source, source_from_config
from shard_builder.sources.base import BadRecord, RawSample, Record, Source

Entry = tuple[str | bytes, bytes]


def tar_bytes(entries: Iterable[Entry], format_: int = tarfile.GNU_FORMAT) -> bytes:
    """A tar of regular files, names byte for byte."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=format_, encoding="utf-8", errors="surrogateescape") as tar:
        for name, data in entries:
            text = name.decode("utf-8", "surrogateescape") if isinstance(name, bytes) else name
            info = tarfile.TarInfo(text)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def special(name: str, type_: bytes, link: str = "") -> tarfile.TarInfo:
    """A member that is no regular file."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname = type_, link
    return info


def header(name: str, size: int, type_: bytes = b"0") -> bytes:
    """One 512-byte header with any size, huge and negative ones in base 256."""
    info = tarfile.TarInfo(name)
    block = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    block[124:136] = b"%011o\0" % size if 0 <= size < 8**11 else (size % 256**12).to_bytes(12, "big")
    if size >= 8**11:
        block[124] |= 0x80
    block[156:157] = type_
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def padded(data: bytes) -> bytes:
    """Data filled up to whole blocks."""
    return data + bytes(-len(data) % 512)


END = bytes(1024)


def scan(source: Source) -> tuple[list[Record], list[BadRecord]]:
    """Good and bad records."""
    found = list(source.scan())
    return [r for r in found if isinstance(r, Record)], [r for r in found if isinstance(r, BadRecord)]


def load_all(source: Source, work: Path) -> dict[bytes, RawSample]:
    """Every good sample by key, loaded as a worker would: from the configuration alone, unit by unit, staged and unstaged."""
    work.mkdir(exist_ok=True)
    records, _ = scan(source)
    worker = source_from_config(source.config(), work)
    samples: dict[bytes, RawSample] = {}
    for unit in sorted({record.unit for record in records}):
        source.stage(unit, work)
        samples.update({record.key: worker.load(record.locator) for record in records if record.unit == unit})
        source.unstage(unit, work)
    return samples


def values(source: Source, work: Path) -> dict[bytes, dict[str, Any]]:
    """Values of every good sample by key."""
    return {key: sample.values for key, sample in load_all(source, work).items()}


def write(folder: Path, data: bytes, name: str = "a.tar") -> str:
    """A file's path as text."""
    path = folder / name
    path.write_bytes(data)
    return str(path)


__all__ = ["END", "Entry", "header", "load_all", "open_source", "padded", "scan", "special", "tar_bytes", "values", "write"]
