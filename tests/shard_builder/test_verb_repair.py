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
from shard_builder.fields import parse_field
from shard_builder.operations.build import BuildOptions
from shard_builder.operations.fields import add_field
from shard_builder.operations.filtering import filter_samples
from shard_builder.operations.merge import merge
from shard_builder.operations.selecting import ShardSizes
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


def test_the_manifest_of_a_result_comes_back_with_its_shards_in_order(tmp_path: Path) -> None:
    run(tmp_path / "a")
    run(tmp_path / "b", synthetic(seed=1, keys={str(number): f"other/{number}" for number in range(100)}))
    build = BuildOptions(ShardSizes(shard_bytes=20_000), workers=1)
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "m", duplicates="first", build=build)
    filter_samples(tmp_path / "m", tmp_path / "f", "label != 3 and label != 60", build=build)
    for name in ("m", "f"):
        before, samples = read_manifest(tmp_path / name), repr(values(tmp_path / name))
        (tmp_path / name / MANIFEST).unlink()
        assert repair(tmp_path / name).returncode == 0
        after = read_manifest(tmp_path / name)
        assert (after.shards, after.fields, after.statistics) == (before.shards, before.fields, before.statistics)
        assert repr(values(tmp_path / name)) == samples
    last = sorted((tmp_path / "f").glob("*.lfd"))[-1]
    (tmp_path / "f" / MANIFEST).unlink()
    last.unlink()
    done = repair(tmp_path / "f")
    assert done.returncode == 1 and "missing" in done.stderr, "a missing last shard is noticed"


def test_a_field_that_only_some_shards_have_beside_them_is_left_out_with_a_warning(tmp_path: Path) -> None:
    run(tmp_path / "t")
    add_field(tmp_path / "t", parse_field("copy:scalar=label,dtype=int64"), workers=1)
    manifest = read_manifest(tmp_path / "t")
    (tmp_path / "t" / manifest.shards[0].sidecars[0].file).unlink()
    (tmp_path / "t" / MANIFEST).unlink()
    rebuilt, warnings = rebuild_manifest(tmp_path / "t")
    assert len(warnings) == len(manifest.shards) - 1 and "did not finish" in warnings[0]
    assert "copy" not in {field.name for field in rebuilt.fields} and not any(shard.sidecars for shard in rebuilt.shards)
