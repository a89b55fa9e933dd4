"""What a user sees when things are wrong: no hang, no traceback, the file named, the report there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

REPO = Path(__file__).resolve().parents[2]
GOLDEN = REPO / "tests" / "golden" / "v1.0" / "mixed"


def run(*arguments: object) -> tuple[int, str]:
    """Exit status and all output of ``shard-builder``, which must end within a minute."""
    environment = os.environ | {"PYTHONPATH": f"{REPO}:{REPO / 'tools'}"}
    command = [sys.executable, "-m", "shard_builder.cli", *map(str, arguments)]
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60, check=False
    )
    assert "Traceback" not in done.stdout, done.stdout
    return done.returncode, done.stdout


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN, tmp_path / "set"))


@pytest.mark.parametrize("verb", [("verify",), ("verify", "--quick"), ("inspect",)])
def test_a_pipe_for_a_manifest_is_an_error(copy: Path, verb: tuple[str, ...]) -> None:
    (copy / "manifest.json").unlink()
    os.mkfifo(copy / "manifest.json")
    status, text = run(*verb, copy)
    assert status != 0
    assert "not a regular file" in text


def test_a_pipe_for_a_shard_is_damage(copy: Path) -> None:
    shard = sorted(path for path in copy.glob("*.lfd") if "+" not in path.name)[0]
    shard.unlink()
    os.mkfifo(shard)
    status, text = run("verify", copy)
    assert status == 1
    assert shard.name in text
    assert "index.lfi" not in text, "an intact index is blamed for a lost shard"


def test_when_nothing_could_be_stored_the_report_is_there(tmp_path: Path) -> None:
    (tmp_path / "bad.bin").write_bytes(b"fine so far \xff")
    (tmp_path / "rows.jsonl").write_text('{"key": "k", "x": "bad.bin"}\n')
    target = tmp_path / "out"
    status, text = run("convert", tmp_path / "rows.jsonl", target, "--field", "x:text=x@file", "--on-error", "skip")
    assert status == 1
    assert str(target / "errors.jsonl") in text
    (entry,) = [msgspec.json.decode(line) for line in (target / "errors.jsonl").read_bytes().splitlines()]
    assert entry["path"] == "rows.jsonl:1: bad.bin"
    assert "byte offset 12" in entry["reason"]


def test_errors_are_words_not_objects(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"key": "k", "x": "missing.png"}\n')
    status, text = run("convert", tmp_path / "rows.jsonl", tmp_path / "out", "--field", "x:image=x", "--on-error", "skip")
    assert status == 1
    assert "BadRecord" not in text
    assert "missing.png" in text
    (tmp_path / "empty").mkdir()
    status, text = run("convert", tmp_path / "empty", tmp_path / "out2", "--kind", "image-folder")
    assert status == 1
    assert "no samples found" in text
    assert "{" not in text


@pytest.mark.parametrize("value", ["nan", "inf", "0", "-1"])
def test_absurd_time_limits_are_refused(value: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"a": "b"}\n')
    status, text = run("convert", tmp_path / "rows.jsonl", tmp_path / "out", "--field", "a:text=a", "--sample-timeout", value)
    assert status == 2
    assert "positive number of seconds" in text
