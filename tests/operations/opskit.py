"""What the tests of operations share: exact comparison of samples, and data sets that must verify."""

from __future__ import annotations

import hashlib
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from killkit import environment

import lfdata
from lfdata.codecs.registry import make_decoder
from lfdata.format.meta import read_manifest
from lfdata.format.verify import verify_file
from shard_builder.verbs.verify import verify


def same_value(mine: Any, theirs: Any) -> bool:
    """Equal in type, shape and bits."""
    if type(mine) is not type(theirs):
        return False
    if isinstance(mine, np.ndarray | np.generic):
        return mine.dtype == theirs.dtype and mine.shape == theirs.shape and mine.tobytes() == theirs.tobytes()
    if isinstance(mine, tuple):
        return len(mine) == len(theirs) and all(same_value(a, b) for a, b in zip(mine, theirs, strict=True))
    return repr(mine) == repr(theirs)


def assert_same(mine: Iterable[dict[str, Any]], theirs: Iterable[dict[str, Any]]) -> None:
    """The same samples in the same order: keys, fields, absences, values."""
    for number, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        assert a.keys() == b.keys(), f"sample {number}"
        wrong = [name for name in a if not same_value(a[name], b[name])]
        assert not wrong, f"sample {number}: {wrong}: {a[wrong[0]]!r} and {b[wrong[0]]!r}"


def samples(path: Path) -> list[dict[str, Any]]:
    """Every sample of a data set, whose files, index and keys are intact."""
    manifest = read_manifest(path)
    for shard in manifest.shards:
        for part in (shard, *shard.sidecars):
            identity = bytes.fromhex(getattr(part, "part", "")) or bytes(16)
            expect = (bytes.fromhex(shard.id), identity, shard.rows)
            findings = verify_file(path / part.file, expect=expect, sha256=part.sha256, decoders=make_decoder)
            assert (found := next(findings, None)) is None, found
    data = lfdata.open(path)
    assert (data.index() is not None) == (path / "index.lfi").exists(), "an index that is not this data set's"
    found = list(data)
    assert len({item["__key__"] for item in found}) == len(found) == manifest.rows
    return found


def proved(path: Path) -> list[dict[str, Any]]:
    """:func:`samples` of a data set that ``verify`` finds nothing wrong with."""
    report = verify(path, workers=1)
    assert report.intact and not report.warnings, report.damage
    return samples(path)


def tree(path: Path) -> dict[str, str]:
    """Digest of every file below a directory."""
    files = sorted(item for item in path.rglob("*") if item.is_file())
    return {str(item.relative_to(path)): hashlib.sha256(item.read_bytes()).hexdigest() for item in files}


def run(folder: Path, *arguments: str) -> str:
    """What a command of ``shard-builder`` prints, run in a folder. It must succeed."""
    command = [sys.executable, "-m", "shard_builder.cli", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, f"{shlex.join(arguments)}: {done.stderr}"
    return done.stdout
