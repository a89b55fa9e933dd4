"""Digests of sources and code, by which what was prepared and checked is found again."""

from __future__ import annotations

import hashlib
import os
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.harness.work import Workload, source_files

SAMPLED_FILES = 64


def fingerprint(work: Workload, source: Path, *, times: bool = True) -> str:
    """Digest of a source folder: names and sizes of its files, and their times; without those, the content of some files instead, so that a
    copy on another day or machine has the same."""
    digest = hashlib.sha256()
    files = source_files(work, source)
    for number, path in enumerate(files):
        found = path.stat()
        digest.update(f"{path.relative_to(source)}\0{found.st_size}\0".encode("utf-8", "surrogateescape"))
        if times:
            digest.update(b"%d\n" % found.st_mtime_ns)
        elif number % max(1, len(files) // SAMPLED_FILES) == 0:
            with open(path, "rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]


@cache
def code_digest(package: bool, within: tuple[str, ...] = ()) -> str:
    """Digest of the harness and the subjects, or of what is ``within`` some paths of theirs; with ``package``, of this package too, native
    modules and all."""
    root = Path(__file__).resolve().parents[2]
    folders = [root / "benchmarks"] + ([root / "lfdata", root / "tools" / "shard_builder"] if package else [])
    digest = hashlib.sha256()
    for path in sorted(path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".so", ".c")):
        name = path.relative_to(root).as_posix()
        if not within or name.startswith(within):
            digest.update(f"{name}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def stored(path: Path, value: Any) -> None:
    """Keep a value as JSON, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        half.write_bytes(msgspec.json.encode(value))
        half.rename(path)
    except BaseException:
        half.unlink(missing_ok=True)
        raise
