"""``lfbench windows`` refuses what it cannot compare, before it measures anything."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.commands.windows_ import command

pytest.importorskip("av", exc_type=ImportError)
pytest.importorskip("pyarrow", exc_type=ImportError)
SOURCE = Path(__file__).resolve().parents[1] / "shard_builder" / "fixtures" / "lerobot" / "v3.0"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--window", "action"], "write FEATURE=FIRST:STOP"),
        (["--window", "action=4:4"], "write FEATURE=FIRST:STOP"),
        (["--window", "nothing=0:2"], "no feature 'nothing'; there are observation.images.top"),
        (["--batch", "25"], "has 24 frames; --batch is 25"),
        (["--batch", "4"], "lerobot failed"),
    ],
)
def test_what_cannot_be_compared_is_refused(options: list[str], message: str, tmp_path: Path) -> None:
    """This interpreter has no lerobot."""
    given = [str(SOURCE), "--lerobot", sys.executable, "--output", str(tmp_path / "record.json"), *options]
    found = CliRunner().invoke(command, given)
    assert found.exit_code != 0 and message in found.output
    assert not (tmp_path / "record.json").exists()


def test_without_lerobot_the_command_that_installs_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.commands.windows_.environment", lambda _name: tmp_path / "none")
    found = CliRunner().invoke(command, [str(SOURCE), "--output", str(tmp_path / "record.json")])
    assert found.exit_code == 1 and "lfbench environment lerobot" in found.output


def test_a_set_that_is_not_there_is_made_only_when_asked(tmp_path: Path) -> None:
    given = [str(tmp_path / "none"), "--lerobot", sys.executable, "--output", str(tmp_path / "record.json")]
    assert "--make 20x300 makes a data set there" in CliRunner().invoke(command, given).output
    assert "write EPISODESxFRAMES" in CliRunner().invoke(command, [*given, "--make", "20"]).output
    assert "lerobot failed" in CliRunner().invoke(command, [*given, "--make", "1x2"]).output
    assert not (tmp_path / "none").exists()
