"""Clocks, time zones, hosts, directories, masks and worker counts change no byte and steal no lock."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from faultkit import SMALL, digests, expected_digests, finish, run, synthetic, with_options
from killkit import CountingFiles, command, environment

from lfdata.errors import TargetExistsError
from lfdata.format.durable import Files
from shard_builder.target import Target

OPTIONS = with_options(SMALL, segment_rows=25, shard_bytes=9_000)


def _jumping() -> Callable[[], float]:
    """A clock that jumps by years, backwards too."""
    jumps = iter([0.0, 4e9, -1e9, 1.0, 9e9] * 10_000)
    return lambda: next(jumps)


def test_a_jumping_clock(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = expected_digests(synthetic(60), OPTIONS)
    monkeypatch.setattr(time, "time", _jumping())
    run(place / "target", synthetic(60), OPTIONS)
    assert digests(place / "target") == wanted


def test_a_clock_set_back_before_resume(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards whose times lie in the future are as committed as others."""

    class Stop(CountingFiles):
        def call(self, operation, path, function, **detail):  # type: ignore[no-untyped-def]
            if self.count > 200:
                raise KeyboardInterrupt
            return super().call(operation, path, function, **detail)

    target = place / "target"
    with pytest.raises(KeyboardInterrupt):
        run(target, synthetic(60), OPTIONS, Stop())
    for path in target.rglob("*"):
        os.utime(path, (4e9, 4e9))
    monkeypatch.setattr(time, "time", lambda: 1.0)
    assert finish(target, synthetic(60), OPTIONS).resumed_shards > 0
    assert digests(target) == expected_digests(synthetic(60), OPTIONS)


def test_a_lock_does_not_age(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Target(place / "target", Files()):
        os.utime(place / "target", (1, 1))
        monkeypatch.setattr(time, "time", lambda: 9e9)
        with pytest.raises(TargetExistsError, match="another process"):
            run(place / "target", synthetic(60), OPTIONS)


def _source(folder: Path) -> None:
    folder.mkdir()
    rows = []
    for number in range(150):
        (folder / f"{number}.bin").write_bytes(f"{number} ".encode() * 60)
        rows.append(
            json.dumps(
                {"key": f"ключ {number}", "file": f"{number}.bin", "about": {"b": number, "a": [1.5, "ü"] * 5, "c": None}}
            )
        )
    (folder / "rows.jsonl").write_text("\n".join(rows))


def test_everything_around_the_command(place: Path) -> None:
    _source(place / "source")
    options = [
        "--field",
        "blob:bytes=file@file",
        "--field",
        "about:json=about",
        "--shard-size",
        "20K",
        "--segment-size",
        "10K",
        "--quiet",
    ]
    surroundings = [
        ("1", place, 0o022, {"TZ": "UTC", "PYTHONHASHSEED": "1", "LC_ALL": "C"}),
        ("2", place / "source", 0o077, {"TZ": "Asia/Kolkata", "PYTHONHASHSEED": "2", "LC_ALL": "C.UTF-8"}),
        (
            "4",
            Path("/"),
            0o000,
            {"TZ": "America/St_Johns", "PYTHONHASHSEED": "3", "HOSTNAME": "elsewhere", "HOME": "/nonexistent"},
        ),
    ]
    made = []
    for workers, folder, mask, variables in surroundings:
        target = place / f"target-{workers}"
        source = os.path.relpath(place / "source" / "rows.jsonl", folder)
        arguments = command("convert", source, os.path.relpath(target, folder), *options, "--workers", workers)
        subprocess.run(arguments, cwd=folder, env=environment(**variables), check=True, preexec_fn=partial(os.umask, mask))
        made.append(digests(target))
    assert len(made[0]) > 5
    assert made[1] == made[0]
    assert made[2] == made[0]


def test_the_data_directory_shadows_no_module(place: Path) -> None:
    """Workers import nothing from the current directory, whatever lies there."""
    _source(place / "source")
    for name in ("json", "numpy", "socket", "zstandard"):
        (place / "source" / f"{name}.py").write_text("raise SystemExit('shadowed')")
    code = "import sys; sys.path = [p for p in sys.path if p]; from shard_builder.cli import main; main()"
    arguments = ["convert", "rows.jsonl", "../target", "--field", "blob:bytes=file@file", "--quiet", "--workers", "1"]
    started = subprocess.run(
        [command()[0], "-P", "-c", code, *arguments],
        cwd=place / "source",
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert started.returncode == 0, started.stderr
