"""``shard-builder repair``: a lost manifest comes back byte for byte from the shards, at few descriptors, and never silently short."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from faultkit import digests, run, synthetic, values

from lfdata.errors import FormatError
from lfdata.format.meta import INDEX, MANIFEST, read_manifest
from shard_builder.verbs.repair import rebuild_manifest


def repair(target: Path, *options: str, files: int = 0) -> subprocess.CompletedProcess[str]:
    limit = (lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))) if files else None
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "shard_builder.cli", "repair", str(target), *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False, preexec_fn=limit)


def test_a_lost_manifest_and_index_come_back_byte_for_byte(tmp_path: Path) -> None:
    run(tmp_path / "t", synthetic(bad={17: "load"}), on_error="skip")
    before, samples = digests(tmp_path / "t"), repr(values(tmp_path / "t"))
    (tmp_path / "t" / MANIFEST).unlink()
    (tmp_path / "t" / INDEX).unlink()
    done = repair(tmp_path / "t")
    assert done.returncode == 0, done.stderr
    assert digests(tmp_path / "t") == before and repr(values(tmp_path / "t")) == samples
    assert repair(tmp_path / "t").returncode != 0, "an intact manifest is not replaced without --force"
    assert repair(tmp_path / "t", "--force").returncode == 0 and digests(tmp_path / "t") == before


def test_more_shards_than_descriptors(tmp_path: Path) -> None:
    run(tmp_path / "t", shard_rows=1)
    manifest = (tmp_path / "t" / MANIFEST).read_bytes()
    assert len(read_manifest(tmp_path / "t").shards) == 100
    (tmp_path / "t" / MANIFEST).unlink()
    done = repair(tmp_path / "t", files=32)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "t" / MANIFEST).read_bytes() == manifest


def test_a_missing_shard_is_not_passed_over(tmp_path: Path) -> None:
    run(tmp_path / "t")
    shards = read_manifest(tmp_path / "t").shards
    (tmp_path / "t" / MANIFEST).unlink()
    (tmp_path / "t" / shards[1].file).unlink()
    done = repair(tmp_path / "t")
    assert done.returncode == 1 and "shards seem to be missing" in done.stderr and not (tmp_path / "t" / MANIFEST).exists()
    assert repair(tmp_path / "t", "--force").returncode == 0
    assert [shard.file for shard in read_manifest(tmp_path / "t").shards] == [s.file for s in shards if s != shards[1]]


def test_shards_of_two_conversions_are_refused(tmp_path: Path) -> None:
    run(tmp_path / "a")
    run(tmp_path / "b", synthetic(seed=1))
    for path in (tmp_path / "b").glob("*.lfd"):
        path.rename(tmp_path / "a" / path.name)
    with pytest.raises(FormatError, match="2 different conversions"):
        rebuild_manifest(tmp_path / "a")
    with pytest.raises(FormatError, match="no base shards"):
        rebuild_manifest(tmp_path / "b")
