"""Memory does not grow with the source: a million tiny samples, a million bad ones, one sample of 3 GiB."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from faultkit import SMALL, reported, run, run_processes, synthetic, with_options
from killkit import children, command, environment, in_child

import lfdata
from shard_builder.options import ConvertOptions

MIB = 1 << 20


def _peak(pid: int | str = "self") -> int:
    """Peak resident bytes of a process; 0 once it is gone."""
    try:
        status = Path("/proc", str(pid), "status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM")), 0)


def _tiny(target: Path, records: int) -> None:
    before = _peak()
    summary = run_processes(target, synthetic(records, tiny=True), ConvertOptions(workers=2))
    assert summary.samples == records
    grown = _peak() - before
    sys.stderr.write(f"{records} tiny samples: the parent grew by {grown / MIB:.0f} MiB; {summary.seconds:.0f} s\n")
    assert grown < 400 * MIB


@pytest.mark.slow
def test_a_million_tiny_samples(tmp_path: Path) -> None:
    assert in_child(partial(_tiny, tmp_path / "t", 1_000_000)) == 0
    found = lfdata.open(tmp_path / "t")
    assert len(found) == 1_000_000
    assert found[999_999]["label"] == 999_999
    assert found.keys([123_456]) == [b"sample/00123456"]


def _bad(target: Path, records: int) -> None:
    before = _peak()
    run(target, synthetic(records, tiny=True, bad_every=2), ConvertOptions(workers=1, on_error="skip"))
    sys.stderr.write(f"{records // 2} bad samples: grew by {(_peak() - before) / MIB:.0f} MiB\n")
    assert _peak() - before < 700 * MIB


@pytest.mark.slow
def test_half_a_million_bad_samples(tmp_path: Path) -> None:
    assert in_child(partial(_bad, tmp_path / "t", 1_000_000)) == 0
    assert len(lfdata.open(tmp_path / "t")) == 500_000
    assert len(reported(tmp_path / "t")) == 500_000


@pytest.mark.slow
def test_one_sample_of_three_gibibytes(tmp_path: Path) -> None:
    size = 3 << 30
    (tmp_path / "source").mkdir()
    with open(tmp_path / "source" / "large.bin", "wb") as file:
        file.truncate(size)
        file.seek(size - 5)
        file.write(b"the e")
    (tmp_path / "source" / "rows.jsonl").write_text(
        '{"key": "small", "file": "rows.jsonl"}\n{"key": "large", "file": "large.bin"}\n'
    )
    arguments = [
        "convert",
        tmp_path / "source" / "rows.jsonl",
        tmp_path / "t",
        "--field",
        "blob:bytes=file@file",
        "--workers",
        "1",
        "--quiet",
    ]
    process = subprocess.Popen(command(*arguments), env=environment())
    parent = workers = 0
    while True:
        parent = max(parent, _peak(process.pid))
        workers = max([workers, *(_peak(pid) for pid in children(process.pid))])
        try:
            process.wait(0.1)
            break
        except subprocess.TimeoutExpired:
            continue
    assert process.returncode == 0
    sys.stderr.write(f"3 GiB sample: parent {parent / size:.2f}, worker {workers / size:.2f} times its size\n")
    assert parent + workers < 3.6 * size
    stored = [shard.bytes for shard in lfdata.open(tmp_path / "t").manifest.shards]
    assert max(stored) >= size
    assert os.path.getsize(tmp_path / "t" / "manifest.json") < MIB


def test_many_samples_in_small_shards(tmp_path: Path) -> None:
    summary = run(
        tmp_path / "t", synthetic(5000, tiny=True), with_options(SMALL, shard_rows=300, segment_rows=1000, shard_bytes=1 << 20)
    )
    assert summary.shards == 20
    assert lfdata.open(tmp_path / "t").column("label").sum() == sum(range(5000))
